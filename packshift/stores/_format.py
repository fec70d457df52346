"""The seam between packshift and a file format.

A store of any format is one file that holds, in this order: a head; the records' pixels, one after another in a frame
that the format chooses; side arrays (labels, paths, checksums, ...); a JSON header that says where everything lies; and
whatever index the format's own library needs. So a record can be read from a map of the file by its byte offset alone,
without that library, and a record can be written the moment it arrives, in plain sequential writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from packshift.record import StoreInfo
from packshift.stores._partial import PartialFile

UNFINISHED = b"packshift: unfinished conversion\n"
"""What a file begins with until everything else in it is on disk."""


@dataclass(frozen=True)
class Payload:
    """The records as they lie in the file.

    `shape` and `stride` are set where all records are of one shape. `offsets` (N,) int64 count from `offset`, the
    first record's first byte; `sizes` (N,) int64 are in bytes; `end` is the first byte after the last frame.
    """

    count: int
    shape: tuple[int, int, int] | None
    offset: int
    stride: int | None
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    end: int


@dataclass(frozen=True)
class HeaderPlace:
    """Where a store keeps its JSON header, that header's CRC-32, and how long the whole file has to be (bytes)."""

    offset: int
    nbytes: int
    crc32: int
    file_size: int


class Format(Protocol):
    """What one file of this package provides."""

    name: str
    suffixes: tuple[str, ...]
    fixed_bytes: int
    """About what header, index and the rounding of side arrays take, for a forecast of a store's size."""

    def first_frame(self) -> int:
        """Byte offset at which the first record's frame begins."""
        ...

    def frame(self, offset: int, nbytes: int) -> tuple[bytes, int]:
        """What goes around `nbytes` of payload in a frame at `offset`: bytes in front, number of zeros behind."""
        ...

    def finish(
        self, file: PartialFile, payload: Payload, arrays: Mapping[str, NDArray[Any]], header: Mapping[str, Any]
    ) -> None:
        """Write everything that is not a record. The head, which makes the file valid, goes last."""
        ...

    def check(self, path: Path, info: StoreInfo) -> None:
        """Read the finished file with the format's own library; raise `StoreError` where that finds something else."""
        ...

    def structure_problems(self, path: Path) -> list[str] | None:
        """What a verifier that belongs to the format finds in a file that nobody has checked yet, one line each.

        It must not hand the file to the format's library. None: there is no such verifier on this machine.
        """
        ...

    def written_with(self) -> str:
        """What else than packshift decides about the bytes, as words to put behind a sentence; empty: nothing."""
        ...

    def recognises(self, head: bytes) -> bool:
        """Whether a file that begins with `head` (up to 4,608 bytes) is of this format, made by packshift or not."""
        ...

    def find_header(self, view: memoryview, path: Path) -> HeaderPlace:
        """Find the header in a mapped file, trusting no byte of it; raise `StoreError` where there is none."""
        ...
