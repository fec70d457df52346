"""Whether a file is in the page cache, and how to get it in and out."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np

_BLOCK = 4 << 20


def drop(path: str | os.PathLike[str]) -> None:
    """Ask the kernel to drop a file's pages from the page cache; pages that somebody maps stay."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)  # only clean pages can be dropped
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def warm(paths: Iterable[str | os.PathLike[str]], most_bytes: int, seconds: float) -> bool:
    """Read files from beginning to end, so that the page cache has them; False: not all, for want of room or time.

    A file that cannot be read is left for its reader to complain about.
    """
    deadline = time.monotonic() + seconds
    buffer = bytearray(_BLOCK)
    for path in paths:
        with suppress(OSError), open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                most_bytes -= count
                if most_bytes < 0 or time.monotonic() > deadline:
                    return False
    return True


def resident_share(paths: Iterable[str | os.PathLike[str]]) -> float:
    """The share of the files' pages that are in the page cache, as `mincore(2)` says; raises OSError where it fails."""
    resident = pages = 0
    for path in paths:
        here, all_pages = _resident_pages(Path(path))
        resident += here
        pages += all_pages
    return resident / pages if pages else 0.0


def _resident_pages(path: Path) -> tuple[int, int]:
    size = path.stat().st_size
    if not size:
        return 0, 0
    pages = -(-size // mmap.PAGESIZE)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        mapped = mmap.mmap(fd, size, access=mmap.ACCESS_READ)
    finally:
        os.close(fd)
    found = np.zeros(pages, np.uint8)
    address = np.frombuffer(mapped, np.uint8).ctypes.data
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_void_p(found.ctypes.data)):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), str(path))
    return int((found & 1).sum()), pages
