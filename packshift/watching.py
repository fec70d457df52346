"""Looks at a training from outside: its processes, their memory, the machine, the control group, the GPUs.

A look reads /proc/PID/smaps_rollup of each process, which costs it nothing but takes 5 milliseconds of the watcher's time
per GB, while the process must wait with new mappings: a look every second or two does not slow a training down.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from packshift.errors import WatchError
from packshift.gpu import Gpu, Gpus
from packshift.machine import GroupMemory, memory_groups, usable_memory
from packshift.memory import Memory, memory_of
from packshift.processes import MAIN, WORKER, Exit, Exits, Process, family


@dataclass(frozen=True)
class ProcessLook:
    """One process in a look.

    `cpu` is the CPUs that it used since the look before (1.0: one all the time). `busy` is the share of that time in
    which it computed, waited for a CPU, or waited for a disk; the rest it waited for other processes or for a GPU. None:
    there was no look before.
    """

    process: Process
    memory: Memory
    cpu: float | None = None
    busy: float | None = None

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def role(self) -> str:
        return self.process.role


@dataclass(frozen=True)
class Look:
    """What was seen at one moment. Memory is in bytes.

    `at` is in seconds on a clock that only goes forward, `clock` in seconds since 1970. `available` is what can still be
    taken before something is killed: the smaller of what the machine has and the control groups leave. `limit` is the
    most that this training can have of the machine and its groups. `group` is the control group that leaves least, or the
    innermost where none has a limit. `oom_kills` counts what the kernel killed in the innermost group for want of
    memory, or on the machine where it has no groups. `exits` are the processes that ended since the look before.
    """

    at: float
    clock: float
    processes: tuple[ProcessLook, ...]
    available: int
    limit: int
    swap_used: int
    swap_total: int
    group: GroupMemory | None
    oom_kills: int
    exits: tuple[Exit, ...] = ()
    gpus: tuple[Gpu, ...] = ()

    @property
    def total(self) -> Memory:
        return sum((each.memory for each in self.processes), Memory())

    @property
    def main(self) -> ProcessLook:
        return self.processes[0]

    @property
    def workers(self) -> tuple[ProcessLook, ...]:
        return tuple(each for each in self.processes if each.role == WORKER)

    @property
    def settled_for(self) -> float:
        """Seconds since the last start of the main process or a worker."""
        return min(each.process.age for each in self.processes if each.role in (MAIN, WORKER))

    @property
    def gpu_use(self) -> float | None:
        """Mean use of the GPUs that this training computes on; None where that is not known."""
        uses = [gpu.use for gpu in self.gpus if gpu.use is not None and (gpu.own or len(self.gpus) == 1)]
        return sum(uses) / len(uses) if uses else None


class Watcher:
    """Looks at one process and what descends from it, again and again."""

    def __init__(self, pid: int) -> None:
        """Raises WatchError where there is no such process or it may not be looked at."""
        self.pid = pid
        _check_readable(pid)
        self._exits = Exits()
        self._gpus = Gpus()
        self._before: dict[tuple[int, float], tuple[float, Process]] = {}
        self._main: Process | None = None
        self.main_exit: Exit | None = None

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.__exit__()

    def look(self) -> Look | None:
        """What is seen now; None: the process has ended."""
        found = family(self.pid, self._exits.known)
        if self._main is not None and (not found or found[0].key != self._main.key):
            found = []  # ended, and its number may be another process's
        self._exits.follow(found)
        exits = self._exits.take()
        self.main_exit = next((each for each in exits if each.process.pid == self.pid), self.main_exit)
        if not found:
            return None
        self._main = found[0]
        looks = [look for look in map(self._look_at, found) if look is not None]
        if not looks or looks[0].pid != self.pid:
            return None
        now = time.monotonic()
        self._before = {each.process.key: (now, each.process) for each in looks}
        groups = memory_groups(self.pid)
        limited = [group for group in groups if group.limit is not None]
        machine = psutil.virtual_memory()
        swap = psutil.swap_memory()
        left = [group.limit - group.unreclaimable for group in groups if group.limit is not None]
        return Look(
            at=now,
            clock=time.time(),
            processes=tuple(looks),
            available=max(0, min([machine.available, *left])),
            limit=min([usable_memory(), *(group.limit for group in groups if group.limit is not None)]),
            swap_used=swap.used,
            swap_total=swap.total,
            group=min(limited, key=_left_in, default=groups[0] if groups else None),
            oom_kills=groups[0].oom_kills if groups else _machine_oom_kills(),
            exits=exits,
            gpus=self._gpus.look({each.pid for each in looks}),
        )

    def wait(self, seconds: float) -> None:
        """Until the next look; shorter where the process ends before."""
        self._exits.wait(seconds, self.pid)

    def _look_at(self, process: Process) -> ProcessLook | None:
        memory = memory_of(process.pid)
        if memory is None:
            return None
        if process.key not in self._before:
            return ProcessLook(process, memory)
        then, before = self._before[process.key]
        seconds = max(1e-3, time.monotonic() - then)
        cpu = (process.cpu - before.cpu) / seconds
        waited = (process.waited - before.waited) / seconds
        busy = 1.0 if process.waits_for_disk else min(1.0, cpu + waited)
        return ProcessLook(process, memory, cpu=cpu, busy=busy)


class Peaks:
    """The most that each process had of each kind of memory, and all together, since the first look."""

    def __init__(self) -> None:
        self.processes: dict[tuple[int, float], tuple[Process, Memory]] = {}
        self.total = Memory()
        self.unreclaimable = 0
        self.least_available: int | None = None

    def add(self, look: Look) -> None:
        for each in look.processes:
            _, peak = self.processes.get(each.process.key, (each.process, Memory()))
            self.processes[each.process.key] = (each.process, peak.larger(each.memory))
        self.total = self.total.larger(look.total)
        self.unreclaimable = max(self.unreclaimable, look.total.unreclaimable)
        least = self.least_available
        self.least_available = look.available if least is None else min(least, look.available)

    def largest(self) -> Sequence[tuple[Process, Memory]]:
        """The main process, then the others, the largest first."""
        return sorted(self.processes.values(), key=lambda pair: (pair[0].role != MAIN, -pair[1].uss))


def _check_readable(pid: int) -> None:
    if not psutil.pid_exists(pid):
        raise WatchError(f"there is no process {pid}: give the number of one that runs (pgrep -f train.py finds it)")
    if family(pid) and memory_of(pid) is not None:
        return
    if _is_forbidden(pid):
        owner = psutil.Process(pid).username()
        raise WatchError(
            f"process {pid} belongs to {owner}, and its memory may not be read: run this as {owner} or root"
        )
    raise WatchError(f"process {pid} has no memory to look at: it has ended, or is a part of the kernel")


def _is_forbidden(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            file.readline()
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def _left_in(group: GroupMemory) -> int:
    return (group.limit or 0) - group.unreclaimable


def _machine_oom_kills() -> int:
    try:
        with open("/proc/vmstat") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
    except FileNotFoundError:  # not Linux
        return 0
