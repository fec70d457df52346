"""A conversion that ended early, however it ended, is carried on, and the store is what an undisturbed run gives."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import FORKED_DECODERS, formula_picture, make_folder, save

from packshift import conversion, convert, journal
from packshift.errors import ImageError, Interrupted, SourceError, TargetError
from packshift.journal import journal_path
from packshift.stores import format_names, get_format
from packshift.stores._partial import PartialFile, partial_path
from packshift.stores._reader import Reader

pytestmark = FORKED_DECODERS

COUNT = 40


def make_source(root: Path) -> Path:
    make_folder(root, ["a", "b"], COUNT // 2)
    (root / "a" / "0005.jpg").write_bytes(b"broken")
    return root


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_source(tmp_path / "src")


@pytest.fixture(scope="module")
def undisturbed_stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    root = tmp_path_factory.mktemp("undisturbed")
    source = make_source(root / "src")
    stores = {}
    for suffix in (get_format(name).suffixes[0] for name in format_names()):
        convert(source, root / f"store{suffix}", size=32)
        stores[suffix] = (root / f"store{suffix}").read_bytes()
    return stores


@pytest.fixture
def undisturbed(undisturbed_stores: dict[str, bytes], suffix: str) -> bytes:
    """The store of `source`; where that lies makes no difference."""
    return undisturbed_stores[suffix]


@pytest.fixture
def target(tmp_path: Path, suffix: str) -> Path:
    return tmp_path / f"out{suffix}"


def interrupt_at(picture: int) -> Callable[[int, int], None]:
    def progress(done: int, total: int) -> None:
        if done == picture:
            raise KeyboardInterrupt

    return progress


def leave_unfinished(source: Path, target: Path, picture: int = 25) -> None:
    with pytest.raises(Interrupted, match=f"nothing was published; {picture} of 40 pictures are kept"):
        convert(source, target, size=32, progress=interrupt_at(picture))
    assert not target.exists()


def assert_carried_on(source: Path, target: Path, undisturbed: bytes, pictures: int) -> None:
    lines: list[str] = []
    report = convert(source, target, size=32, log=lines.append)
    assert report.carried_on == pictures
    assert report.found == COUNT
    assert [skipped.path for skipped in report.skipped] == ["a/0005.jpg"]
    assert target.read_bytes() == undisturbed
    assert not partial_path(target).exists()
    assert not journal_path(partial_path(target)).exists()
    said = f"carrying on: {pictures} of 40 pictures were finished by an earlier run"
    assert (said in lines) == (pictures > 0)


@pytest.mark.parametrize("picture", [1, 6, 7, 25, 40])
def test_carries_on_where_it_stopped(source: Path, target: Path, undisturbed: bytes, picture: int) -> None:
    leave_unfinished(source, target, picture)
    assert_carried_on(source, target, undisturbed, picture)


def test_stopped_many_times(source: Path, target: Path, undisturbed: bytes) -> None:
    for picture in range(3, COUNT, 7):
        leave_unfinished(source, target, picture)
    assert_carried_on(source, target, undisturbed, 38)


def test_own_sizes(source: Path, tmp_path: Path, suffix: str) -> None:
    convert(source, tmp_path / f"whole{suffix}", size=None)
    target = tmp_path / f"out{suffix}"
    with pytest.raises(Interrupted):
        convert(source, target, size=None, progress=interrupt_at(20))
    assert convert(source, target, size=None).carried_on == 20
    assert target.read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()


def test_an_unfinished_file_is_not_taken_for_a_store(source: Path, target: Path) -> None:
    leave_unfinished(source, target)
    with pytest.raises(OSError, match="unfinished"):
        Reader(partial_path(target))


class TestStoppedAtTheEnd:
    """The last steps: side arrays, header, index, waiting for the disk, the name."""

    @pytest.mark.parametrize("step", ["sync", "publish"])
    def test_all_pictures_are_kept(
        self, source: Path, target: Path, undisturbed: bytes, monkeypatch: pytest.MonkeyPatch, step: str
    ) -> None:
        def stop(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(PartialFile, step, stop)
            with pytest.raises(Interrupted, match="40 of 40 pictures are kept"):
                convert(source, target, size=32)
        assert_carried_on(source, target, undisturbed, 40)

    def test_while_the_index_is_written(
        self, source: Path, target: Path, undisturbed: bytes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A power failure at every write after the last record: what is on disk then carries on."""
        real = PartialFile.write_at
        state = {"finishing": False, "writes": 0, "allowed": 0}

        def write(self: PartialFile, offset: int, *buffers: bytes) -> int:
            state["writes"] += state["finishing"]
            if state["writes"] > state["allowed"]:
                raise KeyboardInterrupt
            return real(self, offset, *buffers)

        monkeypatch.setattr(PartialFile, "write_at", write)
        while not target.exists():
            state.update(finishing=False, writes=0)
            try:
                convert(source, target, size=32, progress=lambda done, total: state.update(finishing=done == total))
            except KeyboardInterrupt:
                state["allowed"] += 3
        assert state["allowed"] > 3
        assert target.read_bytes() == undisturbed

    def test_killed_between_publishing_and_removing_the_journal(
        self, source: Path, target: Path, undisturbed: bytes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(journal.Journal, "remove", lambda self: None)
            convert(source, target, size=32)
        assert journal_path(partial_path(target)).exists()
        os.unlink(target)
        assert_carried_on(source, target, undisturbed, 0)


class TestWhatCannotBeTrusted:
    def test_other_settings_are_named_and_nothing_is_lost(self, source: Path, target: Path, undisturbed: bytes) -> None:
        leave_unfinished(source, target)
        with pytest.raises(TargetError, match=r"holds 25 finished pictures of a conversion that differs: size was "):
            convert(source, target, size=48)
        with pytest.raises(TargetError, match=r"fit was crop, now pad. Run that one again .* or add --restart"):
            convert(source, target, size=32, fit="pad")
        with pytest.raises(TargetError, match=r"max_pixels was None, now 1000000. Run that one again"):
            convert(source, target, size=32, max_pixels=10**6)
        assert_carried_on(source, target, undisturbed, 25)

    def test_other_files_are_named_and_nothing_is_lost(self, source: Path, target: Path, undisturbed: bytes) -> None:
        leave_unfinished(source, target)
        added = save(source / "b" / "added.jpg", formula_picture(40, 40))
        with pytest.raises(TargetError, match="files were added, removed or renamed"):
            convert(source, target, size=32)
        os.rename(added, source / "b" / "0000.jpg")
        os.utime(source / "b" / "0000.jpg")
        assert convert(source, target, size=32).carried_on == 20

    def test_another_order_of_classes_is_another_conversion_even_if_it_comes_out_the_same(
        self, source: Path, target: Path, undisturbed: bytes, tmp_path: Path
    ) -> None:
        leave_unfinished(source, target)
        with pytest.raises(TargetError, match=r"class_order was None, now natural\. Run that one again"):
            convert(source, target, size=32, class_order="natural")
        (tmp_path / "list.txt").write_text("a\nb\n")
        with pytest.raises(TargetError, match=r"class_order was None, now given\. Run that one again"):
            convert(source, target, size=32, classes_from=tmp_path / "list.txt")
        assert_carried_on(source, target, undisturbed, 25)

    def test_another_list_of_classes_is_another_conversion(self, source: Path, target: Path, tmp_path: Path) -> None:
        lists = [tmp_path / "1.txt", tmp_path / "2.txt", tmp_path / "3.txt"]
        for path, names in zip(lists, ("b\na\n", "b\na\nc\n", "b\na\n"), strict=True):
            path.write_text(names)
        with pytest.raises(Interrupted):
            convert(source, target, size=32, classes_from=lists[0], progress=interrupt_at(25))
        with pytest.raises(TargetError, match="or other classes hold them"):
            convert(source, target, size=32, classes_from=lists[1])
        with pytest.raises(TargetError, match="class_order was given, now None"):
            convert(source, target, size=32)
        assert convert(source, target, size=32, classes_from=lists[2]).carried_on == 25

    def test_a_new_class_changes_labels(self, source: Path, target: Path, undisturbed: bytes) -> None:
        leave_unfinished(source, target)
        (source / "0 first").mkdir()
        with pytest.raises(TargetError, match="or other classes hold them"):
            convert(source, target, size=32)

    def test_other_tools(self, source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        leave_unfinished(source, target)
        real = conversion.tool_versions()
        monkeypatch.setattr(conversion, "tool_versions", lambda: {**real, "pillow": "99"})
        with pytest.raises(TargetError, match=r"pillow was .*, now 99"):
            convert(source, target, size=32)

    def test_restart_throws_it_away(self, source: Path, target: Path, undisturbed: bytes) -> None:
        leave_unfinished(source, target)
        assert convert(source, target, size=32, restart=True).carried_on == 0
        assert target.read_bytes() == undisturbed

    @pytest.mark.parametrize("changed", ["a/0003.jpg", "a/0005.jpg", "b/0004.jpg"])
    def test_a_file_that_has_changed_and_all_behind_it_are_read_again(
        self, source: Path, target: Path, suffix: str, tmp_path: Path, changed: str
    ) -> None:
        leave_unfinished(source, target)
        save(source / changed, formula_picture(70, 70, seed=5))
        lines: list[str] = []
        report = convert(source, target, size=32, log=lines.append)
        assert report.carried_on == {"a/0003.jpg": 3, "a/0005.jpg": 5, "b/0004.jpg": 24}[changed]
        assert lines[0] == f"{changed} has changed since an earlier run read it"
        convert(source, tmp_path / f"new{suffix}", size=32)
        assert target.read_bytes() == (tmp_path / f"new{suffix}").read_bytes()

    def test_records_that_a_power_failure_lost(self, source: Path, target: Path, undisturbed: bytes) -> None:
        """Nothing was synced: the journal says 25, but from record 10 on the disk has zeros."""
        leave_unfinished(source, target)
        with open(partial_path(target), "r+b") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(size * 10 // 25)
            file.write(bytes(size - file.tell()))
        report = convert(source, target, size=32)
        assert 0 < report.carried_on < 12
        assert target.read_bytes() == undisturbed

    def test_a_partial_file_that_is_too_short(self, source: Path, target: Path, undisturbed: bytes) -> None:
        leave_unfinished(source, target)
        os.truncate(partial_path(target), os.path.getsize(partial_path(target)) // 2)
        report = convert(source, target, size=32)
        assert 5 < report.carried_on < 25
        assert target.read_bytes() == undisturbed

    def test_synced_records_are_trusted_only_as_far_as_the_file_goes(
        self, source: Path, target: Path, undisturbed: bytes
    ) -> None:
        leave_unfinished(source, target)
        with open(journal_path(partial_path(target)), "ab") as file:
            file.write(journal._line(25))
        os.truncate(partial_path(target), os.path.getsize(partial_path(target)) // 2)
        report = convert(source, target, size=32)
        assert 5 < report.carried_on < 25
        assert target.read_bytes() == undisturbed

    @pytest.mark.parametrize(
        ("damage", "kept"),
        [
            (lambda data: data[: len(data) // 2], range(25)),
            (lambda data: data[:-1], range(25)),
            (lambda data: b"", range(1)),
            (lambda data: b"\0" * len(data), range(1)),
            (lambda data: data[:200] + b"X" + data[201:], range(1)),
            (lambda data: data + b"00000000 garbage\n", range(25, 26)),
        ],
        ids=["half", "cut", "empty", "zeros", "altered", "garbage behind"],
    )
    def test_a_damaged_journal(
        self, source: Path, target: Path, undisturbed: bytes, damage: Callable[[bytes], bytes], kept: range
    ) -> None:
        leave_unfinished(source, target)
        path = journal_path(partial_path(target))
        path.write_bytes(damage(path.read_bytes()))
        report = convert(source, target, size=32)
        assert report.carried_on in kept
        assert target.read_bytes() == undisturbed

    def test_the_journal_of_another_file(self, source: Path, target: Path, undisturbed: bytes) -> None:
        leave_unfinished(source, target)
        os.unlink(partial_path(target))
        partial_path(target).write_bytes(b"x" * 1_000_000)
        assert_carried_on(source, target, undisturbed, 0)


def test_messages_and_skipped_files_of_earlier_runs_are_counted(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "LOADER", "faulty_loaders:chatter")
    save(source / "a" / "0000 talk.jpg", formula_picture(40, 40))
    with pytest.raises(Interrupted):
        convert(source, target, size=32, progress=interrupt_at(20))
    report = convert(source, target, size=32)
    assert report.carried_on == 20
    assert report.messages == {
        "Corrupt EXIF data, expecting N bytes": 1,
        "Corrupt JPEG data: N extraneous bytes in ...": 1,
    }


def test_a_sync_marks_what_is_on_disk(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "SECONDS_PER_SYNC", 0.0)
    monkeypatch.setattr(journal, "SECONDS_PER_LINE", 0.0)
    leave_unfinished(source, target)
    marks = []
    for line in journal_path(partial_path(target)).read_bytes().splitlines(keepends=True):
        checksum, _, text = line.partition(b" ")
        assert int(checksum, 16) == zlib.crc32(text)
        value = json.loads(text)
        marks += [value] if isinstance(value, int) else []
    assert marks
    assert marks == sorted(marks)
    assert marks[-1] <= 25


def test_the_journal_is_written_while_the_run_goes_on(
    source: Path, target: Path, undisturbed: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after SIGKILL: nothing that a dying run could still do is needed."""
    monkeypatch.setattr(journal, "SECONDS_PER_LINE", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(journal.Journal, "close", lambda self: 25)
        with pytest.raises(KeyboardInterrupt):
            convert(source, target, size=32, progress=interrupt_at(25))
    assert_carried_on(source, target, undisturbed, 25)


def test_the_command_says_that_it_carries_on(source: Path, target: Path) -> None:
    leave_unfinished(source, target)
    command = [sys.executable, "-m", "packshift", "convert", str(source), str(target), "--size", "32"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    assert "carrying on: 25 of 40 pictures were finished by an earlier run" in done.stderr
    assert "39 of 40 pictures written" in done.stdout
    assert "25 by an earlier run" in done.stdout


def leave_synced(source: Path, target: Path, picture: int = 25) -> None:
    leave_unfinished(source, target, picture)
    with open(journal_path(partial_path(target)), "ab") as file:
        file.write(journal._line(picture))


class TestNothingIsLost:
    """What an earlier run has finished outlives everything that can happen to the run that takes it over."""

    def test_interrupted_while_it_is_taken_over(
        self, source: Path, target: Path, undisturbed: bytes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        leave_unfinished(source, target)

        def stop(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(conversion, "source_state", stop)
            with pytest.raises(Interrupted, match="25 of 40 pictures are kept"):
                convert(source, target, size=32)
        assert_carried_on(source, target, undisturbed, 25)

    @pytest.mark.parametrize("limit", [{"max_errors": 0}, {"on_error": "stop"}], ids=str)
    def test_more_unreadable_pictures_than_now_allowed(
        self, source: Path, target: Path, undisturbed: bytes, limit: dict[str, Any]
    ) -> None:
        leave_unfinished(source, target)
        with pytest.raises(ImageError, match=r"Nothing was published.*25 of 40 pictures are kept"):
            convert(source, target, size=32, **limit)
        assert_carried_on(source, target, undisturbed, 25)

    def test_interrupted_again_while_it_stops(
        self, source: Path, target: Path, undisturbed: bytes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = journal.Journal.close

        def close(self: journal.Journal) -> int:
            real(self)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(journal.Journal, "close", close)
            with pytest.raises(KeyboardInterrupt):
                convert(source, target, size=32, progress=interrupt_at(25))
        assert_carried_on(source, target, undisturbed, 25)


class TestPublishedStoresAreNotTouched:
    def test_the_disk_is_full_when_the_journal_is_closed(
        self, source: Path, target: Path, undisturbed: bytes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(journal, "SECONDS_PER_LINE", 1000.0)
        monkeypatch.setattr(journal, "OUTCOMES_PER_LINE", 1000)

        def full(self: journal.Journal, value: object) -> None:
            if isinstance(value, list):
                raise OSError(errno.ENOSPC, "No space left on device")
            real(self, value)

        real = journal.Journal._append
        monkeypatch.setattr(journal.Journal, "_append", full)
        convert(source, target, size=32)
        assert target.read_bytes() == undisturbed

    def test_interrupted_between_the_two_names(
        self, source: Path, target: Path, undisturbed: bytes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = os.link

        def link(*args: Any) -> None:
            real(*args)
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "link", link)
        with pytest.raises(KeyboardInterrupt):
            convert(source, target, size=32)
        assert target.read_bytes() == undisturbed
        assert not partial_path(target).exists()
        assert not journal_path(partial_path(target)).exists()

    def test_killed_between_the_two_names(self, source: Path, target: Path, undisturbed: bytes) -> None:
        convert(source, target, size=32)
        os.link(target, partial_path(target))
        with pytest.raises(Interrupted):
            convert(source, target, size=32, overwrite=True, progress=interrupt_at(25))
        assert target.read_bytes() == undisturbed
        assert convert(source, target, size=32, overwrite=True).carried_on == 25
        assert target.read_bytes() == undisturbed


def test_a_file_cut_within_a_synced_record(source: Path, target: Path, undisturbed: bytes) -> None:
    leave_synced(source, target)
    size = os.path.getsize(partial_path(target))
    os.truncate(partial_path(target), size * 21 // 50)  # about the middle of a record
    report = convert(source, target, size=32)
    assert 5 < report.carried_on < 25
    assert target.read_bytes() == undisturbed


@pytest.mark.parametrize(
    "line",
    [
        b"{{{",
        b'"\xff"',
        b"[" * 100_000,
        b"9" * 6000,
        b'"x"',
        b"null",
        b"{}",
        b"[1]",
        b"[[]]",
        b"[null]",
        b'[["reason"]]',
        b"[[[32,32],1,2,3,4,[5,6],[],[]]]",
        b"[[[-32,-32,3],1,2,3,4,[5,6],[],[]]]",
        b"[[[32,32,3],-1,2,3,4,[5,6],[],[]]]",
        b"[[[32,32,3],1,1e999,3,4,[5,6],[],[]]]",
        b"[[[32,32,3],1,2,3,4,[5,6],[7],[]]]",
        b"[[[32,32,3],1,2,3,4,[5,6],[],NaN]]",
    ],
    ids=lambda line: line[:30].decode("latin-1"),
)
def test_a_line_that_no_journal_holds(source: Path, target: Path, undisturbed: bytes, line: bytes) -> None:
    leave_unfinished(source, target)
    with open(journal_path(partial_path(target)), "ab") as file:
        file.write(b"%08x " % zlib.crc32(line + b"\n") + line + b"\n")
    assert_carried_on(source, target, undisturbed, 25)


@pytest.mark.parametrize("first", [{}, {"conversion": None}, {"conversion": [1]}], ids=str)
def test_a_first_line_that_no_journal_has(
    source: Path, target: Path, undisturbed: bytes, first: dict[str, Any]
) -> None:
    leave_unfinished(source, target)
    path = journal_path(partial_path(target))
    found = os.stat(partial_path(target))
    path.write_bytes(journal._line({"file": [found.st_dev, found.st_ino], **first}) + path.read_bytes())
    assert_carried_on(source, target, undisturbed, 0)


@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
def test_something_else_under_the_name_of_the_journal(source: Path, target: Path, tmp_path: Path, kind: str) -> None:
    path = journal_path(partial_path(target))
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    {"pipe": os.mkfifo, "folder": os.mkdir, "link": lambda path: os.symlink(victim, path)}[kind](path)
    with pytest.raises(TargetError, match=r"out.*journal is in the way: .*; remove it"):
        convert(source, target, size=32)
    assert victim.read_bytes() == b"precious"


def test_a_source_that_goes_away_ends_the_run_and_keeps_the_work(
    source: Path, target: Path, undisturbed: bytes, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"

    def unplug(done: int, total: int) -> None:
        if done == 1:
            source.rename(elsewhere)

    for number in range(300):
        save(source / "b" / f"more {number:03}.jpg", formula_picture(40, 40))
    with pytest.raises(SourceError, match=r"the source folder .* is gone .* are kept, and the same command carries on"):
        convert(source, target, size=32, progress=unplug)
    assert not target.exists()
    elsewhere.rename(source)
    report = convert(source, target, size=32)
    assert report.carried_on > 0
    assert (report.found, len(report.skipped)) == (340, 1)


def test_a_copied_partial_file_is_said_to_be_of_no_use(source: Path, target: Path, undisturbed: bytes) -> None:
    leave_unfinished(source, target)
    data = partial_path(target).read_bytes()
    kept = os.open(partial_path(target), os.O_RDONLY)  # so that the copy gets another inode
    os.unlink(partial_path(target))
    partial_path(target).write_bytes(data)
    os.close(kept)
    lines: list[str] = []
    assert convert(source, target, size=32, log=lines.append).carried_on == 0
    assert lines[0].startswith("beginning anew: ")
    assert lines[0].endswith("is there, but no journal that belongs to it")
    assert target.read_bytes() == undisturbed
