"""MemoryMonitor: what it sees in its own process and its workers, what it costs, and that it never gets in the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable

import pytest
from test_memory import linux

from packshift import MemoryMonitor, monitor
from packshift.errors import UsageError

MB = 1_000_000


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def script(code: str) -> subprocess.CompletedProcess[str]:
    """A Python process of its own, free of what the tests before have started."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done


def test_it_sees_a_peak_that_is_over() -> None:
    with MemoryMonitor(interval=0.02) as watching:
        before = watching.peak
        samples = watching.report().samples
        block = bytearray(os.urandom(1000) * 100_000)
        until(lambda: watching.report().samples > samples + 2)
        del block
    report = watching.report()
    assert watching.peak >= before + 99 * MB
    assert report.peak == watching.peak
    assert report.processes[0].pid == os.getpid()
    assert report.processes[0].role == "main"
    assert report.processes[0].peak_private >= before * 0.5 + 99 * MB
    assert report.error is None
    assert "that cannot be taken back" in str(report)
    assert not watching.running


@linux
def test_workers_are_there_with_peak_and_slope() -> None:
    done = script("""
        import os, time
        from packshift import MemoryMonitor

        with MemoryMonitor(interval=0.02, log=lambda line: None) as monitor:
            pid = os.fork()
            if pid == 0:
                kept = []
                for _ in range(40):
                    kept.append(b"x" * 1_000_000)
                    time.sleep(0.02)
                os._exit(0)
            os.waitpid(pid, 0)
        main, worker = monitor.report().processes
        assert (main.pid, worker.pid, worker.role) == (os.getpid(), pid, "worker")
        assert worker.peak_private > main.peak_private + 30e6, (main, worker)
        assert 5e6 < worker.slope < 60e6, worker.slope
        assert monitor.peak > 38e6
        print("seen")
    """)
    assert done.stdout == "seen\n"


def test_a_line_every_so_many_steps() -> None:
    lines: list[str] = []
    with MemoryMonitor(steps=10, log=lines.append) as watching:
        for _ in range(35):
            watching.step()
    assert [line.split(":")[0] for line in lines] == ["10 steps", "20 steps", "30 steps"]
    assert "; main " in lines[0]
    assert "available at least" in lines[0]


def test_a_line_every_so_many_seconds() -> None:
    lines: list[str] = []
    with MemoryMonitor(interval=0.02, every=0.05, log=lines.append):
        until(lambda: len(lines) >= 3)
    assert all(line.startswith("memory ") for line in lines)


def test_lines_go_to_stderr_by_default() -> None:
    done = script("""
        from packshift import MemoryMonitor
        with MemoryMonitor(steps=1) as monitor:
            monitor.step()
    """)
    assert done.stdout == ""
    assert done.stderr.startswith("packshift: 1 step: memory ")


def test_a_log_that_fails_does_not_end_the_training() -> None:
    def fail(line: str) -> None:
        raise ValueError("disk full")

    with MemoryMonitor(interval=0.02, steps=1, every=0.02, log=fail) as watching:
        watching.step()
        until(lambda: watching.report().samples > 3)
    assert watching.report().error == "log failed: ValueError: disk full"
    assert str(watching.report()).endswith("monitoring ended early: log failed: ValueError: disk full")


def test_sampling_that_fails_does_not_end_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(pid: int) -> list[object]:
        raise OSError("no /proc today")

    with MemoryMonitor(interval=0.02) as watching:
        monkeypatch.setattr(monitor, "family", fail)
        until(lambda: watching.report().error is not None)
    assert watching.report().error == "OSError: no /proc today"
    with MemoryMonitor() as not_started:
        not_started.step()
    assert not not_started.running
    assert not_started.report().error == "OSError: no /proc today"


def test_it_can_be_started_again() -> None:
    watching = MemoryMonitor(interval=0.02)
    assert watching.peak == 0
    for _ in range(2):
        assert watching.start() is watching.start()
        until(lambda: watching.report().samples >= 2)
        watching.stop()
        watching.stop()
        assert 2 <= watching.report().samples < 1000
    names = [thread.name for thread in threading.enumerate()]
    assert "packshift-memory" not in names


@pytest.mark.parametrize("arguments", [{"interval": 0}, {"interval": "1"}, {"every": -1}, {"steps": 0}, {"steps": 1.5}])
def test_arguments_that_cannot_be_right(arguments: dict) -> None:
    with pytest.raises(UsageError, match=next(iter(arguments))):
        MemoryMonitor(**arguments)


@linux
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
class TestFork:
    def test_a_fork_has_a_monitor_that_does_nothing(self) -> None:
        lines: list[str] = []
        with MemoryMonitor(interval=0.01, steps=1, log=lines.append) as watching:
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    lines.clear()
                    watching.step()
                    watching.stop()
                    threads = [thread.name for thread in threading.enumerate()]
                    if not watching.running and not lines and threads == ["MainThread"] and not monitor._running:
                        code = 0
                finally:
                    os._exit(code)
            assert os.waitpid(pid, 0)[1] == 0
            assert watching.running

    def test_a_fork_may_have_one_of_its_own(self) -> None:
        lines: list[str] = []
        with MemoryMonitor(interval=0.01, every=0.01, log=lines.append) as watching:
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    lines.clear()
                    with watching:
                        until(lambda: len(lines) >= 2)
                    code = 0 if watching.report().processes[0].pid == os.getpid() else 2
                finally:
                    os._exit(code)
            assert os.waitpid(pid, 0)[1] == 0

    def test_a_fork_waits_for_a_log_that_is_being_written(self) -> None:
        """What the log does is not cut in half in the child, such as a lock that would stay locked there for ever."""
        lock = threading.Lock()
        inside = threading.Event()

        def log(line: str) -> None:
            with lock:
                inside.set()
                time.sleep(0.05)

        with MemoryMonitor(interval=0.01, every=0.01, log=log):
            for _ in range(5):
                inside.clear()
                assert inside.wait(10)
                pid = os.fork()
                if pid == 0:
                    os._exit(0 if lock.acquire(timeout=1) else 1)
                assert os.waitpid(pid, 0)[1] == 0

    def test_a_log_that_hangs_holds_a_fork_up_for_a_second_only(self) -> None:
        release, inside = threading.Event(), threading.Event()

        def log(line: str) -> None:
            inside.set()
            release.wait(20)

        watching = MemoryMonitor(interval=0.01, every=0.01, log=log).start()
        assert inside.wait(10)
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert time.monotonic() - began < 5
        release.set()
        watching.stop()

    def test_many_forks_while_it_samples_and_says(self) -> None:
        """Children that print and fork themselves: none hangs."""
        done = script("""
            import os, sys
            from packshift import MemoryMonitor
            with MemoryMonitor(interval=0.01, every=0.01, log=lambda line: print(line, file=sys.stderr)):
                for _ in range(200):
                    pid = os.fork()
                    if pid == 0:
                        print("child", flush=True)
                        os._exit(0)
                    assert os.waitpid(pid, 0)[1] == 0
        """)
        assert done.stdout.count("child") == 200

    def test_dataloader_workers(self) -> None:
        done = script("""
            import torch
            from torch.utils.data import DataLoader
            from packshift import MemoryMonitor
            with MemoryMonitor(interval=0.02, log=lambda line: None) as monitor:
                for _ in range(3):
                    for batch in DataLoader(torch.arange(200.0), batch_size=10, num_workers=2):
                        monitor.step()
            report = monitor.report()
            assert report.error is None
            assert {process.role for process in report.processes} == {"main", "worker"}, report
            print(len([process for process in report.processes if process.role == "worker"]))
        """)
        assert int(done.stdout) >= 2


def test_processes_that_ended_are_forgotten_but_for_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "_MOST_ENDED", 2)
    watching = MemoryMonitor(interval=1000)
    children = [subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) for _ in range(4)]
    watching.start()
    until(lambda: all(os.path.exists(f"/proc/{child.pid}") or sys.platform != "linux" for child in children))
    watching._sample()
    assert {child.pid for child in children} <= {each.pid for each in watching.report().processes}
    for child in children:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    watching._sample()
    left = {each.pid for each in watching.report().processes} & {child.pid for child in children}
    assert len(left) == 2
    watching.stop()
