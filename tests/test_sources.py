"""Which files are found, with which labels, in which order, and that nothing is left out in silence."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
from helpers import formula_picture, image_folder_samples, make_folder, save
from hypothesis import given
from hypothesis import strategies as st

from packshift.errors import SourceError, UsageError
from packshift.record import Listing, Names
from packshift.sources import _tree, get_layout, layout_names, scan


def touch(root: Path, *names: str | bytes) -> Path:
    """Empty files: scanning looks at names only."""
    for name in names:
        path = os.path.join(os.fsencode(root), os.fsencode(name))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        open(path, "wb").close()
    return root


def found(listing: Listing) -> list[tuple[str, int]]:
    return list(zip(listing.names, listing.labels.tolist(), strict=True))


def test_labels_are_those_of_image_folder(tmp_path: Path) -> None:
    root = make_folder(tmp_path, ["class10", "class2", "Class3", "class1", "with space"], 2)
    expected = [(str(path.relative_to(root)), label) for path, label in image_folder_samples(root)]
    assert found(scan(root)) == expected


def test_pictures_in_deeper_folders_belong_to_the_class(tmp_path: Path) -> None:
    touch(tmp_path, "b/z.jpg", "b/deep/er/a.jpg", "a/folder.jpg/inner.jpg", "a b/x.jpg")
    assert found(scan(tmp_path)) == [
        ("a/folder.jpg/inner.jpg", 0),
        ("a b/x.jpg", 1),
        ("b/deep/er/a.jpg", 2),
        ("b/z.jpg", 2),
    ]


def test_order_does_not_depend_on_the_file_system(tmp_path: Path) -> None:
    names = [f"{label}/{number}.jpg" for label in "abc" for number in range(30)]
    listings = []
    for seed in (1, 2):
        shuffled = names[:]
        random.Random(seed).shuffle(shuffled)
        listings.append(found(scan(touch(tmp_path / str(seed), *shuffled))))
    assert listings[0] == listings[1]
    assert listings[0] == sorted(listings[0], key=lambda row: os.fsencode(row[0]))


def test_a_flat_folder_is_unlabelled(tmp_path: Path) -> None:
    listing = scan(touch(tmp_path, "b.jpg", "a.png", "notes.txt"))
    assert listing.layout == "flat"
    assert found(listing) == [("a.png", -1), ("b.jpg", -1)]
    assert listing.classes == ()


def test_a_layout_can_be_asked_for(tmp_path: Path) -> None:
    touch(tmp_path, "a/x.jpg", "b/y.jpg", "z.jpg")
    assert found(scan(tmp_path, "flat")) == [("a/x.jpg", -1), ("b/y.jpg", -1), ("z.jpg", -1)]
    with pytest.raises(UsageError, match="unknown layout 'tree': expected auto or one of class-folders, flat"):
        scan(tmp_path, "tree")


def test_exactly_one_layout_fits_every_tree(tmp_path: Path) -> None:
    trees = {"flat": ["a.jpg"], "classes": ["a/b.jpg"], "both": ["a.jpg", "b/c.jpg"], "deep": ["a/b/c/d.jpg"]}
    for name, files in trees.items():
        tree = _tree.read_tree(touch(tmp_path / name, *files))
        assert sum(get_layout(layout).fits(tree) for layout in layout_names()) == 1, name


def test_suffixes_count_in_any_case(tmp_path: Path) -> None:
    touch(
        tmp_path,
        "a/1.jpg",
        "a/2.JPG",
        "a/3.Jpeg",
        "a/4.PNG",
        "a/5.jfif",
        "a/6.txt",
        "a/7.jpg.txt",
        "a/8.jpg~",
        "a/no_suffix",
    )
    listing = scan(tmp_path)
    assert list(listing.names) == ["a/1.jpg", "a/2.JPG", "a/3.Jpeg", "a/4.PNG", "a/5.jfif"]
    assert listing.ignored == {_tree.OTHER_SUFFIX: 4}


def test_hidden_and_system_files_change_nothing_but_are_counted(tmp_path: Path) -> None:
    clean = scan(touch(tmp_path / "clean", "a/1.jpg", "b/2.jpg"))
    junk = [
        ".DS_Store",
        "a/._1.jpg",
        "a/Thumbs.db",
        "b/desktop.ini",
        ".ipynb_checkpoints/1.jpg",
        "__MACOSX/a/1.jpg",
        "a/@eaDir/1.jpg",
    ]
    dirty = scan(touch(tmp_path / "dirty", "a/1.jpg", "b/2.jpg", *junk))
    assert found(dirty) == found(clean)
    assert dirty.classes == clean.classes == ("a", "b")
    assert dirty.ignored == {_tree.HIDDEN: 7}


def test_pictures_beside_class_folders_are_left_out_and_named(tmp_path: Path) -> None:
    listing = scan(touch(tmp_path, "a/1.jpg", "stray.jpg", "README.txt"))
    assert found(listing) == [("a/1.jpg", 0)]
    assert listing.ignored == {_tree.OUTSIDE_CLASS: 1, _tree.OTHER_SUFFIX: 1}
    assert listing.ignored_examples[_tree.OUTSIDE_CLASS] == ("stray.jpg",)


def test_empty_class_folders_keep_their_label(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    listing = scan(touch(tmp_path, "a/1.jpg", "c/2.jpg"))
    assert listing.classes == ("a", "b", "c")
    assert listing.labels.tolist() == [0, 2]
    assert listing.empty_classes == ("b",)


def test_links_are_followed_and_keep_their_own_place(tmp_path: Path) -> None:
    outside = save(tmp_path / "outside" / "far.jpg", formula_picture(5, 5))
    root = touch(tmp_path / "root", "a/1.jpg", "b/2.jpg")
    (root / "a" / "to_b.jpg").symlink_to("../b/2.jpg")
    (root / "a" / "far.jpg").symlink_to(outside)
    (root / "c").symlink_to(root / "b")
    assert found(scan(root)) == [("a/1.jpg", 0), ("a/far.jpg", 0), ("a/to_b.jpg", 0), ("b/2.jpg", 1), ("c/2.jpg", 2)]


def test_dangling_links_are_listed_so_that_they_are_reported(tmp_path: Path) -> None:
    root = touch(tmp_path, "a/1.jpg")
    (root / "a" / "gone.jpg").symlink_to("nowhere.jpg")
    (root / "a" / "self.jpg").symlink_to("self.jpg")
    assert list(scan(root).names) == ["a/1.jpg", "a/gone.jpg", "a/self.jpg"]


def test_loops_end(tmp_path: Path) -> None:
    root = touch(tmp_path, "a/1.jpg")
    (root / "a" / "loop").symlink_to("..")
    (root / "a" / "self").symlink_to(".")
    listing = scan(root)
    assert list(listing.names) == ["a/1.jpg"]
    assert listing.ignored == {_tree.LOOP: 2}


def test_pipes_are_never_opened(tmp_path: Path) -> None:
    root = touch(tmp_path, "a/1.jpg")
    os.mkfifo(root / "a" / "pipe.jpg")
    listing = scan(root)
    assert list(listing.names) == ["a/1.jpg"]
    assert listing.ignored == {_tree.NOT_A_FILE: 1}


def test_names_in_any_bytes_come_back(tmp_path: Path) -> None:
    odd = [
        b"a/\xff\xfe.jpg",
        "a/é.jpg".encode(),
        "a/e\u0301.jpg".encode(),
        b"a/line\nbreak.jpg",
        b"a/%20#[x].jpg",
        b"a/" + b"n" * 251 + b".jpg",
    ]
    listing = scan(touch(tmp_path, *odd))
    assert [os.fsencode(name) for name in listing.names] == sorted(odd)


def test_nothing_to_convert_says_what_was_expected_and_found(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(SourceError, match=r"no pictures in .*empty: expected .*CLASS/\*\.jpg.*; the folder is empty$"):
        scan(empty)
    junk = touch(tmp_path / "junk", "a/notes.txt", "b.csv", ".hidden.jpg")
    with pytest.raises(
        SourceError, match=r"found (files with other suffixes: 2 \('.*'\), |hidden .*: 1 .*, ){2}folders: 1$"
    ):
        scan(junk)
    with pytest.raises(SourceError, match="does not exist: expected a folder of pictures"):
        scan(tmp_path / "missing")
    with pytest.raises(SourceError, match="is not a folder"):
        scan(junk / "b.csv")
    with pytest.raises(
        SourceError,
        match=r"no pictures in .* in the layout class-folders .* found pictures beside the class folders: 1",
    ):
        scan(touch(tmp_path / "flat", "a.jpg"), "class-folders")


@given(st.lists(st.binary(min_size=1, max_size=40)))
def test_names_are_a_sequence(names: list[bytes]) -> None:
    table = Names.of(names)
    decoded = [os.fsdecode(name) for name in names]
    assert list(table) == decoded
    assert table == decoded
    assert table[::2] == decoded[::2]
    assert [table[-1 - index] for index in range(len(names))] == decoded[::-1]
    assert len(table.data) == sum(map(len, names))
    assert table.offsets.dtype == np.int64
    with pytest.raises(IndexError):
        table[len(names)]
