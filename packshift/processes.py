"""The processes of a training: who descends from whom, what each is for, how busy it is, and how it ended.

Children come from /proc/PID/task/*/children (a quarter of the cost of looking through all processes), CPU time from
/proc/PID/stat, and the time that a process wanted to run but got no CPU from /proc/PID/schedstat. Where there is no
/proc, psutil tells what it can.

How a process ended is known to its parent alone, but until the parent has asked, it stays as a zombie whose exit code
its owner may read (field 52 of /proc/PID/stat). A pidfd says at once when a process has ended, so that a watcher who
waits on it comes in time nearly always; it came too late where the status is None.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass, replace

import psutil

from packshift.text import printable

MAIN, WORKER, HELPER, OTHER = "main", "worker", "helper", "other"
_WORKER_NAME = "pt_data_worker"  # what torch 2.6 and later call a DataLoader's workers
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.semaphore_tracker", "multiprocessing.forkserver")
_SPAWNED = "--multiprocessing-fork"
_ZOMBIES = "ZX"
_DISK = "D"
_LONGEST_NAP = 0.1
_HAS_PROC = os.path.exists("/proc/self/stat")
_KERNEL_LISTS_CHILDREN = os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children")


@dataclass(frozen=True)
class Process:
    """A process as it is now. `key` is its own also when its number is given to another one later.

    `age` is in seconds. `cpu` is the CPU time of all its threads so far, `waited` the time in which its first thread
    was ready to run and had to wait for a CPU, both in seconds. `role` is "main" (the one that is watched), "worker" (a
    fork of its parent, or a process started by multiprocessing, that has no workers of its own), "helper" (one of
    multiprocessing's own), or "other".
    """

    pid: int
    parent: int
    key: tuple[int, float]
    name: str
    role: str
    state: str
    age: float
    cpu: float
    waited: float

    @property
    def title(self) -> str:
        return printable(f"{self.role} {self.name}") + f" (pid {self.pid})"

    @property
    def alive(self) -> bool:
        return self.state not in _ZOMBIES

    @property
    def is_data_worker(self) -> bool:
        """Known by its name to be a DataLoader's worker (torch 2.6 and later); a "worker" may be one without."""
        return self.name == _WORKER_NAME

    @property
    def waits_for_disk(self) -> bool:
        return self.state == _DISK


@dataclass(frozen=True)
class Exit:
    """A process that has ended. `status` is its exit code, negative: the signal that killed it; None: not known."""

    process: Process
    status: int | None

    @property
    def signal_name(self) -> str | None:
        if self.status is None or self.status >= 0:
            return None
        number = -self.status
        return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def process_of(pid: int, role: str = OTHER) -> Process | None:
    """One process; None where it has ended and nothing is left of it."""
    found = _stat(pid)
    if found is None:
        return None if _HAS_PROC else _portable_process_of(pid, role)
    name, fields = found
    ticks = os.sysconf("SC_CLK_TCK")
    started = int(fields[19]) / ticks
    return Process(
        pid=pid,
        parent=int(fields[1]),
        key=(pid, started),
        name=name,
        role=role,
        state=fields[0],
        age=max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started),
        cpu=(int(fields[11]) + int(fields[12])) / ticks,
        waited=_waited(pid),
    )


def family(pid: int, known: Collection[Process] = ()) -> list[Process]:
    """A process and what descends from it, without the calling process; empty where it has ended.

    A child that ends while the kernel lists its brothers can hide some of them: the `known` ones are looked up again.
    """
    main = process_of(pid, MAIN)
    if main is None or not main.alive:
        return []
    found = [main]
    queue = [(pid, _command(pid))]
    while queue:
        parent, parent_command = queue.pop()
        for child in children_of(parent):
            command = _command(child)
            process = process_of(child)
            if process is None or not process.alive or child == os.getpid():
                continue
            found.append(replace(process, role=_role(process.name, command, parent_command)))
            queue.append((child, command))
    listed = {process.key for process in found}
    for process in known:
        if process.key not in listed:
            again = process_of(process.pid, process.role)
            if again is not None and again.key == process.key and again.alive:
                found.append(again)
    employers = {process.parent for process in found if process.role == WORKER}
    return [
        replace(process, role=OTHER) if process.role == WORKER and process.pid in employers else process
        for process in found
    ]


def children_of(pid: int) -> list[int]:
    """The children of all threads of a process."""
    if _KERNEL_LISTS_CHILDREN:
        threads = _names(f"/proc/{pid}/task")
        return [int(word) for thread in threads for word in _text(f"/proc/{pid}/task/{thread}/children").split()]
    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.NoSuchProcess:
        return []


def _role(name: str, command: str, parent_command: str) -> str:
    if name == _WORKER_NAME or (command and command == parent_command):
        return WORKER
    if any(helper in command for helper in _HELPERS):
        return HELPER
    return WORKER if _SPAWNED in command else OTHER


class Exits:
    """Waits, and meanwhile notices which of the processes given to it end, and how.

    Needs Linux 5.3; elsewhere it only waits, and processes that are missing later are told with status None.
    """

    def __init__(self) -> None:
        self._poll = select.poll() if hasattr(os, "pidfd_open") else None
        self._handles: dict[int, Process] = {}
        self._known: dict[tuple[int, float], Process] = {}
        self._ended: list[Exit] = []

    def __enter__(self) -> Exits:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in list(self._handles):
            self._forget(handle)

    @property
    def known(self) -> list[Process]:
        return list(self._known.values())

    def follow(self, processes: Collection[Process]) -> None:
        """These are the living ones now: the new ones are followed, and the missing ones have ended."""
        living = {process.key for process in processes}
        for process in self.known:
            if process.key not in living:
                self._end(process)
        for process in processes:
            if process.key not in self._known:
                self._open(process)
            self._known[process.key] = process

    def take(self) -> tuple[Exit, ...]:
        """Those that ended since the last time this was asked."""
        ended, self._ended = tuple(self._ended), []
        return ended

    def wait(self, seconds: float, pid: int) -> None:
        """Wait so long, or until the process `pid` has ended."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self._poll is None or not self._handles:
                time.sleep(min(left, _LONGEST_NAP))
                if not os.path.exists(f"/proc/{pid}") and not psutil.pid_exists(pid):
                    return
                continue
            for handle, _ in self._poll.poll(left * 1000):
                process = self._handles[handle]
                self._end(process)
                if process.pid == pid:
                    return

    def _open(self, process: Process) -> None:
        if self._poll is None:
            return
        try:
            handle = os.pidfd_open(process.pid)
        except (
            OSError
        ):  # ended already, or there are too many open files: what is missing later is noticed all the same
            return
        self._handles[handle] = process
        self._poll.register(handle, select.POLLIN)

    def _end(self, process: Process) -> None:
        self._ended.append(Exit(process, _exit_status(process)))
        self._known.pop(process.key, None)
        for handle, handled in list(self._handles.items()):
            if handled.key == process.key:
                self._forget(handle)

    def _forget(self, handle: int) -> None:
        if self._poll is not None:
            self._poll.unregister(handle)
        del self._handles[handle]
        os.close(handle)


def _exit_status(process: Process) -> int | None:
    found = _stat(process.pid)
    if found is None:
        return None
    _, fields = found
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    if fields[0] not in _ZOMBIES or started != process.key[1]:
        return None
    code = int(fields[49])
    return -(code & 0x7F) if code & 0x7F else code >> 8


def _stat(pid: int) -> tuple[str, list[str]] | None:
    """The name of a process and the fields of /proc/PID/stat from the third on."""
    before, _, after = _text(f"/proc/{pid}/stat").rpartition(")")
    return (before.partition("(")[2], after.split()) if after else None


def _waited(pid: int) -> float:
    words = _text(f"/proc/{pid}/schedstat").split()
    return int(words[1]) / 1e9 if len(words) == 3 else 0.0


def _command(pid: int) -> str:
    if _HAS_PROC:
        return _text(f"/proc/{pid}/cmdline")
    try:
        return "\0".join(psutil.Process(pid).cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""


def _portable_process_of(pid: int, role: str) -> Process | None:
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            return Process(
                pid=pid,
                parent=process.ppid(),
                key=(pid, process.create_time()),
                name=process.name(),
                role=role,
                state=_ZOMBIES[0] if process.status() == psutil.STATUS_ZOMBIE else "S",
                age=max(0.0, time.time() - process.create_time()),
                cpu=times.user + times.system,
                waited=0.0,
            )
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # ended meanwhile
        return []


def _text(path: str) -> str:
    """The content of a file under /proc; nothing where the process has ended or may not be looked at."""
    try:
        with open(path, "rb", buffering=0) as file:
            return (file.readall() or b"").decode(errors="replace")
    except OSError:
        return ""
