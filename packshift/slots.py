"""Batches from a DataLoader worker to its parent in shared memory that is used again.

With worker processes nine tenths of the time of a stock DataLoader go into making shared memory for every batch: finding
and clearing its pages in the worker, mapping them in the parent. Here a worker keeps a few slots of shared memory and
fills them again and again, and the parent keeps them mapped.

The parts, on the worker's side first:

- `SlotRing`: one memfd per worker, made at its first batch, so every start method works and nothing has a name that
  could be left behind. Its first page holds one state byte per slot, the slots follow.
- `SlotTensor`: the batch in a slot. Pickled for the queue to the parent it becomes a reference, once; whatever is made
  from it (a view, a copy) is an ordinary tensor and goes torch's ordinary way.
- `_attach`: in the parent, opens the memfd through /proc/PID/fd and maps the slot, once per slot.

**A slot is written again only when nothing can see it**: in the worker, the array over it has died (so a view that still
waits in the queue to be pickled protects it) and its state byte is 0. The byte is set when the reference is pickled, and
cleared in the parent when the array that owns the batch's storage dies, which every tensor and view of it keeps alive.
A parent that forks while it holds a batch shares that memory with the child: such a slot stays taken until the child
has ended, too (`_ForkWatch`).

Where there is no memfd or /proc (macOS), or all slots are taken, a batch goes torch's ordinary way.
"""

from __future__ import annotations

import atexit
import mmap
import os
import select
import stat
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from multiprocessing import util
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.multiprocessing.reductions import reduce_tensor

from packshift.windows import Window, file_size_for, open_window, place_after

MOST_SLOTS = 32
"""Slots per worker. As many are in flight as prefetch_factor says, plus what the training loop holds on to."""

MOST_SPARE = 4
"""Free slots that keep their memory. A loop that held many batches at once and let them go does not need it any more."""

_CONTROL = mmap.PAGESIZE
_TOKEN = slice(0, 16)
_CLOSING = 32
_STATES = 64
_FREE, _SENT = 0, 1
_SWEEP_SECONDS = 1.0
_SENDER = "QueueFeederThread"  # multiprocessing.queues
_PATIENCE_SECONDS = 0.5
"""References to slots are sent at once; batches of other kinds may wait for a reader that is gone."""


class SlotTensor(torch.Tensor):
    """A batch that lies in a slot. Every operation on it gives a plain tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # what torch documents for "no __torch_function__", though it types the name as a method

    _slot: _Slot

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = self.as_subclass(torch.Tensor)
        return plain.__reduce_ex__(protocol)  # pickled for anybody but a worker's queue

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()


# --- in the worker ---------------------------------------------------------------------------------------------------


@dataclass
class _Slot:
    """One slot as its worker sees it."""

    index: int
    offset: int
    window: Window
    address: int
    nbytes: int = 0
    array: weakref.ref[NDArray[np.uint8]] | None = None
    has_memory: bool = False
    reference_sent: bool = False

    @property
    def in_use_here(self) -> bool:
        return self.array is not None and self.array() is not None


class SlotRing:
    """The slots of one worker. `take` gives None where no slot can be had; then send the batch in another way."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("packshift-slots", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, _CONTROL)
        self._control = mmap.mmap(self.fd, _CONTROL)
        self._control[_TOKEN] = os.urandom(16)
        self._place = os.getpid(), self.fd, bytes(self._control[_TOKEN])
        self._slots: list[_Slot] = []
        self._end = _CONTROL
        with open(f"/proc/{os.getpid()}/fd/{self.fd}", "rb"):
            pass  # what the parent is going to do; where it cannot be done, say so now
        self._lock = threading.Lock()
        util.Finalize(None, _wait_for_senders, exitpriority=110)
        util.Finalize(None, self.release_free_slots, exitpriority=100)

    def take(self, nbytes: int) -> tuple[_Slot, NDArray[np.uint8]] | None:
        with self._lock:  # a worker may make batches on threads of its own
            return self._take(nbytes)

    def _take(self, nbytes: int) -> tuple[_Slot, NDArray[np.uint8]] | None:
        slot = self._free_slot(nbytes) or self._new_slot(nbytes)
        if slot is None:
            return None
        if not slot.has_memory:
            slot.window.take_large_pages()
        array = slot.window.array(nbytes)
        slot.nbytes, slot.array = nbytes, weakref.ref(array)
        slot.reference_sent, slot.has_memory = False, True
        if len(self._slots) > MOST_SPARE:
            self._trim()
        return slot, array

    def _free_slot(self, nbytes: int) -> _Slot | None:
        best: _Slot | None = None
        for slot in self._slots:
            smaller = best is None or slot.window.capacity < best.window.capacity
            if smaller and slot.window.capacity >= nbytes and self._is_free(slot):
                best = slot
        return best

    def _trim(self) -> None:
        spare = [slot for slot in self._slots if slot.has_memory and self._is_free(slot)]
        for slot in spare[MOST_SPARE:]:
            slot.window.give_back_memory()
            slot.has_memory = False

    def _is_free(self, slot: _Slot) -> bool:
        return not slot.in_use_here and self._control[_STATES + slot.index] == _FREE

    def _new_slot(self, nbytes: int) -> _Slot | None:
        if len(self._slots) == MOST_SLOTS:
            return None
        capacity = -(-max(nbytes, 1) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        offset = place_after(self._end, capacity)
        os.ftruncate(self.fd, max(os.fstat(self.fd).st_size, file_size_for(offset, capacity)))
        window = open_window(self.fd, offset, capacity)
        slot = _Slot(len(self._slots), offset, window, window.address)
        self._end = offset + capacity
        self._slots.append(slot)
        return slot

    def reference(self, slot: _Slot, tensor: torch.Tensor) -> tuple[Any, ...] | None:
        """What the parent needs to find the batch, once; None where `tensor` does not begin where the slot does."""
        if slot.reference_sent or tensor.data_ptr() != slot.address:
            return None
        slot.reference_sent = True
        self._control[_STATES + slot.index] = _SENT
        layout = _name_of(tensor.dtype), tuple(tensor.shape), tensor.stride()
        return (*self._place, slot.index, slot.offset, slot.window.capacity, slot.nbytes, *layout)

    def release_free_slots(self) -> None:
        """Give the memory of slots that nobody sees back to the system, whoever keeps them mapped.

        The worker is ending: of the other slots the parent will do the same when it gives them back.
        """
        self._control[_CLOSING] = 1
        for slot in self._slots:
            if self._control[_STATES + slot.index] == _FREE:
                slot.window.give_back_memory()

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory in all slots."""
        return sum(slot.window.capacity for slot in self._slots)


def _wait_for_senders() -> None:
    """Let the threads that send from this worker end, if they do so soon.

    DataLoader does not wait for them. In a process that was started afresh (spawn) Python then stops such a thread where it
    next asks for the interpreter lock. If that is while a tensor dies (`THPVariable_clear` of torch gives the lock back in
    between), C++ ends the process: "terminate called without an active exception", seen at one end of a worker in a
    hundred.
    """
    for thread in threading.enumerate():
        if thread.name == _SENDER:
            thread.join(_PATIENCE_SECONDS)


_ring: SlotRing | None = None
_ring_owner = 0
_ring_lock = threading.Lock()


def _own_ring() -> SlotRing | None:
    """The ring of this worker process; None where the system has no memfd or no /proc."""
    global _ring, _ring_owner
    if _ring_owner != os.getpid():
        with _ring_lock:
            if _ring_owner != os.getpid():
                try:
                    _ring = SlotRing() if hasattr(os, "memfd_create") else None
                except OSError:
                    _ring = None
                _ring_owner = os.getpid()
    return _ring


def take_slot(nbytes: int) -> tuple[NDArray[np.uint8], Callable[[torch.Tensor], torch.Tensor]] | None:
    """In a worker: a flat array to fill, and what turns a tensor over all of it into the one to send.

    None where no slot can be had.
    """
    ring = _own_ring()
    taken = ring.take(nbytes) if ring is not None else None
    if taken is None:
        return None
    slot, array = taken

    def seal(tensor: torch.Tensor) -> torch.Tensor:
        sealed = tensor.as_subclass(SlotTensor)
        sealed._slot = slot
        return sealed

    return array, seal


@cache
def _name_of(dtype: torch.dtype) -> str:
    """Of a dtype in torch; pickled faster than the dtype."""
    return str(dtype).removeprefix("torch.")


def reference_to(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """In a worker: arguments for `rebuild` in the parent, once for a batch; None where it has to go torch's way."""
    slot = getattr(tensor, "_slot", None)
    ring = _own_ring()
    if slot is None or ring is None:
        return None
    return ring.reference(slot, tensor)


def _reduce_slot_tensor(tensor: Any) -> tuple[Any, ...]:
    reference = reference_to(tensor)
    if reference is not None:
        return rebuild, reference
    return reduce_tensor(tensor.as_subclass(torch.Tensor))  # type: ignore[no-any-return]  # without annotations in torch; what it gives is what pickle asks for


ForkingPickler.register(SlotTensor, _reduce_slot_tensor)


# --- in the parent ---------------------------------------------------------------------------------------------------


class _ForkWatch:
    """Knows whether the children of one fork still run: they hold the other end of a pipe."""

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        self._ended = False

    def ended(self) -> bool:
        if not self._ended:
            poll = select.poll()
            poll.register(self._reader, select.POLLIN)
            if poll.poll(0):
                self._ended = True
                os.close(self._reader)
        return self._ended


@dataclass
class _Peer:
    """A worker's slots as the parent sees them."""

    pid: int
    fd_there: int
    fd: int
    control: mmap.mmap
    windows: dict[int, Window] = field(default_factory=dict)
    held: dict[int, list[_ForkWatch]] = field(default_factory=dict)
    watched: dict[int, weakref.ref[NDArray[np.uint8]]] = field(default_factory=dict)
    waiting: dict[int, list[_ForkWatch]] = field(default_factory=dict)

    def lend(self, index: int, offset: int, capacity: int, nbytes: int) -> NDArray[np.uint8]:
        """The first bytes of a slot, (nbytes,); the slot is the worker's again when nothing sees them any more."""
        if index not in self.windows:
            self.windows[index] = open_window(self.fd, offset, capacity)
        # numpy makes a view of a view refer to the first array of the chain. This is it: its death is what we wait for.
        first = self.windows[index].array(nbytes)
        self.held[index] = []
        self.watched[index] = weakref.ref(first, partial(_give_back, self, index, os.getpid()))
        return first

    def free(self, index: int) -> None:
        self.control[_STATES + index] = _FREE
        if self.control[_CLOSING]:
            self.windows[index].give_back_memory()

    def free_what_forks_held(self) -> None:
        for index, watches in list(self.waiting.items()):
            if all(watch.ended() for watch in watches):
                del self.waiting[index]
                self.free(index)

    def is_gone(self) -> bool:
        """Whether the worker has ended: its file is no longer where it was."""
        try:
            return not os.path.samestat(os.stat(f"/proc/{self.pid}/fd/{self.fd_there}"), os.fstat(self.fd))
        except OSError:
            return True

    def close(self) -> None:
        self.windows.clear()  # the maps close when the last array over them dies
        os.close(self.fd)


_peers: dict[tuple[int, bytes], _Peer] = {}
_peers_lock = threading.Lock()
_last_sweep = 0.0


def rebuild(
    pid: int,
    fd_there: int,
    token: bytes,
    index: int,
    offset: int,
    capacity: int,
    nbytes: int,
    dtype: str,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
) -> torch.Tensor:
    """The batch in the worker's slot, as it was there."""
    with _peers_lock:
        peer = _peers.get((pid, token))
        if peer is None:
            _sweep()
            peer = _peers[pid, token] = _attach(pid, fd_there, token)
        memory = peer.lend(index, offset, capacity, nbytes)
    if dtype == "uint8":  # strides in elements are strides in bytes, and numpy makes the view quicker than torch
        return torch.from_numpy(np.ndarray(shape, np.uint8, memory, 0, stride))
    return torch.from_numpy(memory).view(getattr(torch, dtype)).as_strided(shape, stride)


def _attach(pid: int, fd_there: int, token: bytes) -> _Peer:
    try:
        fd = os.open(f"/proc/{pid}/fd/{fd_there}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise RuntimeError(
            f"the shared memory of DataLoader worker {pid} cannot be opened ({error.strerror}): the worker has ended, or "
            "/proc is closed to this process"
        ) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode) or os.pread(fd, 16, 0) != token:
        os.close(fd)
        raise RuntimeError(f"the shared memory of DataLoader worker {pid} is gone: the worker has ended")
    return _Peer(pid, fd_there, fd, mmap.mmap(fd, _CONTROL))


def _give_back(peer: _Peer, index: int, owner_pid: int, _: object) -> None:
    """The array over a slot has died: nothing in this process sees the slot any more."""
    if os.getpid() != owner_pid:
        return  # a child that inherited the batch; it is the parent's to give back
    watches = [watch for watch in peer.held.pop(index) if not watch.ended()]
    if watches:
        peer.waiting[index] = watches
    else:
        peer.free(index)
    if peer.waiting:
        peer.free_what_forks_held()
    if time.monotonic() - _last_sweep > _SWEEP_SECONDS and _peers_lock.acquire(blocking=False):
        try:
            _sweep()
        finally:
            _peers_lock.release()


def _sweep() -> None:
    """Let go of the slots of workers that have ended and whose batches are all gone."""
    global _last_sweep
    _last_sweep = time.monotonic()
    for key, peer in list(_peers.items()):
        if not peer.held and peer.is_gone():
            del _peers[key]
            peer.close()


@atexit.register
def _forget_what_is_lent() -> None:
    """At the end of Python batches may outlive what `_give_back` needs; the system takes the slots back by itself."""
    for peer in list(_peers.values()):
        peer.watched.clear()


_watch_of_this_fork: _ForkWatch | None = None
_inherited_writers: list[int] = []


def _before_fork() -> None:
    global _watch_of_this_fork
    holding = [watches for peer in _peers.values() for watches in list(peer.held.values())]
    _watch_of_this_fork = _ForkWatch() if holding else None
    for watches in holding:
        if _watch_of_this_fork is not None:
            watches.append(_watch_of_this_fork)


def _after_fork_in_parent() -> None:
    if _watch_of_this_fork is not None:
        os.close(_watch_of_this_fork.writer)


def _after_fork_in_child() -> None:
    global _peers_lock, _ring_lock
    _peers_lock, _ring_lock = threading.Lock(), threading.Lock()
    _peers.clear()
    if _watch_of_this_fork is not None:
        _inherited_writers.append(_watch_of_this_fork.writer)  # stays open as long as this process lives


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
