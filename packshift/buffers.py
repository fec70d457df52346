"""Memory for finished batches in this process, used again once nobody can see it.

A fresh buffer of 38 MB (256 pictures of 224 x 224) costs several times what filling it costs: the system has to find,
clear and map 9,400 pages. So buffers are kept and handed out again, under one rule: only after the array that was handed
out has died. Every tensor, view and array made from it holds on to it, so its death is the proof that nothing can see
the memory any more.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections import deque
from contextlib import suppress
from functools import partial

import numpy as np
from numpy.typing import NDArray

MOST_IDLE = 4
"""Idle buffers kept, unless `keep` asks for more. A loop gives back one at a time and takes it again soon; what was held
beyond that goes back to the system."""

_LARGEST_WASTE = 4


class _Buffer:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.memory = np.empty(nbytes, np.uint8).data
        self.lent: weakref.ref[NDArray[np.uint8]] | None = None


class BufferPool:
    """Hands out uint8 arrays of memory that was used before, where there is some; safe to use from several threads.

    Without a lock: an array may die anywhere, also where the garbage collector runs in the middle of `take`.
    """

    def __init__(self) -> None:
        self._idle: deque[_Buffer] = deque()
        self._most_idle = MOST_IDLE
        self._lent: set[_Buffer] = set()

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """An uninitialised flat array; its memory comes back by itself when the array and all its views are gone."""
        buffer = self._take_idle(nbytes) or _Buffer(nbytes)
        # numpy makes a view of a view refer to the first array of the chain. This is it, as what it refers to itself is no
        # array: its death is what we wait for.
        first: NDArray[np.uint8] = np.frombuffer(buffer.memory, np.uint8, nbytes)
        self._lent.add(buffer)
        buffer.lent = weakref.ref(first, partial(self._give_back, buffer))
        return first

    def _take_idle(self, nbytes: int) -> _Buffer | None:
        while True:
            best: _Buffer | None = None
            for buffer in reversed(list(self._idle)):  # the one used last is the one still in the processor's cache
                if nbytes <= buffer.nbytes <= _LARGEST_WASTE * nbytes and (best is None or buffer.nbytes < best.nbytes):
                    best = buffer
            if best is None:
                return None
            with suppress(ValueError):  # another thread was quicker
                self._idle.remove(best)
                return best

    def _give_back(self, buffer: _Buffer, _: object) -> None:
        self._lent.discard(buffer)
        self._idle.append(buffer)
        if len(self._idle) > self._most_idle:
            with suppress(IndexError):  # another thread was quicker
                self._idle.popleft()  # the oldest goes back to the system

    def keep(self, count: int) -> None:
        """Keep at least so many idle buffers from now on: what comes back at the end of an epoch is wanted in the next."""
        self._most_idle = max(self._most_idle, count)

    def forget_what_is_lent(self) -> None:
        """Let it go to the system, not come back here, when nothing can see it any more."""
        for buffer in list(self._lent):
            buffer.lent = None
        self._lent.clear()

    @property
    def idle_bytes(self) -> int:
        """Bytes in buffers that wait to be used."""
        return sum(buffer.nbytes for buffer in list(self._idle))


_pool = BufferPool()


def shared_pool() -> BufferPool:
    """The pool of this process."""
    return _pool


@atexit.register
def _forget_what_is_lent() -> None:
    """At the end of Python batches may outlive what `_give_back` needs."""
    _pool.forget_what_is_lent()


def _forget_in_child() -> None:
    # Writing to inherited buffers would copy them page by page.
    global _pool
    _pool = BufferPool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
