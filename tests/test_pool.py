"""Decoding processes: order, pictures that kill their process, messages, and slow ones that nobody waits for."""

from __future__ import annotations

import errno
import os
import signal
import socket
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import formula_picture, make_folder, save

from packshift import conversion, convert, pool
from packshift.errors import UsageError
from packshift.pool import BATCH, BATCHES_AHEAD, Decoded, DecodingPool, _Run
from packshift.preprocess import load_record
from packshift.record import Sample
from packshift.settings import Preprocessing
from packshift.stores._reader import Reader
from packshift.worker import kind_of

SETTINGS = Preprocessing((32, 32))


def samples_of(root: Path) -> list[Sample]:
    return [Sample(str(path.relative_to(root)), 0) for path in sorted(root.rglob("*.*"))]


@pytest.mark.parametrize(("count", "jobs"), [(1, 1), (3, 2), (BATCH * 5 + 1, 1), (50, 3)])
@pytest.mark.parametrize("size", [(32, 32), None])
def test_every_picture_once_and_in_order(tmp_path: Path, count: int, jobs: int, size: tuple[int, int] | None) -> None:
    root = make_folder(tmp_path / "src", ["a"], count)
    samples = samples_of(root)
    settings = Preprocessing(size)
    with DecodingPool(str(root), settings, jobs) as pool:
        given = [
            (decoded.entry, bytes(decoded.pixels or b"")) for decoded in pool.outcomes(iter(samples), len(samples))
        ]
    assert len(given) == count
    for sample, (entry, pixels) in zip(samples, given, strict=True):
        record = load_record(str(root), sample, settings)
        assert entry is not None
        assert entry.shape == record.pixels.shape
        assert np.array_equal(np.frombuffer(pixels, np.uint8).reshape(entry.shape), record.pixels), sample


def test_pictures_larger_than_a_slot(tmp_path: Path) -> None:
    picture = formula_picture(1300, 1200)
    save(tmp_path / "large.png", picture, "PNG")
    with DecodingPool(str(tmp_path), Preprocessing(None), 1) as pool:
        (pixels,) = [bytes(decoded.pixels or b"") for decoded in pool.outcomes([Sample("large.png", 0)], 1)]
    assert pixels == picture.tobytes()


class TestCrashes:
    """A process that a picture takes with it is replaced; the picture is named, and all others are converted."""

    @pytest.fixture
    def source(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(conversion, "LOADER", "faulty_loaders:crash")
        return make_folder(tmp_path / "src", ["a", "b"], 12)

    def test_are_named_with_how_the_process_ended(self, source: Path, tmp_path: Path, suffix: str) -> None:
        for name in ("crash-read", "crash-exit", "crash-kill"):
            save(source / "a" / f"0003 {name}.jpg", formula_picture(40, 40))
        report = convert(source, tmp_path / f"out{suffix}", size=32, jobs=2)
        assert (report.found, report.written) == (27, 24)
        reasons = {skipped.path: skipped.reason for skipped in report.skipped}
        assert reasons == {
            "a/0003 crash-exit.jpg": "its decoder crashes (exit code 3: decoder: giving up on this one)",
            "a/0003 crash-kill.jpg": "its decoder crashes (killed by SIGKILL)",
            "a/0003 crash-read.jpg": "its decoder crashes (killed by SIGSEGV)",
        }
        for path in source.glob("*/*crash*"):
            path.unlink()
        convert(source, tmp_path / f"without{suffix}", size=32)
        crashed, without = Reader(tmp_path / f"out{suffix}"), Reader(tmp_path / f"without{suffix}")
        assert list(crashed.paths) == list(without.paths)
        assert all(np.array_equal(crashed.pixels(index), without.pixels(index)) for index in range(24))

    def test_one_that_happens_once_costs_no_picture(self, source: Path, tmp_path: Path) -> None:
        save(source / "a" / "0003 crash-once.jpg", formula_picture(40, 40))
        report = convert(source, tmp_path / "out.lmdb", size=32, jobs=2)
        assert (report.found, report.written) == (25, 25)
        assert (source / "crashed once").exists()

    def test_a_process_killed_from_outside_costs_no_picture(self, source: Path) -> None:
        samples = samples_of(source)
        with DecodingPool(str(source), SETTINGS, 2) as pool:
            given: list[Decoded] = []
            for decoded in pool.outcomes(iter(samples), len(samples)):
                given.append(decoded)
                if len(given) == 5:
                    os.kill(pool._workers[0].process.pid, signal.SIGKILL)
        assert len(given) == 24
        assert all(decoded.entry is not None for decoded in given)

    @pytest.mark.parametrize("forked", [True, False])
    def test_processes_that_cannot_start_are_one_line(
        self, source: Path, monkeypatch: pytest.MonkeyPatch, forked: bool
    ) -> None:
        monkeypatch.setattr(pool, "_is_single_threaded", lambda: forked)
        with (
            DecodingPool(str(source), SETTINGS, 1, loader="no_such_module:load") as decoding,
            pytest.raises(UsageError, match=r"jobs 1: a decoding process does not start .*no_such_module.*; use fewer"),
        ):
            list(decoding.outcomes([Sample("a/0000.jpg", 0)], 1))


class TestMessages:
    def test_are_counted_by_kind_and_printed_nowhere(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(conversion, "LOADER", "faulty_loaders:chatter")
        source = make_folder(tmp_path / "src", ["a"], 3)
        for name in ("talk 1", "talk two", "flood"):
            save(source / "a" / f"{name}.jpg", formula_picture(40, 40))
        report = convert(source, tmp_path / "out.lmdb", size=32)
        assert report.written == 6
        assert report.messages == {
            "Corrupt EXIF data, expecting N bytes": 2,
            "Corrupt JPEG data: N extraneous bytes in ...": 2,
            "TIFFReadDirectory: Warning, Unknown field with tag N (N) encountered.": 1,
        }
        assert capfd.readouterr() == ("", "")

    def test_kinds(self) -> None:
        assert kind_of("  Corrupt JPEG data: 12 of 0xff at 3.5 in a/b 1.jpg\t", "a/b 1.jpg") == (
            "Corrupt JPEG data: N of N at N in ..."
        )
        assert len(kind_of("x" * 10_000)) == 160


def test_others_do_not_wait_for_a_slow_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One picture hangs until 200 others are decoded: with two processes, the second one does all of them."""
    root = make_folder(tmp_path / "src", ["a"], 4)
    for number in range(200):
        os.link(root / "a" / "0000.jpg", root / "a" / f"1{number:03}.jpg")
    save(root / "a" / "0000_slow.jpg", formula_picture(40, 40))
    samples = samples_of(root)
    with DecodingPool(str(root), SETTINGS, 2, loader="faulty_loaders:hesitate") as pool:
        run = _Run(iter(samples), len(samples))
        deadline = time.monotonic() + 20
        while len(run.answers) < len(samples) - BATCH * BATCHES_AHEAD:
            assert time.monotonic() < deadline, len(run.answers)
            pool._hand_out(run)
            pool._collect(run)
        assert 0 not in run.answers
        (root / "go on").touch()
        while len(run.answers) < len(samples):
            pool._hand_out(run)
            pool._collect(run)
    assert all(answer.entry is not None for _, answer in run.answers.values())


def test_the_picture_that_all_wait_for_comes_up_again_when_its_process_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the finished ones behind it take all the memory that they may."""
    monkeypatch.setattr(pool, "LARGEST_ARENA", 8 << 20)
    for name in ("0 slow.png", "1.png", "2.png", "3.png", "4.png"):
        save(tmp_path / name, formula_picture(1300, 1200), "PNG")

    def stuck(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stuck)
    signal.alarm(30)
    try:
        with DecodingPool(str(tmp_path), Preprocessing(None), 2, loader="faulty_loaders:die_late") as decoding:
            outcomes = list(decoding.outcomes(samples_of(tmp_path), 5))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert (tmp_path / "died once").exists()
    assert all(decoded.entry is not None for decoded in outcomes)


def test_no_more_files_can_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket, "socketpair", none)
    with pytest.raises(UsageError, match="jobs 1: no more processes can be started: Too many open files; use fewer"):
        DecodingPool(str(tmp_path), SETTINGS, 1)
