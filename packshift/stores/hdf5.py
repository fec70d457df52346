"""HDF5 stores: a handful of plain arrays, written so that the pixels can be read without the HDF5 library.

The pixels are one contiguous dataset whose place in the file is known before the first record is written
(`first_frame`): records go there in plain writes, and h5py adds the rest at the end. So a killed conversion leaves
records, not 96 unreadable bytes, and the number of records need not be known beforehand, which a contiguous dataset
would otherwise demand.

In front of the HDF5 file proper lies a user block of 4,096 bytes, which the HDF5 format leaves to applications. It
holds one line that says where the header is. Readers need only that: no library lock that a fork could inherit, no
chunk cache, and no HDF5 parser run on a stranger's file.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from packshift.checksum import crc32
from packshift.errors import DamagedStoreError, NotAStoreError, StoreError
from packshift.record import ArrayPlace, StoreInfo, bytes_of
from packshift.stores._format import HeaderPlace, Payload
from packshift.stores._header import VERSION, encode_header, newer_version
from packshift.stores._partial import PartialFile

if TYPE_CHECKING:
    import h5py

USER_BLOCK = 4096

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_SIGNATURE_PLACES = (0, 512, 1024, 2048, 4096)
_LINE = re.compile(
    rb"packshift store, format (\d{1,9}): header at byte (\d{1,18}), (\d{1,18}) bytes, crc32 ([0-9a-f]{8}); "
    rb"file (\d{1,18}) bytes\n"
)


class _Window(io.RawIOBase):
    """The file as the HDF5 library sees it: empty at first, with the place of the records fenced off.

    It has to look empty because the library reads what a file holds before it creates one there. An exception raised
    here is lost inside the library, which reports its own; `error` keeps it.
    """

    def __init__(self, file: PartialFile, fence: range) -> None:
        self._file = file
        self._fence = fence
        self._position = 0
        self.size = 0
        self.error: BaseException | None = None

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size}[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        data = self._file.read_at(self._position, min(len(buffer), max(0, self.size - self._position)))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def write(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        try:
            if self._position < self._fence.stop and self._position + len(view) > self._fence.start:
                raise StoreError(f"{self._file.target}: the HDF5 library wanted to write among the records")
            self._file.write_at(self._position, view)
        except BaseException as error:  # kept and raised again: whatever it is, the library may swallow or alter it
            self.error = self.error or error
            raise
        self._position += len(view)
        self.size = max(self.size, self._position)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        size = self._position if size is None else size
        try:
            if size < self._fence.stop and len(self._fence):
                raise StoreError(f"{self._file.target}: the HDF5 library wanted to cut off the records")
            self._file.resize(size)
        except BaseException as error:  # kept and raised again: whatever it is, the library may swallow or alter it
            self.error = self.error or error
            raise
        self.size = size
        return size


def _create(file: Any, shape: tuple[int, ...]) -> int:
    """Begin an HDF5 file with the dataset `images` of `shape`, uint8, contiguous; return its byte offset."""
    import h5py

    # Alignment 1/4096 puts the pixels on a page of their own whatever their size: the place must not depend on it.
    with h5py.File(
        file,
        "w",
        libver=("earliest", "v110"),
        userblock_size=USER_BLOCK,
        alignment_threshold=1,
        alignment_interval=4096,
    ) as stored:
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_layout(h5py.h5d.CONTIGUOUS)
        properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        properties.set_obj_track_times(False)
        space = h5py.h5s.create_simple(shape)
        dataset = h5py.h5d.create(stored.id, b"images", h5py.h5t.STD_U8LE, space, properties)
        return int(dataset.get_offset())


@cache
def _pixels_offset() -> int:
    """Where the HDF5 library at hand puts the pixels; it does not depend on how many there are."""
    return _create(io.BytesIO(), (1,))


def _add_array(stored: h5py.File, name: str, array: NDArray[Any]) -> ArrayPlace:
    import h5py

    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.CONTIGUOUS)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    properties.set_obj_track_times(False)
    kind = h5py.h5t.py_create(array.dtype)
    dataset = h5py.h5d.create(stored.id, name.encode(), kind, h5py.h5s.create_simple(array.shape), properties)
    if array.size:
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, array)
    offset = dataset.get_offset() if array.size else 0  # the library gives an empty dataset no place
    return ArrayPlace(int(offset), array.dtype.str, array.shape, crc32(bytes_of(array)))


class HDF5Format:
    """Contiguous, uncompressed arrays of fixed-size types; readable by HDF5 1.10."""

    name = "hdf5"
    suffixes = (".h5", ".hdf5")
    fixed_bytes = 1 << 10

    def first_frame(self) -> int:
        return _pixels_offset()

    def frame(self, offset: int, nbytes: int) -> tuple[bytes, int]:
        return b"", 0

    def finish(
        self, file: PartialFile, payload: Payload, arrays: Mapping[str, NDArray[Any]], header: Mapping[str, Any]
    ) -> None:
        import h5py

        shape = (payload.end - payload.offset,) if payload.shape is None else (payload.count, *payload.shape)
        window = _Window(file, range(payload.offset, payload.end))
        try:
            if _create(window, shape) != payload.offset:
                raise StoreError(f"{file.target}: the HDF5 library put the pixels elsewhere than announced")
            with h5py.File(window, "r+", libver=("earliest", "v110")) as stored:
                places = {name: _add_array(stored, name, array) for name, array in arrays.items()}
                text = np.frombuffer(encode_header(header, places), np.uint8)
                place = _add_array(stored, "header", text)
        except Exception:  # raised again; in place of ours h5py reports errors of many types, even AttributeError
            if window.error is not None:
                raise window.error from None
            raise
        file.resize(window.size)
        line = (
            f"packshift store, format {VERSION}: header at byte {place.offset}, {place.nbytes} bytes, "
            f"crc32 {place.crc32:08x}; file {window.size} bytes\n"
        ).encode()
        file.write_at(0, line, bytes(USER_BLOCK - len(line)))

    def check(self, path: Path, info: StoreInfo) -> None:
        import h5py

        try:
            with h5py.File(path, "r", locking=False) as stored:  # the lock is ours
                offset = stored["images"].id.get_offset()
                names = set(stored)
                for index in (0, info.count - 1):
                    stored["labels"][index]
        except (OSError, KeyError, ValueError, RuntimeError) as error:
            raise StoreError(f"{path}: HDF5 cannot read back what was written: {error}") from error
        if offset != info.payload_offset or names != {"images", "header", *info.arrays}:
            raise StoreError(f"{path}: HDF5 reads back other datasets than were written")

    def structure_problems(self, path: Path) -> list[str]:
        return []  # every byte of the library's own is compared with what it writes (`_rewriting`)

    def written_with(self) -> str:
        import h5py

        return f" with HDF5 {h5py.version.hdf5_version} (another HDF5 library may lay out its own tables differently)"

    def recognises(self, head: bytes) -> bool:
        return head.startswith(b"packshift store") or any(
            head[place : place + len(_SIGNATURE)] == _SIGNATURE for place in _SIGNATURE_PLACES
        )

    def find_header(self, view: memoryview, path: Path) -> HeaderPlace:
        line = _LINE.match(view[:256])
        announced = re.match(rb"packshift store, format (\d{1,9})\b", view[:256])
        if announced is not None and int(announced[1]) > VERSION:
            raise newer_version(path, int(announced[1]))
        if line is None:
            if bytes(view[:15]) == b"packshift store":
                raise DamagedStoreError(
                    f"{path} is damaged: its first line is not what packshift writes; copy it again"
                )
            raise NotAStoreError(
                f"{path} is an HDF5 file that packshift did not write (it has no packshift header): "
                "make a store from the pictures with packshift convert"
            )
        _, offset, nbytes, crc32, size = line.groups()
        if int(size) != len(view):
            raise DamagedStoreError(
                f"{path} is damaged: it has {len(view):,} bytes where {int(size):,} were written "
                "(a copy that was cut short?); copy it again or convert again"
            )
        return HeaderPlace(int(offset), int(nbytes), int(crc32, 16), int(size))


FORMAT = HDF5Format()
