"""What the looks at a training mean, in plain words: pure functions of the looks so far.

Thresholds, and why they are where they are:

- Nothing is judged by growth before 5 s have passed since the main process or a worker was started: imports and first
  batches grow by nature.
- Quick growth is judged over 15 s (at least 8 looks) and must be steady (`trends.steady_growth`), at 1 MB/s or more. It
  counts anonymous memory only: batches that fill the workers' queues are shared memory.
- Slow growth is judged over the last 3 to 10 minutes, over starts and ends of workers, and counts all that cannot be
  taken back. It must come to 64 MB and 2 % of what the training has: allocators drift by less.
- Starving is judged over the last 30 s without the first 5 of new workers, from 10 s on: workers busy 90 % of the time or
  more while the consumer waits for 40 % of it or more. Workers that wait for a consumer are never that busy.
- A warning that was given stays until its figure has fallen below half of its threshold (`active`), so that none
  flickers; one for an event stays for a minute.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from packshift.processes import HELPER, WORKER, Exit
from packshift.text import counted, human_bytes, human_rate, human_time
from packshift.trends import Points, slope, steady_growth
from packshift.watching import Look, ProcessLook

MINUTE = 60.0
WARM_UP = 5.0
QUICK_WINDOW = 15.0
SLOW_WINDOW, HISTORY = 180.0, 600.0
STARVING_WINDOW, STARVING_LEAST = 30.0, 10.0
EVENT_STAYS, _EVENT_LOOKS = 60.0, 5
_LEAST_LOOKS = 8
_MB = 1_000_000
_QUICK_RATE = 1.0 * _MB
_SLOW_GROWTH, _SLOW_SHARE = 64 * _MB, 0.02
_SWAP_GROWTH = 16 * _MB
_RUNS_OUT_SOON = 3600.0
_LOW_SHARE = 0.05
_CACHE_GROWTH, _CACHE_SHARE = 256 * _MB, 0.02
_CACHE_REST = 0.1
_NEARLY_FULL, _MOSTLY_CACHE = 0.9, 0.6
_BUSY, _WAITING, _GPU_IDLE = 0.9, 0.4, 0.3
_TAKES_PART = 0.05
_SWING_LOW, _SWING_HIGH, _SWINGS = 0.4, 0.7, 3
_ORDERLY = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_COHORT_SECONDS = 1.0
_LONE_FOR_LOOKS = 2


@dataclass(frozen=True)
class WatchWarning:
    """`name` is one word for programs, `text` what was seen and why it matters, `advice` what to do. `level` is "warning",
    or "note" for what looks like trouble and is none. `at` is the moment of an event, in seconds since 1970; None where
    the warning is about a state.
    """

    name: str
    text: str
    advice: str
    level: str = "warning"
    at: float | None = None

    def __str__(self) -> str:
        return f"{self.level}: {self.text}. {self.advice}"


def warnings_of(history: Sequence[Look], active: Collection[str] = ()) -> list[WatchWarning]:
    """What there is to say after the last of the looks (the oldest first); `active` names what was said after the one before.

    Looks from before the last 10 minutes are not used.
    """
    if not history:
        return []
    recent = [look for look in history if look.at >= history[-1].at - HISTORY]
    found: list[WatchWarning] = []
    for rule in _RULES:
        found += rule(recent, active)
    return found


def window(history: Sequence[Look], seconds: float) -> list[Look]:
    """The looks of the last `seconds`, or the last 8 if that is more time; none where there are not as many yet."""
    if len(history) < _LEAST_LOOKS:
        return []
    begin = min(history[-1].at - seconds, history[-_LEAST_LOOKS].at)
    found = [look for look in history if look.at >= begin - 0.05 * seconds]
    return found if found[-1].at - found[0].at >= 0.9 * seconds else []


def points(looks: Sequence[Look], figure: Callable[[Look], float]) -> Points:
    return [(look.at, figure(look)) for look in looks]


def _settled_window(history: Sequence[Look]) -> list[Look]:
    found = window(history, QUICK_WINDOW)
    return found if found and all(look.settled_for >= WARM_UP for look in found) else []


def _leak(history: Sequence[Look], active: Collection[str]) -> Iterator[WatchWarning]:
    rate = _quick_leak(history, "leak" in active) or _slow_leak(history, "leak" in active)
    if rate is None:
        return
    looks, per_second = rate
    seconds = looks[-1].at - looks[0].at
    left = history[-1].available / per_second
    yield WatchWarning(
        "leak",
        f"memory that cannot be taken back has grown by {human_bytes(per_second * MINUTE)}/min for {human_time(seconds)}, "
        f"steadily{_growing(looks, per_second)}; at this rate the {human_bytes(history[-1].available)} that are available "
        f"are used up in {human_time(left)}",
        "Look for what is kept from step to step: losses with their graph (use loss.item()), lists of batches or outputs, "
        "a cache in the dataset; in all workers alike: Python objects per sample, which each worker copies as it reads them",
    )


def _quick_leak(history: Sequence[Look], active: bool) -> tuple[list[Look], float] | None:
    looks = _settled_window(history)
    private = points(looks, lambda look: look.total.anonymous + look.total.swap)
    rate = slope(private)
    if rate < (_QUICK_RATE / 2 if active else _QUICK_RATE):
        return None
    return (looks, rate) if active or steady_growth(private) else None


def _slow_leak(history: Sequence[Look], active: bool) -> tuple[list[Look], float] | None:
    settled = [look for look in history if look.at >= history[0].at + WARM_UP]
    looks = window(settled, SLOW_WINDOW) and settled
    kept = points(looks, lambda look: look.total.unreclaimable)
    if not kept:
        return None
    least = max(_SLOW_GROWTH, _SLOW_SHARE * median(figure for _, figure in kept))
    growth = steady_growth(kept)
    rate = slope(kept)
    return (looks, rate) if growth >= (least / 2 if active else least) and rate > 0 else None


def _growing(looks: Sequence[Look], rate: float) -> str:
    """In which processes: those that were there all the time, the largest growth first, as long as it is a tenth."""
    rates = sorted(((slope(line), process) for process, line in _lines(looks)), key=lambda pair: -pair[0])
    shown = [f"{process.process.title} {human_rate(each)}" for each, process in rates[:3] if each >= rate / 10]
    return f", most of it in {', '.join(shown)}" if shown else ""


def _lines(looks: Sequence[Look]) -> Iterator[tuple[ProcessLook, Points]]:
    for process in looks[-1].processes:
        line = [
            (look.at, each.memory.anonymous + each.memory.swap + each.memory.shared)
            for look in looks
            for each in look.processes
            if each.process.key == process.process.key
        ]
        if len(line) == len(looks):
            yield process, line


def _memory_low(history: Sequence[Look], active: Collection[str]) -> Iterator[WatchWarning]:
    look = history[-1]
    share = 1.5 * _LOW_SHARE if "memory-low" in active else _LOW_SHARE
    if look.available < share * look.limit:
        yield WatchWarning(
            "memory-low",
            f"only {human_bytes(look.available)} of {human_bytes(look.limit)} are still available, {_limited_by(look)}",
            "Use fewer workers (num_workers), a smaller prefetch_factor or batch_size, before the kernel kills a process",
        )


def _limited_by(look: Look) -> str:
    limited = look.group is not None and look.group.limit is not None and look.group.limit <= look.limit
    return "within this training's control group" if limited else "on this machine"


def _memory_falling(history: Sequence[Look], active: Collection[str]) -> Iterator[WatchWarning]:
    looks = _settled_window(history)
    taken = points(looks, lambda look: -look.available)
    rate = slope(taken)
    if rate <= 0 or not (steady_growth(taken) or "memory-falling" in active):
        return
    left = history[-1].available / rate
    fall = rate * (looks[-1].at - looks[0].at)
    if left > _RUNS_OUT_SOON * (2 if "memory-falling" in active else 1) or fall < 0.001 * history[-1].limit:
        return
    own = slope(points(looks, lambda look: look.total.unreclaimable))
    whose = (
        f"this training takes {human_rate(own)}"
        if own >= rate / 2
        else f"this training takes only {human_rate(own)} of it, something else the rest"
    )
    yield WatchWarning(
        "memory-falling",
        f"available memory falls by {human_bytes(rate * MINUTE)}/min: at this rate the {human_bytes(history[-1].available)} "
        f"that are left are used up in {human_time(left)}; {whose}",
        "Stop what grows, or go back to the last num_workers and batch_size at which it stayed level",
    )


def _swap(history: Sequence[Look], active: Collection[str]) -> Iterator[WatchWarning]:
    looks = window(history, QUICK_WINDOW)
    if not looks:
        return
    swapped = [look.swap_used for look in looks]
    growth = swapped[-1] - swapped[0]
    rises = sum(later > earlier for earlier, later in pairwise(swapped))
    if growth < (_SWAP_GROWTH / 2 if "swap" in active else _SWAP_GROWTH) or rises < 3:
        return
    own = looks[-1].total.swap
    yield WatchWarning(
        "swap",
        f"swap grows: {human_bytes(growth)} more in {human_time(looks[-1].at - looks[0].at)}, "
        f"{human_bytes(swapped[-1])} of {human_bytes(looks[-1].swap_total)} used, {human_bytes(own)} of it by this training; "
        "memory is too small for what runs, each step becomes slower, and what follows is a kill",
        "Use fewer workers (num_workers), a smaller prefetch_factor or batch_size",
    )


def _oom_kills(history: Sequence[Look], active: Collection[str]) -> Iterator[WatchWarning]:
    rises = [later for earlier, later in pairwise(history) if later.oom_kills > earlier.oom_kills]
    if not rises or not _is_fresh(rises[-1], history):
        return
    count = history[-1].oom_kills - history[0].oom_kills
    group = history[-1].group
    where = "on this machine" if group is None else "in this training's control group"
    size = "" if group is None or group.limit is None else f", whose limit is {human_bytes(group.limit)}"
    yield WatchWarning(
        "oom-kill",
        f"the kernel has killed {counted(count, 'process')} for want of memory {where}{size}, at {_moment(rises[-1])}",
        "Use fewer workers (num_workers), a smaller prefetch_factor or batch_size, or raise the limit",
        at=rises[-1].clock,
    )


def _dead_workers(history: Sequence[Look], active: Collection[str]) -> Iterator[WatchWarning]:
    deaths = list(_deaths(history))
    if not deaths or not _is_fresh(deaths[-1][0], history):
        return
    look, last = deaths[-1]
    again = any(each.process.key[1] > last.process.key[1] + _COHORT_SECONDS for each in history[-1].workers)
    often = f" (in {human_time(history[-1].at - history[0].at)}: {len(deaths)} workers)" if deaths[1:] else ""
    how, advice = _end_of(last)
    yield WatchWarning(
        "worker-died",
        f"{last.process.title} {how} at {_moment(look)}{often}{', and workers were started again' if again else ''}",
        advice,
        at=look.clock,
    )


def _is_fresh(event: Look, history: Sequence[Look]) -> bool:
    return event.at >= history[-1].at - EVENT_STAYS or event in history[-_EVENT_LOOKS:]


def _moment(look: Look) -> str:
    return time.strftime("%H:%M:%S", time.localtime(look.clock))


def _deaths(history: Sequence[Look]) -> Iterator[tuple[Look, Exit]]:
    """Workers that did not end as workers do.

    A DataLoader lets its workers return (0) or, after 5 s, terminates them (SIGTERM), all together: at the end of an epoch
    without persistent_workers all are replaced, and that is in order. Where it is not known how a worker ended, one is
    out of order if others that were started with it are still there two looks later.
    """
    for index, look in enumerate(history):
        for exit in look.exits:
            if exit.process.role != WORKER:
                continue
            if exit.status is None:
                if _is_missed(exit, history[index:]):
                    yield look, exit
            elif exit.status > 0 or (exit.status < 0 and -exit.status not in _ORDERLY):
                yield look, exit


def _is_missed(exit: Exit, since: Sequence[Look]) -> bool:
    if len(since) <= _LONE_FOR_LOOKS:
        return False
    later = since[_LONE_FOR_LOOKS]
    started = exit.process.key[1]
    return any(
        each.process.parent == exit.process.parent and abs(each.process.key[1] - started) <= _COHORT_SECONDS
        for each in later.workers
    )


def _end_of(exit: Exit) -> tuple[str, str]:
    """How a worker ended, and what to do about it."""
    if exit.status is None:
        return (
            "was found missing, while those started with it go on,",
            "Look for its last words in the training's output",
        )
    if exit.signal_name == "SIGKILL":
        return (
            "was killed (SIGKILL)",
            "Unless you did that, the kernel or a job scheduler did, for want of memory: look into the kernel log (dmesg), "
            "and use fewer workers (num_workers), a smaller prefetch_factor or batch_size",
        )
    if exit.signal_name == "SIGBUS":
        return (
            "died of a bus error (SIGBUS)",
            "Usually /dev/shm is full: make it larger (docker run --shm-size=8g), or use fewer workers (num_workers), a "
            "smaller prefetch_factor or batch_size",
        )
    if exit.signal_name is not None:
        return (
            f"crashed ({exit.signal_name})",
            "A library that the dataset calls crashed in it: with num_workers=0 and python -X faulthandler you see where",
        )
    return f"ended with exit code {exit.status}", "Look for its last words in the training's output"


def _starving(history: Sequence[Look], active: Collection[str]) -> Iterator[WatchWarning]:
    begin = history[-1].at - STARVING_WINDOW
    looks = [look for look in history if look.at >= begin and look.settled_for >= WARM_UP]
    if len(looks) < 5 or looks[-1] is not history[-1] or looks[-1].at - looks[0].at < STARVING_LEAST:
        return
    gpu = [look.gpu_use for look in looks if look.gpu_use is not None]
    for consumer in _consumers(history[-1]):
        found = _starved(looks, consumer, gpu, "starving" in active)
        if found is not None:
            yield found
            return


def _consumers(look: Look) -> list[ProcessLook]:
    """The processes whose workers work; those of multiprocessing in between are passed over."""
    by_pid = {each.pid: each for each in look.processes}
    found = {}
    for worker in look.workers:
        parent = by_pid.get(worker.process.parent)
        while parent is not None and parent.role == HELPER:
            parent = by_pid.get(parent.process.parent)
        if parent is not None and parent.role != WORKER:
            found[parent.pid] = parent
    return list(found.values()) or [look.main]


def _starved(looks: Sequence[Look], consumer: ProcessLook, gpu: Sequence[float], active: bool) -> WatchWarning | None:
    main = [
        each.busy for look in looks for each in look.processes if each.pid == consumer.pid and each.busy is not None
    ]
    workers = _working(looks)
    if not main:
        return None
    consumption = list(gpu) if len(gpu) >= len(looks) / 2 else main
    idle = 1 - fmean(consumption)
    loaders = fmean(workers) if workers else 0.0
    if (
        consumption is main
        and fmean(main) < _TAKES_PART
        and not any(w.process.is_data_worker for w in looks[-1].workers)
    ):
        workers = []  # perhaps the ranks of a distributed training, and their parent only waits for them
    ease = 0.5 if active else 1.0
    threshold = _GPU_IDLE if consumption is not main else _WAITING
    if workers and loaders >= 1 - (1 - _BUSY) / ease and idle >= threshold * ease:
        return _starving_warning(consumption is not main, consumption, f"the workers are busy for {loaders:.0%} of it")
    if consumption is main or swings(consumption) < (_SWINGS * ease) or idle < _GPU_IDLE * ease:
        return None
    if fmean(main) >= _BUSY:
        return _starving_warning(True, consumption, f"{consumer.process.title} is busy for {fmean(main):.0%} of it")
    return None


def _working(looks: Sequence[Look]) -> list[float]:
    """How busy each worker is that does anything: those of a loader for validation may just wait for their turn."""
    shares = [
        [each.busy for look in looks for each in look.workers if each.pid == worker.pid and each.busy is not None]
        for worker in looks[-1].workers
    ]
    means = [fmean(share) for share in shares if share]
    return [mean for mean in means if mean >= _TAKES_PART]


def _starving_warning(is_gpu: bool, consumption: Sequence[float], who: str) -> WatchWarning:
    low, high = min(consumption), max(consumption)
    swinging = f", swinging between {low:.0%} and {high:.0%}" if swings(consumption) >= _SWINGS else ""
    what = "the GPU is used for" if is_gpu else "the main process works for"
    if "workers" in who:
        reason = "the loader is the bottleneck, training waits for data"
        advice = (
            "Use more workers (num_workers) while CPUs are free, less work per sample (pictures decoded and resized "
            "beforehand: packshift convert), or faster storage"
        )
    else:
        reason = "the GPU waits for the main process"
        advice = "Let workers load (num_workers > 0), and keep Python work out of the training loop"
    return WatchWarning(
        "starving", f"{what} {fmean(consumption):.0%} of the time{swinging}, while {who}: {reason}", advice
    )


def swings(values: Sequence[float]) -> int:
    """How often a series goes from below 40 % to above 70 % or back."""
    sides = [value > _SWING_HIGH for value in values if value > _SWING_HIGH or value < _SWING_LOW]
    return sum(earlier != later for earlier, later in pairwise(sides))


def _page_cache(history: Sequence[Look], active: Collection[str]) -> Iterator[WatchWarning]:
    look = history[-1]
    group = look.group
    full = (
        group is not None
        and group.limit is not None
        and group.used >= _NEARLY_FULL * group.limit
        and group.unreclaimable <= _MOSTLY_CACHE * group.limit
    )
    if group is not None and group.limit is not None and full:
        yield WatchWarning(
            "page-cache",
            f"the control group has used {human_bytes(group.used)} of {human_bytes(group.limit)}, but "
            f"{human_bytes(group.file)} of that are page cache of files, which the kernel takes back when memory is needed",
            "This is no leak, and nothing gets killed for it",
            level="note",
        )
        return
    settled = [each for each in history if each.settled_for >= WARM_UP]
    if len(settled) < _LEAST_LOOKS or settled[-1] is not look:
        return
    kept = look.total.unreclaimable - settled[0].total.unreclaimable
    least = max(_CACHE_GROWTH, _CACHE_SHARE * look.limit) * (0.5 if "page-cache" in active else 1.0)
    for name, figure in (("RSS", lambda each: each.total.rss), ("the control group's use", _group_used)):
        growth = figure(look) - figure(settled[0])
        if growth >= least and kept <= _CACHE_REST * growth and figure(look) > figure(settled[-_LEAST_LOOKS]):
            yield WatchWarning(
                "page-cache",
                f"{name} has grown by {human_bytes(growth)} in {human_time(look.at - settled[0].at)}, but anonymous and "
                f"shared memory by {human_bytes(max(0, kept))} only: the rest is page cache of the files that are read, "
                "which the kernel takes back when memory is needed",
                "This is no leak; look at USS, or at what cannot be taken back",
                level="note",
            )
            return


def _group_used(look: Look) -> int:
    """What grows without being anonymous or shared: use of the innermost limits, by file cache."""
    return 0 if look.group is None else look.group.used


_RULES = (_leak, _memory_falling, _memory_low, _swap, _oom_kills, _dead_workers, _starving, _page_cache)
