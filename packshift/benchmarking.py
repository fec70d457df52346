"""Which format, and how many workers: measured on the user's pictures and machine.

Every run is in a process of its own (`packshift.isolation`), so nothing of one is left for the next. Cases take turns,
round by round, in an order that shifts by one each round, so that a machine that gets slower or faster touches all of
them alike; what is reported is the median over the rounds, and the spread.

Starting Python and importing torch takes longer than measuring, so two processes do that side by side where there are two
CPUs, and then measure one after the other. Which pages are shared is seen rightly only by the second.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any

from packshift.arguments import at_least_one
from packshift.bench_results import Bench, Row
from packshift.bench_sources import PICTURES, Place, Prepared, prepare
from packshift.bench_verdict import notes_on, notes_on_growth, verdict_of
from packshift.errors import UsageError
from packshift.isolation import LOADERS, Ended, Trial, trial_process
from packshift.machine import usable_cpus
from packshift.machine_facts import describe_machine
from packshift.settings import parse_size
from packshift.stores import format_names

_START_TIMEOUT = 120.0  # seconds beyond what is measured: imports, starting workers, a slow disk
_SLOWEST = 5.0  # pictures a second below which a run counts as hanging
_MEASURED = (
    "images_per_s",
    "batches_per_s",
    "mb_per_s",
    "first_batch_s",
    "cpu_s_per_1k",
    "busy",
    "worker_rss_mb",
    "worker_pss_mb",
    "worker_uss_mb",
    "main_rss_mb",
    "main_pss_mb",
    "main_uss_mb",
    "shm_mb",
    "total_mb",
    "resident_before",
    "growth_mb_per_1k",
    "read_ms",
    "decode_ms",
    "convert_ms",
    "transfer_ms",
)

_SHARING = ("worker_rss_mb", "worker_pss_mb", "worker_uss_mb", "main_rss_mb", "main_pss_mb", "main_uss_mb")
"""What depends on who else has the same libraries open."""

Progress = Callable[[int, int, str], None]
"""Called with (runs done, runs in all, what runs next)."""


@dataclass(frozen=True)
class Settings:
    """What to compare, see `bench`."""

    formats: tuple[str, ...]
    loaders: tuple[str, ...]
    num_workers: tuple[int, ...]
    batch_size: int
    prefetch_factor: int | None
    start_method: str | None
    repeats: int
    seconds: float
    epochs: int | None
    images: int
    size: tuple[int, int] | None
    fit: str
    step_ms: float
    step_matmul: int
    cold: bool


@dataclass
class _Case:
    row: Row
    trial: Trial
    results: list[Mapping[str, Any]] = field(default_factory=list)
    error: str | None = None

    @property
    def name(self) -> str:
        return f"{self.row.format} {self.row.loader} {self.row.num_workers}"

    @property
    def memory_is_known(self) -> bool:
        return any(result["main_uss_mb"] is not None for result in self.results)

    def take(self, ended: Ended, *, alone: bool) -> None:
        if ended.result is None:
            self.error = ended.error
        else:
            self.results.append(ended.result if alone else {**ended.result, **dict.fromkeys(_SHARING)})


def default_num_workers(cpus: int) -> tuple[int, ...]:
    """0, 1, 2, 4 and so on up to the CPUs that may be used."""
    counts = [0, 1]
    while counts[-1] * 2 <= cpus:
        counts.append(counts[-1] * 2)
    return tuple(counts)


def bench(
    *sources: str | os.PathLike[str],
    formats: Sequence[str] | None = None,
    loader: str = "dataloader",
    num_workers: Sequence[int] | None = None,
    batch_size: int = 64,
    prefetch_factor: int | None = None,
    start_method: str | None = None,
    repeats: int = 3,
    seconds: float = 2.0,
    epochs: int | None = None,
    images: int = 2000,
    size: int | str | tuple[int, int] | None = 256,
    fit: str = "crop",
    step_ms: float = 0.0,
    step_matmul: int = 0,
    cold: bool = False,
    progress: Progress | None = None,
) -> Bench:
    """Measure how fast `sources` are loaded and what memory that takes, and say which way to take.

    `sources` are one folder of pictures, of which up to `images` are converted into each of `formats` ("jpeg", the
    pictures themselves, "lmdb", "hdf5"; default: all) for this, or stores, or both. `loader` is "dataloader" (torch's),
    "threads" (`packshift.Loader`) or "both", `num_workers` the numbers of worker processes, or of threads. Each case is
    measured `repeats` times, altogether for at least `seconds` seconds, and each time for at least `epochs` passes over the
    pictures, so that growth from one to the next can be seen. The consumer works `step_ms` milliseconds on a
    batch, or multiplies `step_matmul` matrices. `cold` times an epoch with nothing in the page cache instead.

    Raises UsageError, and SourceError, StoreError or TargetError where a source cannot be used; a case that cannot be
    measured is a row that says why. KeyboardInterrupt ends the measuring: what is finished is returned.
    """
    settings = _checked(
        formats,
        loader,
        num_workers,
        batch_size,
        prefetch_factor,
        start_method,
        repeats,
        seconds,
        epochs,
        images,
        size,
        fit,
        step_ms,
        step_matmul,
        cold,
    )
    started = time.perf_counter()
    with ExitStack() as stack:
        prepared = prepare(sources, settings.formats, settings.images, settings.size, settings.fit, stack)
        cases = _cases(prepared, settings)
        interrupted = False
        try:
            _run_all(cases, settings, progress)
        except KeyboardInterrupt:
            interrupted = True
    rows = tuple(_row(case, cases) for case in cases if case.results or case.error)
    notes = [
        *prepared.notes,
        *notes_on(rows, cold=settings.cold, step=bool(settings.step_ms or settings.step_matmul)),
        *notes_on_growth(rows, prepared.source_images),
    ]
    if interrupted:
        notes.insert(0, "interrupted: medians are of the runs that were finished")
    return Bench(
        machine=describe_machine(),
        settings=asdict(settings),
        images=prepared.images,
        source_images=prepared.source_images,
        rows=rows,
        verdict=verdict_of(rows, prepared),
        notes=tuple(notes),
        seconds=time.perf_counter() - started,
    )


def _checked(
    formats: Sequence[str] | None,
    loader: str,
    num_workers: Sequence[int] | None,
    batch_size: int,
    prefetch_factor: int | None,
    start_method: str | None,
    repeats: int,
    seconds: float,
    epochs: int | None,
    images: int,
    size: int | str | tuple[int, int] | None,
    fit: str,
    step_ms: float,
    step_matmul: int,
    cold: bool,
) -> Settings:
    known = (PICTURES, *format_names())
    chosen = known if formats is None else tuple(dict.fromkeys(formats))
    for name in chosen:
        if name not in known:
            raise UsageError(f"unknown format {name!r}: expected some of {', '.join(known)}")
    if not chosen:
        raise UsageError(f"no formats: expected some of {', '.join(known)}")
    if loader not in (*LOADERS, "both"):
        raise UsageError(f"unknown loader {loader!r}: expected one of {', '.join((*LOADERS, 'both'))}")
    if start_method is not None:
        from multiprocessing import get_all_start_methods

        if start_method not in get_all_start_methods():
            raise UsageError(
                f"unknown start method {start_method!r}: expected one of {', '.join(get_all_start_methods())}"
            )
    counts = default_num_workers(usable_cpus()) if num_workers is None else tuple(dict.fromkeys(num_workers))
    if not counts or any(isinstance(count, bool) or not isinstance(count, int) or count < 0 for count in counts):
        raise UsageError(f"num_workers {num_workers!r}: expected numbers from 0, such as 0,1,2,4")
    parsed = parse_size(size)
    if parsed is None:
        raise UsageError("size none: pictures of different sizes make no batches; choose a size")
    if not 0 < seconds < float("inf"):
        raise UsageError(f"seconds {seconds}: expected a number above 0")
    if not 0 <= step_ms < float("inf"):
        raise UsageError(f"step_ms {step_ms}: expected a number from 0")
    if epochs is not None and cold:
        raise UsageError("epochs and cold exclude each other: only the first epoch is cold")
    if step_ms and step_matmul:
        raise UsageError("step_ms and step_matmul exclude each other: choose one kind of work")
    return Settings(
        formats=chosen,
        loaders=LOADERS if loader == "both" else (loader,),
        num_workers=counts,
        batch_size=at_least_one("batch_size", batch_size),
        prefetch_factor=None if prefetch_factor is None else at_least_one("prefetch_factor", prefetch_factor),
        start_method=start_method,
        repeats=at_least_one("repeats", repeats),
        seconds=float(seconds),
        epochs=None if epochs is None else at_least_one("epochs", epochs),
        images=at_least_one("images", images),
        size=parsed,
        fit=fit,
        step_ms=float(step_ms),
        step_matmul=step_matmul,
        cold=cold,
    )


def _cases(prepared: Prepared, settings: Settings) -> list[_Case]:
    """All cases; the first of each format measures the machine's limit, too."""
    cases = []
    for name in (PICTURES, *format_names()):
        if name not in prepared.places:
            continue
        place = prepared.places[name]
        every = [(loader, count) for loader in settings.loaders for count in settings.num_workers]
        ways = [way for way in every if way != ("threads", 0)]
        for number, (loader, count) in enumerate(ways):
            cases.append(_case(name, loader, count, number == 0, place, prepared.images, settings))
    return cases


def _case(name: str, loader: str, count: int, limit: bool, place: Place, images: int, settings: Settings) -> _Case:
    batch_size = min(settings.batch_size, images)
    trial = Trial(
        path=place.path,
        loader=loader,
        batch_size=batch_size,
        num_workers=count,
        prefetch_factor=settings.prefetch_factor,
        start_method=settings.start_method if loader == "dataloader" and count else None,
        size=settings.size if name == PICTURES else None,
        fit=settings.fit,
        images=images,
        seconds=settings.seconds / settings.repeats,
        batches=None if settings.epochs is None else -(-settings.epochs * images // batch_size),
        step_ms=settings.step_ms,
        step_matmul=settings.step_matmul,
        cold=settings.cold,
        limit=limit,
        growth=True,
    )
    row = Row(
        format=name,
        loader=loader,
        num_workers=count,
        batch_size=trial.batch_size,
        prefetch_factor=trial.prefetch_factor,
        start_method=trial.start_method,
        cold=trial.cold,
        error=None,
        store_mb=place.store_mb,
        convert_s=place.convert_s,
    )
    return _Case(row, trial, error=place.error)


def _run_all(cases: Sequence[_Case], settings: Settings, progress: Progress | None) -> None:
    total = len(cases) * settings.repeats
    side_by_side = 2 if settings.repeats > 1 and usable_cpus() > 1 else 1
    turns = _turns(cases, settings.repeats)
    done = 0
    while group := list(islice(turns, side_by_side)):
        if group[-1].memory_is_known:
            group.reverse()
        with ExitStack() as stack:
            processes = [stack.enter_context(trial_process()) for case in group if case.error is None]
            for process in processes:
                process.wait_until_ready(_START_TIMEOUT)
            for case in group:
                if progress is not None:
                    progress(done, total, case.name)
                if case.error is None:
                    ended = processes.pop(0).run(case.trial, timeout=_timeout(case.trial))
                    case.take(ended, alone=not processes)
                done += 1
    if progress is not None:
        progress(total, total, "")


def _timeout(trial: Trial) -> float:
    pictures = (trial.batches or 0) * trial.batch_size
    return _START_TIMEOUT + 20 * trial.seconds + pictures / _SLOWEST


def _turns(cases: Sequence[_Case], repeats: int) -> Iterator[_Case]:
    for number in range(repeats):
        shift = number % max(1, len(cases))
        yield from (*cases[shift:], *cases[:shift])


def _row(case: _Case, cases: Sequence[_Case]) -> Row:
    if case.error is not None:
        return replace(case.row, error=case.error)
    values: dict[str, Any] = {name: _median(case.results, name) for name in _MEASURED}
    speeds = tuple(float(result["images_per_s"]) for result in case.results)
    limit = _limit(case.row, cases)
    return replace(
        case.row,
        **values,
        growth_mb=_least(case.results, "growth_mb"),
        images_per_s_runs=speeds,
        images_per_s_spread=(max(speeds) - min(speeds)) / statistics.median(speeds),
        limit_images_per_s=limit,
        limit_fraction=None if limit is None else statistics.median(speeds) / limit,
        checksum=str(case.results[0]["checksum"]),
    )


def _median(results: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [result[name] for result in results if result[name] is not None]
    return statistics.median(values) if values else None


def _least(results: Sequence[Mapping[str, Any]], name: str) -> float | None:
    return min((result[name] for result in results if result[name] is not None), default=None)


def _limit(row: Row, cases: Sequence[_Case]) -> float | None:
    """Images/s of the machine itself; decoding alone takes as many CPUs as the case has processes."""
    found = (case for case in cases if case.trial.limit and case.row.format == row.format)
    speed = _median([result for case in found for result in case.results], "limit_images_per_s")
    if speed is None:
        return None
    return speed * min(max(1, row.num_workers), usable_cpus()) if row.format == PICTURES else speed
