"""Memory of processes against psutil's figures, shared pages counted once, and what control groups say."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from test_machine import pretend, write

from packshift import machine, memory
from packshift.memory import Memory, Resident, memory_of, memory_of_all, resident_of, tree_of

MB = 1_000_000
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@contextmanager
def process(code: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that has run the code and waits."""
    code = f"{code}\nprint('ready', flush=True)\nimport sys; sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        yield child
    finally:
        child.kill()
        child.communicate()


@contextmanager
def forked(function: Callable[[], None]) -> Iterator[int]:
    """A fork of this process that has run the function and waits."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            function()
            os.write(writing, b"x")
            signal.pause()
        finally:
            os._exit(1)
    try:
        assert os.read(reading, 1) == b"x"
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)
        os.close(writing)


def touch(map: mmap.mmap) -> None:
    for page in range(0, len(map), mmap.PAGESIZE):
        map[page] = 1


@linux
def test_figures_are_those_of_psutil() -> None:
    with process("x = bytearray(50_000_000)") as child:
        ours, theirs = memory_of(child.pid), psutil.Process(child.pid).memory_full_info()
    assert ours is not None
    for name in ("rss", "pss", "uss", "swap"):
        assert abs(getattr(ours, name) - getattr(theirs, name)) < 0.3 * MB, name
    assert ours.anonymous > 50 * MB
    assert ours.shared == 0
    assert abs(ours.anonymous + ours.shared + ours.file - ours.pss) < 0.1 * MB


@linux
def test_a_mapped_file_can_be_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "store"
    path.write_bytes(b"x" * 40_000_000)
    code = f"import mmap\nf = open({str(path)!r}, 'rb')\nm = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)\n"
    code += "sum(m[i] for i in range(0, len(m), 4096))"
    with process(code) as child:
        found, resident = memory_of(child.pid), resident_of(child.pid)
    assert found is not None
    assert resident is not None
    assert found.file > 39 * MB
    assert found.rss > 40 * MB
    assert found.unreclaimable < 20 * MB
    assert resident.file > 39 * MB
    assert resident.unreclaimable < 20 * MB


@linux
def test_shared_memory_is_counted_once_over_forks() -> None:
    """40 MB that three processes map are 40 MB, and three times 40 MB as residents count."""
    with mmap.mmap(-1, 40_000_000) as map, forked(lambda: touch(map)) as one, forked(lambda: touch(map)) as two:
        touch(map)
        pids = [os.getpid(), one, two]
        total = memory_of_all(pids)
        each = [memory_of(pid) for pid in pids]
        residents = [resident_of(pid) for pid in pids]
    assert 40 * MB <= total.shared < 41 * MB
    for found in each:
        assert found is not None
        assert 13 * MB < found.shared < 14 * MB
    assert sum(resident.shared for resident in residents if resident is not None) >= 120 * MB


@linux
def test_memory_from_before_a_fork_is_counted_once_until_it_is_written() -> None:
    before = bytearray(os.urandom(1000) * 30_000)

    def write_half() -> None:
        for position in range(0, len(before) // 2, mmap.PAGESIZE):
            before[position] = 1

    with forked(lambda: None) as idle:
        copied_nothing = memory_of(idle)
    with forked(write_half) as writing:
        copied = memory_of(writing)
    assert copied_nothing is not None
    assert copied is not None
    assert 14 * MB < copied.uss - copied_nothing.uss < 17 * MB
    for found in (copied, copied_nothing):
        assert abs(found.anonymous + found.shared + found.file - found.pss) < 0.1 * MB


@linux
def test_page_tables_count() -> None:
    """A page of page tables maps 2 MiB: 8 bytes for each page of 4096."""
    code = "import mmap\nm = mmap.mmap(-1, 200_000_000, flags=mmap.MAP_SHARED)\n"
    code += "for i in range(0, len(m), 4096): m[i] = 1"
    with process("pass") as empty, process(code) as child:
        less, more = memory_of(empty.pid), memory_of(child.pid)
        theirs = Path(f"/proc/{child.pid}/status").read_text().partition("VmPTE:")[2].split()[0]
    assert less is not None
    assert more is not None
    assert more.page_tables == int(theirs) * 1024
    assert more.page_tables - less.page_tables == pytest.approx(200_000_000 / 4096 * 8, rel=0.1)
    assert more.unreclaimable - less.unreclaimable >= 200 * MB + (more.page_tables - less.page_tables)


def test_a_process_that_is_gone_has_no_memory() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    if sys.platform == "linux":
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
        assert memory_of(child.pid) is None
        assert resident_of(child.pid) is None
    child.wait()
    assert memory_of(child.pid) is None
    assert resident_of(child.pid) is None
    assert memory_of_all([child.pid]) == Memory()
    assert tree_of(child.pid) == []


def test_one_that_may_not_be_looked_at_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(path: Path) -> dict[str, int]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(memory, "_fields", forbid)
    assert memory_of(os.getpid()) is None
    assert resident_of(os.getpid()) is None


def test_without_proc_there_are_psutils_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: Path) -> dict[str, int]:
        raise FileNotFoundError(2, "No such file", str(path))

    monkeypatch.setattr(memory, "_fields", missing)
    found, resident = memory_of(os.getpid()), resident_of(os.getpid())
    assert found is not None
    assert resident is not None
    assert found.rss >= found.anonymous > MB
    assert resident.rss == resident.private > MB
    missing_pid = 2**22 + 1  # above every pid
    assert memory_of(missing_pid) is None
    assert resident_of(missing_pid) is None


def test_an_older_kernel_tells_anonymous_memory_only(monkeypatch: pytest.MonkeyPatch) -> None:
    rollup = {
        "Rss": 10 * MB,
        "Pss": 6 * MB,
        "Anonymous": 4 * MB,
        "Private_Dirty": 3 * MB,
        "Private_Clean": MB,
        "Swap": 5,
    }
    files = {"smaps_rollup": rollup, "status": {"VmPTE": 7}}
    monkeypatch.setattr(memory, "_fields", lambda path: files[path.name])
    assert memory_of(1) == Memory(10 * MB, 6 * MB, 4 * MB, 4 * MB, 0, 2 * MB, 5, 7, anonymous_rss=4 * MB)


def test_sums_and_peaks() -> None:
    one, two = Memory(1, 2, 3, 4, 5, 6, 7, 8), Memory(8, 7, 6, 5, 4, 3, 2, 1)
    assert one + two == Memory(9, 9, 9, 9, 9, 9, 9, 9)
    assert one.larger(two) == Memory(8, 7, 6, 5, 5, 6, 7, 8)
    assert one.unreclaimable == 4 + 5 + 7 + 8
    assert Resident(100, 1, 2, 97, 3, 4).unreclaimable == 10


@linux
def test_the_tree_holds_children_and_theirs() -> None:
    code = (
        "import subprocess, sys\nc = subprocess.Popen([sys.executable, '-S', '-c', 'input()'], stdin=subprocess.PIPE)\n"
    )
    with process(code) as child:
        grandchildren = [each.pid for each in psutil.Process(child.pid).children()]
        assert len(grandchildren) == 1
        assert tree_of(child.pid) == [child.pid, *grandchildren]
        psutil.Process(grandchildren[0]).kill()


class TestGroups:
    def test_version_2(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pretend("v2", tmp_path, monkeypatch)
        step = tmp_path / "job" / "step"
        write(step / "memory.current", "900\n")
        write(step / "memory.max", "1000\n")
        write(step / "memory.stat", "anon 100\nfile 700\nshmem 50\nkernel 40\n")
        write(step / "memory.events", "low 0\noom 4\noom_kill 3\n")
        write(tmp_path / "job" / "memory.current", "950\n")
        write(tmp_path / "job" / "memory.max", "max\n")
        inner, outer = machine.memory_groups()
        assert inner == machine.GroupMemory(str(step), 1000, 900, 100, 50, 650, 3)
        assert inner.unreclaimable == 250  # with the kernel's own
        assert (outer.limit, outer.used, outer.oom_kills) == (None, 950, 0)
        assert machine.available_in_groups() == 750

    def test_version_1(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pretend("v1", tmp_path, monkeypatch)
        step = tmp_path / "memory" / "job" / "step"
        write(step / "memory.usage_in_bytes", "900\n")
        write(step / "memory.limit_in_bytes", "1000\n")
        write(step / "memory.stat", "cache 1\nrss 1\ntotal_cache 700\ntotal_rss 100\ntotal_shmem 50\n")
        write(step / "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
        write(tmp_path / "memory" / "memory.usage_in_bytes", "5000\n")
        write(tmp_path / "memory" / "memory.limit_in_bytes", "9223372036854771712\n")
        inner, outer = machine.memory_groups()
        assert inner == machine.GroupMemory(str(step), 1000, 900, 100, 50, 650, 3)
        assert (outer.limit, outer.used) == (None, 5000)
        assert machine.available_in_groups() == 750

    def test_none(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pretend("v2", tmp_path, monkeypatch)
        assert machine.memory_groups() == []
        assert machine.available_in_groups() is None


def test_limits_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend("v2", tmp_path, monkeypatch)
    write(tmp_path / "job" / "memory.current", "600000000")
    write(tmp_path / "job" / "memory.max", "700000000")
    found = memory.limits()
    assert (found.memory, found.available) == (700 * MB, 100 * MB)
    assert found.machine_memory == psutil.virtual_memory().total
    assert found.open_files is None or found.open_files > 10
