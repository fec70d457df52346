"""`packshift watch`: what looks mean, told from made-up ones, and the command on real processes."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result
from test_memory import linux, process

from packshift import cli, gpu, memory, processes, watch_view
from packshift.diagnosis import WatchWarning, swings, warnings_of
from packshift.errors import WatchError
from packshift.gpu import Gpu, Gpus
from packshift.machine import GroupMemory
from packshift.memory import Memory
from packshift.processes import Exit, Exits, Process, family
from packshift.trends import slope, steady_growth
from packshift.watching import Look, Peaks, ProcessLook, Watcher

MB, GB = 1_000_000, 1_000_000_000


def made_up(pid: int = 10, role: str = "main", *, name: str = "", parent: int = 10, started: float = 0.0) -> Process:
    name = name or {"worker": "pt_data_worker"}.get(role, "python")
    return Process(pid, parent, (pid, started), name, role, "S", age=1000.0, cpu=0.0, waited=0.0)


def one(
    memory: Memory | None = None, process: Process | None = None, busy: float | None = 0.5, age: float = 1000.0
) -> ProcessLook:
    process = replace(process or made_up(), age=age)
    return ProcessLook(process, memory or Memory(rss=500 * MB, anonymous=400 * MB), cpu=busy, busy=busy)


def look(at: float, *processes: ProcessLook, **others: object) -> Look:
    facts = {
        "available": 20 * GB,
        "limit": 24 * GB,
        "swap_used": 0,
        "swap_total": 8 * GB,
        "group": None,
        "oom_kills": 0,
    }
    return Look(at=at, clock=1e9 + at, processes=processes or (one(),), **{**facts, **others})


def names(history: list[Look], active: tuple[str, ...] = ()) -> list[str]:
    return [warning.name for warning in warnings_of(history, active)]


def only(history: list[Look]) -> WatchWarning:
    (warning,) = warnings_of(history)
    return warning


def growing(rate: float, seconds: int, part: str = "anonymous", **others: object) -> list[Look]:
    """`rate` MB/s in one part of the main process's memory."""
    base = Memory(rss=900 * MB, anonymous=300 * MB, file=200 * MB)
    return [
        look(at, one(replace(base, **{part: getattr(base, part) + int(rate * at * MB)})), **others)
        for at in range(seconds + 1)
    ]


class TestTrends:
    def test_slope_is_not_bent_by_odd_values(self) -> None:
        line = [(float(x), 3.0 * x + 1) for x in range(40)]
        for index in (3, 17, 30, 39):
            line[index] = (float(index), 1e6)
        assert slope(line) == pytest.approx(3.0)

    def test_slope_of_many_points_is_that_of_their_means(self) -> None:
        assert slope([(x / 10, 2.0 * x / 10) for x in range(5000)]) == pytest.approx(2.0)

    def test_slope_of_nothing_is_none(self) -> None:
        assert slope([]) == slope([(1.0, 5.0)]) == slope([(1.0, 5.0), (1.0, 9.0)]) == 0.0

    def test_steady_growth(self) -> None:
        def growth(values: list[float]) -> float:
            return steady_growth([(float(x), y) for x, y in enumerate(values)])

        line = [float(x) for x in range(16)]
        assert growth(line) == pytest.approx(12.0)
        assert growth([100.0 - y for y in line]) == 0
        assert growth([0.0] * 8 + [9.0] * 8) == 0  # a jump
        assert growth([min(y, 6.0) for y in line]) == 0  # levels off
        assert growth([y % 5 for y in line]) == 0  # a saw
        assert growth(line[:7]) == 0  # too few


class TestLeak:
    def test_five_mb_a_second_are_named_with_rate_place_and_time_left(self) -> None:
        warning = only(growing(5, 16))
        assert warning.name == "leak"
        assert "has grown by 300.0 MB/min for 15 s, steadily" in warning.text
        assert "most of it in main python (pid 10) +300.0 MB/min" in warning.text
        assert "the 20.0 GB that are available are used up in 1 h 6 min" in warning.text
        assert "loss.item()" in warning.advice
        assert str(warning).startswith("warning: memory that cannot be taken back")

    def test_not_before_there_is_enough_to_judge(self) -> None:
        assert names(growing(5, 12)) == []

    def test_not_while_the_training_starts(self) -> None:
        history = [
            replace(each, processes=(replace(each.main, process=replace(each.main.process, age=each.at)),))
            for each in growing(5, 30)
        ]
        assert [names(history[:end]) for end in (17, 19)] == [[], []]
        assert names(history[:21]) == ["leak"]

    def test_slow_growth_of_allocators_is_none(self) -> None:
        assert names(growing(0.5, 60)) == []
        assert names(growing(0.1, 600)) == []

    def test_it_stays_until_growth_has_halved(self) -> None:
        history = growing(0.7, 30)
        assert names(history) == []
        assert names(history, active=("leak",)) == ["leak"]
        assert names(growing(0.4, 30), active=("leak",)) == []

    def test_slow_leaks_are_found_over_minutes(self) -> None:
        assert names(growing(0.5, 100)) == []
        assert names(growing(0.5, 300)) == ["leak"]

    def test_also_over_epochs_with_new_workers(self) -> None:
        history = []
        for at in range(0, 400, 2):
            worker = made_up(20 + at // 20, "worker", started=float(at // 20))
            memory = Memory(rss=GB, anonymous=300 * MB + at * MB // 2)
            history.append(look(at, one(memory), one(Memory(rss=GB, anonymous=MB), worker, age=at % 20)))
        assert names(history) == ["leak"]

    def test_batches_that_fill_the_queues_are_none(self) -> None:
        assert names(growing(30, 25, "shared")) == []

    def test_a_saw_is_none(self) -> None:
        history = [look(at, one(Memory(rss=GB, anonymous=300 * MB + at % 6 * 50 * MB))) for at in range(120)]
        assert all(names(history[:end]) == [] for end in range(1, 120))


class TestPageCache:
    def test_growth_of_rss_alone_is_no_leak_and_said_so(self) -> None:
        history = [
            look(at, one(Memory(rss=(100 + 50 * at) * MB, anonymous=90 * MB, file=50 * at * MB))) for at in range(31)
        ]
        warning = only(history)
        assert (warning.name, warning.level) == ("page-cache", "note")
        assert "RSS has grown by 1.5 GB in 30 s, but anonymous and shared memory by 0 bytes only" in warning.text
        assert "no leak" in warning.advice
        assert str(warning).startswith("note: ")

    def test_a_little_is_not_worth_a_word(self) -> None:
        assert names([look(at, one(Memory(rss=(100 + 5 * at) * MB, file=5 * at * MB))) for at in range(31)]) == []

    def test_a_group_full_of_cache(self) -> None:
        group = GroupMemory("/job", 4 * GB, used=3_900 * MB, anonymous=GB, shared=0, file=2_900 * MB, oom_kills=0)
        warning = only([look(0, group=group)])
        assert warning.name == "page-cache"
        assert "has used 3.9 GB of 4.0 GB, but 2.9 GB of that are page cache" in warning.text

    def test_growth_of_the_groups_use(self) -> None:
        def group(at: int) -> GroupMemory:
            return GroupMemory("/job", None, (500 + 50 * at) * MB, 400 * MB, 0, (100 + 50 * at) * MB, 0)

        assert (
            "the control group's use has grown by 1.5 GB" in only([look(at, group=group(at)) for at in range(31)]).text
        )


class TestMachine:
    def test_falling_memory_and_when_it_is_used_up(self) -> None:
        history = [look(at, available=2 * GB - at * 10 * MB, limit=4 * GB) for at in range(31)]
        warning = only(history)
        assert warning.name == "memory-falling"
        assert "falls by 600.0 MB/min: at this rate the 1.7 GB that are left are used up in 2 min 50 s" in warning.text
        assert "something else the rest" in warning.text

    def test_whose_it_is(self) -> None:
        history = [
            look(each.at, *each.processes, available=2 * GB - int(each.at) * 10 * MB) for each in growing(10, 16)
        ]
        texts = {warning.name: warning.text for warning in warnings_of(history)}
        assert "this training takes +600.0 MB/min" in texts["memory-falling"]
        assert set(texts) == {"leak", "memory-falling"}

    def test_a_fall_that_lasts_for_hours_is_none(self) -> None:
        assert names([look(at, available=20 * GB - at * 2 * MB) for at in range(60)]) == []

    def test_little_memory_left(self) -> None:
        assert names([look(0, available=GB)]) == ["memory-low"]
        assert names([look(0, available=1_500 * MB)]) == []
        assert names([look(0, available=1_500 * MB)], active=("memory-low",)) == ["memory-low"]
        group = GroupMemory("/job", 2 * GB, 1_950 * MB, 1_950 * MB, 0, 0, 0)
        text = only([look(0, available=50 * MB, limit=2 * GB, group=group)]).text
        assert text == "only 50.0 MB of 2.0 GB are still available, within this training's control group"

    def test_swap_that_grows(self) -> None:
        warning = only([look(at, swap_used=at * 2 * MB) for at in range(21)])
        assert warning.name == "swap"
        assert "swap grows: 30.0 MB more in 15 s, 40.0 MB of 8.0 GB used" in warning.text

    def test_swap_that_is_full_of_old_things_is_none(self) -> None:
        assert names([look(at, swap_used=4 * GB) for at in range(21)]) == []
        assert names([look(at, swap_used=4 * GB + (at > 10) * 50 * MB) for at in range(21)]) == []

    def test_kills_that_the_group_counts(self) -> None:
        group = GroupMemory("/job", 2 * GB, GB, GB, 0, 0, 0)
        history = [look(at, group=group, oom_kills=7 + (at >= 5) + (at >= 6)) for at in range(9)]
        warning = only(history)
        assert warning.name == "oom-kill"
        assert "the kernel has killed 2 processes for want of memory in this training's control group" in warning.text
        assert "whose limit is 2.0 GB" in warning.text
        assert warning.at == 1e9 + 6
        assert names([look(at, oom_kills=7) for at in range(9)]) == []
        assert names([look(at, oom_kills=int(at > 5)) for at in range(100)]) == []


class TestWorkers:
    first = tuple(made_up(pid, "worker", started=5.0 + pid / 100) for pid in (20, 21, 22, 23))
    second = tuple(made_up(pid, "worker", started=30.0 + pid / 100) for pid in (30, 31, 32, 33))

    def history(self, after: tuple[Process, ...], **statuses: int | None) -> list[Look]:
        """Six looks at the first workers, then six at those `after`; w20=-9: worker 20 ended by signal 9."""
        exits = tuple(Exit(worker, statuses[f"w{worker.pid}"]) for worker in self.first if f"w{worker.pid}" in statuses)
        return [
            look(
                at,
                one(),
                *(one(Memory(), worker, busy=0.1) for worker in (self.first if at < 6 else after)),
                exits=exits if at == 6 else (),
            )
            for at in range(12)
        ]

    def test_the_end_of_an_epoch_is_in_order(self) -> None:
        assert names(self.history(self.second, w20=0, w21=0, w22=0, w23=0)) == []
        assert names(self.history(self.second, w20=0, w21=-15, w22=-15, w23=0)) == []
        assert names(self.history(self.second, w20=None, w21=None, w22=None, w23=None)) == []
        assert names(self.history((), w20=None, w21=0, w22=None, w23=0)) == []

    def test_one_killed_and_all_started_again(self) -> None:
        warning = only(self.history(self.second, w20=-9, w21=0, w22=0, w23=0))
        assert warning.name == "worker-died"
        assert "worker pt_data_worker (pid 20) was killed (SIGKILL) at " in warning.text
        assert warning.text.endswith(", and workers were started again")
        assert "want of memory" in warning.advice

    def test_one_missing_while_the_others_go_on(self) -> None:
        assert (
            "was found missing, while those started with it go on" in only(self.history(self.first[1:], w20=None)).text
        )

    def test_a_worker_that_its_parent_ended_is_in_order(self) -> None:
        assert names(self.history(self.first[1:], w20=-15)) == []

    @pytest.mark.parametrize(
        ("status", "words"),
        [
            (-7, "bus error (SIGBUS)"),
            (-11, "crashed (SIGSEGV)"),
            (-6, "crashed (SIGABRT)"),
            (3, "ended with exit code 3"),
        ],
    )
    def test_how_it_ended(self, status: int, words: str) -> None:
        assert words in only(self.history(self.second, w20=status)).text

    def test_several(self) -> None:
        text = only(self.history((), w20=-9, w21=-9)).text
        assert "(in 11 s: 2 workers)" in text

    def test_other_children_may_end_as_they_like(self) -> None:
        history = [look(0), look(1, exits=(Exit(made_up(50, "other"), 1), Exit(made_up(51, "helper"), -9))), look(2)]
        assert names(history) == []

    def test_it_is_said_for_a_minute(self) -> None:
        history = self.history(self.second, w20=-9)
        later = [look(at) for at in range(12, 90)]
        assert names([*history, *later[:50]]) == ["worker-died"]
        assert names([*history, *later]) == []


class TestStarving:
    def history(
        self, main: Callable[[int], float], workers: float, *, gpu: Callable[[int], float] | None = None, count: int = 2
    ) -> list[Look]:
        processes = [made_up(20 + number, "worker") for number in range(count)]
        return [
            look(
                at,
                one(busy=main(at)),
                *(one(Memory(), each, busy=workers) for each in processes),
                gpus=() if gpu is None else (Gpu(0, gpu(at), GB, 8 * GB, True),),
            )
            for at in range(16)
        ]

    def test_busy_workers_and_a_consumer_that_waits(self) -> None:
        warning = only(self.history(lambda at: (0.1, 0.8)[at % 2], 0.99))
        assert warning.name == "starving"
        assert "the main process works for 45% of the time, swinging between 10% and 80%" in warning.text
        assert "the workers are busy for 99% of it: the loader is the bottleneck" in warning.text

    def test_a_gpu_that_swings(self) -> None:
        warning = only(self.history(lambda at: 1.0, 0.95, gpu=lambda at: (0.3, 0.9, 0.3)[at % 3]))
        assert "the GPU is used for 49% of the time, swinging between 30% and 90%" in warning.text
        assert "num_workers" in warning.advice

    def test_a_gpu_that_waits_for_a_main_process_without_workers(self) -> None:
        text = only(self.history(lambda at: 1.0, 0.0, gpu=lambda at: (0.2, 0.9)[at % 2], count=0)).text
        assert text.endswith("main python (pid 10) is busy for 100% of it: the GPU waits for the main process")

    def test_healthy(self) -> None:
        assert names(self.history(lambda at: 0.95, 0.99)) == []  # both work
        assert names(self.history(lambda at: 0.1, 0.3)) == []  # the main process waits for a GPU that is not seen
        assert names(self.history(lambda at: 1.0, 0.99, gpu=lambda at: 0.9)) == []
        assert names(self.history(lambda at: 1.0, 0.3, gpu=lambda at: 0.5)) == []

    def test_idle_workers_of_another_loader_do_not_hide_it(self) -> None:
        history = self.history(lambda at: 0.2, 0.99)
        idle = one(Memory(), made_up(40, "worker"), busy=0.0)
        assert names([replace(each, processes=(*each.processes, idle)) for each in history]) == ["starving"]

    def test_ranks_whose_parent_only_waits_are_not_taken_for_workers(self) -> None:
        rank = one(Memory(), made_up(40, "worker", name="python"), busy=1.0)
        assert names([look(at, one(busy=0.0), rank) for at in range(16)]) == []

    def test_new_workers_may_take_their_time(self) -> None:
        history = self.history(lambda at: 0.0, 1.0)
        young = [
            replace(
                each,
                processes=(each.main, *(replace(w, process=replace(w.process, age=each.at / 2)) for w in each.workers)),
            )
            for each in history
        ]
        assert names(young) == []

    def test_swings(self) -> None:
        assert swings([0.3, 0.9, 0.5, 0.3, 0.9]) == 3
        assert swings([0.5, 0.6, 0.5]) == 0


def test_nothing_to_say_about_nothing() -> None:
    assert warnings_of([]) == []
    assert warnings_of([look(0)]) == []


@linux
class TestProcesses:
    def test_roles(self) -> None:
        """A fork is a worker, and so is what spawn starts; multiprocessing's tracker and a program are none."""
        code = """
import multiprocessing, os, subprocess, sys, time
os.fork() or time.sleep(60)
context = multiprocessing.get_context("spawn")
if __name__ == "__main__":
    sys.argv[0] = ""
    context.Process(target=time.sleep, args=(60,), daemon=True).start()
    subprocess.Popen(["sleep", "60"])
"""
        with process(code) as child:
            deadline = time.monotonic() + 10
            expected = ["helper", "main", "other", "worker", "worker"]
            found = family(child.pid)
            while sorted(each.role for each in found) != expected and time.monotonic() < deadline:
                time.sleep(0.1)
                found = family(child.pid)
            try:
                assert sorted(each.role for each in found) == expected
                assert next(each for each in found if each.role == "other").name == "sleep"
                assert all(each.alive and each.parent == child.pid for each in found[1:])
            finally:
                for each in found[1:]:
                    os.kill(each.pid, signal.SIGKILL)

    def test_a_rank_with_workers_of_its_own_is_no_worker(self) -> None:
        with process("import os, time\nos.fork() or (os.fork(), time.sleep(60))") as child:
            deadline = time.monotonic() + 10
            found = family(child.pid)
            while len(found) < 3 and time.monotonic() < deadline:  # the second fork may be to come
                time.sleep(0.02)
                found = family(child.pid)
            try:
                assert [each.role for each in found] == ["main", "other", "worker"]
                assert found[2].parent == found[1].pid
            finally:
                for each in found[1:]:
                    os.kill(each.pid, signal.SIGKILL)

    @pytest.mark.parametrize(
        ("end", "status", "name"),
        [("os._exit(0)", 0, None), ("os._exit(3)", 3, None), ("os.kill(os.getpid(), 9)", -9, "SIGKILL")],
    )
    def test_how_a_worker_ended_is_read_before_its_parent_asks(self, end: str, status: int, name: str | None) -> None:
        code = f"import os, time\nif os.fork() == 0:\n    time.sleep(0.5)\n    {end}"
        with process(code) as child, Exits() as exits:
            found = family(child.pid)
            assert [each.role for each in found] == ["main", "worker"]
            exits.follow(found)
            exits.wait(1.0, child.pid)
            (ended,) = exits.take()
            assert (ended.process.key, ended.status, ended.signal_name) == (found[1].key, status, name)
            assert exits.take() == ()
            assert [each.pid for each in family(child.pid)] == [child.pid]

    def test_waiting_ends_with_the_process(self) -> None:
        with process("pass") as child, Exits() as exits:
            exits.follow(family(child.pid))
            child.kill()
            began = time.monotonic()
            exits.wait(20.0, child.pid)
            assert time.monotonic() - began < 5
            assert exits.take()[0].signal_name == "SIGKILL"

    def test_without_pidfds_a_missing_process_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
        with process("pass") as child, Exits() as exits:
            found = family(child.pid)
            exits.follow(found)
            exits.wait(0.05, child.pid)
            exits.follow([])
            assert exits.take() == (Exit(found[0], None),)

    def test_a_process_that_the_kernel_did_not_list_is_looked_up_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with process("import os, time\nos.fork() or time.sleep(60)") as child:
            known = family(child.pid)
            monkeypatch.setattr(processes, "children_of", lambda pid: [])
            assert [each.pid for each in family(child.pid)] == [child.pid]
            assert [each.pid for each in family(child.pid, known)] == [each.pid for each in known]
            os.kill(known[1].pid, signal.SIGKILL)

    def test_without_proc_psutil_tells(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with process("import os, time\nos.fork() or time.sleep(60)") as child:
            expected = family(child.pid)
            monkeypatch.setattr(processes, "_text", lambda path: "")
            monkeypatch.setattr(processes, "_HAS_PROC", False)
            monkeypatch.setattr(processes, "_KERNEL_LISTS_CHILDREN", False)
            found = family(child.pid)
            assert [(each.pid, each.parent, each.name, each.role) for each in found] == [
                (each.pid, each.parent, each.name, each.role) for each in expected
            ]
            os.kill(expected[1].pid, signal.SIGKILL)


class TestGpus:
    def fake(self, monkeypatch: pytest.MonkeyPatch, pids: dict[int, list[int]]) -> None:
        class NVMLError(Exception):
            pass

        def utilization(handle: int) -> SimpleNamespace:
            if handle == 2:
                raise NVMLError
            return SimpleNamespace(gpu=40 + handle)

        library = SimpleNamespace(
            NVMLError=NVMLError,
            nvmlInit=lambda: None,
            nvmlDeviceGetCount=lambda: len(pids),
            nvmlDeviceGetHandleByIndex=lambda index: index,
            nvmlDeviceGetUtilizationRates=utilization,
            nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=handle * GB, total=8 * GB),
            nvmlDeviceGetComputeRunningProcesses=lambda handle: [SimpleNamespace(pid=pid) for pid in pids[handle]],
        )
        monkeypatch.setitem(sys.modules, "pynvml", library)

    def test_those_that_the_training_uses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fake(monkeypatch, {0: [1], 1: [10], 2: [11]})
        assert Gpus().look([10, 11]) == (Gpu(1, 0.41, GB, 8 * GB, True), Gpu(2, None, 2 * GB, 8 * GB, True))

    def test_all_where_the_driver_does_not_tell(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fake(monkeypatch, {0: [], 1: []})
        found = Gpus().look([10])
        assert [each.own for each in found] == [None, None]
        assert look(0, gpus=found).gpu_use is None
        assert look(0, gpus=found[:1]).gpu_use == 0.4

    def test_none_without_library_or_driver(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", None)
        assert Gpus().look([10]) == ()
        self.fake(monkeypatch, {0: []})

        def fail() -> None:
            raise sys.modules["pynvml"].NVMLError

        monkeypatch.setattr(sys.modules["pynvml"], "nvmlInit", fail)
        assert gpu.Gpus().look([10]) == ()


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.main, ["watch", *map(str, arguments)])


@contextmanager
def watching(pid: int, *options: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "packshift", "watch", str(pid), *options]
    watcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield watcher
    finally:
        watcher.kill()
        watcher.communicate()


@linux
class TestCommand:
    def test_once(self) -> None:
        with process("x = bytearray(30_000_000)") as child:
            result = run(child.pid, "--once")
        assert result.exit_code == 0, result.output
        lines = result.stdout.splitlines()
        assert lines[0].split() == ["process", "pid", "busy", "RSS", "PSS", "USS", "shared", "trend"]
        assert lines[1].startswith("main python")
        assert str(child.pid) in lines[1]
        assert lines[2].startswith("all ")
        assert "cannot be taken back: anonymous" in lines[3]
        assert lines[4].startswith("available ")

    def test_once_as_json(self) -> None:
        with process("x = bytearray(30_000_000)") as child:
            result = run(child.pid, "--once", "--json")
        document = json.loads(result.stdout)
        assert document["kind"] == "look"
        assert document["processes"][0]["pid"] == child.pid
        assert document["processes"][0]["anonymous_mb"] > 30
        assert document["total"]["unreclaimable_mb"] > 30
        assert 0 <= document["processes"][0]["busy"] <= 1
        assert document["warnings"] == [] or document["warnings"][0]["name"] == "memory-low"
        assert document["gpus"] == [] or document["gpus"][0]["index"] == 0

    def test_until_the_process_ends_with_a_log(self, tmp_path: Path) -> None:
        log = tmp_path / "memory.csv"
        for _ in range(2):
            with (
                process("x = bytearray(30_000_000)") as child,
                watching(child.pid, "--interval", "0.2", "--log", log) as w,
            ):
                assert w.stdout is not None
                first = w.stdout.readline()
                assert "1 process: " in first
                assert "kept" in first
                assert len(log.read_text().splitlines()) >= 2
                w.stdout.readline()
                child.kill()
                rest, errors = w.communicate(timeout=20)
            assert (w.returncode, errors) == (0, "")
            assert f"process {child.pid} was ended by SIGKILL; watched for " in rest
            assert f"main python (pid {child.pid}): peak RSS " in rest
        with log.open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert sum(row["time"] == "time" for row in rows) == 0
        assert len(rows) >= 4
        assert all(float(row["unreclaimable_mb"]) > 30 and row["processes"] == "1" for row in rows)

    def test_ctrl_c_prints_the_summary_and_leaves_the_process_alone(self) -> None:
        with process("pass") as child, watching(child.pid, "--interval", "0.2", "--json") as watcher:
            assert watcher.stdout is not None
            json.loads(watcher.stdout.readline())
            watcher.send_signal(signal.SIGINT)
            rest, errors = watcher.communicate(timeout=20)
            assert child.poll() is None
        assert (watcher.returncode, errors) == (0, "")
        summary = json.loads(rest.splitlines()[-1])
        assert summary["kind"] == "summary"
        assert "goes on without being watched" in summary["end"]
        assert summary["peaks"][0]["rss_mb"] > 1

    def test_no_such_process(self) -> None:
        result = run(2**22 + 1)
        assert result.exit_code == 1
        assert result.stderr.startswith(f"packshift: there is no process {2**22 + 1}: ")

    def test_a_process_that_may_not_be_looked_at(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(memory, "_fields", lambda path: (_ for _ in ()).throw(PermissionError(13, "no")))
        monkeypatch.setattr("packshift.watching._is_forbidden", lambda pid: True)
        with process("pass") as child:
            result = run(child.pid)
        assert result.exit_code == 1
        assert "and its memory may not be read: run this as " in result.stderr

    def test_a_process_that_has_ended(self) -> None:
        child = subprocess.Popen([sys.executable, "-S", "-c", ""])
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        result = run(child.pid)
        child.wait()
        assert result.exit_code == 1
        assert "has no memory to look at: it has ended" in result.stderr

    @pytest.mark.parametrize("arguments", [("x",), (0,), (1, "--interval", "0")])
    def test_wrong_usage(self, arguments: tuple[object, ...]) -> None:
        result = run(*arguments)
        assert result.exit_code == 2
        assert len(result.stderr.splitlines()) == 1

    def test_a_log_of_another_kind_is_left_alone(self, tmp_path: Path) -> None:
        log = tmp_path / "notes.csv"
        log.write_text("my,own,table\n")
        with process("pass") as child:
            result = run(child.pid, "--once", "--log", log)
            assert result.exit_code == 1
            assert "has other columns: choose another file for --log" in result.stderr
            assert log.read_text() == "my,own,table\n"
            result = run(child.pid, "--once", "--log", tmp_path / "missing" / "x.csv")
        assert result.exit_code == 1
        assert "x.csv: cannot be written: No such file or directory" in result.stderr


class Terminal(io.StringIO):
    encoding = "ascii"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


class TestViews:
    def session(self, *looks: Look) -> watch_view.Session:
        session = watch_view.Session(1.0)
        for each in looks:
            session.add(each)
        return session

    def test_a_terminal_is_drawn_over_and_never_wider_than_it_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "60")
        monkeypatch.setenv("LINES", "20")
        out = Terminal()
        session = watch_view.Session(1.0)
        view = watch_view._view(session, out, once=False, as_json=False)
        workers = [one(Memory(uss=pid), made_up(pid, "worker", name="w\u00f6rker")) for pid in range(20, 60)]
        for at in range(2):
            view.look(session.add(look(at, one(), *workers, available=MB)))
        first, second = out.getvalue().split("\x1b[J")
        lines = first.splitlines()[:-1]
        assert first.endswith(f"\x1b[{len(lines)}A\r")
        assert len(lines) < 20
        assert all(len(line) < 60 for line in lines)
        assert "more" in first
        assert second.splitlines()[0].startswith("process")
        monkeypatch.setenv("LINES", "6")
        view.look([])
        assert len(out.getvalue().rpartition("\x1b[J")[2].splitlines()) == 5
        assert "warning: only 1.0 MB" in second

    def test_a_new_event_is_told_though_its_warning_is_there(self) -> None:
        session = watch_view.Session(1.0)
        worker = made_up(20, "worker")
        told = [
            [each.name for each in session.add(look(at, exits=(Exit(worker, -9),) if at in (1, 3) else ()))]
            for at in range(5)
        ]
        assert told == [[], ["worker-died"], [], ["worker-died"], []]

    def test_summary(self) -> None:
        session = self.session(*growing(5, 20))
        lines = watch_view.summary_lines(session, "process 10 has ended")
        assert lines[0] == "process 10 has ended; watched for 20 s, 21 looks"
        assert lines[1].startswith("peak of all together: 400.0 MB that cannot be taken back")
        assert lines[2].startswith("  main python (pid 10): peak RSS 900.0 MB")
        assert lines[-1].startswith("warning after 14 s: memory that cannot be taken back")
        assert watch_view.summary_lines(self.session(look(0)), "x")[-1] == "no warnings"

    def test_trends_and_parts_in_one_line(self) -> None:
        group = GroupMemory("/job", 4 * GB, 2 * GB, GB, 100 * MB, 900 * MB, 0)
        session = self.session(*growing(5, 20, group=group, gpus=(Gpu(0, 0.5, GB, 8 * GB, True),)))
        line = watch_view.look_line(session)
        assert "1 process: 400.0 MB kept (+300.0 MB/min)" in line
        assert "busy: main 50%" in line
        assert "control group 2.0 GB, limit 4.0 GB (anonymous 1.0 GB, shared 100.0 MB, page cache 900.0 MB" in line
        assert "GPU 0 50% used, 1.0 GB of 8.0 GB" in line

    def test_many_ended_workers_are_summed_up(self) -> None:
        peaks = Peaks()
        session = watch_view.Session(1.0)
        session.add(look(0, one(), *(one(Memory(), made_up(pid, "worker")) for pid in range(20, 50))))
        assert "  ... and 21 more, none of them larger" in watch_view.summary_lines(session, "x")
        assert peaks.least_available is None


@linux
def test_a_leak_is_seen_in_a_real_process() -> None:
    """50 MB/s for 3 s, a look every tenth of a second, which the rules see as 5 MB/s for 30 s."""
    code = """
import threading, time
kept = []
def leak():
    while True:
        kept.append(b"x" * 5_000_000)
        time.sleep(0.1)
threading.Thread(target=leak, daemon=True).start()
"""
    with process(code) as child, Watcher(child.pid) as watcher:
        looks = []
        for _ in range(31):
            seen = watcher.look()
            assert seen is not None
            looks.append(seen)
            watcher.wait(0.1)
    begin = looks[0].at
    slowed = [
        replace(
            each,
            at=begin + (each.at - begin) * 10,
            available=20 * GB,
            processes=(replace(each.main, process=replace(each.main.process, age=100.0)),),
        )
        for each in looks
    ]
    assert "leak" in names(slowed)


@linux
def test_a_worker_that_is_killed_is_named_by_the_command() -> None:
    code = "import os, time\nwhile os.fork():\n    os.wait()\n    time.sleep(0.3)\ntime.sleep(60)"
    parent = subprocess.Popen([sys.executable, "-S", "-c", code])
    try:
        with watching(parent.pid, "--interval", "0.2", "--json") as watcher:
            assert watcher.stdout is not None
            named, killed = None, set()
            deadline = time.monotonic() + 20
            while named is None and time.monotonic() < deadline:
                document = json.loads(watcher.stdout.readline())
                named = next((each for each in document["warnings"] if each["name"] == "worker-died"), None)
                for each in document["processes"][1:]:
                    if each["pid"] not in killed:
                        killed.add(each["pid"])
                        os.kill(each["pid"], signal.SIGKILL)
        assert named is not None
        assert "was killed (SIGKILL)" in named["text"]
    finally:
        for each in family(parent.pid)[1:]:
            os.kill(each.pid, signal.SIGKILL)
        parent.kill()
        parent.wait()


def test_a_watcher_says_what_it_cannot_watch() -> None:
    with pytest.raises(WatchError, match="there is no process"):
        Watcher(2**22 + 1)
