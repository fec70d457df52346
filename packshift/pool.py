"""Processes that decode pictures, and what they decoded in the order in which it was asked for.

Pixels travel in one arena of shared memory, in slots that are used again, so nothing is copied through a pipe. Up to
`LARGEST_ARENA` bytes of finished pictures wait for one that takes long, so that a huge file or a slow disk does not keep
the other processes from working; in ordinary running only a few slots are ever touched.

Where this process has one thread alone, as the command has, the processes are forked from it, which takes milliseconds.
Otherwise, since a lock that another thread holds would stay locked for ever in a forked child, they are started afresh,
which takes a fifth of a second.

A process that dies is replaced, and the pictures that it had are decoded once more, one by one. A picture whose process
dies twice is at fault; one whose process is killed from outside, after four times.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from packshift.errors import SourceError, UsageError
from packshift.machine import usable_memory
from packshift.preprocess import get_ready
from packshift.record import Entry, Sample
from packshift.settings import Preprocessing
from packshift.worker import Answer, Assignment, become_worker, source_state, unpack

BATCH = 4
"""Pictures sent to a process at a time: sparing switches between processes is worth 3 % of the time."""

BATCHES_AHEAD = 2
"""Batches that a process has to hand, so that it never waits for the next."""

LARGEST_ARENA = 256 << 20
_SHARE_OF_MEMORY = 16
_MOST_SLOTS = 4096
_MOST_KILLS = 4  # times that a picture's process may be killed from outside before the picture is left out
_OWN_SIZE_SLOT = 4 << 20  # where every picture keeps its own size: larger ones travel through the socket
_START = "import sys; sys.path[:] = sys.argv[2:]; from packshift.worker import serve; serve(int(sys.argv[1]))"


class Decoded(NamedTuple):
    """What became of one picture: an entry and its pixels, valid until the next one is asked for, or a reason.

    `source_state` is the (size in bytes, mtime in ns) of a file that gave no entry.
    """

    sample: Sample
    entry: Entry | None
    reason: str
    pixels: memoryview | None
    source_state: tuple[int, int]
    messages: tuple[str, ...]


@dataclass
class _Pending:
    """A picture on its way: `order` is its place in line, `deaths` how many processes died over it."""

    order: int
    sample: Sample
    slot: int
    deaths: int = 0


class _Process(Protocol):
    """What of `subprocess.Popen` is needed here."""

    @property
    def pid(self) -> int: ...
    def kill(self) -> None: ...
    def wait(self) -> int: ...


class _ForkedProcess:
    """A child of `os.fork`, by the interface of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def kill(self) -> None:
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        if self._code is None:
            _, status = os.waitpid(self.pid, 0)
            self._code = os.waitstatus_to_exitcode(status)
        return self._code


@dataclass
class _Worker:
    process: _Process
    connection: Connection
    stderr_fd: int
    ready: bool = False
    batches: deque[list[_Pending]] = field(default_factory=deque)

    @property
    def was_killed(self) -> bool:
        """Whether somebody else ended it, rather than a fault of its own."""
        return self.process.wait() in (-signal.SIGKILL, -signal.SIGTERM)

    def last_words(self) -> str:
        """The last line that it printed, or how it ended."""
        code = self.process.wait()
        ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        size = os.fstat(self.stderr_fd).st_size
        lines = os.pread(self.stderr_fd, 4096, max(0, size - 4096)).decode("utf-8", "replace").split("\n")
        words = [" ".join(line.split()) for line in lines if line.strip()]
        return f"{ended}: {words[-1][:200]}" if words else ended

    def close(self) -> None:
        """End it at once: it holds nothing that could be lost."""
        self.connection.close()
        self.process.kill()
        self.process.wait()
        os.close(self.stderr_fd)


def _shared_file(name: str) -> int:
    """A descriptor of a file that has no name and lives in memory (on systems without memfd: on disk)."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class DecodingPool:
    """`jobs` processes that decode pictures under `root`. `loader` names the function that does it, for tests."""

    def __init__(
        self, root: str, settings: Preprocessing, jobs: int, *, loader: str = "packshift.preprocess:load_record"
    ) -> None:
        shape = settings.shape
        self._batch = BATCH if shape else 1
        self._slot_bytes = shape[0] * shape[1] * shape[2] if shape else _OWN_SIZE_SLOT
        self._slot_bytes = -(-self._slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        at_least = jobs * self._batch * BATCHES_AHEAD + self._batch
        budget = min(LARGEST_ARENA, usable_memory() // _SHARE_OF_MEMORY)
        self._slots = max(at_least, min(_MOST_SLOTS, budget // self._slot_bytes))
        self._free = list(range(self._slots - 1, -1, -1))
        self._held_bytes = 0
        self._budget = budget
        self._jobs = jobs
        self._workers: list[_Worker] = []
        self._deaths_at_start = 0
        arena_bytes = self._slots * self._slot_bytes
        self._arena_fd = _shared_file("packshift-pixels")
        try:
            os.ftruncate(self._arena_fd, arena_bytes)
            self._arena = memoryview(mmap.mmap(self._arena_fd, arena_bytes))
        except OSError as error:
            os.close(self._arena_fd)
            raise UsageError(
                f"{arena_bytes / 1e6:,.0f} MB of shared memory for pixels cannot be had: {error.strerror}: raise the limit "
                "(ulimit -v, -f), or use fewer jobs"
            ) from error
        self._assignment = Assignment(root, settings, loader, self._arena_fd, arena_bytes, self._slot_bytes)
        try:
            self._workers = [self._start() for _ in range(jobs)]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> DecodingPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the processes and give the shared memory back."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.close()
        self._workers = []
        os.close(self._arena_fd)  # the map goes when nobody looks at pixels any more

    def wait_until_ready(self) -> None:
        """Wait until every process has started, so that what follows can be timed."""
        run = _Run(iter(()), 0)
        while not all(worker.ready for worker in self._workers):
            self._collect(run)

    def outcomes(self, samples: Iterable[Sample], count: int) -> Generator[Decoded, None, None]:
        """One outcome per sample, in the order of `samples`, of which there are `count`."""
        run = _Run(iter(samples), count)
        while run.given < count:
            self._hand_out(run)
            if run.given in run.answers:
                yield from self._give(run)
            else:
                self._collect(run)

    def _give(self, run: _Run) -> Iterator[Decoded]:
        """The finished pictures that are next in line."""
        while run.given in run.answers:
            pending, answer = run.answers.pop(run.given)
            pixels = None
            if answer.entry is not None and answer.pixels is not None:
                pixels = memoryview(answer.pixels)
                self._held_bytes -= len(pixels)
            elif answer.entry is not None:
                start = pending.slot * self._slot_bytes
                pixels = self._arena[start : start + answer.entry.nbytes]
            try:
                yield Decoded(pending.sample, answer.entry, answer.reason, pixels, answer.source_state, answer.messages)
            finally:
                if pixels is not None:
                    pixels.release()
            self._free.append(pending.slot)
            run.given += 1

    def _hand_out(self, run: _Run) -> None:
        while run.waiting or not run.exhausted:
            worker = min(self._workers, key=lambda each: len(each.batches))
            if len(worker.batches) >= BATCHES_AHEAD:
                return
            if self._held_bytes > self._budget and not run.waiting:  # the one that all wait for may be among those
                return
            batch = run.waiting.popleft() if run.waiting else self._next_batch(run)
            if not batch:
                return
            worker.batches.append(batch)
            try:
                worker.connection.send([(each.sample.name, each.sample.label, each.slot) for each in batch])
            except (BrokenPipeError, ConnectionResetError):
                self._bury(worker, run)

    def _next_batch(self, run: _Run) -> list[_Pending]:
        """Up to `BATCH` pictures; the last ones singly, so that all processes end at the same time."""
        left = run.count - run.taken
        size = 1 if left <= 2 * self._batch * self._jobs else self._batch
        if len(self._free) < size:
            return []
        batch = [
            _Pending(run.taken + number, sample, self._free.pop())
            for number, sample in enumerate(islice(run.samples, min(size, left)))
        ]
        run.taken += len(batch)
        run.exhausted = run.taken >= run.count
        return batch

    def _collect(self, run: _Run) -> None:
        """Wait until at least one process has answered or ended."""
        by_connection: dict[Any, _Worker] = {worker.connection: worker for worker in self._workers}
        for connection in wait(list(by_connection)):
            worker = by_connection[connection]
            try:
                answers = worker.connection.recv()
            except (EOFError, OSError):
                self._bury(worker, run)
                continue
            if answers is None:
                worker.ready = True
                self._deaths_at_start = 0
                continue
            for pending, answer in zip(worker.batches.popleft(), answers, strict=True):
                self._keep(run, pending, unpack(answer))

    def _keep(self, run: _Run, pending: _Pending, answer: Answer) -> None:
        if answer.fatal == "memory":
            raise MemoryError
        if answer.fatal:
            raise SourceError(answer.fatal)
        if answer.pixels is not None:
            self._held_bytes += len(answer.pixels)
        run.answers[pending.order] = pending, answer

    def _bury(self, worker: _Worker, run: _Run) -> None:
        """Replace a process that died; the pictures it had come up again, the ones it worked on singly."""
        words = worker.last_words()
        if not worker.ready:
            self._deaths_at_start += 1
            if self._deaths_at_start > 2:
                raise UsageError(f"jobs {self._jobs}: a decoding process does not start ({words}); use fewer")
        else:
            # Being killed from outside, for want of memory perhaps, says less about the picture than a crash does.
            for pending in worker.batches.popleft() if worker.batches else ():
                pending.deaths += 1
                if pending.deaths > (_MOST_KILLS if worker.was_killed else 1):
                    state = source_state(self._assignment.root, pending.sample.name)
                    self._keep(run, pending, Answer(reason=f"its decoder crashes ({words})", source_state=state))
                else:
                    run.waiting.append([pending])
        run.waiting.extendleft(reversed(worker.batches))
        worker.batches.clear()
        self._workers.remove(worker)
        worker.close()
        self._workers.append(self._start())

    def _start(self) -> _Worker:
        with ExitStack() as undo:
            try:
                ours, theirs = socket.socketpair()
                undo.callback(ours.close)
                with theirs:
                    stderr_fd = _shared_file("packshift-messages")
                    undo.callback(os.close, stderr_fd)
                    start = _fork if _is_single_threaded() else _spawn
                    process = start(theirs.fileno(), self._arena_fd, stderr_fd)
            except OSError as error:
                raise UsageError(
                    f"jobs {self._jobs}: no more processes can be started: {error.strerror}; use fewer"
                ) from error
            undo.pop_all()
        worker = _Worker(process, Connection(ours.detach()), stderr_fd)
        with suppress(BrokenPipeError, ConnectionResetError):  # it died at once: `_collect` finds out and says why
            worker.connection.send(self._assignment)
        return worker


def _is_single_threaded() -> bool:
    """Whether this process has one thread, native ones counted; False where that cannot be known."""
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False


def _fork(socket_fd: int, arena_fd: int, stderr_fd: int) -> _Process:
    get_ready()
    pid = os.fork()
    if pid:
        return _ForkedProcess(pid)
    code = 1
    try:
        become_worker(socket_fd, arena_fd, stderr_fd)
        code = 0
    except BaseException:  # noqa: BLE001  # printed, and the end of this process, which is not the one that has files to finish
        traceback.print_exc()
    finally:
        os._exit(code)


def _spawn(socket_fd: int, arena_fd: int, stderr_fd: int) -> _Process:
    return subprocess.Popen(
        [sys.executable, "-c", _START, str(socket_fd), *sys.path],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr_fd,
        pass_fds=(socket_fd, arena_fd),
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONUTF8": str(sys.flags.utf8_mode),  # the same names for the same files
        },
    )


@dataclass
class _Run:
    """The state of one call of `outcomes`."""

    samples: Iterator[Sample]
    count: int
    taken: int = 0
    given: int = 0
    exhausted: bool = False
    waiting: deque[list[_Pending]] = field(default_factory=deque)
    answers: dict[int, tuple[_Pending, Answer]] = field(default_factory=dict)
