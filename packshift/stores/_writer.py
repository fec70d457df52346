"""Writes records in order into a partial file, and finishes it."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from packshift.checksum import crc32
from packshift.record import Entry, Names, Record, Skipped, bytes_of, encode_name
from packshift.stores._format import UNFINISHED, Format, Payload
from packshift.stores._header import encode
from packshift.stores._partial import PartialFile

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_WRITE_BACK_BYTES = 8 << 20


@dataclass(frozen=True)
class Description:
    """What a store says about itself beyond its records.

    `preprocessing`, `source` and `tools` are plain JSON values; none of them may hold times, paths of the machine or
    anything else that differs between two runs on the same files.
    """

    classes: tuple[str, ...]
    preprocessing: Mapping[str, Any]
    source: Mapping[str, Any]
    tools: Mapping[str, str]


class _Column:
    """A growing array of integers, kept as machine words."""

    def __init__(self, typecode: str, dtype: str) -> None:
        self._values = array(typecode)
        self._dtype = dtype
        self.append = self._values.append
        self.extend = self._values.extend

    def __len__(self) -> int:
        return len(self._values)

    def numpy(self, *shape: int) -> NDArray[Any]:
        native = np.frombuffer(self._values, self._values.typecode) if self._values else np.empty(0)
        return np.ascontiguousarray(native.astype(self._dtype)).reshape(shape or (-1,))


class Writer:
    """Appends records; index `i` of the store is the i-th `append`.

    `shape` is (H, W, 3) where every record has it, or None where each keeps its own. A record is on its way to the
    disk when `append` or `add` returns; nothing but a few numbers per record is kept in memory.
    """

    def __init__(self, file: PartialFile, format: Format, shape: tuple[int, int, int] | None) -> None:
        self._file = file
        self._format = format
        self._shape = shape
        self._start = self._next = format.first_frame()
        self._writing_back = self._start
        self._first_payload: int | None = None
        self._labels = _Column("q", "<i8")
        self._offsets = _Column("q", "<i8")
        self._shapes = _Column("i", "<i4")
        self._checksums = _Column("I", "<u4")
        self._source_sizes = _Column("q", "<i8")
        self._original_sizes = _Column("i", "<i4")
        self._source_checksums = _Column("I", "<u4")
        self._names = bytearray()
        self._name_offsets = _Column("q", "<i8")
        self._name_offsets.append(0)
        self._skipped: list[Skipped] = []
        self._notes: Counter[str] = Counter()
        file.write_at(0, UNFINISHED)

    def __len__(self) -> int:
        return len(self._labels)

    @property
    def end(self) -> int:
        """Byte offset behind the last record."""
        return self._next

    @property
    def payload_bytes(self) -> int:
        """Bytes of pixels and their frames so far."""
        return self._next - self._start

    def append(self, record: Record) -> None:
        self.add(record.name, record.label, Entry.of(record), bytes_of(record.pixels))

    def add(self, name: str, label: int, entry: Entry, data: ReadableBuffer) -> None:
        """Write the next record; `data` are the bytes of its pixels, `entry.nbytes` of them."""
        self._check_shape(name, entry)
        front, behind = self._format.frame(self._next, entry.nbytes)
        end = self._file.write_at(self._next, front, data, bytes(behind))
        self._note(name, label, entry, len(front), behind)
        if self._next != end:
            raise ValueError(f"{name}: expected {entry.nbytes} bytes for shape {entry.shape}, got others")
        if self._next - self._writing_back > _WRITE_BACK_BYTES:
            self._file.start_writing_back(self._writing_back, self._next)
            self._writing_back = self._next

    def take_over(self, name: str, label: int, entry: Entry, *, trusted: int) -> bool:
        """Count a record that an earlier run wrote in this place.

        One that ends behind the first `trusted` bytes of the file only if its bytes are there.
        """
        if self._shape is not None and entry.shape != self._shape:
            return False
        front, behind = self._format.frame(self._next, entry.nbytes)
        if self._next + len(front) + entry.nbytes + behind > trusted:
            found = self._file.read_at(self._next, len(front) + entry.nbytes + behind)
            data = memoryview(found)[len(front) : len(front) + entry.nbytes]
            whole = len(found) == len(front) + entry.nbytes + behind and not any(found[len(front) + entry.nbytes :])
            if not whole or not found.startswith(front) or crc32(data) != entry.crc32:
                return False
        self._note(name, label, entry, len(front), behind)
        self._writing_back = self._next
        return True

    def _check_shape(self, name: str, entry: Entry) -> None:
        if self._shape is not None and entry.shape != self._shape:
            raise ValueError(f"{name}: expected a record of shape {self._shape}, got {entry.shape}")

    def _note(self, name: str, label: int, entry: Entry, before: int, behind: int) -> None:
        """Count the record that lies at `_next`, with so many bytes of frame before and behind it."""
        offset = self._next + before
        self._next = offset + entry.nbytes + behind
        if self._first_payload is None:
            self._first_payload = offset
        self._offsets.append(offset - self._first_payload)
        self._shapes.extend(entry.shape)
        self._labels.append(label)
        self._checksums.append(entry.crc32)
        self._source_sizes.append(entry.source_size)
        self._original_sizes.extend(entry.original_size)
        self._source_checksums.append(entry.source_crc32)
        self._names += encode_name(name)
        self._name_offsets.append(len(self._names))
        self._notes.update(entry.notes)

    def skip(self, skipped: Skipped) -> None:
        """Remember a source file that gave no record."""
        self._skipped.append(skipped)

    def names(self) -> Names:
        return Names(np.frombuffer(bytes(self._names), np.uint8), self._name_offsets.numpy())

    def finish(self, description: Description) -> None:
        """Write the side arrays, the header and the index; the file is a whole store when this returns."""
        count = len(self)
        if count == 0 or self._first_payload is None:
            raise ValueError("a store needs at least one record")
        shapes = self._shapes.numpy(count, 3)
        payload = Payload(
            count=count,
            shape=self._shape,
            offset=self._first_payload,
            stride=None if self._shape is None else self.payload_bytes // count,
            offsets=self._offsets.numpy(),
            sizes=shapes.astype(np.int64).prod(axis=1),
            end=self._next,
        )
        self._format.finish(self._file, payload, self._arrays(shapes, payload), self._header(payload, description))

    def _arrays(self, shapes: NDArray[np.int32], payload: Payload) -> dict[str, NDArray[Any]]:
        names = self.names()
        arrays: dict[str, NDArray[Any]] = {
            "labels": self._labels.numpy(),
            "paths": names.data,
            "path_offsets": names.offsets,
            "checksums": self._checksums.numpy(),
            "source_sizes": self._source_sizes.numpy(),
            "source_crc32": self._source_checksums.numpy(),
            "original_sizes": self._original_sizes.numpy(payload.count, 2),
            "skipped": np.frombuffer(encode([asdict(skipped) for skipped in self._skipped]), np.uint8),
        }
        if self._shape is None:
            arrays["offsets"] = payload.offsets
            arrays["shapes"] = shapes
        return arrays

    def _header(self, payload: Payload, description: Description) -> dict[str, Any]:
        return {
            "count": payload.count,
            "payload": {
                "dtype": "uint8",
                "layout": "HWC",
                "channels": "RGB",
                "shape": payload.shape,
                "offset": payload.offset,
                "stride": payload.stride,
            },
            "classes": list(description.classes),
            "preprocessing": dict(description.preprocessing),
            "source": {
                **description.source,
                "bytes": int(self._source_sizes.numpy().sum()),
                "skipped": len(self._skipped),
            },
            "notes": dict(self._notes),
            "tools": dict(description.tools),
        }
