"""What this process may use of the machine, rather than what the machine has."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 62  # version 1 says "no limit" with a number just below 2**63


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


@dataclass(frozen=True)
class GroupMemory:
    """Memory of one control group, in bytes; `limit` None: it sets none.

    `used` is what is charged to it. Of that, `anonymous` and `shared` (shared memory, tmpfs) cannot be taken back, while
    `file` is page cache, which the kernel drops before it kills. `oom_kills` counts processes killed for its limit.
    """

    path: str
    limit: int | None
    used: int
    anonymous: int
    shared: int
    file: int
    oom_kills: int

    @property
    def unreclaimable(self) -> int:
        """What is charged, without the page cache: kernel memory (page tables, stacks) is in it."""
        return max(self.anonymous + self.shared, self.used - self.file)


def memory_groups(pid: int | str = "self") -> list[GroupMemory]:
    """The memory control groups of a process, innermost first; none where there are none or it has ended."""
    found = []
    for folder in _groups("memory", pid):
        for usage_name, limit_name, events_name, prefix in (
            ("memory.current", "memory.max", "memory.events", ""),
            ("memory.usage_in_bytes", "memory.limit_in_bytes", "memory.oom_control", "total_"),
        ):
            usage = _read(folder / usage_name).strip()
            if not usage.isdigit():
                continue
            stat = _numbers(_read(folder / "memory.stat"))
            limit = _read(folder / limit_name).strip()
            shared = stat.get(f"{prefix}shmem", 0)
            cache = stat.get("file", stat.get("total_cache", 0))
            found.append(
                GroupMemory(
                    path=str(folder),
                    limit=int(limit) if limit.isdigit() and int(limit) < _NO_LIMIT else None,
                    used=int(usage),
                    anonymous=stat.get("anon", stat.get("total_rss", 0)),
                    shared=shared,
                    file=max(0, cache - shared),  # both versions count shared memory as file pages
                    oom_kills=_numbers(_read(folder / events_name)).get("oom_kill", 0),
                )
            )
            break
    return found


def available_in_groups(pid: int | str = "self") -> int | None:
    """Bytes that a process's control groups leave it before something is killed; None where nothing limits it."""
    left = [group.limit - group.unreclaimable for group in memory_groups(pid) if group.limit is not None]
    return max(0, min(left)) if left else None


def _numbers(text: str) -> dict[str, int]:
    """Lines of "name number"."""
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _quotas() -> list[int]:
    return [math.ceil(quota / period) for quota, period in map(_quota, _groups("cpu")) if quota > 0 and period > 0]


def _groups(controller: str, pid: int | str = "self") -> list[Path]:
    """The folders of a process's control groups for one controller, innermost first."""
    folders = []
    for line in _read(Path(f"/proc/{pid}/cgroup")).splitlines():
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
