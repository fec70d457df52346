"""A process that decodes pictures for a conversion: it reads batches of them from a socket, puts the pixels into shared
memory and answers with what is known about each.

A process of its own for three reasons. A decoder that crashes takes this process with it, not the conversion. What C
libraries print while they decode goes to file descriptor 2, which here is a file that is read after each picture, so
every line is known to belong to that picture. And Python's interpreter lock is not shared, which two threads pay for
with 4 to 5 % of their time.

It is started with `python -c`, or forked (`packshift.pool` says when), rather than by multiprocessing, which would run the
user's main module once more in each process and needs scripts to be guarded against that.
"""

from __future__ import annotations

import mmap
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from packshift.errors import ImageError, SourceError
from packshift.record import Entry, Record, Sample, bytes_of, encode_name
from packshift.settings import Preprocessing

Loader = Callable[[str, Sample, Preprocessing], Record]

_STDERR = 2
_MOST_CHATTER = 64 << 10  # bytes read of what one picture's decoder printed
_MOST_KINDS = 20
_LONGEST_KIND = 160


@dataclass(frozen=True)
class Assignment:
    """What a worker is told once. `loader` is "module:function" of the type `Loader`.

    The arena is `arena_bytes` of shared memory behind the descriptor `arena_fd`, in slots of `slot_bytes`.
    """

    root: str
    settings: Preprocessing
    loader: str
    arena_fd: int
    arena_bytes: int
    slot_bytes: int


NO_FILE = (-1, -1)


def source_state(root: str, name: str) -> tuple[int, int]:
    """(size in bytes, mtime in ns) of a source file, by which a later run tells whether it is still the same."""
    try:
        found = os.stat(os.path.join(os.fsencode(root), encode_name(name)))
    except OSError:
        return NO_FILE
    return found.st_size, found.st_mtime_ns


def folder_identity(root: str) -> tuple[int, int] | None:
    """Which folder this is, None where there is none: a mount that went away leaves another one behind."""
    try:
        found = os.stat(root)
    except OSError:
        return None
    return found.st_dev, found.st_ino


class Task(NamedTuple):
    """One picture to decode, and the number of the slot for its pixels."""

    sample: Sample
    slot: int


class Answer(NamedTuple):
    """What became of one picture: an entry, or the reason why there is none.

    `pixels` are its bytes where they did not fit into the slot. `source_state` is that of a file that gave no entry.
    `messages` are the kinds of messages that its decoder printed. `fatal` is what must end the conversion: "memory", or
    a message.
    """

    entry: Entry | None = None
    reason: str = ""
    pixels: bytes | None = None
    source_state: tuple[int, int] = NO_FILE
    messages: tuple[str, ...] = ()
    fatal: str = ""


def pack(answer: Answer) -> tuple[Any, ...]:
    """An answer as plain tuples, which are pickled in half the time."""
    return (*answer[1:], None if answer.entry is None else tuple(answer.entry))


def unpack(packed: tuple[Any, ...]) -> Answer:
    return Answer(None if packed[-1] is None else Entry._make(packed[-1]), *packed[:-1])


def serve(socket_fd: int) -> None:
    """Work until the other end of the socket is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the conversion ends its workers
    connection = Connection(socket_fd)
    assignment: Assignment = connection.recv()
    module, name = assignment.loader.split(":")
    decode = _Decoder(assignment, getattr(import_module(module), name))
    connection.send(None)
    while True:
        try:
            tasks = connection.recv()
        except EOFError:
            return
        connection.send([pack(decode(Task(Sample(name, label), slot))) for name, label, slot in tasks])


def become_worker(socket_fd: int, arena_fd: int, stderr_fd: int) -> None:
    """Turn a forked child into a worker: nothing of what its parent had open stays open, least of all the locked file."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(stderr_fd, _STDERR)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > _STDERR and int(name) not in (socket_fd, arena_fd):
            with suppress(OSError):  # the descriptor of the listing itself
                os.close(int(name))
    # Open until the process ends, which flushes nothing: a line at a time.
    sys.stderr = open(_STDERR, "w", 1, "utf-8", "backslashreplace", closefd=False)  # noqa: SIM115
    serve(socket_fd)


class _Decoder:
    def __init__(self, assignment: Assignment, load: Loader) -> None:
        self._assignment = assignment
        self._load = load
        self._arena = memoryview(mmap.mmap(assignment.arena_fd, assignment.arena_bytes))
        self._chatter = Chatter()

    def __call__(self, task: Task) -> Answer:
        answer = self._answer(task)
        messages = self._chatter.take(task.sample.name)
        return answer._replace(messages=messages) if messages else answer

    def _answer(self, task: Task) -> Answer:
        try:
            record = self._load(self._assignment.root, task.sample, self._assignment.settings)
        except ImageError as error:
            state = source_state(self._assignment.root, task.sample.name)
            return Answer(reason=str(error), source_state=state)
        except SourceError as error:
            return Answer(fatal=str(error))
        except MemoryError:
            return Answer(fatal="memory")
        entry = Entry.of(record)
        data = bytes_of(record.pixels)
        if entry.nbytes > self._assignment.slot_bytes:
            return Answer(entry, pixels=bytes(data))
        start = task.slot * self._assignment.slot_bytes
        self._arena[start : start + entry.nbytes] = data
        return Answer(entry)


class Chatter:
    """Collects what is printed to standard error, by C libraries too, and Python's warnings."""

    def __init__(self) -> None:
        self._warnings: list[str] = []
        warnings.simplefilter("always")
        warnings.showwarning = self._show

    def _show(self, message: Warning | str, *_: Any, **__: Any) -> None:
        self._warnings.append(str(message))

    def take(self, name: str) -> tuple[str, ...]:
        """The kinds of messages since the last call, each once; `name` is the picture's, which is cut out of them."""
        if not self._warnings and not os.fstat(_STDERR).st_size:
            return ()
        lines = [*self._warnings, *_printed()]
        self._warnings.clear()
        return tuple(dict.fromkeys(kind for kind in (kind_of(line, name) for line in lines) if kind))[:_MOST_KINDS]


def _printed() -> list[str]:
    text = os.pread(_STDERR, _MOST_CHATTER, 0)
    os.ftruncate(_STDERR, 0)
    os.lseek(_STDERR, 0, os.SEEK_SET)
    if len(text) == _MOST_CHATTER:
        text = text[: text.rfind(b"\n") + 1] or text  # no half line
    return text.decode("utf-8", "replace").splitlines()


def kind_of(line: str, name: str = "") -> str:
    """A message without what differs from picture to picture: its name, numbers and addresses."""
    if name:
        line = line.replace(name, "...")
    line = re.sub(r"0x[0-9a-fA-F]+|\d+(\.\d+)?", "N", line)
    return " ".join(line.split())[:_LONGEST_KIND]
