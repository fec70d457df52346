"""Memory for finished batches in this process, used again once nobody can see it.

A fresh buffer of 38 MB (256 pictures of 224 x 224) costs several times what filling it costs: the system has to find,
clear and map 9,400 pages. So buffers are kept and handed out again, under one rule: only after the array that was handed
out has died. Every tensor, view and array made from it holds on to it, so its death is the proof that nothing can see
the memory any more.
"""

from __future__ import annotations

import os
import threading
import weakref

import numpy as np
from numpy.typing import NDArray

MOST_IDLE = 4
"""Idle buffers kept. A loop gives back one at a time and takes it again soon; what was held beyond that goes back to the
system."""

_LARGEST_WASTE = 4


class BufferPool:
    """Hands out uint8 arrays of memory that was used before, where there is some; safe to use from several threads."""

    def __init__(self) -> None:
        self._idle: list[NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """An uninitialised flat array; its memory comes back by itself when the array and all its views are gone."""
        memory = self._take_idle(nbytes)
        if memory is None:
            memory = np.empty(nbytes, np.uint8)
        # numpy makes a view of a view refer to the first array of the chain. This is it: its death is what we wait for.
        first: NDArray[np.uint8] = np.frombuffer(memory.data, np.uint8, nbytes)
        weakref.finalize(first, self._give_back, memory).atexit = False
        return first

    def _take_idle(self, nbytes: int) -> NDArray[np.uint8] | None:
        with self._lock:
            latest_first = reversed(self._idle)  # the one used last is the one still in the processor's cache
            fitting = [memory for memory in latest_first if nbytes <= memory.nbytes <= _LARGEST_WASTE * nbytes]
            if not fitting:
                return None
            best = min(fitting, key=lambda memory: memory.nbytes)
            self._idle = [memory for memory in self._idle if memory is not best]
            return best

    def _give_back(self, memory: NDArray[np.uint8]) -> None:
        with self._lock:
            self._idle = [*self._idle[-(MOST_IDLE - 1) :], memory]

    @property
    def idle_bytes(self) -> int:
        """Bytes in buffers that wait to be used."""
        return sum(memory.nbytes for memory in self._idle)


_pool = BufferPool()


def shared_pool() -> BufferPool:
    """The pool of this process."""
    return _pool


def _forget_in_child() -> None:
    # Writing to inherited buffers would copy them page by page; and the lock may have been held by another thread.
    global _pool
    _pool = BufferPool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
