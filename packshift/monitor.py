"""Memory of a training, seen from inside: peak and slope of each process, for a script that has a minute to spare for
one line.

A background thread looks once a second at /proc/PID/status of each process, 30 microseconds each. Exact sums, which
count pages that processes share once, come from smaps_rollup, milliseconds for each GB that each process sees: the thread
measures what that costs and does it so seldom that it takes 0.4 % of the time. One process alone needs none.

Workers may be forked while the thread runs. A child has no copy of the thread; it gets a copy of whatever locks the
thread held at that moment, locked for ever. So the thread takes none that a child could want: it reads files
unbuffered, imports nothing, and publishes by replacing one value. What it says goes to file descriptor 2 in one
system call; where a `log` of the user's is to be called, which may take locks, a fork waits for it to return (a second at
most).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

import psutil

from packshift.arguments import at_least_one
from packshift.errors import UsageError
from packshift.memory import Resident, memory_of, resident_of
from packshift.processes import MAIN, Process, family
from packshift.text import counted, human_bytes, human_rate, human_time, printable
from packshift.trends import slope

_QUICK_SECONDS, _EXACT_SHARE = 0.003, 0.004
_COST_OF_BYTE = 12e-12  # seconds, until it is measured: 12 ms for a GB
_MOST_POINTS = 240
_MOST_ENDED = 50
_LOG_SECONDS = 60.0
_FORK_WAITS = 1.0
_JOIN_SECONDS = 5.0


@dataclass(frozen=True)
class ProcessReport:
    """One process since monitoring began; ended ones are kept, too. Bytes, and bytes per second.

    `peak_private` is the most anonymous memory that it saw, with what it shares with the process that it was forked
    from; `slope` is how fast that grows (median slope over the later half), None from fewer
    than 9 samples.
    """

    pid: int
    name: str
    role: str
    peak_rss: int
    peak_private: int
    slope: float | None

    def __str__(self) -> str:
        title = printable(f"{self.role} {self.name}")
        return (
            f"{title} (pid {self.pid}): peak RSS {human_bytes(self.peak_rss)}, "
            f"private {human_bytes(self.peak_private)}{_rate_text(self.slope)}"
        )


@dataclass(frozen=True)
class MonitorReport:
    """What a MemoryMonitor saw. Bytes, and bytes per second.

    `peak` is the most that all processes together had of what cannot be taken back (each page once), `kept` what they
    have now, `slope` its growth. `cost` is the CPU time of monitoring as a share of the time. `error` says what ended
    the monitoring early, if anything did.
    """

    seconds: float
    samples: int
    peak: int
    kept: int
    slope: float | None
    least_available: int
    processes: tuple[ProcessReport, ...]
    cost: float
    error: str | None = None

    def __str__(self) -> str:
        lines = [
            f"peak {human_bytes(self.peak)} that cannot be taken back, now {human_bytes(self.kept)}"
            f"{_rate_text(self.slope)}, least available {human_bytes(self.least_available)}; "
            f"{human_time(self.seconds)}, {counted(self.samples, 'sample')}, {self.cost:.2%} of the time",
            *(f"  {process}" for process in self.processes),
        ]
        return "\n".join(lines + ([f"monitoring ended early: {self.error}"] if self.error else []))


@dataclass
class _Line:
    """Figures over time; when there are many, every second one is dropped, so that they reach back to the beginning."""

    points: list[tuple[float, float]] = field(default_factory=list)
    every: int = 1
    seen: int = 0

    def add(self, at: float, figure: float) -> None:
        if self.seen % self.every == 0:
            self.points.append((at, figure))
        if len(self.points) > _MOST_POINTS:
            self.points = self.points[::2]
            self.every *= 2
        self.seen += 1

    def slope(self) -> float | None:
        """Of the later half: a training grows while it starts."""
        points = self.points[len(self.points) // 2 :]
        return slope(points) if len(points) >= 5 else None


@dataclass
class _Record:
    process: Process
    last: Resident
    peak_rss: int = 0
    peak_private: int = 0
    line: _Line = field(default_factory=_Line)

    def add(self, at: float, resident: Resident) -> None:
        self.last = resident
        self.peak_rss = max(self.peak_rss, resident.rss)
        self.peak_private = max(self.peak_private, resident.private)
        self.line.add(at, resident.private)


class MemoryMonitor:
    """Watches the memory of this process and its workers while a script runs:

        with MemoryMonitor(steps=100) as monitor:
            for images, labels in loader:
                ...
                monitor.step()
        print(monitor.report())

    `interval` is the time from one sample to the next in seconds, stretched where there are so many processes that a
    sample takes more than 3 ms. A line is said every `steps` calls of `step()`, or every `every` seconds (60 where
    neither is given), through `log`, a function of one string; by default to stderr. Nothing that goes wrong here reaches
    the training: `report().error` has it. `peak` is that of the samples that count shared pages once, which are seconds
    apart where there is much memory and there are many workers: a shorter peak can be missed; those per process are of
    every sample.
    """

    def __init__(
        self,
        interval: float = 1.0,
        *,
        steps: int | None = None,
        every: float | None = None,
        log: Callable[[str], object] | None = None,
    ) -> None:
        self._interval = _seconds("interval", interval)
        self._steps = None if steps is None else at_least_one("steps", steps)
        if every is None and steps is None:
            every = _LOG_SECONDS
        self._every = None if every is None else _seconds("every", every)
        self._log = log
        self._log_lock = threading.RLock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._clear()

    def _clear(self) -> None:
        self._pid = os.getpid()
        self._records: dict[tuple[int, float], _Record] = {}
        self._total = _Line()
        self._kept = 0
        self._peak = 0
        self._least_available: int | None = None
        self._count = 0
        self._samples = 0
        self._began = self._ended = time.monotonic()
        self._cost = self._exact_cost = 0.0
        self._cost_of_byte = _COST_OF_BYTE
        self._next_line = 0.0
        self._error: str | None = None

    def start(self) -> MemoryMonitor:
        """Begin anew; nothing happens where it runs already."""
        if self.running:
            return self
        self._clear()
        self._next_line = self._began + (self._every or 0.0)
        self._stop = threading.Event()
        try:
            self._sample()  # here, so that what is loaded at first use is not loaded by the thread
            thread = threading.Thread(target=self._run, name="packshift-memory", daemon=True)
            thread.start()
        except Exception as error:  # noqa: BLE001  # kept for the report and shown there: a monitor must not stop the training it looks at
            self._error = _text_of(error)
        else:
            self._thread = thread
            _running.add(self)
        return self

    def stop(self) -> None:
        """End, after a last sample; what was seen stays readable."""
        if not self.running or self._thread is None:
            return
        self._stop.set()
        self._thread.join(_JOIN_SECONDS)
        self._thread = None
        _running.discard(self)

    @property
    def running(self) -> bool:
        """Whether the thread samples; never in a process forked meanwhile."""
        return self._thread is not None and self._pid == os.getpid()

    def __enter__(self) -> MemoryMonitor:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def step(self) -> None:
        """To be called after each step of the training."""
        if not self.running:
            return
        self._count += 1
        if self._steps is not None and self._count % self._steps == 0:
            self._say(f"{counted(self._count, 'step')}: {self.line()}")

    @property
    def peak(self) -> int:
        """The most bytes that all processes together had of what the kernel cannot take back."""
        return self._peak

    def line(self) -> str:
        """What there is to say now, in one line."""
        records = [record for record in list(self._records.values()) if record.last.rss]
        main = [record for record in records if record.process.role == MAIN]
        others = sorted((r for r in records if r.process.role != MAIN), key=lambda record: -record.last.private)
        parts = [
            f"memory {human_bytes(self._kept)}{_rate_text(self._total.slope())}, peak "
            f"{human_bytes(self._peak)}, available at least {human_bytes(self._least_available or 0)}",
            *(f"main {human_bytes(each.last.private)}{_rate_text(each.line.slope())}" for each in main),
        ]
        if others:
            largest = others[0]
            parts.append(
                f"{counted(len(others), 'other')}, the largest {human_bytes(largest.last.private)}"
                f"{_rate_text(largest.line.slope())}"
            )
        return "; ".join(parts)

    def report(self) -> MonitorReport:
        """All that was seen so far: the main process first, then the others, the largest first."""
        end = time.monotonic() if self.running else self._ended
        seconds = max(1e-3, end - self._began)
        records = sorted(self._records.values(), key=lambda r: (r.process.role != MAIN, -r.peak_private))
        return MonitorReport(
            seconds=seconds,
            samples=self._samples,
            peak=self._peak,
            kept=self._kept,
            slope=self._total.slope(),
            least_available=self._least_available or 0,
            processes=tuple(
                ProcessReport(r.process.pid, r.process.name, r.process.role, r.peak_rss, r.peak_private, r.line.slope())
                for r in records
            ),
            cost=self._cost / seconds,
            error=self._error,
        )

    def _run(self) -> None:
        try:
            quick = 0.0
            while not self._stop.wait(self._interval * max(1.0, quick / _QUICK_SECONDS)):
                quick = self._sample()
                if self._every is not None and time.monotonic() >= self._next_line:
                    self._next_line += self._every
                    self._say_from_thread(self.line())
            self._sample()
        except Exception as error:  # noqa: BLE001  # kept for the report and shown there: in a thread it would reach nobody
            self._error = _text_of(error)
        self._ended = time.monotonic()

    def _sample(self) -> float:
        """One sample; returns the seconds of CPU time that the quick part took."""
        began = time.thread_time()
        now = time.monotonic()
        found = family(self._pid)
        residents = {process.key: resident_of(process.pid) for process in found}
        seen = {process: resident for process in found if (resident := residents[process.key]) is not None}
        for process, resident in seen.items():
            self._records.setdefault(process.key, _Record(process, resident)).add(now, resident)
        self._forget_ended({process.key for process in seen})
        largest = max((resident.unreclaimable for resident in seen.values()), default=0)
        self._peak = max(self._peak, largest)
        available = psutil.virtual_memory().available
        least = self._least_available
        self._least_available = available if least is None else min(least, available)
        self._samples += 1
        quick = time.thread_time() - began
        if len(seen) == 1:
            self._add_total(now, largest)
        elif self._can_afford(mapped := sum(resident.rss for resident in seen.values()), now):
            memories = [memory_of(process.pid) for process in seen]
            self._add_total(now, sum(memory.unreclaimable for memory in memories if memory is not None))
            exact = time.thread_time() - began - quick
            self._exact_cost += exact
            self._cost_of_byte = exact / max(1, mapped)
        self._cost += time.thread_time() - began
        return quick

    def _can_afford(self, mapped: int, now: float) -> bool:
        """Whether exact figures, which cost in proportion to what all processes map, are within their share of the time."""
        return self._exact_cost + self._cost_of_byte * mapped <= _EXACT_SHARE * (now - self._began)

    def _add_total(self, at: float, unreclaimable: int) -> None:
        self._kept = unreclaimable
        self._peak = max(self._peak, unreclaimable)
        self._total.add(at, unreclaimable)

    def _forget_ended(self, alive: set[tuple[int, float]]) -> None:
        """Of processes that have ended, the 50 largest stay."""
        ended = [key for key in self._records if key not in alive]
        for key in ended:
            self._records[key].last = Resident()
        for key in sorted(ended, key=lambda each: -self._records[each].peak_private)[_MOST_ENDED:]:
            del self._records[key]

    def _say_from_thread(self, line: str) -> None:
        if self._log is None:
            self._say(line)
            return
        with self._log_lock:  # a fork waits for this one
            self._say(line)

    def _say(self, line: str) -> None:
        try:
            if self._log is None:
                os.write(2, f"packshift: {line}\n".encode(errors="backslashreplace"))
            else:
                self._log(line)
        except Exception as error:  # noqa: BLE001  # the user's log function may raise anything: kept for the report, not raised in training
            self._error = f"log failed: {_text_of(error)}"


_running: set[MemoryMonitor] = set()
_held = threading.local()


def _before_fork() -> None:
    _held.locks = [monitor._log_lock for monitor in tuple(_running) if monitor._log_lock.acquire(timeout=_FORK_WAITS)]


def _after_fork_in_parent() -> None:
    for lock in _held.locks:
        lock.release()


def _after_fork_in_child() -> None:
    for monitor in tuple(_running):
        monitor._thread = None
        monitor._log_lock = threading.RLock()
    _running.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


def _seconds(name: str, value: float) -> float:
    if not isinstance(value, (int, float)) or not 0.01 <= value < float("inf"):
        raise UsageError(f"{name} {value!r}: expected a number of seconds of at least 0.01")
    return float(value)


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _rate_text(bytes_per_second: float | None) -> str:
    return "" if bytes_per_second is None else f" ({human_rate(bytes_per_second)})"
