"""`packshift watch`: looks at a training again and again, and tells what it sees: on a terminal, as JSON lines, as CSV."""

from __future__ import annotations

import csv
import json
import os
import shutil
import textwrap
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TextIO

from packshift.diagnosis import HISTORY, WatchWarning, points, warnings_of, window
from packshift.errors import WatchError
from packshift.memory import Memory
from packshift.processes import MAIN, WORKER, Exit
from packshift.text import counted, human_bytes, human_rate, human_time, printable
from packshift.trends import slope
from packshift.watching import Look, Peaks, ProcessLook, Watcher

_MB = 1_000_000
_TREND_SECONDS = 60.0
_ONCE_SECONDS = 0.5  # two looks so far apart tell how busy each process is
_PROCESSES_SUMMED_UP = 10
_COLUMNS = ("rss", "pss", "uss", "anonymous", "shared", "file", "swap", "page_tables")
_CSV_COLUMNS = (
    "time",
    "elapsed_s",
    "processes",
    "workers",
    *(f"{name}_mb" for name in _COLUMNS),
    "unreclaimable_mb",
    "main_rss_mb",
    "main_uss_mb",
    "workers_rss_mb",
    "workers_uss_mb",
    "main_busy",
    "workers_busy",
    "available_mb",
    "swap_used_mb",
    "group_used_mb",
    "group_limit_mb",
    "group_anonymous_mb",
    "group_shared_mb",
    "group_file_mb",
    "oom_kills",
    "gpu_use",
    "gpu_memory_mb",
    "unreclaimable_mb_per_min",
    "available_mb_per_min",
    "warnings",
)


class Session:
    """The looks so far, what was said about them, and what is said now."""

    def __init__(self, interval: float) -> None:
        self.history: deque[Look] = deque(maxlen=max(10, int(HISTORY / interval) + 2))
        self.peaks = Peaks()
        self.warnings: list[WatchWarning] = []
        self.told: dict[str, tuple[float, WatchWarning]] = {}  # name: (seconds from the first look, the last text)
        self.looks = 0
        self._first: Look | None = None

    def add(self, look: Look) -> list[WatchWarning]:
        """Take a look in; returns the warnings that were not there after the one before, and those about new events."""
        self._first = self._first or look
        self.history.append(look)
        self.peaks.add(look)
        self.looks += 1
        before = {warning.name: warning.at for warning in self.warnings}
        self.warnings = warnings_of(self.history, before)
        for warning in self.warnings:
            since, _ = self.told.get(warning.name, (self.elapsed, warning))
            self.told[warning.name] = (since, warning)
        return [each for each in self.warnings if each.name not in before or each.at != before[each.name]]

    @property
    def last(self) -> Look:
        return self.history[-1]

    @property
    def elapsed(self) -> float:
        """Seconds from the first look to the last."""
        return self.last.at - self._first.at if self._first is not None else 0.0

    def trend(self, figure: Callable[[Look], float]) -> float | None:
        """Change per second over the last minute; None while there are too few looks."""
        looks = window(self.history, min(_TREND_SECONDS, self.elapsed)) if self.elapsed > 0 else []
        return slope(points(looks, figure)) if looks else None

    def process_trend(self, process: ProcessLook) -> float | None:
        """The same for what one process has for itself or shares in, without page cache."""
        looks = window(self.history, min(_TREND_SECONDS, self.elapsed)) if self.elapsed > 0 else []
        line = [
            (look.at, each.memory.unreclaimable)
            for look in looks
            for each in look.processes
            if each.process.key == process.process.key
        ]
        return slope(line) if len(line) >= 3 else None


def run_watch(
    pid: int, *, interval: float = 2.0, log: str | None = None, once: bool = False, as_json: bool = False, out: TextIO
) -> None:
    """Watch a process until it ends, Ctrl-C is pressed, or, with `once`, for one look.

    `interval` is in seconds, `log` the CSV file to which each look is appended. Raises WatchError where there is no such
    process, it may not be looked at, or the log cannot be written.
    """
    with Watcher(pid) as watcher, _log_of(log) as write_row:
        session = Session(interval)
        show = _view(session, out, once=once, as_json=as_json)
        ended = False
        try:
            ended = _watch(watcher, session, interval, show, write_row, once)
        except KeyboardInterrupt:
            if once or not session.looks:
                raise
        if not once and session.looks:
            how = _ending(pid, watcher.main_exit) if ended else f"process {pid} goes on without being watched"
            show.end(how)


def _watch(
    watcher: Watcher,
    session: Session,
    interval: float,
    show: _Lines | _Screen | _JsonLines,
    write_row: Callable[[Session], None],
    once: bool,
) -> bool:
    """Look until the process ends (True), or once."""
    looks = 0
    begin = time.monotonic()
    while (look := watcher.look()) is not None:
        looks += 1
        if once and looks == 1:
            watcher.wait(_ONCE_SECONDS)
            continue
        new = session.add(look)
        write_row(session)
        show.look(new)
        if once:
            return False
        due = begin + looks * interval
        if (now := time.monotonic()) > due:  # a look took longer than the interval: start counting anew
            begin, looks, due = now, 0, now
        watcher.wait(due - now)
    if not session.looks:
        raise WatchError(f"process {watcher.pid} ended before it could be looked at")
    return True


def _ending(pid: int, exit: Exit | None) -> str:
    if exit is None or exit.status is None:
        return f"process {pid} has ended"
    if exit.signal_name is not None:
        return f"process {pid} was ended by {exit.signal_name}"
    return f"process {pid} has ended with exit code {exit.status}"


class _Lines:
    """One line for each look, warnings below it as they come up."""

    def __init__(self, session: Session, out: TextIO) -> None:
        self._session = session
        self._out = out

    def look(self, new: Sequence[WatchWarning]) -> None:
        _write(self._out, [look_line(self._session), *map(str, new)])

    def end(self, how: str) -> None:
        _write(self._out, summary_lines(self._session, how))


class _Once(_Lines):
    def look(self, new: Sequence[WatchWarning]) -> None:
        _write(self._out, [*table_lines(self._session), *facts_lines(self._session)])


class _Screen(_Lines):
    """The whole look, drawn over the one before; warnings that are over stay readable in the summary."""

    _drawn = 0

    def look(self, new: Sequence[WatchWarning]) -> None:
        size = shutil.get_terminal_size()
        facts = [_encodable(line, self._out) for line in facts_lines(self._session)]
        below = [part for line in facts for part in textwrap.wrap(line, size.columns - 1, subsequent_indent="  ")]
        table = table_lines(self._session, processes=max(2, size.lines - len(below) - 5))
        table = [_encodable(line, self._out) for line in table]
        lines = [*(line[: size.columns - 1] for line in table), *below][: size.lines - 1]
        self._erase()
        _write(self._out, lines)
        self._drawn = len(lines)

    def end(self, how: str) -> None:
        _write(self._out, ["", *summary_lines(self._session, how)])

    def _erase(self) -> None:
        if self._drawn:
            self._out.write(f"\x1b[{self._drawn}A\r\x1b[J")


class _JsonLines:
    def __init__(self, session: Session, out: TextIO) -> None:
        self._session = session
        self._out = out

    def look(self, new: Sequence[WatchWarning]) -> None:
        self._print(look_json(self._session))

    def end(self, how: str) -> None:
        self._print(summary_json(self._session, how))

    def _print(self, document: dict[str, Any]) -> None:
        _write(self._out, [json.dumps(document)])


def _view(session: Session, out: TextIO, *, once: bool, as_json: bool) -> _Lines | _Screen | _JsonLines:
    if as_json:
        return _JsonLines(session, out)
    if once:
        return _Once(session, out)
    on_terminal = out.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    return _Screen(session, out) if on_terminal else _Lines(session, out)


def _write(out: TextIO, lines: Sequence[str]) -> None:
    out.write("".join(f"{_encodable(line, out)}\n" for line in lines))
    out.flush()


def _encodable(line: str, out: TextIO) -> str:
    """What the terminal's encoding cannot show is escaped."""
    encoding = getattr(out, "encoding", None) or "utf-8"
    return line.encode(encoding, "backslashreplace").decode(encoding)


def look_line(session: Session) -> str:
    """One look in one line."""
    look = session.last
    total = look.total
    trend = session.trend(lambda each: each.total.unreclaimable)
    parts = [
        f"{counted(len(look.processes), 'process')}: {human_bytes(total.unreclaimable)} kept"
        + (f" ({human_rate(trend)})" if trend is not None else "")
        + f", {human_bytes(total.shared)} of it shared, {human_bytes(total.file)} page cache",
        _busy_text(look),
        f"available {human_bytes(look.available)}",
        f"swap {human_bytes(look.swap_used)}" if look.swap_total else "",
        _group_text(look) if look.group is not None and look.group.limit is not None else "",
        *_gpu_texts(look),
    ]
    return f"{time.strftime('%H:%M:%S', time.localtime(look.clock))}  " + "; ".join(part for part in parts if part)


def _busy_text(look: Look) -> str:
    shares = [("main", _mean_busy([look.main])), ("workers", _mean_busy(look.workers))]
    told = [f"{name} {share:.0%}" for name, share in shares if share is not None]
    return f"busy: {', '.join(told)}" if told else ""


def _mean_busy(processes: Sequence[ProcessLook]) -> float | None:
    shares = [each.busy for each in processes if each.busy is not None]
    return sum(shares) / len(shares) if shares else None


def _group_text(look: Look) -> str:
    group = look.group
    if group is None:
        return ""
    limit = "no limit" if group.limit is None else f"limit {human_bytes(group.limit)}"
    return (
        f"control group {human_bytes(group.used)}, {limit} (anonymous {human_bytes(group.anonymous)}, shared "
        f"{human_bytes(group.shared)}, page cache {human_bytes(group.file)}, out-of-memory kills {look.oom_kills})"
    )


def _gpu_texts(look: Look) -> list[str]:
    texts = []
    for gpu in look.gpus:
        use = "use unknown" if gpu.use is None else f"{gpu.use:.0%} used"
        memory = "" if gpu.memory_used is None else f", {human_bytes(gpu.memory_used)}"
        total = "" if gpu.memory_total is None else f" of {human_bytes(gpu.memory_total)}"
        texts.append(f"GPU {gpu.index} {use}{memory}{total}")
    return texts


def table_lines(session: Session, processes: int | None = None) -> list[str]:
    """A row for each process, at most so many, the main one and the largest, and one for all together."""
    look = session.last
    head = ("process", "pid", "busy", "RSS", "PSS", "USS", "shared", "trend")
    others = sorted(look.processes[1:], key=lambda each: -each.memory.uss)
    chosen = [look.main, *others][:processes]
    lines = [_aligned(head), *(_process_line(each, session.process_trend(each)) for each in chosen)]
    if len(chosen) < len(look.processes):
        lines.append(f"... and {len(look.processes) - len(chosen):,} more")
    trend = session.trend(lambda each: each.total.unreclaimable)
    return [*lines, _table_line("all", "", "", look.total, trend)]


def facts_lines(session: Session) -> list[str]:
    """What is true of all processes together, of the machine, the control group and the GPUs; then the warnings."""
    look = session.last
    total = look.total
    fall = session.trend(lambda each: each.available)
    lines = [
        f"{human_bytes(total.unreclaimable)} cannot be taken back: anonymous {human_bytes(total.anonymous)}, shared "
        f"{human_bytes(total.shared)}, swapped out {human_bytes(total.swap)}, page tables {human_bytes(total.page_tables)}; "
        f"{human_bytes(total.file)} more are page cache",
        f"available {human_bytes(look.available)}"
        + (f" ({human_rate(fall)})" if fall is not None else "")
        + f" of {human_bytes(look.limit)}; "
        + (f"swap {human_bytes(look.swap_used)} of {human_bytes(look.swap_total)}" if look.swap_total else "no swap"),
        _group_text(look),
        *_gpu_texts(look),
        *map(str, session.warnings),
    ]
    return [line for line in lines if line]


def _process_line(each: ProcessLook, trend: float | None) -> str:
    busy = "" if each.busy is None else f"{each.busy:.0%}"
    return _table_line(printable(f"{each.role} {each.process.name}"), str(each.pid), busy, each.memory, trend)


def _table_line(name: str, pid: str, busy: str, memory: Memory, trend: float | None) -> str:
    sizes = (human_bytes(size) for size in (memory.rss, memory.pss, memory.uss, memory.shared))
    return _aligned((name, pid, busy, *sizes, "" if trend is None else human_rate(trend)))


def _aligned(cells: Sequence[str]) -> str:
    widths = (22, 8, 5, 9, 9, 9, 9, 15)
    first, *rest = (f"{cell:>{width}}" for cell, width in zip(cells[1:], widths[1:], strict=True))
    return " ".join([f"{cells[0]:<22.22}", first, *rest]).rstrip()


def summary_lines(session: Session, how: str) -> list[str]:
    """What there is to say at the end."""
    peaks = session.peaks
    lines = [
        f"{how}; watched for {human_time(session.elapsed)}, {counted(session.looks, 'look')}",
        f"peak of all together: {human_bytes(peaks.unreclaimable)} that cannot be taken back, PSS "
        f"{human_bytes(peaks.total.pss)}; least available: {human_bytes(peaks.least_available or 0)}",
    ]
    largest = peaks.largest()
    for process, memory in largest[:_PROCESSES_SUMMED_UP]:
        lines.append(
            f"  {printable(process.role + ' ' + process.name)} (pid {process.pid}): peak RSS {human_bytes(memory.rss)}, "
            f"PSS {human_bytes(memory.pss)}, USS {human_bytes(memory.uss)}"
        )
    if len(largest) > _PROCESSES_SUMMED_UP:
        lines.append(f"  ... and {len(largest) - _PROCESSES_SUMMED_UP:,} more, none of them larger")
    lines += [
        f"{warning.level} after {human_time(since)}: {warning.text}" for since, warning in session.told.values()
    ] or ["no warnings"]
    return lines


def look_json(session: Session) -> dict[str, Any]:
    look = session.last
    group = look.group
    return {
        "kind": "look",
        "time": _time_text(look),
        "elapsed_s": round(session.elapsed, 3),
        "pid": look.main.pid,
        "processes": [
            {
                "pid": each.pid,
                "parent": each.process.parent,
                "name": each.process.name,
                "role": each.role,
                "age_s": round(each.process.age, 1),
                "cpu": _rounded(each.cpu),
                "busy": _rounded(each.busy),
                **_memory_json(each.memory),
                "unreclaimable_mb_per_min": _mb_per_minute(session.process_trend(each)),
            }
            for each in look.processes
        ],
        "total": _memory_json(look.total),
        "available_mb": look.available / _MB,
        "limit_mb": look.limit / _MB,
        "swap_used_mb": look.swap_used / _MB,
        "swap_total_mb": look.swap_total / _MB,
        "group": None
        if group is None
        else {
            "path": group.path,
            "limit_mb": None if group.limit is None else group.limit / _MB,
            "used_mb": group.used / _MB,
            "anonymous_mb": group.anonymous / _MB,
            "shared_mb": group.shared / _MB,
            "file_mb": group.file / _MB,
        },
        "oom_kills": look.oom_kills,
        "gpus": [
            {
                "index": gpu.index,
                "use": gpu.use,
                "memory_used_mb": None if gpu.memory_used is None else gpu.memory_used / _MB,
                "memory_total_mb": None if gpu.memory_total is None else gpu.memory_total / _MB,
            }
            for gpu in look.gpus
        ],
        "trends": {
            "rss_mb_per_min": _mb_per_minute(session.trend(lambda each: each.total.rss)),
            "unreclaimable_mb_per_min": _mb_per_minute(session.trend(lambda each: each.total.unreclaimable)),
            "available_mb_per_min": _mb_per_minute(session.trend(lambda each: each.available)),
            "swap_used_mb_per_min": _mb_per_minute(session.trend(lambda each: each.swap_used)),
        },
        "exits": [
            {"pid": exit.process.pid, "role": exit.process.role, "status": exit.status, "signal": exit.signal_name}
            for exit in look.exits
        ],
        "warnings": [asdict(warning) for warning in session.warnings],
    }


def summary_json(session: Session, how: str) -> dict[str, Any]:
    peaks = session.peaks
    return {
        "kind": "summary",
        "end": how,
        "elapsed_s": round(session.elapsed, 3),
        "looks": session.looks,
        "peak_unreclaimable_mb": peaks.unreclaimable / _MB,
        "least_available_mb": (peaks.least_available or 0) / _MB,
        "peaks": [
            {"pid": process.pid, "name": process.name, "role": process.role, **_memory_json(memory)}
            for process, memory in peaks.largest()
        ],
        "warnings": [{"after_s": round(since, 3), **asdict(warning)} for since, warning in session.told.values()],
    }


def _memory_json(memory: Memory) -> dict[str, float]:
    return {
        **{f"{name}_mb": getattr(memory, name) / _MB for name in _COLUMNS},
        "unreclaimable_mb": memory.unreclaimable / _MB,
    }


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 3)


def _mb_per_minute(bytes_per_second: float | None) -> float | None:
    return None if bytes_per_second is None else round(bytes_per_second * 60 / _MB, 3)


def _time_text(look: Look) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(look.clock))


@contextmanager
def _log_of(path: str | None) -> Iterator[Callable[[Session], None]]:
    """A function that appends the last look as a row to a CSV file, whose first line names the columns."""
    if path is None:
        yield lambda session: None
        return
    with _open_log(path) as file:
        writer = csv.DictWriter(file, _CSV_COLUMNS)
        if file.tell() == 0:
            writer.writeheader()

        def write_row(session: Session) -> None:
            try:
                writer.writerow(_row(session))
                file.flush()
            except OSError as error:
                raise WatchError(f"{path}: cannot be written: {error.strerror}") from error

        yield write_row


def _open_log(path: str) -> TextIO:
    try:
        file = open(path, "a+", newline="", encoding="utf-8", errors="replace")  # noqa: SIM115 (the caller closes it)
    except OSError as error:
        raise WatchError(f"{path}: cannot be written: {error.strerror}") from error
    file.seek(0)
    head = file.readline().rstrip("\r\n")
    if head and head != ",".join(_CSV_COLUMNS):
        file.close()
        raise WatchError(f"{path} is there and has other columns: choose another file for --log")
    file.seek(0, os.SEEK_END)
    return file


def _row(session: Session) -> dict[str, Any]:
    document = look_json(session)
    look = session.last
    group = document["group"] or {}
    parts = {role: [each.memory for each in look.processes if each.role == role] for role in (MAIN, WORKER)}
    sums = {role: sum(memories, Memory()) for role, memories in parts.items()}
    gpu_memory = [gpu.memory_used for gpu in look.gpus if gpu.memory_used is not None]
    return {
        "time": document["time"],
        "elapsed_s": document["elapsed_s"],
        "processes": len(look.processes),
        "workers": len(look.workers),
        **document["total"],
        "main_rss_mb": sums[MAIN].rss / _MB,
        "main_uss_mb": sums[MAIN].uss / _MB,
        "workers_rss_mb": sums[WORKER].rss / _MB,
        "workers_uss_mb": sums[WORKER].uss / _MB,
        "main_busy": _rounded(look.main.busy),
        "workers_busy": _rounded(_mean_busy(look.workers)),
        "available_mb": document["available_mb"],
        "swap_used_mb": document["swap_used_mb"],
        **{
            f"group_{name}": group.get(name) for name in ("used_mb", "limit_mb", "anonymous_mb", "shared_mb", "file_mb")
        },
        "oom_kills": look.oom_kills,
        "gpu_use": _rounded(look.gpu_use),
        "gpu_memory_mb": sum(gpu_memory) / _MB if gpu_memory else None,
        "unreclaimable_mb_per_min": document["trends"]["unreclaimable_mb_per_min"],
        "available_mb_per_min": document["trends"]["available_mb_per_min"],
        "warnings": " ".join(warning.name for warning in session.warnings),
    }
