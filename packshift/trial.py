"""One measurement of loading, run in a process of its own: what it is told comes as JSON on stdin, the result as a line of
JSON on stdout. `packshift.isolation` starts it and watches it.

What is timed is a steady state: workers are started, queues are full, and a whole number of rounds of all workers is
counted, since batches arrive in bursts of `num_workers`. The consumer reads a byte of every page of every batch, so
that pixels really come through the page tables, and then works, if it is told to.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import asdict, astuple, dataclass, replace
from itertools import chain
from typing import Any, cast

import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from packshift.carried import unpack
from packshift.datasets import ImageFolderDataset, StoreDataset, open_dataset
from packshift.isolation import Trial
from packshift.loader import Loader
from packshift.memory import Memory, memory_of, memory_of_all, tree_of
from packshift.one_thread import OneThread, pass_over_pictures, pass_over_store, touch
from packshift.pagecache import drop, resident_share

_CHECKED_BATCHES = 2
_MATMUL_SIDE = 512

Step = Callable[[Any], float]
"""The consumer's work on a batch; returns the seconds that it took."""


@dataclass(frozen=True)
class Result:
    """What was measured; memory in MB of 1,000,000 bytes, times in seconds.

    `first_batch_s` runs from the start of iterating to the first batch, workers' start included. `busy` is the share of
    the time in which the consumer worked. Worker memory is the mean over the workers; `total_mb` what the kernel cannot
    take back from all processes together, `shm_mb` the part of it that is shared memory. `checksum` is that of the
    first two batches' pixels. `resident_before` is the share of the data that was in the page cache when a cold trial
    began.

    `growth_mb` is how much more the kernel cannot take back after the timed part than before it, where that was asked
    for, `growth_mb_per_1k` the same per 1,000 pictures; a cold trial, which times the start of the workers, has neither.
    Where the limit was asked for, `limit_images_per_s` is that of one thread, and `read_ms`, `decode_ms`, `convert_ms`,
    `transfer_ms` are those of `OneThread`; a cold trial has none, since all that is measured with a warm page cache.
    """

    images_per_s: float
    batches_per_s: float
    mb_per_s: float
    first_batch_s: float
    cpu_s_per_1k: float
    busy: float
    waiting_s: float
    images: int
    seconds: float
    main_rss_mb: float
    main_pss_mb: float
    main_uss_mb: float
    worker_rss_mb: float | None
    worker_pss_mb: float | None
    worker_uss_mb: float | None
    shm_mb: float
    total_mb: float
    checksum: str
    worker_pids: tuple[int, ...] = ()
    resident_before: float | None = None
    growth_mb: float | None = None
    growth_mb_per_1k: float | None = None
    limit_images_per_s: float | None = None
    read_ms: float | None = None
    decode_ms: float | None = None
    convert_ms: float | None = None
    transfer_ms: float | None = None


class EndlessSampler(Sampler[int]):
    """Every item once in random order, then again in another, without end: no epoch boundary falls into a measurement."""

    def __init__(self, count: int, seed: int) -> None:
        self._count = count
        self._seed = seed

    def __iter__(self) -> Iterator[int]:
        rng = np.random.default_rng(self._seed)
        while True:
            yield from rng.permutation(self._count).tolist()


def main(imported: int) -> None:
    os.close(imported)  # tells the parent that everything is imported
    told = json.load(sys.stdin)
    size = told.get("size")
    trial = Trial(**{**told, "size": None if size is None else (size[0], size[1])})
    result = measure(trial)
    print(json.dumps(asdict(result)), flush=True)
    os._exit(0)  # workers have nothing to finish, and joining them one by one takes seconds


def open_trial_dataset(trial: Trial) -> Dataset[Any]:
    """The dataset of a trial."""
    if os.path.isdir(trial.path):
        return ImageFolderDataset(trial.path, size=trial.size, fit=trial.fit)
    return open_dataset(trial.path)


def measure(trial: Trial) -> Result:
    """Run one trial in this process."""
    users = None if trial.carried is None else unpack(trial.carried)
    dataset = open_trial_dataset(trial) if users is None or users.dataset is None else users.dataset
    count = _length(dataset) if trial.images is None else min(trial.images, _length(dataset))
    resident = _make_cold(trial, dataset) if trial.cold else None
    started = time.perf_counter()
    batches = _batches(trial, dataset, EndlessSampler(count, trial.seed), users.collate_fn if users else None)
    step = _step(trial) if users is None or users.step is None else _timing(users.step)
    warm_up = _warm_up(trial, batches, step, started)
    before = _look(trial, batches, step, warm_up) if trial.growth and not trial.cold else None
    timed = _timed(trial, batches, step, warm_up, -(-count // trial.batch_size))
    grown = None if before is None else (_unreclaimable() - before.nbytes, before.images + timed.images)
    if trial.fill:
        _fill(trial, batches, timed)
    time.sleep(0.05)  # what is held then is held in training
    result = _result(timed, warm_up, resident)
    if grown is not None:
        result = replace(result, growth_mb=grown[0] / 1e6, growth_mb_per_1k=grown[0] / 1e3 / grown[1])
    if not trial.limit:
        return result
    del batches, timed  # ends workers and threads
    alone = _one_thread(trial, dataset, EndlessSampler(count, trial.seed))
    if trial.cold:
        return replace(result, limit_images_per_s=alone.limit_images_per_s)
    return replace(result, **asdict(alone))


def _one_thread(trial: Trial, dataset: Dataset[Any], order: EndlessSampler) -> OneThread:
    if isinstance(dataset, ImageFolderDataset):
        return pass_over_pictures(dataset, order, trial.seconds, trial.batch_size)
    assert isinstance(dataset, StoreDataset)  # the caller's case; not a user's data
    return pass_over_store(dataset, order, trial.seconds, trial.batch_size)


def _fill(trial: Trial, batches: Iterator[Any], timed: _Timed) -> None:
    """Bring about the most memory that a training can meet whose steps are now longer, now shorter than its loader's.

    The consumer stands still until all queues are full. Then it holds a batch of each worker in turn while that worker
    makes its next, so that each has as much shared memory as it ever needs. Then it takes all that is ready at once, and
    all workers make batches at the same time. At last it stands still again.
    """
    if trial.loader == "dataloader" and not trial.num_workers:
        return
    workers = max(1, trial.num_workers)
    ahead = workers * (trial.prefetch_factor or 2)
    alone = max(timed.cpu_s, timed.seconds - timed.worked) / timed.batches  # seconds that a worker needs for a batch
    together = min(alone, timed.seconds / timed.batches)
    _stand_still(ahead * together)
    if trial.loader == "dataloader":
        for _ in range(workers):
            before, timed.held = timed.held, next(batches)
            _stand_still(alone)
            del before  # a loop's variable has the old batch until it gets the new one, which may be long enough
        for _ in range(ahead):
            timed.held = next(batches)
        _stand_still(ahead * together)


def _stand_still(needed: float) -> None:
    """For half as long again as should be needed; a batch in new memory takes far longer than one in memory used before."""
    time.sleep(max(0.2, 1.5 * needed))


def _make_cold(trial: Trial, dataset: Dataset[Any]) -> float:
    """Drop the data from the page cache; the share of it that is still there."""
    files = [trial.path]
    if isinstance(dataset, ImageFolderDataset):
        files = [os.path.join(trial.path, name) for name in dataset.paths]
    for file in files:
        drop(file)
    return resident_share(files)


@dataclass
class _WarmUp:
    """What comes before the clock starts: workers and the batches that they make ahead. In a cold trial, nothing."""

    started: float
    first_batch_s: float = 0.0
    checksum: int = 0
    held: Any = None
    """The last batch, held until the next one is there, as in the timed part."""


def _warm_up(trial: Trial, batches: Iterator[Any], step: Step, started: float) -> _WarmUp:
    warm_up = _WarmUp(started)
    if trial.cold:
        return warm_up
    ahead = max(1, trial.num_workers) * ((trial.prefetch_factor or 2) + 1)  # these must not count as loaded in time
    for number in range(max(_CHECKED_BATCHES, ahead)):
        batch = warm_up.held = next(batches)
        if number == 0:
            warm_up.first_batch_s = time.perf_counter() - started
        if number < _CHECKED_BATCHES and trial.carried is None:
            warm_up.checksum = _checksum(batch[0], warm_up.checksum)
        _read(trial, batch)
        step(batch)
    return warm_up


@dataclass(frozen=True)
class _Before:
    """Bytes that the kernel could not take back before the timed part, and the pictures that came between."""

    nbytes: int
    images: int


def _look(trial: Trial, batches: Iterator[Any], step: Step, warm_up: _WarmUp) -> _Before:
    """Look at memory, then take what workers made in the meantime: that must not count as loaded in time."""
    started = time.perf_counter()
    nbytes = _unreclaimable()
    looked = time.perf_counter()
    images = 0
    while trial.num_workers and (not images or time.perf_counter() - looked < looked - started):
        for _ in range(trial.num_workers):
            warm_up.held = next(batches)
            images += _read(trial, warm_up.held)[0]
            step(warm_up.held)
    return _Before(nbytes, images)


def _unreclaimable() -> int:
    return memory_of_all(tree_of(os.getpid())).unreclaimable


def _checksum(images: torch.Tensor, value: int) -> int:
    """Of the pixels picture by picture, channels first: a copy of the whole batch would count as memory of loading."""
    for image in images:
        value = zlib.crc32(image.contiguous().numpy(), value)
    return value


@dataclass
class _Timed:
    images: int = 0
    batches: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    worked: float = 0.0
    cpu_s: float = 0.0
    held: Any = None
    """The last batch, held until memory was read, as a training loop holds it while it works."""


def _timed(trial: Trial, batches: Iterator[Any], step: Step, warm_up: _WarmUp, epoch: int) -> _Timed:
    """Whole rounds of all workers until `seconds` have passed and `batches` were taken; a cold trial one epoch."""
    timed = _Timed(held=warm_up.held)
    warm_up.held = None
    a_round = max(1, trial.num_workers)
    least_batches = epoch if trial.cold else trial.batches or 0
    seconds = 0.0 if trial.cold else trial.seconds
    pids = tree_of(os.getpid())
    cpu_before = _cpu_seconds(pids)
    started = warm_up.started if trial.cold else time.perf_counter()
    while True:
        for _ in range(a_round):
            timed.held = next(batches)
            if not timed.batches and trial.cold:
                warm_up.first_batch_s = time.perf_counter() - started
            images, nbytes = _read(trial, timed.held)
            timed.worked += step(timed.held)
            timed.images += images
            timed.nbytes += nbytes
            timed.batches += 1
        timed.seconds = time.perf_counter() - started
        if timed.seconds >= seconds and timed.batches >= least_batches:
            break
    timed.cpu_s = _cpu_seconds(pids) - cpu_before
    return timed


def _result(timed: _Timed, warm_up: _WarmUp, resident: float | None) -> Result:
    everyone = tree_of(os.getpid())
    pids = [process.pid for process in multiprocessing.active_children() if process.pid is not None]
    workers = [memory_of(pid) for pid in pids]
    main, total = memory_of(os.getpid()) or Memory(), memory_of_all(everyone)
    known = [memory for memory in workers if memory is not None]
    mean = _mean(known)
    return Result(
        images_per_s=timed.images / timed.seconds,
        batches_per_s=timed.batches / timed.seconds,
        mb_per_s=timed.nbytes / timed.seconds / 1e6,
        first_batch_s=warm_up.first_batch_s,
        cpu_s_per_1k=timed.cpu_s / timed.images * 1000,
        busy=timed.worked / timed.seconds,
        waiting_s=timed.seconds - timed.worked,
        images=timed.images,
        seconds=timed.seconds,
        main_rss_mb=main.rss / 1e6,
        main_pss_mb=main.pss / 1e6,
        main_uss_mb=main.uss / 1e6,
        worker_rss_mb=None if mean is None else mean.rss / 1e6,
        worker_pss_mb=None if mean is None else mean.pss / 1e6,
        worker_uss_mb=None if mean is None else mean.uss / 1e6,
        shm_mb=total.shared / 1e6,
        total_mb=total.unreclaimable / 1e6,
        checksum=f"{warm_up.checksum:08x}",
        worker_pids=tuple(pids),
        resident_before=resident,
    )


def _mean(memories: list[Memory]) -> Memory | None:
    if not memories:
        return None
    total = sum(memories, Memory())
    return Memory(*(value // len(memories) for value in astuple(total)))


def _length(dataset: Dataset[Any]) -> int:
    return len(cast("Sized", dataset))  # torch's Dataset promises no length; those that come here have one


def _batches(
    trial: Trial, dataset: Dataset[Any], sampler: EndlessSampler, collate_fn: Callable[[Any], Any] | None
) -> Iterator[Any]:
    if trial.loader == "threads":
        return iter(
            Loader(
                dataset,
                trial.batch_size,
                sampler=sampler,
                threads=max(1, trial.num_workers),
                prefetch=trial.prefetch_factor or 2,
                pin_memory=trial.pin_memory,
            )
        )
    workers: dict[str, Any] = {}
    if trial.num_workers:
        workers = {"prefetch_factor": trial.prefetch_factor or 2, "multiprocessing_context": trial.start_method}
    return iter(
        DataLoader(
            dataset,
            trial.batch_size,
            sampler=sampler,
            num_workers=trial.num_workers,
            collate_fn=collate_fn,
            pin_memory=trial.pin_memory,
            **workers,
        )
    )


def _read(trial: Trial, batch: Any) -> tuple[int, int]:
    """Read every page of a batch; (items, bytes) in it. The sampler never ends, so that all batches are full."""
    if trial.carried is None:
        touch(batch[0])
        return len(batch[0]), batch[0].numel() * batch[0].element_size()
    nbytes = 0
    for tensor in _tensors(batch):
        if _is_dense(tensor):
            touch(tensor)
            nbytes += tensor.numel() * tensor.element_size()
    return trial.batch_size, nbytes


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements lie next to each other in memory, in whatever order."""
    if tensor.layout != torch.strided or not tensor.numel():
        return False
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() == 1 + reach


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    """The tensors of a batch of the user, however it is nested in dicts, lists and tuples."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        yield from chain.from_iterable(map(_tensors, batch.values()))
    elif isinstance(batch, (list, tuple)):
        yield from chain.from_iterable(map(_tensors, batch))


def _timing(work: Callable[[Any], Any]) -> Step:
    def timed(batch: Any) -> float:
        started = time.perf_counter()
        work(batch)
        return time.perf_counter() - started

    return timed


def _step(trial: Trial) -> Step:
    """The work that a trial's numbers describe."""
    if trial.step_matmul:
        matrix = torch.rand(_MATMUL_SIDE, _MATMUL_SIDE)

        def multiply(batch: Any) -> float:
            started = time.perf_counter()
            for _ in range(trial.step_matmul):
                torch.mm(matrix, matrix)
            return time.perf_counter() - started

        return multiply

    def wait(batch: Any) -> float:
        if not trial.step_ms:
            return 0.0
        started = time.perf_counter()
        time.sleep(trial.step_ms / 1000)
        return time.perf_counter() - started

    return wait


def _cpu_seconds(pids: list[int]) -> float:
    """CPU time that processes have used so far, user and system."""
    total = 0.0
    for pid in pids:
        try:
            times = psutil.Process(pid).cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total
