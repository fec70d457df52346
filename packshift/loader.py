"""An in-process loader: threads instead of worker processes, for datasets whose reading is a copy, not a computation.

For a store in the page cache that is the fastest way there is: no processes to start, no messages, no shared memory, and
batches in buffers that are used again. The threads run torch's operations on one thread each: the gather of one batch
is then in nobody's way, while a pool of threads per loader thread would fight with that of the training loop for the
same cores (with two cores and one loader thread that took four fifths of the speed).
"""

from __future__ import annotations

import operator
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, Sampler, default_collate
from torch.utils.data._utils.pin_memory import pin_memory as pin

from packshift.arguments import at_least_one
from packshift.datasets import PictureDataset
from packshift.errors import UsageError
from packshift.gathering import Gathering, shown_to
from packshift.machine import usable_cpus
from packshift.transforms import apply

_MOMENT = 0.001
"""Seconds in which a thread that has nothing else to do begins to copy the rows of a batch."""


class Loader:
    """Iterates over a dataset in batches, like `torch.utils.data.DataLoader`, with background threads.

    For packshift's datasets a batch is `[images, labels]`: images (B, C, H, W) uint8, channels last, and labels (B,)
    int64. Other map-style datasets are read item by item in the threads and collated with `default_collate`.

    `threads` make batches, each up to `prefetch` of them ahead of the loop. `transform` is called in the threads with the
    images of a batch (`packshift.transforms`, or any callable) and replaces them. With `seed`, order and transforms
    depend on it and on the epoch alone; without, it is drawn from torch's default generator. Each iteration is the next
    epoch; `set_epoch` chooses one, as on resuming. `pin_memory` copies batches to page-locked memory where there is a GPU.

    A batch stays valid as long as anything refers to it; its memory is used again afterwards. An exception in a thread
    is raised in the loop; leaving the loop stops the threads. Raises UsageError for arguments that cannot be right.
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
        waiting: deque[_Task] = deque()
        pool = _start_threads(self.threads)
        lend_a_hand = self.threads < usable_cpus()
        try:
            for number, positions in enumerate(self._chunks(epoch)):
                waiting.append(_Task(partial(self._make, positions, epoch, number), pool))
                if len(waiting) > self.threads * self.prefetch:
                    yield _next_result(waiting, lend_a_hand)
            while waiting:
                yield _next_result(waiting, lend_a_hand)
        finally:
            pool.shutdown(cancel_futures=True)

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

    def _make(self, positions: NDArray[np.int64], epoch: int, number: int) -> Any:
        """One batch; runs in a thread."""
        batch = default_collate(_items(self.dataset, positions))
        if self.transform is not None:
            images, *rest = batch
            batch = [apply(self.transform, images, self._generator(epoch, number + 1)), *rest]
        return pin(batch) if self.pin_memory and torch.cuda.is_available() else batch

    def _generator(self, epoch: int, number: int = 0) -> torch.Generator:
        """The generator of an epoch's order (0) or of its batch's transforms (1, ...)."""
        state = np.random.SeedSequence([self.seed % 2**64, epoch % 2**64, number]).generate_state(1, np.uint64)
        return torch.Generator().manual_seed(int(state[0] >> np.uint64(1)))


class _Task:
    """A batch to be made, and where it will be found."""

    def __init__(self, make: Callable[[], Any], pool: ThreadPoolExecutor) -> None:
        self.make = make
        self._gatherings: list[Gathering] = []
        self._has_news = has_news = threading.Event()  # copies rows, or is done
        self.future = pool.submit(self._made_in_sight)
        self.future.add_done_callback(lambda _: has_news.set())  # not `self`: a cycle would keep the batch's memory

    def _made_in_sight(self) -> Any:
        with shown_to(self._show):
            return self.make()

    def _show(self, gathering: Gathering) -> None:
        self._gatherings.append(gathering)
        self._has_news.set()

    def take_part(self) -> bool:
        """Copy a part of the rows that a thread copies for it; False where it copies none."""
        self._has_news.wait(_MOMENT)
        gatherings = list(self._gatherings)
        for gathering in gatherings:
            gathering.take_part()
        return bool(gatherings)


def _next_result(waiting: deque[_Task], lend_a_hand: bool) -> Any:
    """The oldest batch. A loop that would have to wait for it takes part in making it, or where that cannot be done makes
    the next one that no thread has begun.

    So no core is idle while there is work, and a loader is not slower than reading in the loop itself. Where there are
    as many threads as CPUs, none would be idle anyway. While the oldest is done, nothing here gives the interpreter lock
    away: with the threads of the training loop on every core it took 3 ms to come back.
    """
    oldest = waiting.popleft()
    if lend_a_hand and not oldest.future.done() and not oldest.take_part():
        for task in (oldest, *waiting):
            if task.future.cancel():
                task.future = _made_here(task.make)
                break
    return oldest.future.result()


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


def _items(dataset: Any, positions: NDArray[np.int64]) -> Any:
    if isinstance(dataset, PictureDataset):
        return dataset.__getitems__(positions)
    if callable(getattr(dataset, "__getitems__", None)):
        return dataset.__getitems__(positions.tolist())
    return [dataset[position] for position in positions.tolist()]


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
        ready.wait()

    pool = ThreadPoolExecutor(count, thread_name_prefix="packshift-loader", initializer=prepare)
    for _ in range(count):
        pool.submit(int)  # starts one more thread, as the ones before wait for the others
    ready.wait()
    torch.set_num_threads(before)
    return pool


def _length(dataset: Any) -> int:
    return len(dataset)
