"""num_workers, batch size and the rest, chosen by measurement under a limit of memory.

Every trial runs in a process of its own under a watchdog (`packshift.isolation`), which ends it at the limit, before the
kernel would end something else. What a trial measures is its peak with full queues: at the end of its time the consumer
holds a batch and stands still until the workers have nothing more to do, since that is what a training meets whose
steps are slower than its loader. The choice rests on measured peaks alone; a forecast only keeps trials from being run
that cannot fit even if it is 15 % too high, and so do the room in /dev/shm and the limit of open files.

What a short trial cannot see is growth over an epoch. The headroom is for small growth, `packshift watch` for the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing import get_all_start_methods
from typing import Any

from packshift.arguments import at_least_one, parse_bytes
from packshift.carried import Carried
from packshift.errors import UsageError
from packshift.forecast_results import Choice, Configuration, Tuning, TuningTrial
from packshift.isolation import LOADERS, Ended, Trial, run_trial
from packshift.machine import memory_groups, usable_cpus
from packshift.machine_facts import describe_machine
from packshift.memory import Limits, limits
from packshift.pagecache import warm
from packshift.text import human_bytes
from packshift.tuning_bounds import Bounds, Foretell
from packshift.tuning_code import code_of
from packshift.tuning_data import Data, data_of
from packshift.tuning_search import DATALOADER, THREADS, Search, Space, choose, describe, doublings, halvings, speed_of

_SAMPLE_EVERY = 0.05  # looking at memory costs milliseconds for each process; more often, and it would cost speed
_WARMING_S = 15.0  # the first trials would measure the disk, the later ones what the first have read

Progress = Callable[[int, str], None]
"""Called with (trials done, what runs next)."""


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
        data = data_of(dataset, Carried(dataset, step, collate_fn), size, fit, stack)
        space = Space(
            batch_sizes=halvings(min(target, data.count)),
            counts={name: _counts(name, max_workers) for name in _loaders(loaders, data)},
            budget=int(limit * (1 - headroom)),
            prefetch_factor=None if prefetch_factor is None else at_least_one("prefetch_factor", prefetch_factor),
            start_method=start_method,
            pin_memory=pin_memory,
            working=step is not None or step_ms > 0,
        )
        bounds = Bounds(space, now, foretell, data)
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


def _loaders(told: Sequence[str] | None, data: Data) -> tuple[str, ...]:
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


class _Trials:
    """Runs trials and keeps their rows, also when Ctrl-C comes between."""

    def __init__(
        self,
        common: Trial,
        limit: int,
        timeout: float,
        step_ms_per_item: float,
        working: bool,
        bounds: Bounds,
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


def _choice(rows: Sequence[TuningTrial], space: Space, target: int, limit: int, data: Data) -> Choice | None:
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


def _notes(target: int, data: Data, space: Space, rows: Sequence[TuningTrial], bounds: Bounds, limit: int) -> list[str]:
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
