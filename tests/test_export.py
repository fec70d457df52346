"""`packshift export`: what comes out converts to the same records again, and nothing is written outside the folder."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import FORKED_DECODERS, SAMPLE_PHOTOS, formula_picture, make_records, save, write_store
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from test_cli import error_line, run

from packshift import convert, export
from packshift.errors import DamagedStoreError, TargetError, UsageError
from packshift.export import export_store
from packshift.record import Record
from packshift.sources import scan
from packshift.stores._reader import Reader

pytestmark = FORKED_DECODERS

LONG = "x" * 251

ODD_NAMES = [
    b"with space.jpg",
    b"\xff\xfe not utf-8.jpeg",
    "日本.JPG".encode(),
    b"v1.2.final.jpg",
    b"a.jpg",
    b"a.png",
    b"a.jpg (1).jpg",
    b"a-.jpg",
    b"a.jpg.jpg",
    b"a.jpe",
    b"a.q.jpg",
    b"b.png/inside.jpg",
    b"b.jpg",
    b"deep/er/c.jpg",
    b"deep.jpg",
    b"line\nbreak.jpg",
    LONG.encode() + b".jpg",
    b"y" * 250 + b".jpeg",
    b"z" * 251 + b".jpg",
    b"z" * 251 + b".png",
]


def write_pictures(root: Path, names: list[bytes]) -> Path:
    for seed, name in enumerate(names):
        save(Path(os.fsdecode(os.fsencode(root) + b"/" + name)), formula_picture(12, 12, seed))
    return root


def same_records(first: Path, second: Path) -> None:
    one, two = Reader(first), Reader(second)
    assert one.info.classes == two.info.classes
    assert one.labels.tolist() == two.labels.tolist()
    assert one.array("checksums").tolist() == two.array("checksums").tolist()
    if one.info.shape is None:
        assert one.array("shapes").tolist() == two.array("shapes").tolist()


class TestRoundTrip:
    @pytest.mark.parametrize("size", [16, None])
    def test_png_gives_the_same_records_again(self, tmp_path: Path, suffix: str, size: int | None) -> None:
        source = tmp_path / "source"
        for name in ("Ant", "bee", "cow é", "1 2"):
            write_pictures(source / name, ODD_NAMES)
        for name in ("", "empty", "zebra"):
            (source / name).mkdir(exist_ok=True)
        first, second = tmp_path / f"1{suffix}", tmp_path / f"2{suffix}"
        convert(source, first, size=size)
        report = export_store(first, tmp_path / "out")
        assert (report.written, report.skipped) == (4 * len(ODD_NAMES), ())
        convert(tmp_path / "out", second, size=size)
        same_records(first, second)
        assert {"empty", "zebra"} <= set(Reader(second).info.classes)

    def test_flat(self, tmp_path: Path, suffix: str) -> None:
        write_pictures(tmp_path / "source", ODD_NAMES)
        convert(tmp_path / "source", tmp_path / f"1{suffix}", size=16, layout="flat")
        report = export_store(tmp_path / f"1{suffix}", tmp_path / "out")
        assert (report.written, report.skipped) == (len(ODD_NAMES), ())
        assert (Reader(tmp_path / f"1{suffix}").labels == -1).all()
        convert(tmp_path / "out", tmp_path / f"2{suffix}", size=16, layout="flat")
        same_records(tmp_path / f"1{suffix}", tmp_path / f"2{suffix}")

    def test_names_are_the_old_ones_with_another_suffix(self, store: Path, tmp_path: Path) -> None:
        export_store(store, tmp_path / "out")
        assert list(scan(tmp_path / "out").names) == [name.replace(".jpg", ".png") for name in Reader(store).paths]

    def test_two_pictures_that_differ_in_the_suffix_keep_it(self, tmp_path: Path) -> None:
        write_pictures(tmp_path / "source" / "a", [b"1.jpg", b"1.png", b"2.jpg"])
        convert(tmp_path / "source", tmp_path / "s.lmdb", size=16)
        export_store(tmp_path / "s.lmdb", tmp_path / "out")
        assert list(scan(tmp_path / "out").names) == ["a/1.jpg.png", "a/1.png", "a/2.png"]

    def test_jpeg(self, store: Path, tmp_path: Path) -> None:
        small = export_store(store, tmp_path / "small", image_format="jpeg", quality=30)
        large = export_store(store, tmp_path / "large", image_format="jpeg", quality=95)
        assert small.file_bytes < large.file_bytes
        with Image.open(tmp_path / "large" / "ant" / "0000.jpg") as picture:
            assert picture.format == "JPEG"
            assert np.abs(np.asarray(picture).astype(int) - Reader(store).pixels(0)).mean() < 12

    @settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_any_names_keep_their_order(self, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
        piece = st.sampled_from(["a", "b", ".jpg", ".png", ".jpeg", ".", " ", "-", "/", "p", "z", "~", "é", "\udcff"])
        stem = st.lists(piece, min_size=1, max_size=4).map("".join)
        name = st.builds(lambda stem, suffix: stem + suffix, stem, st.sampled_from([".jpg", ".png", ".JPG", ".webp"]))
        names = data.draw(st.lists(name, min_size=1, max_size=8, unique=True))
        parts = [part for name in names for part in name.split("/")]
        assume(all(part and not part.startswith(".") for part in parts))
        labelled = data.draw(st.booleans())
        raw = sorted(os.fsencode("k/" + name if labelled else name) for name in names)
        folders = {path[:place] for path in raw for place in range(len(path)) if path[place : place + 1] == b"/"}
        assume(not folders & set(raw))
        image_format = data.draw(st.sampled_from(["png", "jpeg"]))
        folder = tmp_path_factory.mktemp("names")
        records = [
            Record(os.fsdecode(path), 0 if labelled else -1, np.full((1, 1, 3), seed, np.uint8), 1, 1, (1, 1))
            for seed, path in enumerate(raw)
        ]
        write_store(folder / "store", "lmdb", records, classes=["k"] if labelled else [])
        report = export_store(folder / "store", folder / "out", jobs=1, image_format=image_format)
        assert not any("order" in note for note in report.notes if "keep the suffix" not in note)
        listing = scan(folder / "out", "class-folders" if labelled else "flat")
        assert len(listing) == len(names)
        for index, exported in enumerate(listing.names):
            with Image.open(folder / "out" / exported) as picture:
                assert abs(int(np.asarray(picture)[0, 0, 0]) - index) <= (2 if image_format == "jpeg" else 0)
                assert picture.format == image_format.upper()

    def test_records_that_are_not_in_the_order_of_their_names_are_said_to_be(self, tmp_path: Path) -> None:
        records = make_records([(4, 4)] * 6)
        report = export_store(write_store(tmp_path / "store", "lmdb", records), tmp_path / "out")
        assert "in another order" in report.notes[0]
        assert len(scan(tmp_path / "out")) == 6


class TestStrangers:
    """A store is somebody else's file: its names never lead out of the folder."""

    @pytest.mark.parametrize(
        "name",
        [
            "../../x.jpg",
            "/tmp/x.jpg",
            "class0/../../x.jpg",
            "class0//x.jpg",
            "",
            "class0/",
            "class0/\0.jpg",
            "..",
            "./x.jpg",
            "a/" * 500_000 + "x",
        ],
    )
    def test_a_path_that_leads_out_is_refused_before_anything_is_written(
        self, name: str, tmp_path: Path, format_name: str
    ) -> None:
        records = make_records([(4, 4)] * 2)
        object.__setattr__(records[1], "name", name)
        store = write_store(tmp_path / "store", format_name, records)
        with pytest.raises(
            DamagedStoreError, match="of its record 1 is not the name of a file inside a folder"
        ) as caught:
            export_store(store, tmp_path / "a" / "b" / "out")
        assert "\n" not in str(caught.value)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]

    @pytest.mark.parametrize("name", ["..", "a/b", "", "/etc", "x\0"])
    def test_so_is_a_class(self, name: str, tmp_path: Path) -> None:
        store = write_store(tmp_path / "store", "lmdb", make_records([(4, 4)]), classes=[name, "b", "c"])
        with pytest.raises(DamagedStoreError, match="its class"):
            export_store(store, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_a_path_outside_its_class_is_put_into_it(self, tmp_path: Path) -> None:
        records = make_records([(4, 4)] * 3)
        object.__setattr__(records[0], "name", "elsewhere/x.jpg")
        export_store(write_store(tmp_path / "store", "lmdb", records), tmp_path / "out")
        assert (tmp_path / "out" / "class0" / "elsewhere" / "x.png").is_file()

    def test_two_records_of_one_name(self, tmp_path: Path) -> None:
        records = make_records([(4, 4)] * 2, classes=1)
        object.__setattr__(records[1], "name", records[0].name)
        store = write_store(tmp_path / "store", "lmdb", records)
        with pytest.raises(TargetError, match="two records have this name"):
            export_store(store, tmp_path / "out")

    def test_hidden_names_are_told(self, tmp_path: Path) -> None:
        records = make_records([(4, 4)])
        object.__setattr__(records[0], "name", "class0/.x.jpg")
        (note,) = export_store(write_store(tmp_path / "store", "lmdb", records), tmp_path / "out").notes
        assert note == "files with hidden names, which packshift convert leaves out: 1"

    def test_a_picture_that_the_format_cannot_hold_is_named(self, tmp_path: Path) -> None:
        store = write_store(tmp_path / "store", "lmdb", make_records([(1, 65_501)]))
        with pytest.raises(
            TargetError, match=r"^record 0 \(class0/picture 0.jpg\): 65501 x 1 pixels cannot be encoded"
        ):
            export_store(store, tmp_path / "out", image_format="jpeg")


class TestCommand:
    def test_summary(self, store: Path, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        result = run("export", store, tmp_path / "out", "--jobs", 2)
        assert (result.exit_code, result.stderr) == (0, "")
        assert result.stdout.startswith(f"12 of 12 records written to {tmp_path}/out as png, ")

    def test_json_and_quiet(self, store: Path, tmp_path: Path) -> None:
        report = json.loads(run("export", store, tmp_path / "1", "--json", "--image-format", "jpeg").stdout)
        assert (report["written"], report["image_format"], report["skipped"]) == (12, "jpeg", [])
        assert report["file_bytes"] == sum(path.stat().st_size for path in (tmp_path / "1").rglob("*.jpg"))
        assert run("export", store, tmp_path / "2", "-q").output == ""

    def test_a_damaged_record_is_left_out_and_named(self, store: Path, tmp_path: Path) -> None:
        info = Reader(store).info
        with store.open("r+b") as file:
            file.seek(info.payload_offset + 5 * (info.stride or 0))
            file.write(b"damage")
        result = run("export", store, tmp_path / "out")
        assert result.exit_code == 3
        assert result.stderr == "skipped bee/0001.jpg: damaged: its pixels do not match their checksum\n"
        assert "11 of 12 records written" in result.stdout
        assert not (tmp_path / "out" / "bee" / "0001.png").exists()

    @pytest.mark.parametrize(
        ("arguments", "code", "words"),
        [
            ("export", 2, "Missing argument"),
            ("export s", 2, "Missing argument"),
            ("export missing out", 1, "missing: cannot open the store"),
            ("export s full", 1, "full is not empty (it has 'x'): choose a new or an empty folder"),
            ("export s s", 1, "s is a file: expected the name of a new folder"),
            ("export s no/out", 1, "no/out: the folder no does not exist; make it first"),
            ("export s out --quality 0", 2, "--quality"),
            ("export s out --image-format gif", 2, "--image-format"),
        ],
    )
    def test_bad_input_is_one_line(
        self, arguments: str, code: int, words: str, store: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(store.parent)
        store.rename("s")
        (store.parent / "full").mkdir()
        (store.parent / "full" / "x").touch()
        assert words in error_line(run(*arguments.split()), code)
        assert not (store.parent / "out").exists()

    def test_wrong_arguments_in_python(self, store: Path, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="unknown image format 'gif'"):
            export_store(store, tmp_path / "out", image_format="gif")
        with pytest.raises(UsageError, match="quality 101"):
            export_store(store, tmp_path / "out", image_format="jpeg", quality=101)

    def test_a_full_disk_is_one_line_and_leaves_no_half_picture(
        self, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class FullDisk(io.FileIO):
            def write(self, data: Any) -> int:
                if files > 4:
                    super().write(bytes(data[:10]))
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return super().write(data)

        files = 0

        def open_counted(fd: int, *_: object, **__: object) -> FullDisk:
            nonlocal files
            files += 1
            return FullDisk(fd, "wb")

        monkeypatch.setattr(export, "open", open_counted, raising=False)
        line = error_line(run("export", store, tmp_path / "out", "--jobs", 1), 1)
        assert line == (
            f"packshift: {tmp_path}/out: the disk is full; make room, or export elsewhere. "
            "What was written so far is left there"
        )
        left = list((tmp_path / "out").rglob("*.png"))
        assert len(left) == 4
        for path in left:
            with Image.open(path) as picture:
                picture.load()

    def test_ctrl_c_in_a_real_process(self, tmp_path: Path) -> None:
        """It says so in one line and leaves whole pictures."""
        store = write_store(tmp_path / "store", "hdf5", make_records([(300, 300)] * 400))
        command = [sys.executable, "-m", "packshift", "export", str(store), str(tmp_path / "out")]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 60
        while not list((tmp_path / "out").rglob("*.png")) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
        assert (process.returncode, output) == (1, "")
        assert errors == f"packshift: interrupted: what was written so far is left in {tmp_path}/out\n"
        left = list((tmp_path / "out").rglob("*.png"))
        assert 0 < len(left) < 400
        for path in left:
            with Image.open(path) as picture:
                picture.load()

    def test_as_a_real_process(self, tmp_path: Path) -> None:
        convert(SAMPLE_PHOTOS, tmp_path / "photos.lmdb")
        command = [sys.executable, "-m", "packshift", "export", str(tmp_path / "photos.lmdb"), str(tmp_path / "out")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")
        convert(tmp_path / "out", tmp_path / "again.lmdb")
        same_records(tmp_path / "photos.lmdb", tmp_path / "again.lmdb")
