"""num_workers, batch size and the rest, chosen by measurement under a limit of memory.

Every trial runs in a process of its own under a watchdog (`packshift.isolation`), which ends it at the limit, before the
kernel would end something else. What a trial measures is its peak with full queues: at the end of its time the consumer
holds a batch and stands still until the workers have nothing more to do, since that is what a training meets whose
steps are slower than its loader. The choice rests on measured peaks alone; a forecast only keeps trials from being run
that cannot fit even if it is 15 % too high, and so do the room in /dev/shm and the limit of open files.

What a short trial cannot see is growth over an epoch. The headroom is for small growth, `packshift watch` for the rest.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing import get_all_start_methods
from typing import Any

from packshift.arguments import at_least_one, parse_bytes
from packshift.carried import Carried, pack
from packshift.errors import UsageError
from packshift.forecast_results import Choice, Configuration, Tuning, TuningTrial
from packshift.isolation import LOADERS, Ended, Trial, run_trial
from packshift.machine import memory_groups, usable_cpus
from packshift.machine_facts import describe_machine
from packshift.memory import Limits, limits
from packshift.pagecache import warm
from packshift.preprocess import parse_size
from packshift.sources import scan
from packshift.stores._reader import Reader
from packshift.text import human_bytes
from packshift.tuning_code import Opening, code_of, opening_of
from packshift.tuning_search import DATALOADER, THREADS, Search, Space, choose, doublings, halvings, speed_of

FORECAST_ERROR = 0.15
"""How far a forecast may be off, as a share of what is measured."""

_SAMPLE_EVERY = 0.05  # looking at memory costs milliseconds for each process; more often, and it would cost speed
_WARMING_S = 15.0  # the first trials would measure the disk, the later ones what the first have read
_FILES_PER_WORKER = 16
_FILES_ELSEWHERE = 128

Foretell = Callable[[Configuration], int]
"""The bytes that a configuration is expected to take."""

Progress = Callable[[int, str], None]
"""Called with (trials done, what runs next)."""


@dataclass(frozen=True)
class _Data:
    """What trials read: `trial` is all that they have in common, `opening` the code that opens the dataset, None for
    one of the user.

    `item_bytes` is the size of an item in a batch where it is known beforehand. `in_dev_shm`: workers send batches
    through /dev/shm; packshift's own datasets have shared memory without a name where the system has that.
    """

    trial: Trial
    count: int
    item_bytes: int | None
    threads: bool
    in_dev_shm: bool
    opening: Opening | None
    files: Iterable[str] = ()
    collate_fn: bool = False


def tune(
    dataset: Any,
    step: Callable[[Any], Any] | None = None,
    *,
    memory_limit: int | str | None = None,
    target_batch_size: int = 64,
    step_ms: float = 0.0,
    max_workers: int | None = None,
    loaders: Sequence[str] | None = None,
    prefetch_factor: int | None = None,
    start_method: str | None = None,
    pin_memory: bool = False,
    collate_fn: Callable[[Any], Any] | None = None,
    headroom: float = 0.1,
    size: int | str | tuple[int, int] | None = 256,
    fit: str = "crop",
    seconds: float = 1.5,
    timeout: float = 120.0,
    foretell: Foretell | None = None,
    progress: Progress | None = None,
) -> Tuning:
    """Find the cheapest way to load `dataset` that is as fast as any and stays below `memory_limit`.

    `dataset` is a store, a folder of pictures (read with `size` and `fit`), or any dataset with a length. `step` is
    called with each batch as the DataLoader gives it, in the trial's process: what it takes of memory counts, and its
    time is that of the consumer (wait for the GPU in it). Both are pickled into that process, and so is `collate_fn`.
    `step_ms` instead of `step` is the time that a step on a whole target batch takes without the CPU; on a smaller batch
    it takes as much less.

    `memory_limit` is in bytes or text ("8GB"), at most and by default what control groups and the machine leave
    available now. `headroom` is the share of it that the choice leaves free. Batches of `target_batch_size` are tried,
    and smaller ones where those do not fit; `max_workers` is the most worker processes, by default the CPUs that may be
    used; `loaders` are "dataloader" (torch's) and "threads" (`packshift.Loader`, for stores); `prefetch_factor` None
    tries 1 to 4 where it matters. A trial measures for `seconds` and is given up after `timeout` seconds. `foretell`
    gives the bytes that a configuration will take, to within 15 %.

    Raises UsageError for what cannot be right or cannot be pickled, and PackshiftError where a store or folder cannot be
    read. A trial that fails is a row with its reason. KeyboardInterrupt ends the trials: what is finished is returned.
    """
    started = time.perf_counter()
    if step is not None and step_ms:
        raise UsageError("step and step_ms exclude each other: choose one kind of work")
    if not 0 <= step_ms < float("inf"):
        raise UsageError(f"step_ms {step_ms}: expected a number from 0")
    if not 0 <= headroom < 1:
        raise UsageError(f"headroom {headroom}: expected a share from 0 to below 1")
    if not 0 < seconds < float("inf"):
        raise UsageError(f"seconds {seconds}: expected a number above 0")
    if start_method is not None and start_method not in get_all_start_methods():
        raise UsageError(f"unknown start method {start_method!r}: expected one of {', '.join(get_all_start_methods())}")
    target = at_least_one("target_batch_size", target_batch_size)
    now = limits()
    limit, limit_source = _limit(memory_limit, now)
    with ExitStack() as stack:
        data = _data(dataset, Carried(dataset, step, collate_fn), size, fit, stack)
        space = Space(
            batch_sizes=halvings(min(target, data.count)),
            counts={name: _counts(name, max_workers) for name in _loaders(loaders, data)},
            budget=int(limit * (1 - headroom)),
            prefetch_factor=None if prefetch_factor is None else at_least_one("prefetch_factor", prefetch_factor),
            start_method=start_method,
            pin_memory=pin_memory,
            working=step is not None or step_ms > 0,
        )
        bounds = _Bounds(space, now, foretell, data)
        trials = _Trials(
            replace(data.trial, seconds=seconds), limit, timeout, step_ms / target, space.working, bounds, progress
        )
        notes = []
        try:
            if not warm(data.files, now.available // 2, _WARMING_S):
                notes.append("the data is not all in the page cache: trials also measure the disk, the first ones most")
            Search(space, trials.measure, bounds.admits).run()
        except KeyboardInterrupt:
            notes.append("interrupted: the choice is among the trials that were finished")
    notes += _notes(target, data, space, trials.rows, bounds, limit)
    return Tuning(
        memory_limit=limit,
        limit_source=limit_source,
        headroom=headroom,
        target_batch_size=target,
        trials=tuple(trials.rows),
        choice=_choice(trials.rows, space, target, limit, data),
        notes=tuple(notes),
        machine=describe_machine(),
        seconds=time.perf_counter() - started,
    )


def _limit(told: int | str | None, now: Limits) -> tuple[int, str]:
    """(the limit in bytes, where it comes from): what is told, if so much is available."""
    wanted = None if told is None else parse_bytes("memory_limit", told)
    if wanted is not None and wanted <= now.available:
        return wanted, "memory_limit"
    left = [(group.limit - group.unreclaimable, group.path) for group in memory_groups() if group.limit is not None]
    tightest = min(left, default=None)
    if tightest is not None and tightest[0] <= now.available:
        source = f"what the control group {tightest[1]} leaves available"
    else:
        source = "what the machine has available"
    return now.available, source if wanted is None else f"{source}, less than the {human_bytes(wanted)} asked for"


def _counts(loader: str, max_workers: int | None) -> tuple[int, ...]:
    if max_workers is not None and (
        isinstance(max_workers, bool) or not isinstance(max_workers, int) or max_workers < 0
    ):
        raise UsageError(f"max_workers {max_workers!r}: expected a whole number from 0")
    if max_workers is None or loader == THREADS:
        return doublings(usable_cpus())
    return doublings(max_workers, usable_cpus())


def _loaders(told: Sequence[str] | None, data: _Data) -> tuple[str, ...]:
    if told is None:
        return LOADERS if data.threads else (DATALOADER,)
    for name in told:
        if name not in LOADERS:
            raise UsageError(f"unknown loader {name!r}: expected some of {', '.join(LOADERS)}")
    if not told:
        raise UsageError(f"no loaders: expected some of {', '.join(LOADERS)}")
    if THREADS in told and data.collate_fn:
        raise UsageError("loaders: packshift.Loader takes no collate_fn; leave out threads, or the collate_fn")
    return tuple(dict.fromkeys(told))


def _data(
    dataset: Any, carried: Carried, size: int | str | tuple[int, int] | None, fit: str, stack: ExitStack
) -> _Data:
    data = _of_path(dataset, size, fit) if isinstance(dataset, (str, os.PathLike)) else _of_user(dataset)
    if not data.count:
        raise UsageError(f"{dataset}: there is nothing in it to be loaded")
    collates = carried.collate_fn is not None
    if data.opening is None or carried.step is not None or collates:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="packshift-tune-"))
        path = os.path.join(folder, "carried.pickle")
        pack(replace(carried, dataset=None) if data.opening else carried, path)
        data = replace(data, trial=replace(data.trial, carried=path))
    if collates:
        data = replace(data, item_bytes=None, threads=False, in_dev_shm=True, collate_fn=True)
    return data


def _of_path(path: str | os.PathLike[str], size: int | str | tuple[int, int] | None, fit: str) -> _Data:
    """A store, or a folder of pictures; torch is left to the trials."""
    common = Trial(path=os.path.abspath(path), fit=fit, fill=True)
    sends_through_memfd = hasattr(os, "memfd_create")
    if os.path.isdir(path):
        parsed = parse_size(size)
        if parsed is None:
            raise UsageError("size none: pictures of different sizes make no batches; choose a size")
        listing = scan(path)
        return _Data(
            trial=replace(common, size=parsed),
            count=len(listing),
            item_bytes=parsed[0] * parsed[1] * 3,
            threads=False,
            in_dev_shm=not sends_through_memfd,
            opening=opening_of(os.fspath(path), parsed, fit),
            files=(os.path.join(listing.root, name) for name in listing.names),
        )
    reader = Reader(path)
    shape = reader.info.shape
    if shape is None:
        raise UsageError(f"{os.fspath(path)}: its pictures are of different sizes, which make no batches")
    return _Data(
        trial=common,
        count=len(reader),
        item_bytes=shape[0] * shape[1] * 3,
        threads=True,
        in_dev_shm=not sends_through_memfd,
        opening=opening_of(os.fspath(path), None, fit),
        files=[str(reader.path)],
    )


def _of_user(dataset: Any) -> _Data:
    if not callable(getattr(dataset, "__len__", None)) or not callable(getattr(dataset, "__getitem__", None)):
        raise UsageError(
            f"{type(dataset).__name__}: expected a store, a folder, or a dataset with __len__ and __getitem__"
        )
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(dataset).__mro__}
    return _Data(
        trial=Trial(path="", fill=True),
        count=len(dataset),
        item_bytes=None,
        threads="packshift.datasets.StoreDataset" in kinds,  # by name, since importing it would load torch
        in_dev_shm=True,
        opening=None,
    )


class _Bounds:
    """What cannot fit is not tried. `refused` keeps one reason of each kind, for the notes."""

    def __init__(self, space: Space, now: Limits, foretell: Foretell | None, data: _Data) -> None:
        self._space = space
        self._now = now
        self._foretell = foretell
        self._in_dev_shm = data.in_dev_shm
        self.item_bytes = data.item_bytes
        self.refused: dict[str, str] = {}

    def foretold(self, configuration: Configuration) -> int | None:
        return None if self._foretell is None else self._foretell(configuration)

    def admits(self, configuration: Configuration) -> bool:
        """Whether there is room for a configuration, as far as that can be known without a trial."""
        workers = configuration.num_workers if configuration.loader == DATALOADER else 0
        ahead = configuration.num_workers * configuration.prefetch_factor
        batch = configuration.batch_size * (self.item_bytes or 0)
        memory = max(int((self.foretold(configuration) or 0) / (1 + FORECAST_ERROR)), (ahead + 1) * batch)
        if memory > self._space.budget:
            return self._refuse("memory", configuration, f"needs {human_bytes(memory)} at least")
        free = self._now.shm_free
        if self._in_dev_shm and workers and free is not None and ahead * batch > free:
            needs = f"needs {human_bytes(ahead * batch)} of /dev/shm, of which {human_bytes(free)} are free"
            return self._refuse("shm", configuration, f"{needs} (docker run --shm-size)")
        files = workers * (_FILES_PER_WORKER + 2 * configuration.prefetch_factor) + _FILES_ELSEWHERE
        most = self._now.open_files
        if workers and most is not None and files > most:
            return self._refuse(
                "files", configuration, f"needs about {files:,} open files, {most:,} are allowed (ulimit -n)"
            )
        return True

    def _refuse(self, kind: str, configuration: Configuration, reason: str) -> bool:
        self.refused.setdefault(kind, f"not tried: {describe(configuration)} {reason}")
        return False


class _Trials:
    """Runs trials and keeps their rows, also when Ctrl-C comes between."""

    def __init__(
        self,
        common: Trial,
        limit: int,
        timeout: float,
        step_ms_per_item: float,
        working: bool,
        bounds: _Bounds,
        progress: Progress | None,
    ) -> None:
        self._common = common
        self._limit = limit
        self._timeout = timeout
        self._step_ms_per_item = step_ms_per_item
        self._working = working
        self._bounds = bounds
        self._progress = progress
        self.rows: list[TuningTrial] = []
        self.made = 0

    def measure(self, configuration: Configuration) -> TuningTrial:
        if self._progress is not None:
            self._progress(self.made, describe(configuration))
        self.made += 1
        trial = replace(
            self._common,
            loader=configuration.loader,
            batch_size=configuration.batch_size,
            num_workers=configuration.num_workers,
            prefetch_factor=configuration.prefetch_factor,
            start_method=configuration.start_method,
            pin_memory=configuration.pin_memory,
            step_ms=self._step_ms_per_item * configuration.batch_size,
        )
        ended = run_trial(trial, timeout=self._timeout, memory_limit=self._limit, sample_every=_SAMPLE_EVERY)
        if self._bounds.item_bytes is None and ended.result is not None:
            self._bounds.item_bytes = int(ended.result["mb_per_s"] * 1e6 / ended.result["images_per_s"])
        row = self._row(configuration, ended)
        for position, before in enumerate(self.rows):
            if before.configuration == configuration:
                self.rows[position] = _merged(before, row)
                return self.rows[position]
        self.rows.append(row)
        return row

    def _row(self, configuration: Configuration, ended: Ended) -> TuningTrial:
        result = ended.result or {}
        peaks = [peak for peak in (ended.peak_bytes, int(result.get("total_mb", 0) * 1e6)) if peak]
        return TuningTrial(
            configuration=configuration,
            error=ended.error,
            over_limit=ended.over_limit,
            forecast_bytes=self._bounds.foretold(configuration),
            peak_bytes=max(peaks, default=None),
            busy=result.get("busy") if self._working else None,
            iterations_per_s=result.get("batches_per_s"),
            images_per_s=result.get("images_per_s"),
        )


def _merged(before: TuningTrial, again: TuningTrial) -> TuningTrial:
    """One row of two trials: an error if there is one, else the higher speed, and the higher peak in any case."""
    failed = [row for row in (again, before) if row.error is not None]
    kept = failed[0] if failed else max(before, again, key=speed_of)
    return replace(kept, peak_bytes=max(before.peak_bytes or 0, again.peak_bytes or 0) or None)


def describe(configuration: Configuration) -> str:
    """A configuration in a few words: "batch 64, 2 workers, prefetch 2"."""
    if configuration.loader == DATALOADER and not configuration.num_workers:
        return f"batch {configuration.batch_size}, no workers"
    noun = "thread" if configuration.loader == THREADS else "worker"
    ending = "" if configuration.num_workers == 1 else "s"
    return (
        f"batch {configuration.batch_size}, {configuration.num_workers} {noun}{ending}, "
        f"prefetch {configuration.prefetch_factor}"
    )


def _choice(rows: Sequence[TuningTrial], space: Space, target: int, limit: int, data: _Data) -> Choice | None:
    chosen = choose(rows, space)
    if chosen is None or chosen.peak_bytes is None or chosen.images_per_s is None:
        return None
    steps = -(-target // chosen.configuration.batch_size)
    return Choice(
        configuration=chosen.configuration,
        accumulation_steps=steps,
        peak_bytes=chosen.peak_bytes,
        images_per_s=chosen.images_per_s,
        busy=chosen.busy,
        reason=_reason(chosen, rows, space, steps, limit),
        code=code_of(chosen.configuration, steps, data.opening, data.collate_fn),
    )


def _reason(chosen: TuningTrial, rows: Sequence[TuningTrial], space: Space, steps: int, limit: int) -> str:
    fastest = max((row for row in rows if space.fits(row)), key=speed_of)
    parts = []
    if fastest is chosen:
        parts.append("the fastest that fits")
    else:
        share = speed_of(chosen) / speed_of(fastest)
        parts.append(f"{share:.0%} of the fastest that fits ({describe(fastest.configuration)}), and cheaper")
    if chosen.busy is not None and chosen.busy >= 0.95:
        parts.append(f"the consumer is busy {chosen.busy:.0%} of the time: more workers would not help")
    if steps > 1:
        parts.append(f"{steps} batches make one step of the optimizer")
    parts.append(f"peak {human_bytes(chosen.peak_bytes or 0)} of {human_bytes(limit)}")
    return "; ".join(parts)


def _notes(
    target: int, data: _Data, space: Space, rows: Sequence[TuningTrial], bounds: _Bounds, limit: int
) -> list[str]:
    notes = list(bounds.refused.values())
    if target > data.count:
        notes.append(f"the dataset has {data.count:,} items only: batches of {target:,} cannot be tried")
    if choose(rows, space) is None:
        notes.append(_why_nothing_fits(rows, space, limit))
    elif not space.working:
        notes.append(
            "without a step the consumer takes batches as fast as they come; told how long a step takes (step_ms), tune "
            "chooses the cheapest that keeps it busy"
        )
    return notes


def _why_nothing_fits(rows: Sequence[TuningTrial], space: Space, limit: int) -> str:
    if not rows:
        return "nothing was tried"
    last = min(rows, key=lambda row: (row.configuration.num_workers, row.configuration.batch_size))
    name = describe(last.configuration)
    if last.error is not None and not last.over_limit:
        return f"nothing could be measured: {name}: {last.error}"
    took = f"{'more than ' if last.over_limit else ''}{human_bytes(last.peak_bytes or 0)}"
    room = f"{human_bytes(space.budget)} (of {human_bytes(limit)}, the rest is headroom)"
    return f"nothing fits into {room}: the smallest configuration, {name}, took {took}"
