"""Runs one trial in a fresh process and watches it: a trial that crashes, hangs or takes too much memory is an answer, not
the end of the program that asked.

Fresh, since memory that an earlier trial left behind, threads and loaded libraries would be measured with it. In a session
of its own, so that everything it started can be ended with it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import IO, Any

import psutil

from packshift.memory import Memory, memory_of, open_shared_memory, tree_of

_START = "import sys; sys.path[:] = sys.argv[2:]; from packshift.trial import main; main(int(sys.argv[1]))"
_LONGEST_WORDS = 300
_TRACKER = "multiprocessing.resource_tracker"
_TRACKER_SECONDS = 2.0


LOADERS = ("dataloader", "threads")


@dataclass(frozen=True)
class Trial:
    """What to measure.

    `path` is a store, or a folder of pictures to be read with `size` and `fit`. `images` limits how many of its items
    are used (None: all). `loader` is "dataloader" (stock, `num_workers` processes) or "threads" (packshift's Loader,
    `num_workers` threads). With `limit` the machine's own limit is measured afterwards, one thread with nothing around it:
    a gather of batches from the page cache into one buffer, or for a folder of pictures decoding alone. With `growth`
    memory is looked at before and after what is timed.

    `seconds` is the least time measured, `batches` the least number of batches; `step_ms` is how long the consumer
    works on each batch without the CPU, as the owner of a GPU does; `step_matmul` how many matrix products of 512 x 512
    it computes for each. A `cold` trial drops the data from the page cache first and times one epoch from its first
    batch on, the start of the workers included.

    `carried` is a file with a dataset and a step of the user (`packshift.carried`) in the place of `path` and `step_ms`.
    With `fill` the consumer brings about, after the time is up, the most memory that a training can meet: it stands still
    until the queues must be full, holds a batch of each worker in turn, and takes all that is ready at once.
    """

    path: str
    loader: str = "dataloader"
    batch_size: int = 64
    num_workers: int = 0
    prefetch_factor: int | None = None
    start_method: str | None = None
    pin_memory: bool = False
    size: tuple[int, int] | None = None
    fit: str = "crop"
    images: int | None = None
    seconds: float = 1.0
    batches: int | None = None
    step_ms: float = 0.0
    step_matmul: int = 0
    cold: bool = False
    seed: int = 0
    carried: str | None = None
    fill: bool = False
    limit: bool = False
    growth: bool = False


@dataclass(frozen=True)
class Ended:
    """How a trial ended: its result, or in words why there is none.

    `peak_bytes` is the most memory seen that the kernel could not take back, None where nobody looked. `over_limit`:
    it was ended because it went over `memory_limit`.
    """

    result: dict[str, Any] | None
    error: str | None
    peak_bytes: int | None
    over_limit: bool = False


Sample = Callable[[Mapping[int, Memory]], None]
"""Called with the memory of every process of a trial, main process first."""


def run_trial(
    trial: Trial,
    *,
    timeout: float,
    memory_limit: int | None = None,
    sample_every: float | None = None,
    on_sample: Sample | None = None,
) -> Ended:
    """Run a trial in a process started for it, see `TrialProcess.run`."""
    with trial_process() as process:
        return process.run(
            trial, timeout=timeout, memory_limit=memory_limit, sample_every=sample_every, on_sample=on_sample
        )


@contextmanager
def trial_process() -> Iterator[TrialProcess]:
    """A fresh process that imports what a trial needs, which takes seconds, and waits to be told which one.

    Two can import at the same time and then measure one after the other. While both are there, the pages of the libraries
    count as shared between them: what memory a trial takes is seen only by the last one.
    """
    with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as words, ExitStack() as stack:
        ready, imported = os.pipe()
        stack.callback(os.close, ready)
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", _START, str(imported), *sys.path],
                stdin=subprocess.PIPE,
                stdout=answer,
                stderr=words,
                pass_fds=[imported],
                start_new_session=True,
            )
        finally:
            os.close(imported)
        stack.callback(_end, process)
        yield TrialProcess(process, ready, answer, words)


class TrialProcess:
    """What `trial_process` started."""

    def __init__(self, process: subprocess.Popen[bytes], ready: int, answer: IO[bytes], words: IO[bytes]) -> None:
        self._process = process
        self._ready = ready
        self._answer = answer
        self._words = words

    def wait_until_ready(self, timeout: float) -> None:
        """Wait until everything is imported, or the process has ended, but no longer than `timeout` seconds."""
        select.select([self._ready], [], [], timeout)

    def run(
        self,
        trial: Trial,
        *,
        timeout: float,
        memory_limit: int | None = None,
        sample_every: float | None = None,
        on_sample: Sample | None = None,
    ) -> Ended:
        """Run one trial, and end. It is ended after `timeout` seconds, and when it goes over `memory_limit` bytes.

        Memory is sampled every `sample_every` seconds (None: not at all, unless there is a limit, then every 20 ms), and
        `on_sample` called with it.
        """
        interval = 0.02 if sample_every is None and memory_limit is not None else sample_every
        stdin = self._process.stdin
        assert stdin is not None  # it is a pipe
        with suppress(BrokenPipeError):  # where it has ended already, `_ended` says how
            stdin.write(json.dumps(asdict(trial)).encode())
            stdin.close()
        try:
            peak, reason = _watch(self._process, timeout, memory_limit, interval, on_sample)
        finally:
            _end(self._process)
        return _ended(self._process.returncode, self._answer, self._words, peak, reason)


def _watch(
    process: subprocess.Popen[bytes],
    timeout: float,
    memory_limit: int | None,
    interval: float | None,
    on_sample: Sample | None,
) -> tuple[int | None, str | None]:
    """(peak in bytes, why it has to be ended or None) once the process has ended or has to."""
    deadline = time.monotonic() + timeout
    if interval is None:
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None, f"no result after {timeout:.0f} s"
        return None, None
    peak = 0
    while process.poll() is None:
        looks = ((pid, memory_of(pid)) for pid in tree_of(process.pid))
        found = {pid: memory for pid, memory in looks if memory is not None}
        mapped = sum(memory.shared for memory in found.values())
        on_the_way = max(0, open_shared_memory(found) - mapped)  # mapped by nobody, but charged
        peak = max(peak, sum(memory.unreclaimable for memory in found.values()) + on_the_way)
        if on_sample is not None:
            on_sample(found)
        if memory_limit is not None and peak > memory_limit:
            return peak, f"needs more than {memory_limit / 1e6:,.0f} MB: {peak / 1e6:,.0f} MB when it was ended"
        if time.monotonic() > deadline:
            return peak, f"no result after {timeout:.0f} s"
        time.sleep(interval)
    return peak, None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and everything in its session; workers may outlive it.

    The resource tracker of multiprocessing comes last: when the others are gone, it removes what they have left in
    /dev/shm, and ends.
    """
    trackers = []
    for pid in _session_of(process.pid):
        with suppress(psutil.Error, ProcessLookupError):
            if any(_TRACKER in word for word in psutil.Process(pid).cmdline()):
                trackers.append(pid)
            else:
                os.kill(pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + _TRACKER_SECONDS
    while time.monotonic() < deadline and any(map(psutil.pid_exists, trackers)):
        time.sleep(0.005)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.stdin is not None:
        with suppress(BrokenPipeError):
            process.stdin.close()


def _session_of(leader: int) -> list[int]:
    found = []
    for pid in psutil.pids():
        with suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == leader:
                found.append(pid)
    return found


def _ended(code: int, answer: IO[bytes], words: IO[bytes], peak: int | None, reason: str | None) -> Ended:
    if reason is not None:
        return Ended(None, reason, peak, over_limit=reason.startswith("needs more"))
    answer.seek(0)
    lines = answer.read().decode("utf-8", "replace").strip().splitlines()
    if code == 0 and lines:
        return Ended(json.loads(lines[-1]), None, peak)
    ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    last = _last_words(words)
    return Ended(None, f"{ended}: {last}" if last else ended, peak)


def _last_words(words: IO[bytes]) -> str:
    size = words.seek(0, os.SEEK_END)
    words.seek(max(0, size - 16_384))
    lines = [" ".join(line.split()) for line in words.read().decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1][:_LONGEST_WORDS] if lines else ""
