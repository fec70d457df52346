"""What a verification finds, collected while it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from packshift.text import printable

SOURCE_KINDS = frozenset({"added", "removed", "changed", "classes", "pixels"})
"""Kinds of problems that are differences from the source; all others are faults of the store."""

MOST_PROBLEMS = 10_000
"""Problems beyond this many are counted, not described: a store of millions of bad records must not fill the memory."""

Progress = Callable[[str, int, int], None]
"""Called with ("bytes", bytes read, bytes in all), then, with a source, ("pictures", pictures done, pictures in all)."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    `kind` is "structure" (the file's layout), "header", "array", "record", or, against a source, "added", "removed",
    "changed" (a source file is another one now), "classes" or "pixels" (the source's file is the same, its pixels are
    not). `index` and `path` (relative to the source folder) say which record, where it is one.
    """

    kind: str
    text: str
    index: int | None = None
    path: str | None = None

    def __str__(self) -> str:
        if self.index is not None:
            name = f" ({printable(self.path)})" if self.path is not None else ""
            return f"record {self.index}{name}: {self.text}"
        return f"{printable(self.path)}: {self.text}" if self.path is not None else self.text


class Findings:
    """Collects problems and notes while a verification runs."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.counts: Counter[str] = Counter()
        self.notes: list[str] = []

    def add(self, kind: str, text: str, index: int | None = None, path: str | None = None) -> None:
        self.counts[kind] += 1
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(Problem(kind, text, index, path))
