"""Is a store what was written? Reads every byte of it once, in order, and names what is not as it should be.

Records are read with `pread`, not through the reader's map: a bad block on the disk is then an error with a record's
name instead of a bus error, and the memory of the process stays flat. Checksums are computed on several threads, since
one core computes CRC-32 more slowly than page cache and fast disks deliver. What is not a record has to be what
packshift writes there (`stores._rewriting`); no library is ever made to parse the file.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packshift.arguments import at_least_one
from packshift.checksum import crc32
from packshift.errors import DamagedStoreError, StoreError, UsageError
from packshift.findings import SOURCE_KINDS, Findings, Problem, Progress
from packshift.machine import usable_cpus
from packshift.stores import get_format
from packshift.stores._format import Format, Payload
from packshift.stores._reader import Reader
from packshift.stores._rewriting import differences
from packshift.text import printable
from packshift.threads import in_order

_WINDOW = 4 << 20
_INDICES = 1 << 16
_Checked = tuple[int, list[tuple[int, str, str]]]


@dataclass(frozen=True)
class Verification:
    """What was found. `problems` are the first `MOST_PROBLEMS`, `counts` counts all of them by kind.

    `notes` say what could not be checked and why. `pictures` counts the source files decoded; None: the source was not
    compared.
    """

    path: str
    format: str
    count: int
    store_bytes: int
    seconds: float
    source: str | None
    pictures: int | None
    counts: Mapping[str, int]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]

    @property
    def faults(self) -> int:
        """How many problems are the store's own."""
        return sum(count for kind, count in self.counts.items() if kind not in SOURCE_KINDS)

    @property
    def differences(self) -> int:
        """How many problems are differences from the source."""
        return sum(count for kind, count in self.counts.items() if kind in SOURCE_KINDS)

    @property
    def sound(self) -> bool:
        """Whether the store is what was written, whatever became of the source."""
        return not self.faults

    @property
    def passed(self) -> bool:
        return not self.counts


def verify_store(
    path: str | os.PathLike[str],
    source: str | os.PathLike[str] | None = None,
    *,
    sample: int | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Check every byte of a store and, with `source`, whether converting that folder now would give the same store.

    `sample`: decode only that many of the source's pictures, evenly spread; all are looked for and their sizes compared.
    `jobs` threads compute checksums and decode (default: the CPUs this process may use).

    What is wrong is in the result. Raises StoreError where the file is no packshift store, or too damaged to find the
    records in it; SourceError; UsageError. Memory: a window of 4 MB a job and 16 bytes a record; with a source, a list
    of its files and a few pictures a job as well.
    """
    started = time.perf_counter()
    if sample is not None:
        at_least_one("sample", sample)
        if source is None:
            raise UsageError("sample without source: it says how many pictures of the source to decode")
    threads = usable_cpus() if jobs is None else at_least_one("jobs", jobs)
    reader, findings, pictures = Reader(path), Findings(), None
    damaged, bad = _check_store(reader, threads, findings, progress)
    if source is not None and damaged:
        findings.notes.append(f"the source was not compared: damaged are the arrays {', '.join(sorted(damaged))}")
    elif source is not None:
        from packshift.source_comparison import compare_with_source

        pictures = compare_with_source(reader, Path(source), sample, threads, bad, findings, progress)
    return Verification(
        path=str(reader.path),
        format=reader.info.format,
        count=len(reader),
        store_bytes=reader.file_size,
        seconds=time.perf_counter() - started,
        source=None if source is None else str(source),
        pictures=pictures,
        counts=dict(findings.counts),
        problems=tuple(findings.problems),
        notes=tuple(findings.notes),
    )


def _check_store(
    reader: Reader, jobs: int, findings: Findings, progress: Progress | None
) -> tuple[set[str], NDArray[np.bool_]]:
    """Everything that the store alone can tell; returns which arrays are damaged, and which records, (N,)."""
    bad = np.zeros(len(reader), np.bool_)
    known = get_format(reader.info.format)
    try:
        fd = os.open(reader.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StoreError(f"{reader.path}: cannot open the store: {error.strerror}") from error
    try:
        _check_structure(reader, known, findings)
        damaged = _check_arrays(reader, fd, findings)
        if damaged & {"offsets", "shapes"}:
            findings.notes.append("the records were not checked: the arrays that say where they lie are damaged")
            return damaged, bad
        layout = _Layout(reader, known)
        if layout.overlaps():
            findings.add("structure", "its records overlap: together they are larger than the file")
            return damaged, ~bad
        checksums = None if "checksums" in damaged else reader.array("checksums")
        if checksums is None:
            findings.notes.append("the records' bytes were not checked: their checksums are damaged")
        names = None if damaged & {"paths", "path_offsets"} else reader.paths
        for index, kind, text in _bad_records(layout, fd, jobs, checksums, progress):
            findings.add(kind, text, index, None if names is None else names[index])
            bad[index] = True
        if damaged:
            listed = ", ".join(sorted(damaged))
            findings.notes.append(f"what lies between the records and arrays was not compared: damaged are {listed}")
        else:
            _check_rest(reader, layout, fd, findings)
        return damaged, bad
    finally:
        os.close(fd)


def _check_structure(reader: Reader, known: Format, findings: Findings) -> None:
    problems = known.structure_problems(reader.path)
    if problems is None:
        findings.notes.append(
            f"the structure was not checked by {known.name}'s own verifier, which the installed version does not have "
            "(py-lmdb 3 does); packshift's own checks were made"
        )
    for problem in problems or ():
        findings.add("structure", problem)


def _check_arrays(reader: Reader, fd: int, findings: Findings) -> set[str]:
    """Check side arrays and the counts that follow from them; returns the names of damaged ones."""
    damaged = set()
    for name, place in reader.info.arrays.items():
        try:
            _read_through(fd, place.offset, place.nbytes)
            reader.array(name)
        except OSError as error:
            text = "cannot be read: " + str(error.strerror) if error.strerror else "does not match its checksum"
            findings.add("array", f"array {printable(name)!r} {text}")
            damaged.add(name)
    info = reader.info
    for needed, check in (
        ({"labels"}, lambda: reader.labels),
        ({"paths", "path_offsets"}, lambda: reader.paths),
        ({"skipped"}, lambda: reader.skipped),
    ):
        try:
            if not damaged & needed:
                check()
        except DamagedStoreError as error:
            findings.add("array", str(error).removeprefix(f"{reader.path} is damaged: ").split(";")[0])
            damaged |= needed
    if "skipped" not in damaged and info.source["skipped"] != len(reader.skipped):
        findings.add(
            "header", f"its header counts {info.source['skipped']} skipped files, its list has {len(reader.skipped)}"
        )
    if info.source["found"] != info.count + info.source["skipped"]:
        findings.add(
            "header",
            f"its header counts {info.source['found']} pictures found, which is not records plus skipped files",
        )
    if "source_sizes" not in damaged and info.source["bytes"] != int(reader.array("source_sizes").sum()):
        findings.add("header", "its header's count of source bytes is not the sum of the source files' sizes")
    return damaged


def _read_through(fd: int, offset: int, nbytes: int) -> None:
    """Read a part of the file once, so that a bad block is an OSError now and not a bus error in the map later."""
    for first in range(offset, offset + nbytes, _WINDOW):
        os.pread(fd, min(_WINDOW, offset + nbytes - first), first)


class _Layout:
    """Where the records lie, and the frame that the format puts around each."""

    def __init__(self, reader: Reader, known: Format) -> None:
        self.known = known
        self.count = reader.info.count
        self.file_size = reader.file_size
        self.front = len(known.frame(0, 1)[0])
        self._first = reader.info.payload_offset
        self._shape, self._stride = reader.info.shape, reader.info.stride
        self._size = 0 if self._shape is None else prod(self._shape)
        self._offsets = reader.array("offsets") if self._shape is None else None
        self._shapes = reader.array("shapes") if self._shape is None else None

    def places(self, first: int, last: int) -> tuple[list[int], list[int]]:
        """(byte offsets, sizes in bytes) of records `first` to `last` - 1; size -1: it is no picture in the file."""
        starts, sizes = self._arrays(first, last)
        return [self._first + start for start in starts.tolist()], sizes.tolist()

    def _arrays(self, first: int, last: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if self._offsets is None or self._shapes is None:
            starts = np.arange(first, last, dtype=np.int64) * (self._stride or 0)
            return starts, np.full(last - first, self._size if self._first >= self.front else -1, np.int64)
        starts, shapes = self._offsets[first:last], self._shapes[first:last]
        sizes = shapes.astype(np.float64).prod(axis=1)  # int64 could overflow
        whole = (shapes >= 1).all(axis=1) & (shapes[:, 2] == 3) & (sizes <= self.file_size)
        lowest, highest = self.front - self._first, self.file_size - self._first
        inside = whole & (starts >= lowest) & (starts <= highest - np.where(whole, sizes, 0))
        return starts, np.where(inside, sizes, -1).astype(np.int64)

    def overlaps(self) -> bool:
        total = 0
        for first in range(0, self.count, _INDICES):
            sizes = self._arrays(first, min(self.count, first + _INDICES))[1]
            total += int(sizes[sizes > 0].sum())
        return total > self.file_size

    def end(self, start: int, size: int) -> int:
        """The first byte behind the frame of a record."""
        return start + size + self.known.frame(start - self.front, size)[1]

    def jobs(self) -> Iterator[range]:
        """All records in ranges of about `_WINDOW` bytes; larger records come alone."""
        first, pending = 0, 0
        for block in range(0, self.count, _INDICES):
            starts, sizes = self.places(block, min(self.count, block + _INDICES))
            for index, start, size in zip(range(block, self.count), starts, sizes, strict=False):
                nbytes = self.end(start, size) - start + self.front if size >= 0 else 0
                if pending and pending + nbytes > _WINDOW:
                    yield range(first, index)
                    first, pending = index, 0
                pending += nbytes
        yield range(first, self.count)

    def payload(self) -> Payload:
        starts, sizes = self._arrays(0, self.count)
        end = self.end(self._first + int(starts[-1]), int(sizes[-1])) if sizes[-1] >= 0 else 0  # then nobody asks
        return Payload(self.count, self._shape, self._first, self._stride, starts, sizes, end)


class _Window:
    """A part of the file in memory; moves forward by whole windows."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._buffer = memoryview(bytearray(_WINDOW))
        self._start = self._end = 0

    def view(self, offset: int, nbytes: int, limit: int) -> memoryview:
        """`nbytes` (at most a window) at `offset`, valid until the next call; reads ahead up to `limit`.

        Raises OSError where the disk does not give them.
        """
        if not (self._start <= offset and offset + nbytes <= self._end):
            self._start = self._end = offset
            wanted = max(nbytes, min(_WINDOW, limit - offset))
            while self._end - offset < nbytes:
                got = os.preadv(self._fd, [self._buffer[self._end - offset : wanted]], self._end)
                if not got:
                    raise OSError(errno.EIO, f"the file ends at byte {self._end:,}")
                self._end += got
        return self._buffer[offset - self._start :][:nbytes]


def _bad_records(
    layout: _Layout, fd: int, jobs: int, checksums: NDArray[Any] | None, progress: Progress | None
) -> Iterator[tuple[int, str, str]]:
    """(index, kind, problem) of every bad record, in order."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    windows: SimpleQueue[_Window] = SimpleQueue()
    for _ in range(jobs):
        windows.put(_Window(fd))

    def check(indices: range) -> _Checked:
        window = windows.get()
        try:
            return _check_range(layout, window, indices, checksums)
        finally:
            windows.put(window)

    done = 0
    for nbytes, problems in in_order(check, layout.jobs(), jobs):
        yield from problems
        done += nbytes
        if progress is not None:
            progress("bytes", done, layout.file_size)
    if progress is not None:
        progress("bytes", layout.file_size, layout.file_size)


def _check_range(layout: _Layout, window: _Window, indices: range, checksums: NDArray[Any] | None) -> _Checked:
    """(bytes read, [(index, kind, problem)]) of some records."""
    problems: list[tuple[int, str, str]] = []
    starts, sizes = layout.places(indices.start, min(layout.count, indices.stop + 1))
    whole = [place for place in zip(starts[: len(indices)], sizes, strict=False) if place[1] >= 0]
    limit = layout.end(*whole[-1]) if whole else 0
    nbytes = 0
    for index, start, size in zip(indices, starts, sizes, strict=False):
        if size < 0:
            problems.append((index, "record", "it does not lie in the file"))
            continue
        try:
            checksum, frame = _read_record(layout, window, start, size, limit)
        except OSError as error:
            problems.append((index, "record", f"it cannot be read: {error.strerror}"))
            continue
        nbytes += layout.front + size
        if checksums is not None and checksum != int(checksums[index]):
            problems.append((index, "record", "its pixels do not match their checksum"))
        position = index - indices.start + 1
        following = layout.end(start, size) + layout.front
        if not frame:
            problems.append((index, "structure", "the bytes around its pixels are not what packshift writes there"))
        elif position < len(starts) and starts[position] != following:
            problems.append(
                (index, "structure", f"the next record does not begin {following - start:,} bytes after it")
            )
    return nbytes, problems


def _read_record(layout: _Layout, window: _Window, start: int, size: int, limit: int) -> tuple[int, bool]:
    """(CRC-32 of the pixels, whether the bytes around them are what packshift writes)."""
    front, behind = layout.known.frame(start - layout.front, size)
    front_is_right = bytes(window.view(start - len(front), len(front), limit)) == front
    checksum = 0
    for first in range(0, size, _WINDOW):
        checksum = crc32(window.view(start + first, min(_WINDOW, size - first), limit), checksum)
    return checksum, front_is_right and bytes(window.view(start + size, behind, limit)) == bytes(behind)


def _check_rest(reader: Reader, layout: _Layout, fd: int, findings: Findings) -> None:
    """Compare what is neither a record nor checked already with what packshift writes there."""
    payload = layout.payload()
    if payload.sizes.min() < 0:
        findings.notes.append("what lies behind the records was not compared: not all of them lie in the file")
        return
    records = range(payload.offset - layout.front, payload.end)
    ordered = sorted(reader.info.arrays, key=lambda name: reader.info.arrays[name].offset)
    arrays = {name: reader.array(name) for name in ordered}
    for problem in differences(layout.known, reader.path, fd, payload, arrays, reader.header_text(), records):
        findings.add("structure", problem)
