"""Measures the constants of a memory forecast: two short runs on the user's own data.

Both runs feed a consumer that is slower than the loader, so that all queues are full, which is what a forecast has to
foretell, while all processes are looked at every 20 ms. With worker processes, the runs are one worker with small
batches and two workers with larger ones. What a worker needs by itself and for a batch, and what the main process does,
follow from the private memory of each: of n processes that share pages after a fork, each has the proportional share
p = private + shared / n and in all a = private + shared, so private = (n p - a) / (n - 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from packshift.errors import PackshiftError
from packshift.isolation import Trial, run_trial
from packshift.memory import Memory, limits

_MOST_ITEMS, _MOST_BYTES = 48, 100_000_000  # in a batch: large beside the noise of a process, small beside any memory
_BATCHES = 16
_STEP_MS = 40.0
_TIMEOUT = 180.0


class ProbeError(PackshiftError):
    """The probe's runs gave no figures."""


@dataclass(frozen=True)
class Line:
    """Bytes as a function of the bytes of a batch: `base + per_batch_byte * batch_bytes`."""

    base: float
    per_batch_byte: float

    def at(self, batch_bytes: float) -> float:
        return self.base + self.per_batch_byte * batch_bytes

    @classmethod
    def through(cls, first: tuple[float, float], second: tuple[float, float]) -> Line:
        """The line through two points (batch bytes, bytes), falling never: memory that shrank is noise."""
        if second[0] == first[0]:  # batches that hold no tensors
            return cls(max(first[1], second[1]), 0.0)
        slope = max(0.0, (second[1] - first[1]) / (second[0] - first[0]))
        return cls(max(first[1] - slope * first[0], 0.0), slope)


@dataclass(frozen=True)
class Probe:
    """What was measured, in bytes.

    `main` is the private memory of everything but the workers' own: the main process, helpers of the start method, and
    what workers share with them. `worker` is one worker's own, None without workers. `page_tables` is the kernel's for
    one process with nothing large mapped.
    """

    batch_bytes_per_item: float
    loader: str
    start_method: str | None
    main: Line
    worker: Line | None
    page_tables: float


@dataclass(frozen=True)
class _Point:
    """Highest private memory seen in one run, in bytes, and the size of its batches."""

    batch_bytes: float
    batch_size: int
    main: float
    worker: float
    page_tables: float


def measure_constants(trial: Trial, item_bytes: int) -> Probe:
    """Measure the constants for trials like this one: same data, loader, start method, with workers or without.

    `item_bytes` is about the size of an item in a batch. Raises ProbeError where one of the two runs fails.
    """
    workers = trial.loader == "dataloader" and trial.num_workers > 0
    large = max(2, min(_MOST_ITEMS, _MOST_BYTES // max(1, item_bytes)))
    first = _point(trial, min(trial.num_workers, 1), max(1, large // 6))
    second = _point(trial, min(trial.num_workers, 2) if workers else min(trial.num_workers, 1), large)
    lines = [
        Line.through((first.batch_bytes, low), (second.batch_bytes, high))
        for low, high in ((first.main, second.main), (first.worker, second.worker))
    ]
    return Probe(
        batch_bytes_per_item=second.batch_bytes / second.batch_size,
        loader=trial.loader,
        start_method=trial.start_method,
        main=lines[0],
        worker=lines[1] if workers else None,
        page_tables=max(first.page_tables, second.page_tables),
    )


def _point(trial: Trial, num_workers: int, batch_size: int) -> _Point:
    samples: list[dict[int, Memory]] = []
    trial = replace(
        trial,
        num_workers=num_workers,
        batch_size=batch_size,
        prefetch_factor=1,
        seconds=0.3,
        batches=_BATCHES,
        step_ms=_STEP_MS,
        step_matmul=0,
    )
    ended = run_trial(
        trial,
        timeout=_TIMEOUT,
        memory_limit=limits().available,
        sample_every=0.02,
        on_sample=lambda found: samples.append(dict(found)),
    )
    name = trial.path or "the dataset"
    if ended.result is None:
        raise ProbeError(f"{name} cannot be measured with batches of {batch_size}: {ended.error}")
    pids = ended.result["worker_pids"]
    splits = [_split(found, pids) for found in samples if all(pid in found for pid in pids)]
    if not splits:
        raise ProbeError(f"{name}: the run was over before memory could be looked at")
    batch_bytes = ended.result["mb_per_s"] / ended.result["batches_per_s"] * 1e6
    return _Point(
        batch_bytes,
        batch_size,
        main=max(main for main, _ in splits),
        worker=max(worker for _, worker in splits),
        page_tables=max(memory.page_tables for found in samples for memory in found.values()),
    )


def _split(found: Mapping[int, Memory], worker_pids: Sequence[int]) -> tuple[float, float]:
    """(private memory of everything but the workers' own, one worker's own) in one sample."""
    everything = sum(memory.anonymous + memory.swap for memory in found.values())
    count = len(worker_pids)
    if not count:
        return everything, 0.0
    own = 0.0
    for pid in worker_pids:
        memory = found[pid]
        own += max(0.0, ((count + 1) * memory.anonymous - memory.anonymous_rss) / count)
    return everything - own, own / count
