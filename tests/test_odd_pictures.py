"""What becomes of odd files (`odd_pictures.py`) in both formats: stored right, skipped with a reason, or left out."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from helpers import formula_picture, make_folder, save
from odd_pictures import LEFT_OUT, SKIPPED, STORED, Case, make_tree
from PIL import Image, ImageOps

from packshift import convert
from packshift.conversion import Report
from packshift.stores._reader import Reader


@dataclass(frozen=True)
class Converted:
    cases: list[Case]
    report: Report
    reader: Reader

    def __post_init__(self) -> None:
        assert self.cases


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Case]]:
    root = tmp_path_factory.mktemp("odd")
    cases, refused = make_tree(root)
    assert not refused or sys.platform == "darwin", refused
    return root, cases


@pytest.fixture(scope="module", params=["lmdb", "h5"])
def converted(
    request: pytest.FixtureRequest, tree: tuple[Path, list[Case]], tmp_path_factory: pytest.TempPathFactory
) -> Converted:
    root, cases = tree
    target = tmp_path_factory.mktemp("stores") / f"odd.{request.param}"
    return Converted(cases, convert(root, target, size=None, jobs=2), Reader(target))


def test_every_file_becomes_what_it_must(converted: Converted) -> None:
    stored, skipped = set(converted.reader.paths), {each.path: each.reason for each in converted.reader.skipped}
    wrong = []
    for case in converted.cases:
        became = STORED if case.path in stored else SKIPPED if case.path in skipped else LEFT_OUT
        if became != case.becomes or case.words not in skipped.get(case.path, case.words):
            wrong.append((case.path, case.becomes, became, skipped.get(case.path)))
    assert wrong == []
    assert all(reason and "\n" not in reason for reason in skipped.values())


def test_nothing_else_is_there_and_nothing_is_lost(converted: Converted) -> None:
    expected = Counter(case.becomes for case in converted.cases)
    report = converted.report
    assert report.written == len(converted.reader) == expected[STORED]
    assert len(report.skipped) == expected[SKIPPED]
    assert sum(report.ignored.values()) == expected[LEFT_OUT]


def test_stored_pictures_are_upright_and_of_the_right_colours(converted: Converted) -> None:
    wrong = []
    places = {path: index for index, path in enumerate(converted.reader.paths)}
    for case in converted.cases:
        if case.becomes != STORED:
            continue
        pixels = converted.reader.pixels(places[case.path])
        height, width = case.size
        if pixels.shape != (height, width, 3):
            wrong.append((case.path, pixels.shape))
        elif case.colours is not None:
            spots = [(y, x) for y in (height // 4, height * 3 // 4) for x in (width // 4, width * 3 // 4)]
            found = np.array([pixels[spot] for spot in spots], int)
            if np.abs(found - np.array(case.colours)).max() > case.tolerance:
                wrong.append((case.path, found.tolist()))
    assert wrong == []


def test_notes_are_counted(converted: Converted) -> None:
    expected = Counter(note for case in converted.cases if case.becomes == STORED for note in case.notes)
    assert dict(converted.report.notes) == dict(expected)
    assert all(expected[note] for note in ("turned", "transparent", "frames", "16-bit"))


def test_pixels_are_pillows_own_wherever_it_does_not_clip(converted: Converted) -> None:
    """Also of the pictures whose colours the table does not know."""
    places = {path: index for index, path in enumerate(converted.reader.paths)}
    compared = 0
    for case in converted.cases:
        if case.becomes == STORED and case.data is not None and "16-bit" not in case.notes:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with Image.open(io.BytesIO(case.data)) as opened:
                    opened.load()
                    expected = np.asarray(ImageOps.exif_transpose(opened).convert("RGB"))
            assert np.array_equal(converted.reader.pixels(places[case.path]), expected), case.path
            compared += 1
    assert compared > 100


def test_labels_are_those_of_the_first_folder(converted: Converted) -> None:
    classes = converted.reader.info.classes
    assert classes == ("broken", "kinds", "modes", "names", "places", "sizes", "turned")
    labels = converted.reader.labels
    for index, path in enumerate(converted.reader.paths):
        assert classes[labels[index]] == path.split("/")[0]


def test_one_size_for_all(tree: tuple[Path, list[Case]], tmp_path: Path) -> None:
    root, cases = tree
    report = convert(root, tmp_path / "small.lmdb", size=32, jobs=2)
    assert report.written == sum(case.becomes == STORED for case in cases)
    assert Reader(tmp_path / "small.lmdb").info.shape == (32, 32, 3)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads files of every mode")
@pytest.mark.parametrize("suffix", ["lmdb", "h5"])
def test_a_file_that_may_not_be_read_is_an_error_of_that_file(tmp_path: Path, suffix: str) -> None:
    root = make_folder(tmp_path / "photos", ["a", "b"], 2)
    (root / "a" / "0001.jpg").chmod(0)
    report = convert(root, tmp_path / f"out.{suffix}")
    assert report.written == 3
    assert [(each.path, each.reason) for each in report.skipped] == [
        ("a/0001.jpg", "cannot be read: Permission denied")
    ]


@pytest.mark.parametrize("suffix", ["lmdb", "h5"])
def test_background_reaches_the_store(tmp_path: Path, suffix: str) -> None:
    save(tmp_path / "photos" / "clear.png", Image.new("RGBA", (8, 8), (255, 0, 0, 0)), "PNG")
    save(tmp_path / "photos" / "opaque.png", formula_picture(8, 8), "PNG")
    report = convert(tmp_path / "photos", tmp_path / f"out.{suffix}", size=8, background="white")
    reader = Reader(tmp_path / f"out.{suffix}")
    assert reader.info.preprocessing["background"] == [255, 255, 255]
    assert dict(report.notes) == {"background": 1}
    assert (reader.pixels(0) == 255).all()
    assert np.array_equal(reader.pixels(1), np.asarray(formula_picture(8, 8)))
