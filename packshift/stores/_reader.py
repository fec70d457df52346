"""Reads a store through a map of its file.

All formats end here: once the header is found, a record is `nbytes` at an offset. The map needs no library and no
lock, and a forked child may go on using it: it is read-only and has no position, cache or state that could be shared
by accident. A reader is opened per process all the same (`datasets`), so that a dataset can be pickled.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import resource
import stat
from collections.abc import Sequence
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packshift.checksum import crc32
from packshift.compiled import compiled
from packshift.errors import (
    ChangedStoreError,
    DamagedStoreError,
    NotAStoreError,
    StoreError,
    UnfinishedStoreError,
)
from packshift.machine import usable_memory
from packshift.record import ArrayPlace, Names, Skipped, StoreInfo, bytes_of, encode_name
from packshift.stores import formats, get_format
from packshift.stores._format import UNFINISHED, Format
from packshift.stores._header import decode_header

_HEAD = 4608
_REQUIRED: dict[str, tuple[str, tuple[int, ...]]] = {
    "labels": ("<i8", ()),
    "path_offsets": ("<i8", ()),
    "checksums": ("<u4", ()),
    "source_sizes": ("<i8", ()),
    "source_crc32": ("<u4", ()),
    "original_sizes": ("<i4", (2,)),
}
_REQUIRED_WITHOUT_SHAPE: dict[str, tuple[str, tuple[int, ...]]] = {"offsets": ("<i8", ()), "shapes": ("<i4", (3,))}


class Reader:
    """An open store: `info`, `record(i)`, the side arrays.

    `identity` is the same for two readers exactly when they read the same store. Raises StoreError where the file is
    not a whole store; nothing is read beyond the header until it is asked for.
    """

    def __init__(self, path: str | os.PathLike[str], *, format: str | None = None, identity: int | None = None) -> None:
        self.path = Path(path)
        self._map = _map_file(self.path)
        view = memoryview(self._map)
        known = _recognise(self.path, bytes(view[:_HEAD]), format)
        place = known.find_header(view, self.path)
        if place.offset + place.nbytes > len(view):
            raise self._damaged("its header lies outside the file")
        text = bytes(view[place.offset : place.offset + place.nbytes])
        if crc32(text) != place.crc32:
            raise self._damaged("its header does not match its checksum")
        if identity is not None and place.crc32 != identity:
            raise ChangedStoreError(
                f"{self.path} was replaced since this dataset was opened; make the dataset again to read the new store"
            )
        self.identity = place.crc32
        self.header_place = place
        self.info: StoreInfo = decode_header(text, known.name, self.path)
        self._bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self._arrays: dict[str, NDArray[Any]] = {}
        self._disk_reads = -1
        if not self.kernel_reads_ahead:
            self._map.madvise(mmap.MADV_RANDOM)
        self._check_bounds()

    def __len__(self) -> int:
        return self.info.count

    @property
    def file_size(self) -> int:
        return len(self._bytes)

    def _damaged(self, what: str) -> DamagedStoreError:
        return DamagedStoreError(f"{self.path} is damaged: {what}; copy it again or convert again")

    def _check_bounds(self) -> None:
        info = self.info
        for name, place in info.arrays.items():
            if place.offset + place.nbytes > self.file_size:
                raise self._damaged(f"its array {name!r} lies outside the file")
        required = _REQUIRED | (_REQUIRED_WITHOUT_SHAPE if info.shape is None else {})
        for name, (dtype, tail) in required.items():
            expected = (info.count + (name == "path_offsets"), *tail)
            place_or_none = info.arrays.get(name)
            if place_or_none is None or (place_or_none.dtype, place_or_none.shape) != (dtype, expected):
                raise self._damaged(f"its array {name!r} is missing or of the wrong shape")
        for name in ("paths", "skipped"):  # of any length
            one_dimensional = name in info.arrays and len(info.arrays[name].shape) == 1
            if not one_dimensional or info.arrays[name].dtype != "|u1":
                raise self._damaged(f"its array {name!r} is missing or of the wrong shape")
        if info.shape is not None and info.stride is not None:
            size = prod(info.shape)
            end = info.payload_offset + (info.count - 1) * info.stride + size
            if info.count < 1 or info.stride < size or end > self.file_size:
                raise self._damaged("its records lie outside the file")

    def header_text(self) -> bytes:
        """The header's JSON."""
        return bytes_of(self._bytes[self.header_place.offset :][: self.header_place.nbytes]).tobytes()

    def array(self, name: str) -> NDArray[Any]:
        """A side array as a read-only view of the map, checked against its CRC-32; raises DamagedStoreError."""
        if name not in self._arrays:
            place: ArrayPlace = self.info.arrays[name]
            raw = self._bytes[place.offset : place.offset + place.nbytes]
            if crc32(bytes_of(raw)) != place.crc32:
                raise self._damaged(f"its array {name!r} does not match its checksum")
            self._arrays[name] = raw.view(place.dtype).reshape(place.shape)
        return self._arrays[name]

    @cached_property
    def labels(self) -> NDArray[np.int64]:
        """(N,) int64: indices of `info.classes`, or -1 throughout."""
        labels = self.array("labels")
        lowest, highest = (0, len(self.info.classes) - 1) if self.info.labelled else (-1, -1)
        if labels.min() < lowest or labels.max() > highest:
            raise self._damaged(f"its labels are not all in {lowest} .. {highest}")
        return labels

    @cached_property
    def paths(self) -> Names:
        """(N,) source paths relative to the source folder, "/" between the parts."""
        offsets, data = self.array("path_offsets"), self.array("paths")
        if offsets[0] != 0 or offsets[-1] != len(data) or (np.diff(offsets) < 0).any():
            raise self._damaged("its path offsets are not in order")
        return Names(data, offsets)

    @cached_property
    def skipped(self) -> Sequence[Skipped]:
        """The source files that gave no record, with the reason."""
        try:
            rows = json.loads(self.array("skipped").tobytes())
            skipped = tuple(Skipped(str(row["path"]), str(row["reason"])) for row in rows)
            for each in skipped:
                encode_name(each.path)  # raises ValueError for what can be no file's name
            return skipped
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise self._damaged("its list of skipped files cannot be read") from error

    @cached_property
    def _offsets(self) -> NDArray[np.int64]:
        return self.array("offsets")

    @cached_property
    def _shapes(self) -> NDArray[np.int32]:
        return self.array("shapes")

    def pixels(self, index: int) -> NDArray[np.uint8]:
        """The pixels of one record, (H, W, 3) uint8, as a read-only view of the map; `index` counts from 0."""
        if self.info.shape is not None and self.info.stride is not None:
            shape = self.info.shape
            offset = self.info.payload_offset + index * self.info.stride
            size = shape[0] * shape[1] * shape[2]
        else:
            height, width, channels = (int(length) for length in self._shapes[index])
            shape = (height, width, channels)
            offset = self.info.payload_offset + int(self._offsets[index])
            size = height * width * channels
            if min(shape) < 1 or offset < 0 or offset + size > self.file_size:
                raise self._damaged(f"record {index} lies outside the file")
        return self._bytes[offset : offset + size].reshape(shape)

    @property
    def kernel_reads_ahead(self) -> bool:
        """Whether the kernel may read around what is asked for. Not where the store is larger than the memory: in random
        order it would read several times the store, and throw out pages that are still needed."""
        return self.file_size <= usable_memory()

    def waits_for_disk(self) -> bool:
        """Whether this process has waited for the disk at an address since the last call (a major page fault)."""
        before, self._disk_reads = self._disk_reads, _disk_reads()
        return before != self._disk_reads

    def read_ahead(self, positions: NDArray[np.int64]) -> None:
        """Have the kernel fetch the records at `positions` from the disk, all at once.

        Exactly their byte ranges. Costs a system call a record, so it is worth it as long as reading waits for the disk.
        """
        if self.info.shape is None or self.info.stride is None:
            return
        size = prod(self.info.shape)
        for start in (self.info.payload_offset + positions * self.info.stride).tolist():
            page = start // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_WILLNEED, page, start + size - page)

    @cached_property
    def rows(self) -> NDArray[np.uint8] | None:
        """All records as one read-only view of the map, (N, H * W * 3) uint8; None where their sizes differ.

        Rows lie `info.stride` bytes apart, which for LMDB is more than their length.
        """
        if self.info.shape is None or self.info.stride is None:
            return None
        size = prod(self.info.shape)
        first = self._bytes[self.info.payload_offset :]
        return np.lib.stride_tricks.as_strided(first, (self.info.count, size), (self.info.stride, 1), writeable=False)

    def checksum_matches(self, index: int) -> bool:
        return crc32(bytes_of(self.pixels(index))) == int(self.array("checksums")[index])


def _disk_reads() -> int:
    library = compiled()
    if library is None:
        return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    return int(library.major_faults())


def _recognise(path: Path, head: bytes, name: str | None) -> Format:
    if head.startswith(UNFINISHED):
        raise UnfinishedStoreError(
            f"{path} is an unfinished conversion: run the packshift convert command that wrote it again"
        )
    found = next((known for known in formats() if known.recognises(head)), None)
    if found is None:
        raise NotAStoreError(
            f"{path} is not a packshift store: expected an LMDB or HDF5 file made by packshift convert, "
            f"found a file that begins with {head[:8]!r}"
        )
    if name is not None and name != found.name:
        raise NotAStoreError(
            f"{path} is of format {found.name}, not {get_format(name).name}: use the dataset class for {found.name}, "
            "or open_dataset, which takes every format"
        )
    return found


def _map_file(path: Path) -> mmap.mmap:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise StoreError(f"{path}: cannot open the store: {error.strerror}") from error
    try:
        found = os.fstat(fd)
        if stat.S_ISDIR(found.st_mode):
            raise NotAStoreError(f"{path} is a folder: expected a store file made by packshift convert")
        if not stat.S_ISREG(found.st_mode):
            raise NotAStoreError(f"{path} is not a regular file: expected a store made by packshift convert")
        if found.st_size == 0:
            raise NotAStoreError(f"{path} is empty: expected a store made by packshift convert")
        return mmap.mmap(fd, found.st_size, access=mmap.ACCESS_READ)
    except OSError as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(_no_map(path, found.st_size, error)) from error
    finally:
        os.close(fd)


def _no_map(path: Path, size: int, error: OSError) -> str:
    if error.errno == errno.ENOMEM:
        return f"{path}: no address space to map its {size / 1e6:,.0f} MB: raise the limit (ulimit -v)"
    return (
        f"{path}: its file system cannot map files into memory ({error.strerror}): copy the store to a local disk first"
    )
