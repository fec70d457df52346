"""A conversion gives the same bytes however it runs, and a whole store or none however it ends."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from helpers import (
    FORKED_DECODERS,
    SAMPLE_PHOTOS,
    encoded,
    formula_picture,
    image_folder_samples,
    make_folder,
    resize_and_crop,
    save,
)
from odd_pictures import png_of

from packshift import ImageFolderDataset, conversion, convert, preprocess
from packshift.errors import ImageError, SourceError, TargetError, UsageError
from packshift.options import Options
from packshift.planning import look_ahead, make_plan
from packshift.preprocess import NOTES
from packshift.record import Sample
from packshift.settings import Preprocessing
from packshift.stores import _partial
from packshift.stores._partial import partial_file, partial_path
from packshift.stores._reader import Reader
from packshift.verification import verify_store


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def test_every_sample_photo_equals_resize_and_crop(tmp_path: Path, suffix: str) -> None:
    target = tmp_path / f"out{suffix}"
    report = convert(SAMPLE_PHOTOS, target)
    reader = Reader(target)
    samples = image_folder_samples(SAMPLE_PHOTOS)
    assert report.written == len(reader) == len(samples) == 24
    assert report.notes == {"turned": 1}
    assert reader.info.classes == ("boat", "flower", "house", "mountain")
    for index, (path, label) in enumerate(samples):
        assert reader.paths[index] == str(path.relative_to(SAMPLE_PHOTOS))
        assert reader.labels[index] == label
        assert np.array_equal(reader.pixels(index), resize_and_crop(path, 256)), path


def test_a_huge_picture_needs_a_larger_limit(tmp_path: Path) -> None:
    """182 million grey pixels: skipped by Pillow's guard, converted with `max_pixels`, which the store and verify know."""
    save(tmp_path / "src" / "a" / "usual.png", formula_picture(20, 30), "PNG")
    rows = (b"\0" + b"\x80" * 14_000) * 13_000
    (tmp_path / "src" / "a" / "huge.png").write_bytes(png_of(14_000, 13_000, 8, 0, rows))
    del rows
    usual = convert(tmp_path / "src", tmp_path / "usual.lmdb", size=16)
    reason = "too many pixels: 182,000,000, over the limit of 178,956,970 (--max-pixels sets another)"
    assert [(each.path, each.reason) for each in usual.skipped] == [("a/huge.png", reason)]
    target = tmp_path / "out.lmdb"
    report = convert(tmp_path / "src", target, size=16, max_pixels=182_000_000, jobs=1)
    assert (report.written, report.skipped, report.messages) == (2, (), {})
    store = Reader(target)
    assert store.info.preprocessing["max_pixels"] == 182_000_000
    assert (store.pixels(0) == 128).all()
    assert verify_store(target, tmp_path / "src", jobs=1).passed


def test_max_pixels_is_about_decoding_forecasts_and_folder_datasets_alike(tmp_path: Path) -> None:
    root = make_folder(tmp_path / "src", ["a"], 3)
    save(root / "a" / "large.png", formula_picture(100, 100), "PNG")
    report = convert(root, tmp_path / "out.lmdb", size=None, max_pixels=9999)
    reason = "too many pixels: 10,000, over the limit of 9,999 (--max-pixels sets another)"
    assert [(each.path, each.reason) for each in report.skipped] == [("a/large.png", reason)]
    plans = [make_plan(root, tmp_path / "new.lmdb", Options(size=None, max_pixels=limit)) for limit in (9999, 10_000)]
    without, whole = (look_ahead(plan, decode=False).store_bytes for plan in plans)
    assert without < whole
    assert ImageFolderDataset(root, size=None, max_pixels=10_000)[3][0].shape == (3, 100, 100)
    with pytest.raises(ImageError, match=r"large\.png: too many pixels"):
        ImageFolderDataset(root, size=None, max_pixels=9999)[3]


def test_the_same_bytes_for_any_number_of_jobs(tmp_path: Path, suffix: str) -> None:
    root = make_folder(tmp_path / "pictures", ["a", "b"], 40)
    (root / "a" / "0003.jpg").write_bytes(b"broken")
    stores = []
    for jobs in (1, 2, 7):
        target = tmp_path / f"jobs{jobs}{suffix}"
        assert convert(root, target, size=32, jobs=jobs).written == 79
        stores.append(target.read_bytes())
    assert stores[0] == stores[1] == stores[2]


def test_the_store_does_not_depend_on_where_the_source_lies(tmp_path: Path, suffix: str) -> None:
    stores = []
    for place in ("here", "over there"):
        target = tmp_path / f"{place}{suffix}"
        convert(make_folder(tmp_path / place, ["a"], 3), target, size=16)
        stores.append(target.read_bytes())
    assert stores[0] == stores[1]


def test_own_sizes(tmp_path: Path, suffix: str) -> None:
    images = {
        "a/1.png": formula_picture(31, 57),
        "a/2.png": formula_picture(100, 20),
        "b/3.png": formula_picture(64, 64),
    }
    for name, image in images.items():
        save(tmp_path / "src" / name, image, "PNG")
    convert(tmp_path / "src", tmp_path / f"out{suffix}", size=None)
    reader = Reader(tmp_path / f"out{suffix}")
    for index, image in enumerate(images.values()):
        assert np.array_equal(reader.pixels(index), np.asarray(image))


class TestBadFiles:
    pytestmark = FORKED_DECODERS

    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        root = make_folder(tmp_path / "src", ["a", "b"], 3)
        (root / "a" / "empty.jpg").touch()
        good = encoded(formula_picture(60, 80))
        (root / "b" / "cut.jpg").write_bytes(good[: len(good) // 2])
        (root / "b" / "gone.jpg").symlink_to("nowhere")
        return root

    def test_are_skipped_named_and_kept_in_the_store(self, source: Path, tmp_path: Path, suffix: str) -> None:
        report = convert(source, tmp_path / f"out{suffix}", size=32)
        assert (report.found, report.written) == (9, 6)
        assert [(skipped.path, skipped.reason) for skipped in report.skipped] == [
            ("a/empty.jpg", "empty file (0 bytes)"),
            ("b/cut.jpg", report.skipped[1].reason),
            ("b/gone.jpg", "cannot be read: No such file or directory"),
        ]
        assert "truncated" in report.skipped[1].reason
        reader = Reader(tmp_path / f"out{suffix}")
        assert tuple(reader.skipped) == report.skipped
        assert len(reader) == 6
        assert all(reader.pixels(index).any() for index in range(6))

    def test_stop(self, source: Path, tmp_path: Path) -> None:
        with pytest.raises(ImageError, match=r"^a/empty\.jpg: empty file .*3 of 9 pictures are kept"):
            convert(source, tmp_path / "out.lmdb", on_error="stop")
        assert not (tmp_path / "out.lmdb").exists()
        save(source / "a" / "empty.jpg", formula_picture(50, 50))
        with pytest.raises(ImageError, match=r"^b/cut\.jpg"):
            convert(source, tmp_path / "out.lmdb", on_error="stop")
        (source / "b" / "cut.jpg").unlink()
        with pytest.raises(TargetError, match=r"pictures was 9, now 8; files were added, removed or renamed"):
            convert(source, tmp_path / "out.lmdb", on_error="stop")

    @pytest.mark.parametrize("limit", [2, "2", "30%", "22.3%"])
    def test_more_than_the_limit(self, source: Path, tmp_path: Path, limit: int | str) -> None:
        with pytest.raises(
            ImageError, match=r"^3 pictures cannot be read, more than the 2 that --max-errors allows; .*b/gone\.jpg"
        ):
            convert(source, tmp_path / "out.lmdb", max_errors=limit)
        assert not (tmp_path / "out.lmdb").exists()

    @pytest.mark.parametrize("limit", [3, "34%"])
    def test_just_within_the_limit(self, source: Path, tmp_path: Path, limit: int | str) -> None:
        assert len(convert(source, tmp_path / "out.lmdb", max_errors=limit).skipped) == 3

    @pytest.mark.parametrize("limit", ["many", "-1", "101%", "1.5", True, "nan%", ""])
    def test_limits_that_cannot_be_right(self, source: Path, tmp_path: Path, limit: object) -> None:
        with pytest.raises(
            UsageError, match=r"^max_errors .*: expected a number of files such as 10, or a share such as 5%"
        ):
            convert(source, tmp_path / "out.lmdb", max_errors=limit)

    def test_nothing_readable(self, tmp_path: Path) -> None:
        (tmp_path / "src" / "a").mkdir(parents=True)
        for number in range(3):
            (tmp_path / "src" / "a" / f"{number}.jpg").write_bytes(b"nonsense")
        with pytest.raises(
            SourceError, match=r"none of the 3 pictures in .* can be read; the first, a/0\.jpg: not a picture"
        ):
            convert(tmp_path / "src", tmp_path / "out.h5")
        assert leftovers(tmp_path) == []


class TestWhatIsNotTheFilesFault:
    """Too little memory or too many open files end the run: skipping pictures for it would give another store each time."""

    def test_no_memory(self, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(conversion, "LOADER", "faulty_loaders:no_memory")
        with pytest.raises(MemoryError):
            convert(pictures, tmp_path / "out.lmdb")
        assert leftovers(tmp_path) == []

    def test_too_many_open_files(self, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(conversion, "LOADER", "faulty_loaders:too_many_open_files")
        with pytest.raises(SourceError, match=r"ant/000\d\.jpg: Too many open files: use fewer jobs"):
            convert(pictures, tmp_path / "out.lmdb")
        assert leftovers(tmp_path) == []

    def test_too_many_open_files_is_told_from_a_bad_file(self, pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object, **__: object) -> None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        monkeypatch.setattr(preprocess, "open", fail, raising=False)
        with pytest.raises(SourceError, match=r"ant/0000\.jpg: Too many open files: use fewer jobs"):
            preprocess.load_record(str(pictures), Sample("ant/0000.jpg", 0), Preprocessing())


class TestTarget:
    pytestmark = FORKED_DECODERS

    def test_a_name_as_long_as_names_can_be(self, pictures: Path, tmp_path: Path) -> None:
        target = tmp_path / ("n" * 250 + ".lmdb")
        convert(pictures, target, size=16)
        assert len(Reader(target)) == 12
        assert leftovers(tmp_path) == []

    def test_a_pipe_in_the_place_of_the_partial_file(self, pictures: Path, tmp_path: Path) -> None:
        os.mkfifo(partial_path(tmp_path / "out.lmdb"))
        with pytest.raises(TargetError, match="is in the way"):
            convert(pictures, tmp_path / "out.lmdb")

    def test_an_existing_one_is_kept(self, pictures: Path, store: Path) -> None:
        before = store.read_bytes()
        with pytest.raises(TargetError, match=r"exists: choose another name, or replace it with --overwrite"):
            convert(pictures, store)
        assert store.read_bytes() == before

    def test_an_existing_one_is_replaced_when_asked(self, pictures: Path, store: Path) -> None:
        convert(pictures, store, size=48, overwrite=True)
        assert Reader(store).info.shape == (48, 48, 3)

    def test_a_link_is_followed(self, pictures: Path, store: Path, tmp_path: Path, suffix: str) -> None:
        link = tmp_path / f"link{suffix}"
        link.symlink_to(store)
        convert(pictures, link, size=48, overwrite=True)
        assert link.is_symlink()
        assert Reader(store).info.shape == (48, 48, 3)

    def test_one_that_appears_meanwhile_is_kept(self, pictures: Path, tmp_path: Path) -> None:
        target = tmp_path / "out.lmdb"
        with pytest.raises(TargetError, match="appeared while the conversion ran"):
            convert(pictures, target, progress=lambda done, total: target.write_bytes(b"mine"))
        assert target.read_bytes() == b"mine"
        os.unlink(target)
        assert convert(pictures, target).carried_on == 12
        assert leftovers(tmp_path) == []

    def test_what_cannot_be_a_target(self, pictures: Path, tmp_path: Path) -> None:
        with pytest.raises(TargetError, match="is a folder: expected the name of a file"):
            convert(pictures, pictures, format="lmdb")
        with pytest.raises(TargetError, match="does not exist: create it first"):
            convert(pictures, tmp_path / "no" / "where.lmdb")
        with pytest.raises(TargetError, match="is a file, not a folder"):
            convert(pictures, pictures / "ant" / "0000.jpg" / "out.lmdb")
        (tmp_path / "loop.lmdb").symlink_to("loop.lmdb")
        with pytest.raises(TargetError, match="symbolic links"):
            convert(pictures, tmp_path / "loop.lmdb", overwrite=True)
        with pytest.raises(TargetError, match="File name too long"):
            convert(pictures, tmp_path / ("n" * 300 + ".lmdb"))
        with pytest.raises(TargetError, match="is not a regular file"):
            convert(pictures, "/dev/null", format="lmdb", overwrite=True)
        with pytest.raises(UsageError, match=r"from its suffix: expected \.h5 or \.hdf5 \(hdf5\), \.lmdb \(lmdb\)"):
            convert(pictures, tmp_path / "out.zip")

    def test_the_format_can_be_named(self, pictures: Path, tmp_path: Path, format_name: str) -> None:
        convert(pictures, tmp_path / "out.bin", size=16, format=format_name)
        assert Reader(tmp_path / "out.bin").info.format == format_name

    def test_two_conversions_to_one_target(self, pictures: Path, tmp_path: Path) -> None:
        with (
            partial_file(tmp_path / "out.lmdb"),
            pytest.raises(TargetError, match="another conversion is writing it now"),
        ):
            convert(pictures, tmp_path / "out.lmdb")
        assert convert(pictures, tmp_path / "out.lmdb", size=16).written == 12

    def test_a_run_that_waited_for_the_lock_of_one_that_published_leaves_its_store_alone(
        self, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Between opening and locking the partial file, another run gives it the target's name."""
        target = tmp_path / "out.lmdb"
        convert(pictures, tmp_path / "first.lmdb", size=16)
        os.rename(tmp_path / "first.lmdb", partial_path(target))
        real_lock = _partial.fcntl.flock

        def lock(fd: int, operation: int) -> None:
            if partial_path(target).exists() and not target.exists():
                os.rename(partial_path(target), target)
            real_lock(fd, operation)

        monkeypatch.setattr(_partial.fcntl, "flock", lock)
        with partial_file(target):
            assert len(Reader(target)) == 12
        assert len(Reader(target)) == 12

    def test_no_access(self, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The test may run as root, whom no permission stops: the operating system's answer is put in its mouth."""
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        with pytest.raises(TargetError, match="is not writable"):
            convert(pictures, tmp_path / "out.lmdb")


class TestFullDisk:
    pytestmark = FORKED_DECODERS

    @pytest.fixture
    def disk(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """A disk that takes so many bytes and no more; set `disk[0]`."""
        room = [0]
        real_write = os.pwritev

        def write(fd: int, buffers: list[memoryview], offset: int) -> int:
            if offset + sum(buffer.nbytes for buffer in buffers) > room[0]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real_write(fd, buffers, offset)

        monkeypatch.setattr(_partial.os, "pwritev", write)
        return room

    @pytest.mark.parametrize("room", [0, 10_000, 60_000, 115_000])
    def test_one_line_the_old_store_kept_and_carried_on_once_there_is_room(
        self, room: int, disk: list[int], pictures: Path, tmp_path: Path, suffix: str
    ) -> None:
        """At the first byte, among the records, and while the index is written."""
        target = tmp_path / f"out{suffix}"
        disk[0] = 10**9
        convert(pictures, target, size=48)
        before = target.read_bytes()
        assert len(before) > 115_000
        disk[0] = room
        with pytest.raises(TargetError, match=r"the disk is full after .* MB were written; make room in") as caught:
            convert(pictures, target, size=48, overwrite=True)
        assert "\n" not in str(caught.value)
        assert target.read_bytes() == before
        kept = re.search(r"(\d+) of 12 pictures are kept, and the same command carries on", str(caught.value))
        assert bool(kept) == bool(leftovers(tmp_path)) == (room > 10_000)
        disk[0] = 10**9
        report = convert(pictures, target, size=48, overwrite=True)
        assert report.carried_on == (int(kept[1]) if kept else 0)
        assert target.read_bytes() == before
        assert leftovers(tmp_path) == []

    def test_a_short_write_is_continued(
        self, pictures: Path, tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        convert(pictures, tmp_path / f"whole{suffix}", size=48)
        real_write = os.pwritev
        monkeypatch.setattr(
            _partial.os, "pwritev", lambda fd, buffers, offset: real_write(fd, [buffers[0][:777]], offset)
        )
        convert(pictures, tmp_path / f"bitwise{suffix}", size=48)
        assert (tmp_path / f"bitwise{suffix}").read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()


class TestKilled:
    """A conversion in a process of its own, ended in the middle by a signal."""

    pytestmark = FORKED_DECODERS

    def start(self, source: Path, target: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "packshift", "convert", str(source), str(target), "--jobs", "1"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        journal = partial_path(target).with_name(f".{target.name}.journal")
        deadline = time.monotonic() + 60
        while not journal.exists() or journal.read_bytes().count(b"\n") < 2:  # the first is about the conversion
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.002)
        return process

    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        large = save(tmp_path / "large.jpg", formula_picture(900, 1200))
        (tmp_path / "src" / "a").mkdir(parents=True)
        for number in range(150):
            os.link(large, tmp_path / "src" / "a" / f"{number}.jpg")
        return tmp_path / "src"

    def test_sigkill_leaves_no_target_and_the_next_run_succeeds(
        self, source: Path, tmp_path: Path, suffix: str
    ) -> None:
        target = tmp_path / f"out{suffix}"
        process = self.start(source, target)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert not target.exists()
        kept = convert(source, target, size=256, jobs=2, overwrite=True)
        assert kept.written == 150
        assert kept.carried_on > 0
        assert leftovers(tmp_path) == []
        assert convert(source, tmp_path / f"undisturbed{suffix}").written == 150
        assert target.read_bytes() == (tmp_path / f"undisturbed{suffix}").read_bytes()

    def test_ctrl_c_is_one_line_that_says_what_is_kept(self, source: Path, tmp_path: Path) -> None:
        process = self.start(source, tmp_path / "out.lmdb")
        process.send_signal(signal.SIGINT)
        _, log = process.communicate(timeout=60)
        assert process.returncode == 1
        assert re.search(
            r"^packshift: interrupted: nothing was published; \d+ of 150 pictures are kept, and the same command carries on$",
            log.splitlines()[-1],
        )
        assert "Traceback" not in log
        assert not (tmp_path / "out.lmdb").exists()
        assert leftovers(tmp_path) == [".out.lmdb.journal", ".out.lmdb.partial"]


def test_arguments_that_cannot_be_right(pictures: Path, tmp_path: Path) -> None:
    for wrong in (
        {"jobs": 0},
        {"jobs": "2"},
        {"on_error": "ignore"},
        {"fit": "squeeze"},
        {"size": "huge"},
        {"format": "zip"},
    ):
        with pytest.raises(UsageError, match="expected"):
            convert(pictures, tmp_path / "out.lmdb", **wrong)
    for source, target in (("", "out.lmdb"), (pictures, ""), ("a\0b", "out.lmdb")):
        with pytest.raises(UsageError, match="expected the name of a file or folder"):
            convert(source, target)


def test_conversions_in_threads_leave_the_warning_filters_as_they_were(pictures: Path, tmp_path: Path) -> None:
    before = list(warnings.filters)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda number: convert(pictures, tmp_path / f"{number}.lmdb", size=16), range(6)))
    assert warnings.filters == before


def test_progress_counts_every_picture(pictures: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    convert(pictures, tmp_path / "out.lmdb", size=16, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, 12) for done in range(1, 13)]


def test_notes_are_counted(tmp_path: Path) -> None:
    root = make_folder(tmp_path / "src", ["a"], 2, size=(300, 300))
    save(root / "a" / "small.png", formula_picture(10, 10), "PNG")
    transparent = formula_picture(300, 300).convert("RGBA")
    transparent.putalpha(100)
    save(root / "a" / "clear.png", transparent, "PNG")
    report = convert(root, tmp_path / "out.lmdb")
    assert report.notes == {"enlarged": 1, "transparent": 1}
    assert set(report.notes) <= set(NOTES)


def test_duplicates_are_found_and_kept(tmp_path: Path) -> None:
    root = make_folder(tmp_path / "src", ["a", "b"], 3)
    copies = {
        "a/0000_again.jpg": "a/0000.jpg",
        "b/x.jpg": "a/0001.jpg",
        "b/y.jpg": "a/0001.jpg",
        "b/z.jpg": "b/0002.jpg",
    }
    for copy, original in copies.items():
        (root / copy).write_bytes((root / original).read_bytes())
    report = convert(root, tmp_path / "out.lmdb", size=16)
    assert report.written == 10
    assert (report.duplicates.count, report.duplicates.other_label) == (4, 2)
    assert report.duplicates.examples == (
        ("a/0001.jpg", "b/x.jpg"),
        ("a/0001.jpg", "b/y.jpg"),
        ("a/0000.jpg", "a/0000_again.jpg"),
    )
    none = convert(root / "a", tmp_path / "none.lmdb", size=16, restart=True)
    assert none.duplicates.count == 1


def test_memory_does_not_grow_with_the_number_of_pictures(tmp_path: Path) -> None:
    """Peak memory of a fresh process converting 300 and 3,000 links to one picture."""
    picture = save(tmp_path / "one.jpg", formula_picture(64, 64))
    peaks = []
    for count in (300, 3000):
        folder = tmp_path / f"src{count}" / "a"
        folder.mkdir(parents=True)
        for number in range(count):
            os.link(picture, folder / f"{number}.jpg")
        code = (
            "import resource, sys; from packshift import convert; convert(sys.argv[1], sys.argv[2], size=64, jobs=2);"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        )
        target = str(tmp_path / f"{count}.lmdb")
        done = subprocess.run(
            [sys.executable, "-c", code, str(folder.parent), target], capture_output=True, text=True, check=True
        )
        peaks.append(int(done.stdout) / 1024)
    assert peaks[1] - peaks[0] < 8, peaks
