"""Memory of processes and what limits it, read from the operating system.

Three columns answer three questions. RSS is what a process can see in memory; pages that several processes map, such as
a store's page cache, are counted in each of them, so sums of it mean nothing. PSS divides such pages among those who map
them: sums of it are right. USS is what would be free if the process ended.

None of them says what can get a job killed: page cache of files is in RSS and PSS, and the kernel takes it back when it
is needed. `Memory.unreclaimable` leaves it out: anonymous memory and shared memory, each page counted once in a sum over
processes (`Pss_Anon` and `Pss_Shmem` of /proc/PID/smaps_rollup, Linux 5.4 and later), what is swapped out, and the page
tables, which are charged to the job's control group, too.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import psutil

from packshift.machine import available_in_groups, usable_memory

_KILOBYTE = 1024


@dataclass(frozen=True)
class Memory:
    """Memory of one process, or the sum over several, in bytes.

    `anonymous`, `shared` and `file` are proportional shares (as PSS) of private memory, of shared memory that no file
    backs (/dev/shm, memfd), and of page cache. `swap` is swapped out, `page_tables` what the kernel needs to map it all.
    `anonymous_rss` counts anonymous pages whole that a fork shares, as RSS does.
    """

    rss: int = 0
    pss: int = 0
    uss: int = 0
    anonymous: int = 0
    shared: int = 0
    file: int = 0
    swap: int = 0
    page_tables: int = 0
    anonymous_rss: int = 0

    def __add__(self, other: Memory) -> Memory:
        return Memory(*(one + another for one, another in zip(astuple(self), astuple(other), strict=True)))

    def larger(self, other: Memory) -> Memory:
        """The larger of each figure: a peak, whose parts need not have been there at the same time."""
        return Memory(*(max(one, another) for one, another in zip(astuple(self), astuple(other), strict=True)))

    @property
    def unreclaimable(self) -> int:
        """Bytes that the kernel cannot take back: what counts when it looks for a process to kill."""
        return self.anonymous + self.shared + self.swap + self.page_tables


@dataclass(frozen=True)
class Resident:
    """Memory of one process in bytes, as /proc/PID/status counts it: each page in full in each process that maps it.

    Read in 30 microseconds, whatever the size; sums over forked processes count shared pages several times.
    """

    rss: int = 0
    anonymous: int = 0
    shared: int = 0
    file: int = 0
    swap: int = 0
    page_tables: int = 0

    @property
    def unreclaimable(self) -> int:
        """What the kernel cannot take back, as `Memory.unreclaimable`, with all that is shared with other processes."""
        return self.anonymous + self.shared + self.swap + self.page_tables

    @property
    def private(self) -> int:
        """Anonymous memory, swapped out or not: what grows in a process that leaks."""
        return self.anonymous + self.swap


def resident_of(pid: int) -> Resident | None:
    """Quick figures of a process; None where it has ended or may not be looked at."""
    try:
        status = _fields(Path(f"/proc/{pid}/status"))
    except FileNotFoundError:
        return _portable_resident_of(pid)
    except (ProcessLookupError, PermissionError):
        return None
    if "VmRSS" not in status:  # a process that has ended and was not waited for
        return None
    names = ("VmRSS", "RssAnon", "RssShmem", "RssFile", "VmSwap", "VmPTE")
    return Resident(*(status.get(name, 0) for name in names))


def memory_of(pid: int) -> Memory | None:
    """Memory of a process; None where it has ended or may not be looked at."""
    try:
        rollup = _fields(Path(f"/proc/{pid}/smaps_rollup"))
        status = _fields(Path(f"/proc/{pid}/status"))
    except FileNotFoundError:
        return _portable_memory_of(pid)
    except (ProcessLookupError, PermissionError):
        return None
    if "Rss" not in rollup:  # a process that has ended and was not waited for
        return None
    uss = sum(rollup.get(name, 0) for name in ("Private_Clean", "Private_Dirty", "Private_Hugetlb"))
    if "Pss_Anon" in rollup:
        anonymous, shared, file = rollup["Pss_Anon"], rollup["Pss_Shmem"], rollup["Pss_File"]
    else:  # before Linux 5.4: what is anonymous is known, what is shared memory is not
        anonymous, shared = rollup.get("Anonymous", 0), 0
        file = max(0, rollup["Pss"] - anonymous)
    return Memory(
        rss=rollup["Rss"],
        pss=rollup["Pss"],
        uss=uss,
        anonymous=anonymous,
        shared=shared,
        file=file,
        swap=rollup.get("SwapPss", rollup.get("Swap", 0)),
        page_tables=status.get("VmPTE", 0),
        anonymous_rss=rollup.get("Anonymous", 0),
    )


def _fields(path: Path) -> dict[str, int]:
    """The lines "Name: 123 kB" of a file under /proc, in bytes."""
    found = {}
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB":
            found[name] = int(words[0]) * _KILOBYTE
    return found


def _portable_memory_of(pid: int) -> Memory | None:
    """Where there is no smaps_rollup (macOS, or the process has ended): psutil's figures, with USS for what is private."""
    try:
        full = psutil.Process(pid).memory_full_info()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None
    pss = getattr(full, "pss", full.uss)
    return Memory(
        rss=full.rss, pss=pss, uss=full.uss, anonymous=full.uss, file=max(0, pss - full.uss), anonymous_rss=full.uss
    )


def _portable_resident_of(pid: int) -> Resident | None:
    try:
        rss = psutil.Process(pid).memory_info().rss
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None
    return Resident(rss=rss, anonymous=rss)


def tree_of(pid: int) -> list[int]:
    """A process and all that descend from it."""
    try:
        process = psutil.Process(pid)
        return [pid, *(child.pid for child in process.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def memory_of_all(pids: Iterable[int]) -> Memory:
    """The sum over processes; ended ones count nothing.

    Shared memory that they hold open counts also while none of them maps it, as batches on their way from a DataLoader
    worker to its parent: the kernel charges it, though it is in no column of any process.
    """
    pids = list(pids)
    total = sum((memory for memory in map(memory_of, pids) if memory is not None), Memory())
    return replace(total, shared=max(total.shared, open_shared_memory(pids)))


def open_shared_memory(pids: Iterable[int]) -> int:
    """Bytes in files of /dev/shm and memfds that the processes have open, each counted once."""
    sizes = {}
    for pid in pids:
        try:
            links = list(os.scandir(f"/proc/{pid}/fd"))
        except OSError:  # ended, somebody else's, or no /proc
            continue
        for link in links:
            with suppress(OSError):  # closed meanwhile
                if os.readlink(link.path).startswith(("/dev/shm/", "/memfd:")):
                    found = os.stat(link.path)
                    sizes[found.st_dev, found.st_ino] = found.st_blocks * 512
    return sum(sizes.values())


@dataclass(frozen=True)
class Limits:
    """What this process and its children may use, in bytes; None where nothing limits it.

    `memory` is the smallest of the machine's memory and the control groups' limits; `available` what is free of that now
    without swapping. `shm_size` and `shm_free` are those of /dev/shm. `open_files` is a number, not bytes.
    """

    machine_memory: int
    memory: int
    available: int
    swap_free: int
    shm_size: int | None
    shm_free: int | None
    address_space: int | None
    open_files: int | None


def limits() -> Limits:
    """The limits as they are now."""
    machine = psutil.virtual_memory()
    memory = usable_memory()
    shm = _disk("/dev/shm")
    in_groups = available_in_groups()
    return Limits(
        machine_memory=machine.total,
        memory=memory,
        available=machine.available if in_groups is None else min(machine.available, in_groups),
        swap_free=psutil.swap_memory().free,
        shm_size=shm[0] if shm else None,
        shm_free=shm[1] if shm else None,
        address_space=_soft_limit(resource.RLIMIT_AS),
        open_files=_soft_limit(resource.RLIMIT_NOFILE),
    )


def _disk(folder: str) -> tuple[int, int] | None:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _soft_limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft
