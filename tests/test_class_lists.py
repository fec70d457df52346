"""Labels that do not follow the string order of the class folders: natural order, and the classes of another data set."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from helpers import make_folder
from hypothesis import given
from hypothesis import strategies as st

from packshift import ImageFolderDataset, convert, open_dataset
from packshift.class_lists import read_classes
from packshift.errors import PackshiftError, SourceError, UnfinishedStoreError, UsageError
from packshift.export import export_store
from packshift.sources import scan
from packshift.sources._labelling import Labelling, natural_key
from packshift.stores._reader import Reader
from packshift.verification import verify_store


class TestNaturalOrder:
    def test_digits_are_compared_as_numbers(self) -> None:
        in_order = [
            "",
            "0",
            "00",
            "001",
            "01",
            "1",
            "2",
            "10",
            "9" * 5000,
            "B2",
            "a2",
            "a2b",
            "a10",
            "b1c9",
            "b1c10",
            "٣",
        ]
        assert sorted(random.Random(0).sample(in_order, len(in_order)), key=natural_key) == in_order

    @given(st.lists(st.integers(0, 10**30), unique=True))
    def test_numbers_are_in_their_order(self, numbers: list[int]) -> None:
        assert sorted(map(str, numbers), key=natural_key) == [str(number) for number in sorted(numbers)]

    def test_labels_and_records_of_a_store_follow(self, tmp_path: Path, suffix: str) -> None:
        root = make_folder(tmp_path / "src", [str(number) for number in range(12)], 1)
        convert(root, tmp_path / f"out{suffix}", size=8, class_order="natural")
        store = Reader(tmp_path / f"out{suffix}")
        assert store.info.classes == tuple(map(str, range(12)))
        assert store.labels.tolist() == list(range(12))
        assert store.paths == [f"{number}/0000.jpg" for number in range(12)]
        folder = ImageFolderDataset(root, size=8, class_order="natural")
        assert folder.class_to_idx == open_dataset(store.path).class_to_idx
        assert folder.paths == store.paths

    def test_the_default_is_that_of_torchvision_and_is_not_recorded(self, tmp_path: Path, suffix: str) -> None:
        root = make_folder(tmp_path / "src", ["10", "2"], 1)
        convert(root, tmp_path / f"out{suffix}", size=8)
        store = Reader(tmp_path / f"out{suffix}")
        assert store.info.classes == ("10", "2")
        assert sorted(store.info.source) == ["bytes", "found", "layout", "skipped"]

    def test_an_order_that_is_none(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="unknown class order 'random': expected one of string, natural"):
            convert(tmp_path, tmp_path / "out.lmdb", class_order="random")

    def test_a_flat_folder_has_no_order(self, tmp_path: Path) -> None:
        make_folder(tmp_path, ["a"], 1)
        assert scan(tmp_path / "a", labelling=Labelling("natural")).class_order is None


class TestClassesFrom:
    def test_train_and_val_agree_whatever_is_missing(self, tmp_path: Path, suffix: str) -> None:
        """The case of a val without class b and a train with an empty folder c."""
        make_folder(tmp_path / "train", ["a", "b", "d"], 2)
        make_folder(tmp_path / "val", ["d", "a"], 1)
        (tmp_path / "train" / "c").mkdir()
        train, val = (tmp_path / f"{name}{suffix}" for name in ("train", "val"))
        assert convert(tmp_path / "train", train, size=8).empty_classes == ("c",)
        report = convert(tmp_path / "val", val, size=8, classes_from=train)
        assert report.classes == ("a", "b", "c", "d")
        assert report.empty_classes == ("b", "c")
        assert open_dataset(val).class_to_idx == open_dataset(train).class_to_idx
        assert open_dataset(val).targets.tolist() == [0, 3]
        folder = ImageFolderDataset(tmp_path / "val", size=8, classes_from=str(train))
        assert (folder.classes, folder.targets.tolist()) == (report.classes, [0, 3])

    def test_a_folder_that_is_not_in_it_is_refused_before_anything_is_written(
        self, tmp_path: Path, store: Path
    ) -> None:
        root = make_folder(tmp_path / "val", ["ant", "yak"], 1)
        (root / "zebra").mkdir()
        before = sorted(os.listdir(tmp_path))
        words = r"val: 'yak', 'zebra': no class of .*my store.*, which has 'ant', 'bee', 'cow'; rename the folder"
        with pytest.raises(SourceError, match=words):
            convert(root, tmp_path / "out.lmdb", classes_from=store)
        with pytest.raises(SourceError, match=words):
            ImageFolderDataset(root, classes_from=store)
        assert sorted(os.listdir(tmp_path)) == before

    def test_a_text_file_gives_the_order(self, tmp_path: Path) -> None:
        root = make_folder(tmp_path / "src", ["a", "b"], 2)
        (tmp_path / "classes.txt").write_text("b\nc\na\n")
        report = convert(root, tmp_path / "out.lmdb", size=8, classes_from=tmp_path / "classes.txt")
        store = Reader(tmp_path / "out.lmdb")
        assert store.info.classes == ("b", "c", "a")
        assert store.paths == ["b/0000.jpg", "b/0001.jpg", "a/0000.jpg", "a/0001.jpg"]
        assert store.labels.tolist() == [0, 0, 2, 2]
        assert report.empty_classes == ("c",)

    def test_pictures_without_class_folders_are_refused(self, tmp_path: Path, store: Path) -> None:
        root = make_folder(tmp_path / "src", ["ant"], 1)
        for source, layout in ((root / "ant", "auto"), (root, "flat")):
            with pytest.raises(
                SourceError, match=r"pictures without class folders get no labels: .* leave --classes-from out"
            ):
                convert(source, tmp_path / "out.lmdb", classes_from=store, layout=layout)

    def test_a_list_has_its_own_order(self, tmp_path: Path, store: Path, pictures: Path) -> None:
        with pytest.raises(UsageError, match="give one of them"):
            convert(pictures, tmp_path / "out.lmdb", classes_from=store, class_order="natural")

    def test_too_many_names_are_cut(self, tmp_path: Path) -> None:
        labelling = Labelling(names=tuple(f"{number:02}" for number in range(20)), origin="list.txt")
        with pytest.raises(
            SourceError, match=r"'x': no class of list.txt, which has '00', .*, '04' and 15 more; rename"
        ):
            labelling.arrange("src", ["x", "01"])


class TestReadingTheList:
    def test_of_a_store(self, store: Path) -> None:
        assert read_classes(store) == ("ant", "bee", "cow")

    def test_of_text_in_any_bytes(self, tmp_path: Path) -> None:
        path = tmp_path / "classes.txt"
        path.write_bytes(b"\xef\xbb\xbfant\r\n\n  \ncaf\xc3\xa9\nwith space \n\xff\xfe\nlast")
        assert read_classes(path) == ("ant", "café", "with space ", os.fsdecode(b"\xff\xfe"), "last")

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (
                None,
                "does not exist: expected a packshift store with classes, or a text file with one class name per line",
            ),
            (b"", "has no classes: expected a packshift store"),
            (b"\n \n", "has no classes: expected"),
            (b"a\nb\na\n", "has the class 'a' 2 times: expected each name once"),
            (b"a\nb/c\n", "line 2 is not the name of a folder: expected a packshift store"),
            (b"a\n..\n", "line 2 is not the name of a folder"),
            (b"\x89PNG\r\n\x1a\n\0\0", "line 3 is not the name of a folder"),
            (b"x" * 10_000, "line 1 is not the name of a folder"),
        ],
    )
    def test_what_is_none(self, tmp_path: Path, content: bytes | None, words: str) -> None:
        path = tmp_path / "list"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(SourceError, match=words):
            read_classes(path)

    def test_no_file_at_all(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        for path in (tmp_path, tmp_path / "pipe"):
            with pytest.raises(SourceError, match="is not a regular file: expected"):
                read_classes(path)

    def test_a_store_without_classes(self, pictures: Path, tmp_path: Path, suffix: str) -> None:
        convert(pictures / "ant", tmp_path / f"flat{suffix}", size=8)
        with pytest.raises(SourceError, match="has no classes"):
            read_classes(tmp_path / f"flat{suffix}")

    def test_a_store_that_cannot_be_read_is_not_taken_for_text(self, store: Path, tmp_path: Path) -> None:
        whole = store.read_bytes()
        store.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(PackshiftError) as caught:
            read_classes(store)
        assert not isinstance(caught.value, SourceError)

        def stop(done: int, total: int) -> None:
            raise KeyboardInterrupt

        make_folder(tmp_path / "src", ["a"], 2)
        with pytest.raises(KeyboardInterrupt):
            convert(tmp_path / "src", tmp_path / "new.lmdb", size=8, progress=stop)
        with pytest.raises(UnfinishedStoreError):
            read_classes(tmp_path / ".new.lmdb.partial")


class TestStoresOfOtherOrders:
    """What a store records of it, for the commands that look at the folder again."""

    @pytest.fixture(params=["natural", "given"])
    def made(self, request: pytest.FixtureRequest, tmp_path: Path, suffix: str) -> tuple[Path, Path]:
        root = make_folder(tmp_path / "src", ["10", "2", "1"], 2)
        (tmp_path / "list.txt").write_text("2\n7\n1\n10\n")
        options = {"natural": {"class_order": "natural"}, "given": {"classes_from": tmp_path / "list.txt"}}
        convert(root, tmp_path / f"out{suffix}", size=8, **options[request.param])
        assert Reader(tmp_path / f"out{suffix}").info.source["class_order"] == request.param
        return root, tmp_path / f"out{suffix}"

    def test_verify_knows_it(self, made: tuple[Path, Path]) -> None:
        root, store = made
        assert verify_store(store, root, jobs=1).passed
        make_folder(root, ["new"], 1)
        problems = [str(problem) for problem in verify_store(store, root, jobs=1).problems]
        assert any("only in the source 'new'" in problem for problem in problems)
        assert any("new/0000.jpg" in problem for problem in problems)

    def test_export_says_how_to_convert_the_folder_again(self, made: tuple[Path, Path], tmp_path: Path) -> None:
        _, store = made
        (note,) = export_store(store, tmp_path / "again", jobs=1).notes
        natural = Reader(store).info.source["class_order"] == "natural"
        option = "--class-order natural" if natural else f"--classes-from {store}"
        assert note.endswith(f"converting the folder again gives them with {option}")
        how = {"class_order": "natural"} if natural else {"classes_from": store}
        convert(tmp_path / "again", tmp_path / "second.lmdb", size=8, **how)
        first, second = Reader(store), Reader(tmp_path / "second.lmdb")
        assert first.info.classes == second.info.classes
        assert first.labels.tolist() == second.labels.tolist()
        assert all((first.pixels(index) == second.pixels(index)).all() for index in range(len(first)))
