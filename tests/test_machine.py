"""What this process may use: affinity, CPU quotas and memory limits of control groups, not what the machine has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from packshift import machine
from packshift.memory import memory_of_all

MEMBERSHIP = {"v2": "0::/job/step\n", "v1": "5:memory:/job/step\n3:cpu,cpuacct:/job/step\n"}


def pretend(version: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up /sys/fs/cgroup on 16 CPUs; this process is in /job/step of every hierarchy."""
    real_read = machine._read

    def read(path: Path) -> str:
        return MEMBERSHIP[version] if path == Path("/proc/self/cgroup") else real_read(path)

    monkeypatch.setattr(machine, "_read", read)
    monkeypatch.setattr(machine, "_CGROUP", root)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pretend("v2", tmp_path, monkeypatch)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_no_limits(groups: Path) -> None:
    assert machine.usable_cpus() == 16
    assert machine.usable_memory() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("text", "cpus"), [("150000 100000", 2), ("max 100000", 16), ("50000 100000", 1), ("6400000 100000", 16)]
)
def test_a_cpu_quota_is_rounded_up(groups: Path, text: str, cpus: int) -> None:
    write(groups / "job" / "step" / "cpu.max", text)
    assert machine.usable_cpus() == cpus


def test_the_smallest_limit_on_the_way_up_counts(groups: Path) -> None:
    write(groups / "job" / "step" / "cpu.max", "800000 100000")
    write(groups / "job" / "cpu.max", "300000 100000")
    write(groups / "job" / "step" / "memory.max", "max\n")
    write(groups / "job" / "memory.max", "1000000000\n")
    assert machine.usable_cpus() == 3
    assert machine.usable_memory() == 1_000_000_000


def test_cgroup_version_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = tmp_path
    pretend("v1", groups, monkeypatch)
    write(groups / "cpu,cpuacct" / "job" / "cpu.cfs_quota_us", "250000")
    write(groups / "cpu,cpuacct" / "job" / "cpu.cfs_period_us", "100000")
    write(groups / "memory" / "memory.limit_in_bytes", "2000000000")
    assert machine.usable_cpus() == 3
    assert machine.usable_memory() == 2_000_000_000
    write(groups / "cpu,cpuacct" / "job" / "step" / "cpu.cfs_quota_us", "-1")
    write(groups / "cpu,cpuacct" / "job" / "step" / "cpu.cfs_period_us", "100000")
    assert machine.usable_cpus() == 3


def test_this_machine() -> None:
    assert 1 <= machine.usable_cpus() <= (os.cpu_count() or 1)
    assert machine.usable_memory() > 2**20


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memfd here")
def test_shared_memory_counts_that_nobody_maps() -> None:
    """Batches between a worker and its parent are in no process's smaps, and yet charged to the job."""
    before = memory_of_all([os.getpid()])
    fd = os.memfd_create("packshift-test")
    twin = os.dup(fd)
    try:
        os.posix_fallocate(fd, 0, 200 << 20)
        after = memory_of_all([os.getpid()])
    finally:
        os.close(fd)
        os.close(twin)
    assert after.unreclaimable - before.unreclaimable == pytest.approx(200 << 20, rel=0.2)
