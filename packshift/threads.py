"""Work on several threads whose results come back in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from packshift.errors import UsageError

_Task = TypeVar("_Task")
_Done = TypeVar("_Done")


def in_order(function: Callable[[_Task], _Done], tasks: Iterable[_Task], jobs: int) -> Iterator[_Done]:
    """`function(task)` of every task, in order, computed on `jobs` threads; at most three tasks a job are under way."""
    waiting: deque[Future[_Done]] = deque()
    pool = ThreadPoolExecutor(jobs, thread_name_prefix="packshift")
    try:
        for task in tasks:
            waiting.append(_submit(pool, function, task, jobs))
            if len(waiting) > 2 * jobs:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _submit(pool: ThreadPoolExecutor, function: Callable[[_Task], _Done], task: _Task, jobs: int) -> Future[_Done]:
    try:
        return pool.submit(function, task)
    except RuntimeError as error:  # the system gives no more threads
        raise UsageError(f"jobs {jobs}: {error}; use fewer") from error
