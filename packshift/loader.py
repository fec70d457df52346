"""An in-process loader: threads instead of worker processes, for datasets whose reading is a copy, not a computation.

For a store in the page cache that is the fastest way there is: no processes to start, no messages, no shared memory, and
batches in buffers that are used again. The threads of Python run torch's operations on one thread each: a pool of threads
per loader thread would fight with that of the training loop for the same cores (with two cores and one loader thread that
took four fifths of the speed).
"""

from __future__ import annotations

import operator
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, Sampler, Subset, default_collate
from torch.utils.data._utils.pin_memory import pin_memory as pin

from packshift.arguments import at_least_one
from packshift.batches import Batch
from packshift.buffers import shared_pool
from packshift.datasets import PictureDataset, StoreDataset
from packshift.errors import UsageError
from packshift.gathering import open_queue
from packshift.machine import usable_cpus
from packshift.transforms import apply

if TYPE_CHECKING:
    from packshift.compiled import Gathering, Queue


class Loader:
    """Iterates over a dataset in batches, like `torch.utils.data.DataLoader`, with background threads.

    For packshift's datasets a batch is `[images, labels]`: images (B, C, H, W) uint8, channels last, and labels (B,)
    int64. Other map-style datasets are read item by item in the threads and collated with `default_collate`.

    `threads` make batches, each up to `prefetch` of them ahead of the loop. `transform` is called in the threads with the
    images of a batch (`packshift.transforms`, or any callable) and replaces them. With `seed`, order and transforms
    depend on it and on the epoch alone; without, it is drawn from torch's default generator. Each iteration is the next
    epoch; `set_epoch` chooses one, as on resuming. `pin_memory` copies batches to page-locked memory where there is a GPU.

    Without a sampler or a transform, the first batches of an epoch are read during the last steps of the one before, and
    kept until then. A batch stays valid as long as anything refers to it; its memory is used again afterwards. An exception
    in a thread is raised in the loop; leaving the loop stops the threads. Raises UsageError for arguments that cannot be
    right.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int = 1,
        shuffle: bool = False,
        sampler: Sampler[int] | Iterable[int] | None = None,
        drop_last: bool = False,
        *,
        threads: int = 1,
        prefetch: int = 2,
        pin_memory: bool = False,
        seed: int | None = None,
        transform: object = None,
    ) -> None:
        if shuffle and sampler is not None:
            raise UsageError("shuffle and sampler exclude each other: the sampler decides about the order")
        if transform is not None and not callable(transform):
            raise UsageError(f"transform {transform!r}: expected something to call with the images of a batch")
        self.dataset = dataset
        self.batch_size = at_least_one("batch_size", batch_size)
        self.shuffle = shuffle
        self.sampler = sampler
        self.drop_last = drop_last
        self.threads = at_least_one("threads", threads)
        self.prefetch = at_least_one("prefetch", prefetch)
        self.pin_memory = pin_memory
        self.transform = transform
        self.seed = int(torch.empty((), dtype=torch.int64).random_()) if seed is None else operator.index(seed)
        self._epoch = 0
        self._ahead: list[_Begun] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ahead": []}

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        items = len(self.sampler) if isinstance(self.sampler, Sized) else _length(self.dataset)
        return items // self.batch_size if self.drop_last else -(-items // self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the one that the next iteration is; passed on to a sampler that has epochs itself."""
        self._epoch = operator.index(epoch)
        forward = getattr(self.sampler, "set_epoch", None)
        if forward is not None:
            forward(self._epoch)

    def __iter__(self) -> Iterator[Any]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        return self._batches(epoch)

    def _batches(self, epoch: int) -> Iterator[Any]:
        shared_pool().keep(self.threads * self.prefetch + 2)  # and one that is read, one in the loop's hand
        making = self._making(epoch)
        begun = 0
        try:
            for number, indices in enumerate(self._chunks(epoch)):
                making.begin(number, indices)
                begun += 1
                if begun > self.threads * self.prefetch:
                    begun -= 1
                    yield making.result()
            following = self._chunks(epoch + 1) if self.sampler is None else iter(())
            for _ in range(begun):
                if isinstance(making, _Copying):
                    making.begin_ahead(following)
                yield making.result()
        finally:
            self._ahead = making.close()

    def _making(self, epoch: int) -> _Copying | _Making:
        store, indices = _seen_through(self.dataset)
        if store is None or not store._copies_batches:
            return _Making(self, epoch, None, None)
        if self.transform is not None or self._pins:
            return _Making(self, epoch, store, indices)
        ahead, self._ahead = self._ahead, []
        return _Copying(store, indices, self.threads, ahead)

    def _chunks(self, epoch: int) -> Iterator[NDArray[np.int64]]:
        """The indices of each batch of an epoch."""
        if self.sampler is not None:
            yield from self._sampled_chunks(self.sampler)
            return
        count = _length(self.dataset)
        shuffled = torch.randperm(count, generator=self._generator(epoch)) if self.shuffle else torch.arange(count)
        order: NDArray[np.int64] = shuffled.numpy()
        for start in range(0, count, self.batch_size):
            batch = order[start : start + self.batch_size]
            if len(batch) == self.batch_size or not self.drop_last:
                yield batch

    def _sampled_chunks(self, sampler: Iterable[int]) -> Iterator[NDArray[np.int64]]:
        batch: list[int] = []
        for index in sampler:
            batch.append(operator.index(index))
            if len(batch) == self.batch_size:
                yield np.array(batch)
                batch = []
        if batch and not self.drop_last:
            yield np.array(batch)

    @property
    def _pins(self) -> bool:
        return self.pin_memory and torch.cuda.is_available()

    def _finished(self, read: Callable[[], list[Any]], epoch: int, number: int) -> Any:
        """One batch, from what the dataset gives."""
        batch = read()
        if self.transform is not None:
            batch = _with_images(batch, partial(apply, self.transform, generator=self._generator(epoch, number + 1)))
        return pin(batch) if self._pins else batch

    def _generator(self, epoch: int, number: int = 0) -> torch.Generator:
        """The generator of an epoch's order (0) or of its batch's transforms (1, ...)."""
        state = np.random.SeedSequence([self.seed % 2**64, epoch % 2**64, number]).generate_state(1, np.uint64)
        return torch.Generator().manual_seed(int(state[0] >> np.uint64(1)))


@dataclass(frozen=True)
class _Begun:
    """A batch in the making that is a copy of rows of `store`, and nothing else; made by process `owner`."""

    store: StoreDataset
    gathering: Gathering
    batch: Batch
    owner: int

    def is_for(self, store: StoreDataset, indices: NDArray[np.int64]) -> bool:
        """Whether it is what `store` gives for `indices`. Not in a child that was forked while a thread was copying."""
        here = self.owner == os.getpid()
        return here and self.store is store and self.gathering.positions == indices.tobytes()


class _Copying:
    """The batches of one epoch in the making, each a copy of rows and nothing else.

    The threads are those of a `Queue` in C, and all that Python has to do is done in the loop: a thread that needs the
    interpreter gets it 3 to 4 ms late where the training loop keeps every core busy. `ahead` are batches that were begun
    before, perhaps the first ones.
    """

    def __init__(
        self, store: StoreDataset, indices: NDArray[np.int64] | None, threads: int, ahead: Iterable[_Begun]
    ) -> None:
        self._store, self._indices, self._ahead = store, indices, deque(ahead)
        self._queue = open_queue(threads)
        self._begun: deque[_Begun | Exception] = deque()
        self._for_later: list[_Begun] = []

    def begin(self, number: int, indices: NDArray[np.int64]) -> None:
        """The next batch, the items at `indices`."""
        try:
            if self._indices is not None:
                indices = self._indices[indices]
            begun = self._ahead.popleft() if self._ahead else None
            if begun is None or not begun.is_for(self._store, indices):
                self._ahead.clear()
                begun = _Begun(self._store, *self._store._begin_batch(indices), os.getpid())
            self._queue.hand_over(begun.gathering)
            self._begun.append(begun)
        except Exception as error:  # noqa: BLE001  # raised in the loop when it is this batch's turn: those before it are right
            self._begun.append(error)

    def begin_ahead(self, following: Iterator[NDArray[np.int64]]) -> None:
        """The next batch of the next epoch, if there is one. Nobody asks for it here; there it would be waited for, 38 MB of
        256 pictures for 4 ms."""
        for indices in following:
            self.begin(0, indices)
            last = self._begun.pop()
            if not isinstance(last, Exception):  # which is raised where somebody asks
                self._for_later.append(last)
            break

    def result(self) -> list[Any]:
        """The oldest batch. A loop that would have to wait for it takes part in copying it."""
        oldest = self._begun.popleft()
        if isinstance(oldest, Exception):
            raise oldest
        self._queue.finish(oldest.gathering)
        return oldest.batch.parts

    def close(self) -> list[_Begun]:
        """What was begun ahead; it may not be there yet."""
        self._queue.close()
        return self._for_later


@dataclass
class _Task:
    """A batch in the making: `future` where a thread makes it, `gathering` where copying is a part of that."""

    make: Callable[[], Any]
    gathering: Gathering | None = None
    future: Future[Any] | None = None


class _Making:
    """The batches of one epoch in the making, by threads of Python; the loop takes part, also in copying a batch."""

    def __init__(
        self, loader: Loader, epoch: int, store: StoreDataset | None, indices: NDArray[np.int64] | None
    ) -> None:
        self._loader, self._epoch, self._owner = loader, epoch, os.getpid()
        self._store, self._indices = store, indices
        self._queue = None if store is None else open_queue(0)
        self._lend_a_hand = loader.threads < usable_cpus()
        self._pool = _start_threads(loader.threads)
        self._begun: deque[_Task] = deque()

    def begin(self, number: int, indices: NDArray[np.int64]) -> None:
        """Batch `number` of the epoch, the items at `indices`."""
        read: Callable[[], list[Any]] = partial(_collated, self._loader.dataset, indices)
        gathering = None
        if self._queue is not None and self._store is not None:
            try:
                gathering, batch = self._store._begin_batch(
                    indices if self._indices is None else self._indices[indices]
                )
            except Exception as error:  # noqa: BLE001  # raised in the loop when it is this batch's turn: those before it are right
                self._begun.append(_Task(partial(_raise, error)))
                return
            self._queue.hand_over(gathering)
            read = partial(_copied, self._queue, gathering, batch)
        make = partial(self._loader._finished, read, self._epoch, number)
        # In a child that was forked in the loop there are no threads; a pool would only keep what it is given.
        self._begun.append(_Task(make, gathering, None if self._is_inherited else self._pool.submit(make)))

    @property
    def _is_inherited(self) -> bool:
        """Whether this is a child that was forked in the loop: threads have stayed in its parent."""
        return os.getpid() != self._owner

    def result(self) -> Any:
        """The oldest batch. A loop that would have to wait for it takes part in copying it, or where that cannot be done
        makes the next one that no thread has begun.

        So no core is idle while there is work. Where there are as many threads as CPUs, none would be idle anyway. While
        the oldest is done, nothing here gives the interpreter lock to a thread.
        """
        oldest = self._begun.popleft()
        if oldest.future is None or (self._is_inherited and not oldest.future.done()):
            return oldest.make()
        if self._lend_a_hand and not oldest.future.done():
            if (
                self._queue is not None
                and oldest.gathering is not None
                and oldest.gathering.begun < len(oldest.gathering)
            ):
                self._queue.finish(oldest.gathering)
            else:
                _make_one_here((oldest, *self._begun))
        return oldest.future.result()

    def close(self) -> list[_Begun]:
        """End the threads."""
        if not self._is_inherited:
            self._pool.shutdown(cancel_futures=True)
        if self._queue is not None:
            self._queue.close()
        return []


def _copied(queue: Queue, gathering: Gathering, batch: Batch) -> list[Any]:
    queue.finish(gathering)
    return batch.parts


def _with_images(batch: Any, transform: Callable[[Any], Any]) -> Any:
    if isinstance(batch, torch.Tensor):
        return transform(batch)
    if isinstance(batch, Sequence) and not isinstance(batch, str) and len(batch):
        images, *rest = batch
        return [transform(images), *rest]
    raise TypeError(
        f"transform is called with the images of a batch, expected [images, ...] or images, and the dataset's batches are "
        f"{type(batch).__name__}: transform them in the loop"
    )


def _raise(error: Exception) -> None:
    raise error


def _make_one_here(tasks: Iterable[_Task]) -> None:
    for task in tasks:
        if task.future is not None and task.future.cancel():
            task.future = _made_here(task.make)
            break


def _made_here(make: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the other cores are busy with the loader's threads
    try:
        future.set_result(make())
    except Exception as error:  # noqa: BLE001  # raised where the result is asked for, in the order of the batches
        future.set_exception(error)
    finally:
        torch.set_num_threads(before)
    return future


def _seen_through(dataset: Any) -> tuple[StoreDataset | None, NDArray[np.int64] | None]:
    """The store behind a dataset, and for a `Subset` of it its items there; None where there is something else."""
    indices: NDArray[Any] | None = None
    while type(dataset) is Subset:
        its = np.asarray(dataset.indices)
        if its.ndim != 1 or its.dtype.kind not in "iu":
            return None, None
        indices = its if indices is None else its[indices]
        dataset = dataset.dataset
    return (dataset if isinstance(dataset, StoreDataset) else None), indices


def _collated(dataset: Any, indices: NDArray[np.int64]) -> list[Any]:
    if isinstance(dataset, PictureDataset) and type(dataset).__getitems__ is PictureDataset.__getitems__:
        items: Any = dataset.__getitems__(indices)
    elif callable(getattr(dataset, "__getitems__", None)):
        items = dataset.__getitems__(indices.tolist())
    else:
        items = [dataset[index] for index in indices.tolist()]
    collated: list[Any] = default_collate(items)
    return collated


def _start_threads(count: int) -> ThreadPoolExecutor:
    """Threads on which torch's operations run single-threaded; everybody else's setting stays as it is.

    `torch.set_num_threads` sets the number of the calling thread and of threads that come to use torch later. So it is
    called in each new thread, after that has used torch (`get_num_threads` counts), and then here again with the number
    from before.
    """
    before = torch.get_num_threads()
    ready = threading.Barrier(count + 1)

    def prepare() -> None:
        torch.get_num_threads()
        torch.set_num_threads(1)
        with suppress(threading.BrokenBarrierError):  # told by whoever broke it
            ready.wait()

    pool = ThreadPoolExecutor(count, thread_name_prefix="packshift-loader", initializer=prepare)
    try:
        for _ in range(count):
            pool.submit(int)  # starts one more thread, as the ones before wait for the others
    except RuntimeError as error:
        ready.abort()
        pool.shutdown()
        raise RuntimeError(f"Loader: the system does not give {count} threads ({error}): use fewer") from error
    ready.wait()
    torch.set_num_threads(before)
    return pool


def _length(dataset: Any) -> int:
    return len(dataset)
