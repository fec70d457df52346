"""Writes a store a second time, against the file that is there, to find bytes that packshift would not have written.

Records have a checksum each and side arrays too, but not what lies between and behind them: frames, padding, the tree
of keys, the HDF5 library's own tables. All of that follows from the records' sizes, the arrays and the header. So the
format's `finish` runs once more, on a `PartialFile` that compares instead of writing; no library ever parses the file.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from packshift.errors import PackshiftError
from packshift.stores._format import Format, Payload
from packshift.stores._header import encode
from packshift.stores._partial import PartialFile

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_PIECE = 1 << 20
_KEPT = 16 << 20


class _Rewriting(PartialFile):
    """Compares what is written with what the file `fd` holds.

    The HDF5 library writes its tables several times and reads them back, so small writes are kept (`_KEPT` bytes at
    most) and compared when all is written; large ones are arrays, written once, and compared at once.
    """

    def __init__(self, path: Path, fd: int) -> None:
        super().__init__(path, path, fd)
        self.size = 0
        self.differences: list[tuple[int, int]] = []
        self._kept: list[tuple[int, bytes]] = []
        self._kept_bytes = 0
        self._covered: list[tuple[int, int]] = []

    def write_at(self, offset: int, *buffers: ReadableBuffer) -> int:
        for view in (memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes):
            self.cover(offset, offset + len(view))
            if len(view) > _PIECE:
                self._compare(offset, view)
            else:
                self._kept.append((offset, bytes(view)))
                self._kept_bytes += len(view)
            offset += len(view)
        if self._kept_bytes > _KEPT:
            self.settle()
        return offset

    def read_at(self, offset: int, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        for start, written in self._kept:
            first, last = max(start, offset), min(start + len(written), offset + nbytes)
            if first < last:
                data[first - offset : last - offset] = written[first - start : last - start]
        return bytes(data)

    def resize(self, nbytes: int) -> None:
        self.size = nbytes

    def cover(self, start: int, end: int) -> None:
        """Remember that the bytes from `start` to `end` are somebody's; what is nobody's must be zero."""
        if self._covered and self._covered[-1][1] == start:
            start = self._covered.pop()[0]
        self._covered.append((start, end))

    def settle(self) -> None:
        """Compare what was kept; of several writes to one place the last counts."""
        pages: dict[int, tuple[NDArray[np.uint8], NDArray[np.bool_]]] = {}
        for offset, data in self._kept:
            written = 0
            while written < len(data):
                page, first = divmod(offset + written, _PIECE)
                count = min(_PIECE - first, len(data) - written)
                content, mask = pages.setdefault(page, (np.zeros(_PIECE, np.uint8), np.zeros(_PIECE, np.bool_)))
                content[first : first + count] = np.frombuffer(data, np.uint8, count, written)
                mask[first : first + count] = True
                written += count
        self._kept, self._kept_bytes = [], 0
        for page, (content, mask) in sorted(pages.items()):
            self._report(page * _PIECE, (self._stored(page * _PIECE, _PIECE) != content) & mask)

    def check_gaps(self) -> None:
        end = 0
        for start, stop in sorted([*self._covered, (self.size, self.size)]):
            for first in range(end, start, _PIECE):
                stored = self._stored(first, min(_PIECE, start - first))
                self._report(first, stored != 0)
            end = max(end, stop)

    def _compare(self, offset: int, view: memoryview) -> None:
        for first in range(0, len(view), _PIECE):
            piece = np.frombuffer(view[first : first + _PIECE], np.uint8)
            self._report(offset + first, self._stored(offset + first, len(piece)) != piece)

    def _stored(self, offset: int, nbytes: int) -> NDArray[np.int16]:
        """The bytes of the file as numbers, -1 where it has none."""
        found = np.full(nbytes, -1, np.int16)
        data = os.pread(self.fd, nbytes, offset)
        found[: len(data)] = np.frombuffer(data, np.uint8)
        return found

    def _report(self, offset: int, differs: NDArray[np.bool_]) -> None:
        if differs.any():
            self.differences.append((offset + int(differs.argmax()), int(differs.sum())))


def differences(
    known: Format,
    path: Path,
    fd: int,
    payload: Payload,
    arrays: Mapping[str, NDArray[Any]],
    header: bytes,
    records: range,
) -> Iterator[str]:
    """What is wrong outside the bytes of `records` (a range of the file), in words; nothing where all is as written.

    `arrays` come in the order in which they lie in the file, `header` is its JSON text.
    """
    value = json.loads(header)
    try:
        canonical = encode(value) == header
    except (ValueError, RecursionError):
        canonical = False
    if not canonical:
        yield "its header is not written as packshift writes it (sorted keys, no spaces, ASCII)"
        return
    file = _Rewriting(path, fd)
    file.cover(records.start, records.stop)
    try:
        known.finish(file, payload, arrays, value)
        file.settle()
        file.check_gaps()
    except (PackshiftError, ValueError, RuntimeError, OSError, struct.error) as error:
        yield f"it cannot be laid out as packshift does: {error}"
        return
    size = os.fstat(fd).st_size
    if file.size != size:
        yield f"it has {size:,} bytes where packshift writes {file.size:,}"
    elif file.differences:
        count = sum(number for _, number in file.differences)
        first = min(offset for offset, _ in file.differences)
        yield (
            f"{count:,} of the bytes before, between and behind its records are not what packshift writes there, the "
            f"first is byte {first:,}{known.written_with()}"
        )
