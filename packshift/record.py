"""The values that travel along the line: file -> Sample -> Record -> store -> reader.

All of them are frozen. What exists once per picture is kept in flat arrays (`Names`, numpy), never in a list of Python
objects: a million small objects cost hundreds of megabytes and are copied page by page into every forked worker,
because reading a Python object writes its reference count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from packshift.checksum import crc32

UNLABELLED = -1


def encode_name(name: str) -> bytes:
    """A file name as bytes, UTF-8 whatever the locale; bytes that are not UTF-8 come back from their surrogates."""
    return name.encode("utf-8", "surrogateescape")


def decode_name(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def bytes_of(array: NDArray[Any]) -> memoryview:
    """The bytes of a C-contiguous array, without a copy."""
    return array.data.cast("B") if array.size else memoryview(b"")


class Names(Sequence[str]):
    """File names as one run of bytes plus offsets; reads like a list of str.

    `data` holds the names' bytes one after another (uint8), `offsets` (N + 1, int64) where each begins. Names that are
    not UTF-8 come back with surrogate escapes, as from `os.listdir`.
    """

    def __init__(self, data: NDArray[np.uint8], offsets: NDArray[np.int64]) -> None:
        self.data = data
        self.offsets = offsets

    @classmethod
    def of(cls, names: Iterable[bytes]) -> Names:
        names = list(names)
        offsets = np.zeros(len(names) + 1, np.int64)
        np.cumsum([len(name) for name in names], out=offsets[1:])
        return cls(np.frombuffer(b"".join(names), np.uint8), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def raw(self, index: int) -> bytes:
        """The bytes of one name; `index` counts from 0."""
        return self.data[self.offsets[index] : self.offsets[index + 1]].tobytes()

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        positions = range(len(self))[index]
        if isinstance(positions, range):
            return [decode_name(self.raw(position)) for position in positions]
        return decode_name(self.raw(positions))

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # Python's way to say that there is none, as for the lists that this equals; typed as a method

    def __repr__(self) -> str:
        shown = ", ".join(repr(name) for name in self[:3])
        return f"[{shown}, ... {len(self):,} names]" if len(self) > 3 else f"[{shown}]"


@dataclass(frozen=True)
class Sample:
    """One picture to convert: its place under the source folder and its label (-1: unlabelled)."""

    name: str
    label: int


@dataclass(frozen=True)
class Listing:
    """What a source folder holds, in the order in which it is stored.

    `names` are relative to `root`; `labels` (N,) int64 index `classes` or are all -1. `class_order` says how the classes
    come to their labels where that is not by the string order of their names: "natural", "given" (by a list). `ignored`
    counts what was left out per reason, `ignored_examples` names a few of each.
    """

    root: str
    layout: str
    classes: tuple[str, ...]
    names: Names
    labels: NDArray[np.int64]
    ignored: Mapping[str, int] = field(default_factory=Counter)
    ignored_examples: Mapping[str, Sequence[str]] = field(default_factory=dict)
    class_order: str | None = None

    def __len__(self) -> int:
        return len(self.names)

    def sample(self, index: int) -> Sample:
        return Sample(self.names[index], int(self.labels[index]))

    @property
    def labelled(self) -> bool:
        return bool(self.classes)

    @property
    def empty_classes(self) -> tuple[str, ...]:
        """Classes without a picture; they keep their index."""
        present = set(np.unique(self.labels).tolist())
        return tuple(name for index, name in enumerate(self.classes) if index not in present)


@dataclass(frozen=True)
class Record:
    """One preprocessed picture and where it came from.

    `pixels` is (H, W, 3) uint8, C-contiguous. `source_size` is the file's length in bytes, `source_crc32` its CRC-32,
    `original_size` the (height, width) of the upright picture before resizing. `notes` name what was done to it beyond
    the settings (see `preprocess.NOTES`). `source_mtime_ns` is the file's time of change; no store keeps it.
    """

    name: str
    label: int
    pixels: NDArray[np.uint8]
    source_size: int
    source_crc32: int
    original_size: tuple[int, int]
    notes: tuple[str, ...] = ()
    source_mtime_ns: int = 0


class Entry(NamedTuple):
    """What is known of a record beside its name, its label and its pixels; `crc32` is that of the pixels' bytes."""

    shape: tuple[int, int, int]
    crc32: int
    source_size: int
    source_mtime_ns: int
    source_crc32: int
    original_size: tuple[int, int]
    notes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        height, width, channels = self.shape
        return height * width * channels

    @classmethod
    def of(cls, record: Record) -> Entry:
        height, width, channels = record.pixels.shape
        return cls(
            (height, width, channels),
            crc32(bytes_of(record.pixels)),
            record.source_size,
            record.source_mtime_ns,
            record.source_crc32,
            record.original_size,
            record.notes,
        )


@dataclass(frozen=True)
class Skipped:
    """A source file that was left out of the store, and why."""

    path: str
    reason: str


@dataclass(frozen=True)
class ArrayPlace:
    """Where a side array lies in a store: byte offset in the file, little-endian dtype, shape, CRC-32 of its bytes."""

    offset: int
    dtype: str
    shape: tuple[int, ...]
    crc32: int

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=object)) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class StoreInfo:
    """The header of a store: all that is known about it without touching a record.

    `shape` is (H, W, 3) where all records share one, else None. Record `i` begins at byte
    `payload_offset + i * stride` of the file, or at `payload_offset + offsets[i]` where `stride` is None.
    """

    format: str
    version: int
    count: int
    shape: tuple[int, int, int] | None
    payload_offset: int
    stride: int | None
    classes: tuple[str, ...]
    preprocessing: Mapping[str, Any]
    source: Mapping[str, Any]
    notes: Mapping[str, int]
    tools: Mapping[str, str]
    arrays: Mapping[str, ArrayPlace]

    @property
    def labelled(self) -> bool:
        return bool(self.classes)
