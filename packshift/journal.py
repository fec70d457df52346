"""What a conversion has finished, so that another run can carry on from there.

The journal lies beside the partial file and belongs to it (its first line says which file, by its inode). Each
line is a JSON document with its CRC-32 in front, so a line that was cut off ends the journal. The first line describes
the conversion: everything that decides about the store's bytes. Each further line holds outcomes, in order:

    [shape, crc32, source size, source mtime in ns, source crc32, original size, notes, messages]   a record
    [reason, source size, source mtime in ns, messages]                                             a skipped file

or the number of outcomes whose records are known to be on disk. Those are trusted; the records behind them, which a
power failure may have lost, are compared with their checksums before they are.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import Any

from packshift.checksum import crc32
from packshift.errors import TargetError
from packshift.record import Entry
from packshift.stores._partial import PartialFile, sync_folder

SECONDS_PER_LINE = 0.2
OUTCOMES_PER_LINE = 256
SECONDS_PER_SYNC = 10.0


@dataclass(frozen=True)
class Outcome:
    """What became of one listed file: `entry`, or the `reason` why it was skipped; what its decoder printed.

    Size (bytes) and mtime (ns) of the source file tell later whether it is still the same; -1 where there is no file.
    """

    entry: Entry | None
    reason: str
    source_size: int
    source_mtime_ns: int
    messages: tuple[str, ...]

    def to_json(self) -> list[Any]:
        if self.entry is not None:
            return [*self.entry, self.messages]
        return [self.reason, self.source_size, self.source_mtime_ns, self.messages]

    @classmethod
    def from_json(cls, values: Any) -> Outcome:
        """Raises ValueError for what `to_json` does not write."""
        if not isinstance(values, list) or not values:
            raise ValueError
        if isinstance(values[0], str):
            reason, size, mtime, messages = values
            _check([size, mtime], -1, 2**63)
            _check_words(messages)
            return cls(None, reason, size, mtime, tuple(messages))
        shape, crc32, size, mtime, source_crc32, original_size, notes, messages = values
        _check(shape, 1, 2**31, length=3)
        _check(original_size, 1, 2**31, length=2)
        _check([crc32, source_crc32], 0, 2**32)
        _check([size, mtime], -(2**63), 2**63)
        _check_words(notes)
        _check_words(messages)
        entry = Entry(tuple(shape), crc32, size, mtime, source_crc32, tuple(original_size), tuple(notes))
        return cls(entry, "", size, mtime, tuple(messages))


@dataclass(frozen=True)
class Earlier:
    """The journal that an earlier run left: its description, how many outcomes it has and how many are surely on disk."""

    file: PartialFile
    description: Mapping[str, Any]
    count: int
    synced: int

    def lines(self) -> Iterator[tuple[list[Outcome], int]]:
        """(outcomes, byte offset behind them in the journal), a few hundred at a time."""
        for line, end in islice(_whole_lines(self.file), 1, None):
            if isinstance(line, list):
                try:
                    outcomes = [Outcome.from_json(values) for values in line]
                except ValueError:
                    return
                yield outcomes, end


def journal_path(partial: Path) -> Path:
    return partial.with_name(partial.name.removesuffix("partial") + "journal")


def earlier_journal(file: PartialFile) -> Earlier | None:
    """The journal of a partial file; None where there is none that belongs to it."""
    lines = (line for line, _ in _whole_lines(file))
    first = next(lines, None)
    if not isinstance(first, dict) or first.get("inode") != _inode(file):
        return None
    description = first.get("conversion")
    if not isinstance(description, dict):
        return None
    count = synced = 0
    for line in lines:
        if isinstance(line, list):
            count += len(line)
        elif isinstance(line, int):
            synced = min(line, count)
    return Earlier(file, description, count, synced)


def _whole_lines(file: PartialFile) -> Iterator[tuple[Any, int]]:
    """(value, byte offset behind its line) up to the first line that is not whole."""
    end = 0
    try:
        fd = _open(file, os.O_RDONLY)
    except FileNotFoundError:
        return
    except OSError as error:
        raise _in_the_way(file, error.strerror) from error
    with open(fd, "rb") as lines:
        for line in lines:
            checksum, _, text = line.partition(b" ")
            if not line.endswith(b"\n") or checksum != b"%08x" % crc32(text):
                return
            try:
                value = json.loads(text)
            except (ValueError, RecursionError):  # with the right checksum: nothing that a journal ever held
                return
            end += len(line)
            yield value, end


def _open(file: PartialFile, flags: int) -> int:
    """Open the journal of a partial file; never what a link points to, and without waiting at a pipe."""
    fd = os.open(journal_path(file.path), flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _in_the_way(file, "it is not a regular file")
    return fd


def _in_the_way(file: PartialFile, reason: str | None) -> TargetError:
    return TargetError(f"{file.target}: {journal_path(file.path)} is in the way: {reason}; remove it")


def _check(values: Any, low: int, high: int, *, length: int | None = None) -> None:
    if not isinstance(values, list) or length not in (None, len(values)):
        raise ValueError
    if not all(type(value) is int and low <= value < high for value in values):
        raise ValueError


def _check_words(values: Any) -> None:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError


def _line(value: Any) -> bytes:
    text = json.dumps(value, separators=(",", ":")).encode() + b"\n"
    return b"%08x " % crc32(text) + text


def _inode(file: PartialFile) -> int:
    """Not the device: its number can be another one after the next start of the machine."""
    return os.fstat(file.fd).st_ino


class Journal:
    """Writes the journal of a partial file: anew, or behind the first `keep` bytes of the one that is there."""

    def __init__(self, file: PartialFile, description: Mapping[str, Any], *, keep: int | None = None) -> None:
        self._file = file
        self.path = journal_path(file.path)
        self._waiting: list[list[Any]] = []
        self._ends: list[int] = []  # where the records of the waiting outcomes end in the partial file
        self._count = 0
        self._last_line = self._last_sync = monotonic()
        self._syncing: Future[None] | None = None
        self._lock = Lock()
        try:
            self._fd = _open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        except TargetError:
            raise
        except OSError as error:
            raise _in_the_way(file, error.strerror) if os.path.lexists(self.path) else file.failure(error) from error
        try:
            os.ftruncate(self._fd, keep or 0)
            if keep is None:
                self._append({"inode": _inode(file), "conversion": description})
        except OSError as error:
            os.close(self._fd)
            if keep is None:
                self.remove()
            raise file.failure(error) from error
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="packshift-sync")

    def took_over(self, count: int) -> None:
        """Say how many outcomes the part kept of an earlier journal holds."""
        self._count = count

    def add(self, outcome: Outcome, end: int) -> None:
        """Note an outcome; the records up to and with it end at byte `end` of the partial file and are written.

        It is in the journal a fraction of a second later.
        """
        self._waiting.append(outcome.to_json())
        self._ends.append(end)
        now = monotonic()
        if now - self._last_line < SECONDS_PER_LINE and len(self._waiting) < OUTCOMES_PER_LINE:
            return
        self._last_line = now
        try:
            self._flush()
            if now - self._last_sync > SECONDS_PER_SYNC and (self._syncing is None or self._syncing.done()):
                self._last_sync = now
                self._check_syncing()
                self._syncing = self._pool.submit(self._sync, self._count)
        except OSError as error:
            raise self._file.failure(error) from error

    def _flush(self) -> None:
        if self._waiting:
            self._append(self._waiting)
            self._count += len(self._waiting)
            self._waiting = []
            self._ends = []

    def _append(self, value: Any) -> None:
        """One line, whole or not at all."""
        with self._lock:
            size = os.fstat(self._fd).st_size
            line = memoryview(_line(value))
            try:
                while line:
                    line = line[os.write(self._fd, line) :]
            except OSError:
                os.ftruncate(self._fd, size)
                raise

    def _sync(self, count: int) -> None:
        os.fdatasync(self._file.fd)
        self._append(count)
        os.fsync(self._fd)
        sync_folder(self.path.parent)

    def _check_syncing(self) -> None:
        if self._syncing is not None:
            done, self._syncing = self._syncing, None
            done.result()

    def close(self) -> int:
        """Write what waits and stop; return how many outcomes the journal holds.

        Where the disk is full, the last records make room for the line that says that the others are there.
        """
        while self._waiting:
            try:
                self._flush()
            except OSError:
                self._waiting.pop()
                self._ends.pop()
                if self._ends:
                    self._file.resize(self._ends[-1])
        self._pool.shutdown()
        os.close(self._fd)
        return self._count

    def discard(self) -> None:
        """Stop and leave nothing; the partial file is not touched."""
        self.remove()
        self._pool.shutdown()
        os.close(self._fd)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
