"""What this process may use of the machine, rather than what the machine has."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def usable_cpus() -> int:
    """CPUs that this process may keep busy: the smallest of its affinity and its cgroups' CPU quota, at least 1.

    A quota is read from cgroup v2 (`cpu.max`) and v1 (`cpu.cfs_quota_us`), on the way from this process's group up to
    the root, and rounded up: 1.5 CPUs keep two threads busy most of the time.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *_quotas()]))


def usable_memory() -> int:
    """Bytes of memory that this process may use: the smallest of what the machine has and its cgroups' limits.

    Limits are read from cgroup v2 (`memory.max`) and v1 (`memory.limit_in_bytes`), from this process's group up to the
    root. Page cache counts against them, too.
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    texts = [_read(group / name) for group in _groups("memory") for name in ("memory.max", "memory.limit_in_bytes")]
    return min([machine, *(int(text) for text in texts if text.strip().isdigit())])


def _quotas() -> list[int]:
    return [math.ceil(quota / period) for quota, period in map(_quota, _groups("cpu")) if quota > 0 and period > 0]


def _groups(controller: str) -> list[Path]:
    """The folders of this process's control groups for one controller, innermost first."""
    folders = []
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = _CGROUP
        elif controller in controllers.split(","):
            root = _CGROUP / controllers
        else:
            continue
        group = root / path.lstrip("/")
        folders += [group, *(parent for parent in group.parents if parent.is_relative_to(root))]
    return folders


def _quota(group: Path) -> tuple[int, int]:
    """(microseconds per period, period in microseconds) of one control group; (0, 0) where it sets none."""
    second_version = _read(group / "cpu.max").split()
    first_version = _read(group / "cpu.cfs_quota_us").split() + _read(group / "cpu.cfs_period_us").split()
    for words in (second_version, first_version):
        if len(words) == 2 and all(word.isdigit() for word in words):
            return int(words[0]), int(words[1])
    return 0, 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
