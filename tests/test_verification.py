"""`packshift verify`: a sound store passes, every changed byte is told, and against a source every difference."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import lmdb
import numpy as np
import pytest
from helpers import FORKED_DECODERS, SAMPLE_PHOTOS, encoded, formula_picture, make_records, save, write_store
from test_cli import error_line, run

from packshift import convert, findings, source_comparison, verification
from packshift.errors import StoreError, UsageError
from packshift.record import Record
from packshift.stores._reader import Reader
from packshift.stores._writer import Writer
from packshift.verification import Verification, verify_store

pytestmark = FORKED_DECODERS

GOLDEN = Path(__file__).parent / "golden"


def flip(path: Path, offset: int, mask: int = 0x10) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


def make_store(folder: Path, format_name: str, own_sizes: bool, count: int = 40) -> Path:
    shapes = [(20 + index % 7, 30 - index % 5) if own_sizes else (21, 30) for index in range(count)]
    return write_store(folder / "store", format_name, make_records(shapes), own_sizes=own_sizes)


def texts(found: Verification) -> list[str]:
    return [str(problem) for problem in found.problems]


@pytest.fixture(params=[False, True], ids=["one-size", "own-sizes"])
def own_sizes(request: pytest.FixtureRequest) -> bool:
    return request.param


class TestStore:
    def test_a_whole_store_is_sound(self, tmp_path: Path, format_name: str, own_sizes: bool) -> None:
        path = make_store(tmp_path, format_name, own_sizes)
        found = verify_store(path)
        assert (found.sound, found.passed, found.problems, found.notes) == (True, True, (), ())
        assert (found.count, found.store_bytes, found.format) == (40, path.stat().st_size, format_name)

    @pytest.mark.parametrize("path", sorted(GOLDEN.glob("version*")), ids=lambda path: path.name)
    def test_stores_of_released_versions_are_sound(self, path: Path) -> None:
        assert texts(verify_store(path)) == []

    @pytest.mark.parametrize("count", [1, 500])
    def test_any_number_of_records(self, tmp_path: Path, format_name: str, own_sizes: bool, count: int) -> None:
        assert texts(verify_store(make_store(tmp_path, format_name, own_sizes, count))) == []

    def test_records_larger_than_a_window(
        self, tmp_path: Path, format_name: str, own_sizes: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(verification, "_WINDOW", 5000)
        path = write_store(tmp_path / "store", format_name, make_records([(90, 90)] * 3), own_sizes=own_sizes)
        assert texts(verify_store(path, jobs=2)) == []
        flip(path, Reader(path).info.payload_offset + 20_000)
        assert texts(verify_store(path)) == ["record 0 (class0/picture 0.jpg): its pixels do not match their checksum"]

    def test_a_flipped_byte_of_a_record_names_that_record_and_nothing_else(
        self, tmp_path: Path, format_name: str, own_sizes: bool
    ) -> None:
        path, rng = make_store(tmp_path, format_name, own_sizes), random.Random(0)
        reader = Reader(path)
        for trial in range(40):
            index = rng.choice((0, len(reader) - 1, rng.randrange(len(reader))))
            pixels = reader.pixels(index)
            place = rng.choice((0, pixels.size - 1, rng.randrange(pixels.size)))
            offset = pixels.ctypes.data - reader.array("labels").ctypes.data + reader.info.arrays["labels"].offset
            flip(path, offset + place, 1 << trial % 8)
            found = verify_store(path)
            flip(path, offset + place, 1 << trial % 8)
            assert texts(found) == [
                f"record {index} (class{index % 3}/picture {index}.jpg): its pixels do not match their checksum"
            ]
            assert (found.problems[0].index, found.problems[0].kind) == (index, "record")
        assert verify_store(path).passed

    def test_a_flipped_byte_anywhere_else_is_told_and_blames_no_pixels(
        self, tmp_path: Path, format_name: str, own_sizes: bool, pytestconfig: pytest.Config
    ) -> None:
        """Padding, frames, the tree of keys, the HDF5 library's tables, the user block, arrays, the header."""
        path, rng = make_store(tmp_path, format_name, own_sizes, 5), random.Random(0)
        reader = Reader(path)
        free = np.ones(reader.file_size, bool)
        base = reader.array("labels").ctypes.data - reader.info.arrays["labels"].offset
        for index in range(len(reader)):
            pixels = reader.pixels(index)
            free[pixels.ctypes.data - base :][: pixels.size] = False
        del reader
        for place in rng.sample(np.flatnonzero(free).tolist(), 250 if pytestconfig.getoption("full") else 100):
            flip(path, place)
            try:
                found = verify_store(path)
            except StoreError:
                pass
            else:
                assert not found.sound, place
                assert "record" not in found.counts, (place, texts(found))
            flip(path, place)

    @pytest.mark.parametrize(
        "name",
        ["labels", "paths", "path_offsets", "checksums", "source_sizes", "source_crc32", "original_sizes", "skipped"],
    )
    def test_a_damaged_array_is_named(self, store: Path, name: str) -> None:
        flip(store, Reader(store).info.arrays[name].offset)
        found = verify_store(store)
        assert texts(found) == [f"array '{name}' does not match its checksum"]
        assert any(name in note for note in found.notes)

    def test_records_are_named_by_index_where_their_paths_are_damaged(self, store: Path) -> None:
        info = Reader(store).info
        flip(store, info.arrays["paths"].offset)
        flip(store, info.payload_offset)
        assert texts(verify_store(store))[1:] == ["record 0: its pixels do not match their checksum"]

    def test_a_record_that_the_disk_does_not_give_is_named(self, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        info = Reader(store).info
        assert info.stride is not None
        bad = info.payload_offset + 5 * info.stride + 10
        read = os.preadv

        def preadv(fd: int, buffers: Any, offset: int) -> int:
            if offset <= bad < offset + len(buffers[0]):
                if offset == bad:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                buffers = [buffers[0][: bad - offset]]
            return read(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", preadv)
        assert texts(verify_store(store)) == ["record 5 (bee/0001.jpg): it cannot be read: Input/output error"]

    def test_overlapping_records_are_refused_without_reading_them_again_and_again(
        self, tmp_path: Path, format_name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = make_store(tmp_path, format_name, own_sizes=True, count=400)
        place = verification._Layout._arrays
        monkeypatch.setattr(
            verification._Layout,
            "_arrays",
            lambda layout, first, last: (place(layout, first, last)[0], np.full(last - first, 100_000)),
        )
        assert texts(verify_store(path)) == ["its records overlap: together they are larger than the file"]

    def test_a_record_that_lies_outside_the_file_is_named(
        self, tmp_path: Path, format_name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make_arrays = Writer._arrays

        def forged(writer: Writer, *rest: Any) -> dict[str, Any]:
            arrays = {name: array.copy() for name, array in make_arrays(writer, *rest).items()}
            arrays["shapes"][1, 0] = -1
            arrays["offsets"][2] = 1 << 40
            return arrays

        monkeypatch.setattr(Writer, "_arrays", forged)
        found = verify_store(make_store(tmp_path, format_name, own_sizes=True))
        assert texts(found) == [
            "record 1 (class1/picture 1.jpg): it does not lie in the file",
            "record 2 (class2/picture 2.jpg): it does not lie in the file",
        ]

    def test_problems_beyond_a_limit_are_counted(self, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(findings, "MOST_PROBLEMS", 3)
        info = Reader(store).info
        assert info.stride is not None
        for index in range(12):
            flip(store, info.payload_offset + index * info.stride)
        found = verify_store(store)
        assert (len(found.problems), found.counts, found.faults) == (3, {"record": 12}, 12)
        result = run("verify", store)
        assert result.stderr.splitlines()[-1] == f"packshift: {store}: and 9 more problems"

    def test_progress_counts_bytes_up_to_the_end(self, store: Path) -> None:
        seen: list[tuple[str, int, int]] = []
        verify_store(store, progress=lambda *step: seen.append(step))
        size = store.stat().st_size
        assert seen[-1] == ("bytes", size, size)
        assert [step[1] for step in seen] == sorted(step[1] for step in seen)

    def test_without_the_engines_verifier_a_note_says_so(
        self, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        convert(pictures, tmp_path / "out.lmdb", size=16)
        monkeypatch.setitem(sys.modules, "lmdb.verify", None)
        found = verify_store(tmp_path / "out.lmdb")
        assert found.sound
        assert "py-lmdb 3" in found.notes[0]

    def test_no_library_opens_the_file(self, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A stranger's file goes to no parser: HDF5 writes one of its own to compare, the LMDB engine does nothing."""
        opened = []
        low_level = h5py.h5f.open
        monkeypatch.setattr(
            h5py.h5f, "open", lambda name, *rest, **more: opened.append(name) or low_level(name, *rest, **more)
        )
        monkeypatch.setattr(lmdb, "Environment", None)
        monkeypatch.setattr(lmdb, "open", None)
        assert verify_store(store).passed
        assert not any(os.fsencode(store.name) in os.fsencode(name) for name in opened)


class TestSource:
    def differences(self, store: Path, source: Path, **options: Any) -> list[str]:
        found = verify_store(store, source, **options)
        assert found.sound
        return texts(found)

    def test_an_unchanged_source_gives_the_same(self, store: Path, pictures: Path) -> None:
        found = verify_store(store, pictures)
        assert (found.passed, found.pictures, found.notes) == (True, 12, ())

    @pytest.mark.parametrize(("size", "fit"), [(None, "crop"), ((20, 30), "pad"), (16, "stretch")])
    def test_the_settings_come_from_the_header(
        self, pictures: Path, tmp_path: Path, suffix: str, size: Any, fit: str
    ) -> None:
        convert(pictures, tmp_path / f"out{suffix}", size=size, fit=fit)
        assert verify_store(tmp_path / f"out{suffix}", pictures).passed

    def test_flat_folders(self, pictures: Path, tmp_path: Path, suffix: str) -> None:
        convert(pictures, tmp_path / f"out{suffix}", size=16, layout="flat")
        assert verify_store(tmp_path / f"out{suffix}", pictures).passed

    def test_added_and_removed_files(self, store: Path, pictures: Path) -> None:
        (pictures / "bee" / "0002.jpg").rename(pictures / "bee" / "new.jpg")
        assert self.differences(store, pictures) == [
            "record 6 (bee/0002.jpg): the source has no such file any more",
            "bee/new.jpg: a file of the source that the store does not have",
        ]

    def test_a_changed_file_is_not_taken_for_changed_pixels(self, store: Path, pictures: Path) -> None:
        path = pictures / "cow" / "0001.jpg"
        size = path.stat().st_size
        data = bytearray(path.read_bytes())
        data[-20] ^= 1
        path.write_bytes(data)
        save(pictures / "ant" / "0000.jpg", formula_picture(9, 9))
        assert self.differences(store, pictures) == [
            f"record 0 (ant/0000.jpg): its source is not the file that was converted ({self.sizes(store, pictures, 0)})",
            "record 9 (cow/0001.jpg): its source is not the file that was converted "
            f"({size:,} bytes as before, but other ones)",
        ]

    def sizes(self, store: Path, pictures: Path, index: int) -> str:
        reader = Reader(store)
        now = (pictures / reader.paths[index]).stat().st_size
        return f"{reader.array('source_sizes')[index]:,} bytes then, {now:,} now"

    def test_a_sample_decodes_few_and_looks_at_the_size_of_all(self, store: Path, pictures: Path) -> None:
        save(pictures / "bee" / "0003.jpg", formula_picture(9, 9))  # of the records 0, 5 and 11 none
        found = verify_store(store, pictures, sample=3)
        assert found.pictures == 3
        assert texts(found) == [
            f"record 7 (bee/0003.jpg): its source is not the file that was converted ({self.sizes(store, pictures, 7)})"
        ]
        seen: list[int] = []
        verify_store(store, pictures, sample=3, progress=lambda stage, done, _: seen.append(done * (stage != "bytes")))
        assert seen[-1] == 3

    def test_the_sample_is_evenly_spread(self) -> None:
        assert source_comparison._spread(np.arange(12), 3).tolist() == [0, 5, 11]
        assert source_comparison._spread(np.arange(12), 1).tolist() == [0]
        assert source_comparison._spread(np.arange(3), 9).tolist() == [0, 1, 2]

    def test_skipped_files_are_a_difference_only_when_they_can_be_read(
        self, pictures: Path, tmp_path: Path, suffix: str
    ) -> None:
        for name in ("bad.jpg", "good.jpg"):
            (pictures / "bee" / name).touch()
        convert(pictures, tmp_path / f"out{suffix}", size=16)
        assert self.differences(tmp_path / f"out{suffix}", pictures) == []
        (pictures / "bee" / "good.jpg").write_bytes(encoded(formula_picture(9, 9)))
        assert self.differences(tmp_path / f"out{suffix}", pictures) == [
            "bee/good.jpg: was skipped, and can be read now"
        ]

    def test_another_class(self, store: Path, pictures: Path) -> None:
        (pictures / "bat").mkdir()
        assert self.differences(store, pictures) == [
            "the source's classes are not the store's: only in the source 'bat'"
        ]

    def test_other_pixels_from_the_same_file_are_counted_and_the_versions_said(
        self, store: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        load = source_comparison.load_record

        def another_decoder(root: str, sample: Any, settings: Any) -> Record:
            record = load(root, sample, settings)
            if sample.name != "bee/0000.jpg":
                return record
            pixels = record.pixels.copy()
            pixels[3:5, 7, 1] ^= 3
            return dataclasses.replace(record, pixels=pixels)

        monkeypatch.setattr(source_comparison, "load_record", another_decoder)
        found = verify_store(store, pictures)
        assert texts(found) == [
            "record 4 (bee/0000.jpg): its source is unchanged, but 2 of 1,024 pixels come out different, "
            "by at most 3 of 255"
        ]
        assert found.notes == ()
        versions = source_comparison.tool_versions
        monkeypatch.setattr(source_comparison, "tool_versions", lambda: {**versions(), "pillow": "99.0"})
        (note,) = verify_store(store, pictures).notes
        monkeypatch.setattr(source_comparison, "load_record", load)
        assert verify_store(store, pictures).notes == ()
        assert note.endswith(f"which is no damage: pillow {versions()['pillow']} then, 99.0 here")

    def test_a_source_that_is_not_readable_any_more(self, store: Path, pictures: Path) -> None:
        path = pictures / "ant" / "0000.jpg"
        path.write_bytes(b"<html>")
        (text,) = self.differences(store, pictures)
        assert text.startswith(
            "record 0 (ant/0000.jpg): its source is not the file that was converted, and cannot be de"
        )
        path.unlink()
        path.symlink_to("nowhere")
        assert self.differences(store, pictures) == [
            "record 0 (ant/0000.jpg): its source cannot be read: No such file or directory"
        ]

    def test_a_damaged_record_is_not_blamed_on_the_source(self, store: Path, pictures: Path) -> None:
        flip(store, Reader(store).info.payload_offset)
        assert verify_store(store, pictures).counts == {"record": 1}

    def test_a_store_of_other_preprocessing_is_refused(self, tmp_path: Path, format_name: str, pictures: Path) -> None:
        path = make_store(tmp_path, format_name, own_sizes=False)
        with pytest.raises(StoreError, match="preprocessed in a way that this packshift cannot repeat"):
            verify_store(path, pictures)

    def test_a_sample_needs_a_source(self, store: Path) -> None:
        with pytest.raises(UsageError, match="sample without source"):
            verify_store(store, sample=3)


class TestCommand:
    def test_sound(self, store: Path, pictures: Path) -> None:
        result = run("verify", store, "--source", pictures, "--jobs", 2)
        assert (result.exit_code, result.stderr) == (0, "")
        assert result.stdout.splitlines()[0].startswith(f"{store}: sound: every byte is what was written; 12 records, ")
        assert result.stdout.splitlines()[1] == f"{pictures}: no difference; 12 pictures decoded"

    def test_damaged(self, store: Path) -> None:
        flip(store, Reader(store).info.payload_offset)
        result = run("verify", store)
        assert result.exit_code == 1
        assert result.stderr == f"packshift: {store}: record 0 (ant/0000.jpg): its pixels do not match their checksum\n"
        assert f"{store}: not sound: 1 problem; 12 records" in result.stdout

    def test_a_difference_from_the_source_is_no_fault_of_the_store(self, store: Path, pictures: Path) -> None:
        (pictures / "ant" / "0000.jpg").unlink()
        result = run("verify", store, "--source", pictures, "--sample", 2)
        assert result.exit_code == 1
        assert "sound: every byte" in result.stdout
        assert "1 difference; 2 pictures decoded" in result.stdout

    def test_json_and_quiet(self, store: Path) -> None:
        assert run("verify", store, "-q").output == ""
        flip(store, Reader(store).info.payload_offset)
        result = run("verify", store, "--json")
        facts = json.loads(result.stdout)
        assert (result.exit_code, result.stderr) == (1, "")
        assert (facts["sound"], facts["passed"], facts["counts"]) == (False, False, {"record": 1})
        assert facts["problems"] == [
            {
                "kind": "record",
                "text": "its pixels do not match their checksum",
                "index": 0,
                "path": "ant/0000.jpg",
            }
        ]
        assert len(run("verify", store, "-q").output.splitlines()) == 1

    @pytest.mark.parametrize(
        ("arguments", "code", "words"),
        [
            ("verify", 2, "Missing argument"),
            ("verify missing.lmdb", 1, "missing.lmdb: cannot open the store: No such file"),
            ("verify {store} --sample 3", 2, "give both"),
            ("verify {store} --source {store} --sample 0", 2, "--sample"),
            ("verify {store} --jobs 0", 2, "--jobs"),
            ("verify {store} --source /no/such/folder", 1, "source folder /no/such/folder does not exist"),
            ("verify .", 1, "is a folder"),
        ],
    )
    def test_bad_input_is_one_line(
        self, arguments: str, code: int, words: str, store: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(store.parent)
        store.rename("s")
        assert words in error_line(run(*arguments.format(store="s").split()), code)

    def test_cut_short(self, store: Path) -> None:
        os.truncate(store, store.stat().st_size // 2)
        assert "copied" in (line := error_line(run("verify", store), 1)) or "copy it again" in line

    def test_ctrl_c_is_one_line(self, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(verification, "verify_store", interrupted)
        assert error_line(run("verify", store), 1) == "packshift: interrupted before everything was checked"

    def test_as_a_real_process(self, tmp_path: Path, suffix: str) -> None:
        store = tmp_path / f"photos{suffix}"
        convert(SAMPLE_PHOTOS, store)
        command = [sys.executable, "-m", "packshift", "verify", str(store), "--source", str(SAMPLE_PHOTOS)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")
        assert "24 pictures decoded" in done.stdout
        flip(store, Reader(store).info.payload_offset)
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 1
        assert done.stderr.endswith("record 0 (boat/boat_1.jpg): its pixels do not match their checksum\n")
