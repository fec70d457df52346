"""Windows into shared memory, in large pages where the kernel gives them.

Filling a batch in pages of 4 KiB takes a fifth longer than in pages of 2 MiB, since the processor has to look up 500
times as many addresses (benchmarks/README.md). Shared memory comes in large pages only where the system's setting
`shmem_enabled` says so, which is "never" nearly everywhere; but since Linux 6.1 a process can ask for a range of its own
(MADV_COLLAPSE). Address and place in the file have to be the same modulo 2 MiB for that, in every process that maps it.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LARGE_PAGE = 2 << 20
"""On x86-64, and on arm64 with pages of 4 KiB."""

_MADV_COLLAPSE = 25  # linux/mman.h; Python's mmap has no name for it
_TRIES = 3


@dataclass(frozen=True)
class Window:
    """`capacity` bytes of a file in memory, which begin at `start` of the map `memory`; what lies around them in the map
    belongs to others."""

    memory: mmap.mmap
    start: int
    capacity: int

    @property
    def address(self) -> int:
        return _address_of(self.memory) + self.start

    def array(self, nbytes: int) -> NDArray[np.uint8]:
        """The first bytes, (nbytes,) uint8; keeps the map open."""
        array: NDArray[np.uint8] = np.frombuffer(self.memory, np.uint8, nbytes, self.start)
        return array

    def give_back_memory(self) -> None:
        """Give the memory back to the system, whoever maps it; it reads as zeros afterwards."""
        self.memory.madvise(mmap.MADV_REMOVE, self.start, self.capacity)

    def take_large_pages(self) -> None:
        """Claim the memory, which nobody has written to, in large pages, as far as there are any: without them it is slower,
        and right all the same."""
        whole = self.capacity // LARGE_PAGE * LARGE_PAGE
        for position in range(self.start, self.start + whole, LARGE_PAGE):
            self.memory[position] = 0  # where there is nothing at all, nothing can be put together
        if whole:
            with suppress(OSError):  # an older kernel, or memory in too small pieces
                self.memory.madvise(_MADV_COLLAPSE, self.start, whole)


def place_after(end: int, capacity: int) -> int:
    """Where in a file that is taken up to `end` a window of `capacity` bytes may begin."""
    granularity = LARGE_PAGE if capacity >= LARGE_PAGE else mmap.ALLOCATIONGRANULARITY
    return -(-end // granularity) * granularity


def file_size_for(offset: int, capacity: int) -> int:
    """The size that a file must have for `open_window`; beyond the window it takes no memory."""
    return offset + capacity + (LARGE_PAGE if capacity >= LARGE_PAGE else 0)


def open_window(fd: int, offset: int, capacity: int) -> Window:
    """Map `capacity` bytes at `offset`, which `place_after` gave.

    The kernel chooses the address, the same for the same length as long as nothing else is mapped in between: so a map
    that is a large page too long is tried once, and then begins as far before the window as its address requires.
    """
    if capacity < LARGE_PAGE:
        return Window(mmap.mmap(fd, capacity, offset=offset), 0, capacity)
    lead = 0
    for _ in range(_TRIES):
        memory = mmap.mmap(fd, capacity + LARGE_PAGE, offset=offset - lead)
        short_of_aligned = -_address_of(memory) % LARGE_PAGE
        if lead == short_of_aligned:
            break
        lead = short_of_aligned
        memory.close()
    else:
        lead = 0
        memory = mmap.mmap(fd, capacity, offset=offset)
    return Window(memory, lead, capacity)


def _address_of(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, np.uint8, 1).ctypes.data)
