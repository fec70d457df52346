"""The rows of a batch, copied out of a store into one piece of memory."""

from __future__ import annotations

import atexit
import ctypes
import os
import weakref
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from packshift.compiled import BatchStruct, compiled

_WORTH_A_THREAD = 2 << 20
"""Bytes: about 0.2 ms of copying, where starting a thread takes 0.02."""


class Rows:
    """Rows of equal length in memory: `table` is (N, bytes) uint8, each row in one piece, else ValueError."""

    def __init__(self, table: torch.Tensor) -> None:
        count, nbytes = table.shape
        gap, step = table.stride()
        if step != 1 or gap < nbytes:
            raise ValueError(f"expected rows in one piece each, got {gap} and {step} bytes from element to element")
        self.table, self.count, self.nbytes = table, count, nbytes
        self.address, self.gap = table.data_ptr(), gap

    def gather(self, positions: NDArray[np.integer[Any]], out: torch.Tensor) -> None:
        """Copy the rows at `positions` into `out`, on as many threads as torch uses for an operation here, where they are
        worth it.

        `positions` is (B,), of integers; `out` uint8 of B * bytes, in one piece (or channels last), else ValueError. Raises
        IndexError where a position is not one of 0 to N - 1.
        """
        if compiled() is not None:
            Gathering(self, positions, out).run(min(torch.get_num_threads(), out.nbytes // _WORTH_A_THREAD))
            return
        self.check_room(len(positions), out)
        into = out.as_strided((len(positions), self.nbytes), (self.nbytes, 1))
        dtype = _widest(self.table, into)
        torch.index_select(self.table.view(dtype), 0, torch.from_numpy(positions), out=into.view(dtype))

    def check_room(self, count: int, out: torch.Tensor) -> None:
        in_one_piece = out.is_contiguous(memory_format=torch.channels_last) if out.dim() == 4 else out.is_contiguous()
        if out.nbytes != count * self.nbytes or not in_one_piece:
            raise ValueError(f"expected room for {count} of {self.nbytes} bytes in one piece, got {tuple(out.shape)}")


class Gathering:
    """One batch to be gathered in C. Arguments as for `Rows.gather`, and ValueError."""

    def __init__(self, rows: Rows, positions: NDArray[np.integer[Any]], out: torch.Tensor) -> None:
        library = compiled()
        assert library is not None  # whoever makes one has asked; not a user's data
        count = len(positions)
        rows.check_room(count, out)
        places = torch.from_numpy(np.ascontiguousarray(positions, np.int64))
        self.batch = BatchStruct(
            rows.address, rows.count, rows.gap, rows.nbytes, places.data_ptr(), count, out.data_ptr()
        )
        self._rows, self._places, self._out = rows, places, out
        self._library = library

    @property
    def all_begun(self) -> bool:
        """Whether there is nothing left to take part in."""
        return bool(self.batch.begun >= self.batch.count)

    def run(self, threads: int = 1) -> None:
        """Copy all of it, on so many threads, the caller's among them. Raises IndexError as `Rows.gather` does."""
        self.batch.begun = 0
        if not self._library.gather(self.batch, threads):
            raise self.out_of_range()

    def out_of_range(self) -> IndexError:
        found = f"{int(self._places.min())} to {int(self._places.max())}"
        return IndexError(f"expected positions from 0 to {self._rows.count - 1}, got {found}")


class GatheringQueue:
    """Threads that gather, in the order in which batches are handed over, and never need the interpreter for it.

    Whoever waits for a batch takes part in it. In a child that was forked meanwhile, which has no such threads, and after
    `close` it copies all of it.
    """

    def __init__(self, threads: int) -> None:
        library = compiled()
        assert library is not None  # whoever makes one has asked; not a user's data
        queue = library.open_queue(threads)
        if queue is None:
            raise MemoryError(f"no memory for a queue of {threads} threads")
        self._library, self._queue, self._owner = library, queue, os.getpid()
        self._in_queue: set[Gathering] = set()  # what is copied from and to has to stay
        weakref.finalize(self, _free, library, queue, self._in_queue, self._owner).atexit = False
        _open_queues.add(self)

    @property
    def is_inherited(self) -> bool:
        """Whether this is a child of the process whose threads these are."""
        return os.getpid() != self._owner

    def hand_over(self, gathering: Gathering) -> None:
        """Have a batch copied. Raises IndexError as `Rows.gather` does."""
        if self.is_inherited:
            return
        self._in_queue.add(gathering)
        if not self._library.hand_over(self._queue, gathering.batch):
            self._in_queue.discard(gathering)
            raise gathering.out_of_range()

    def finish(self, gathering: Gathering) -> None:
        """Come back when all rows of a batch that was handed over are there."""
        if self.is_inherited:
            gathering.run()
        else:
            self._library.finish(self._queue, gathering.batch)
        self._in_queue.discard(gathering)

    def close(self) -> None:
        """End the threads."""
        if not self.is_inherited:
            self._library.end_threads(self._queue)


_open_queues: weakref.WeakSet[GatheringQueue] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Before what is copied from and to goes with the interpreter. A thread of Python may still be in a queue's `finish`, so
    none is freed."""
    for queue in list(_open_queues):
        queue.close()


def _free(library: ctypes.CDLL, queue: int, in_queue: set[Gathering], owner: int) -> None:
    if os.getpid() == owner:
        library.end_threads(queue)
        library.free_queue(queue)
    in_queue.clear()


def _widest(*tables: torch.Tensor) -> torch.dtype:
    """The widest integers that the rows of all of these can be taken for: `index_select` copies an element at a time, and 8
    bytes at a time is a third faster than 1 (for 224 x 224 pictures faster than `np.take`, too)."""
    for dtype in (torch.int64, torch.int32, torch.int16):
        numbers = (
            number
            for each in tables
            for number in (each.data_ptr(), each.storage_offset(), each.stride(0), each.shape[1])
        )
        if not any(number % dtype.itemsize for number in numbers):
            return dtype
    return torch.uint8
