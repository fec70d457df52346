"""What `packshift bench` found out, for a terminal and as CSV.

A terminal has 100 columns: speed and memory are two tables, so that each fits, with a bar beside the speeds. Whatever
cases differ in besides format, loader and workers is a line above the cases that share it, not a column.
"""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from packshift.bench_results import Bench, Row
from packshift.bench_words import (
    CONSUMER_COLUMNS,
    MEMORY_COLUMNS,
    MEMORY_COLUMNS_EXPLAINED,
    SPEED_COLUMNS,
    STAGES_EXPLAINED,
    STAGES_HEAD,
    STAGES_TITLE,
    Column,
    best_rows,
    consumer_text,
    grouped,
    heading_text,
    note_texts,
    setting_texts,
    size_text,
    sizes,
    stage_lines,
    verdict_texts,
)
from packshift.text import counted, printable

_GAP = "  "
_NAME_WIDTH = 12
_REASON_LENGTH = 400
_SHORTEST_BAR = 4
_BEST, _TITLE, _FAILED = "1;32", "1", "31"  # ANSI: bold green, bold, red


def bench_text(bench: Bench, width: int = 100, colour: bool = False, encoding: str = "utf-8") -> str:
    """All results for a terminal that is `width` columns wide; with less than 90, a table may be wider than it.

    The best cells have a star, with `colour` also a colour; the recommended case has an arrow. Bars are made of "#" where
    `encoding` has no block characters.
    """
    page = _Page(bench, width, colour, _blocks(encoding))
    return "\n\n".join("\n".join(line.rstrip() for line in part) for part in page.parts())


def bench_csv(bench: Bench) -> str:
    """One line a case under the names of Row's fields. Empty is not measured; several values have spaces between them."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [field.name for field in fields(Row)]
    writer.writerow(names)
    writer.writerows([_csv_value(getattr(row, name)) for name in names] for row in bench.rows)
    return text.getvalue()


def _csv_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return printable(value) if isinstance(value, str) else value


@dataclass(frozen=True)
class _Page:
    """The parts of the text, each a few lines."""

    bench: Bench
    width: int
    colour: bool
    blocks: str

    def parts(self) -> Iterator[list[str]]:
        bench = self.bench
        measured = [row for row in bench.rows if row.error is None]
        machine = "; ".join(f"{name} {text}" for name, text in setting_texts(bench.machine))
        yield self._wrapped(f"packshift bench: {heading_text(bench)}") + self._wrapped(machine)
        yield [self._title("speed"), *self._table(SPEED_COLUMNS, bench.rows, bars=True)]
        if stages := list(stage_lines(measured)):
            yield [self._title(STAGES_TITLE), *_stage_table(stages), *self._wrapped(STAGES_EXPLAINED)]
        if any(column.value(row) is not None for row in measured for column in MEMORY_COLUMNS):
            table = self._table(MEMORY_COLUMNS, measured)
            yield [self._title("memory, MB"), *table, *self._wrapped(MEMORY_COLUMNS_EXPLAINED)]
        if (consumer := consumer_text(bench.settings)) and measured:
            yield [self._title(f"with {consumer}"), *self._table(CONSUMER_COLUMNS, measured)]
        yield [self._title(f"on disk, {counted(bench.images, 'picture')}"), *self._sizes()]
        yield ["* best of its column" + ("   > recommended" if bench.verdict else "")]
        if notes := note_texts(bench):
            yield [line for note in notes for line in self._wrapped(f"note: {note}")]
        yield [line for sentence in verdict_texts(bench) for line in self._wrapped(sentence)]

    def _sizes(self) -> Iterator[str]:
        for size in sizes(self.bench.rows):
            yield f"  {_name(size.format):<{_NAME_WIDTH}}{size_text(size):>10}{_GAP}{size.making(self.bench.images)}"

    def _table(self, columns: Sequence[Column], rows: Sequence[Row], *, bars: bool = False) -> Iterator[str]:
        cases = _Aligned([("format", "loader", "workers"), *map(_key, rows)])
        cells = [_Cells(column, rows) for column in columns]
        for line, names in enumerate((("", "", ""), ("format", "loader", "workers"))):
            yield _GAP.join(["  " + cases.line(names), *(each.head(line) for each in cells)])
        bar_width = self.width - 2 - cases.width - sum(each.width + len(_GAP) for each in cells) - len(_GAP)
        groups = grouped(rows)
        for group, members in groups.items():
            if len(groups) > 1:
                yield f"  {group or 'without workers'}:"
            for row in members:
                start = ("> " if self._recommended(row) else "  ") + cases.line(_key(row))
                if row.error is not None:
                    yield from self._failure(start, row.error)
                else:
                    figures = [self._painted(*each.cell(row)) for each in cells]
                    yield _GAP.join([start, *figures, self._bar(row, bar_width) if bars else ""])

    def _failure(self, start: str, error: str) -> Iterator[str]:
        reason = textwrap.shorten(f"failed: {printable(error)}", _REASON_LENGTH, placeholder=" ...")
        for line in textwrap.wrap(reason, max(20, self.width - len(start + _GAP)), break_on_hyphens=False):
            yield start + _GAP + self._painted(line, _FAILED)
            start = " " * len(start)

    def _recommended(self, row: Row) -> bool:
        return self.bench.verdict is not None and row == self.bench.verdict.row

    def _bar(self, row: Row, width: int) -> str:
        fastest = max(each.images_per_s or 0 for each in self.bench.rows)
        if width < _SHORTEST_BAR or not fastest or row.images_per_s is None:
            return ""
        steps = max(1, round(row.images_per_s / fastest * width * len(self.blocks)))
        full, rest = divmod(steps, len(self.blocks))
        return self.blocks[-1] * full + (self.blocks[rest - 1] if rest else "")

    def _title(self, text: str) -> str:
        return self._painted(text, _TITLE)

    def _painted(self, text: str, style: str) -> str:
        return f"\x1b[{style}m{text}\x1b[0m" if self.colour and style else text

    def _wrapped(self, text: str) -> list[str]:
        return textwrap.wrap(text, self.width, subsequent_indent="  ", break_on_hyphens=False)


def _stage_table(lines: Sequence[tuple[str, ...]]) -> Iterator[str]:
    cells = [STAGES_HEAD, *((_name(line[0]), *line[1:]) for line in lines)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for name, *figures in cells:
        yield _GAP.join(
            [f"  {name:<{widths[0]}}", *(f"{text:>{width}}" for text, width in zip(figures, widths[1:], strict=True))]
        )


class _Aligned:
    """Names on the left, the number of workers on the right."""

    def __init__(self, keys: Sequence[tuple[str, str, str]]) -> None:
        self._widths = [max(map(len, cells)) for cells in zip(*keys, strict=True)]
        self.width = sum(self._widths) + len(_GAP) * (len(self._widths) - 1)

    def line(self, key: tuple[str, str, str]) -> str:
        format, loader, workers = self._widths
        return _GAP.join([f"{key[0]:<{format}}", f"{key[1]:<{loader}}", f"{key[2]:>{workers}}"])


class _Cells:
    """A column of figures; the star of the best has a place of its own, so that digits stay below each other."""

    def __init__(self, column: Column, rows: Sequence[Row]) -> None:
        self._column = column
        self._best = best_rows(column, rows)
        self._star = "*" if self._best else ""
        texts = [column.text(row) for row in rows if row.error is None]
        self.width = max(map(len, [*column.head, *texts])) + len(self._star)

    def head(self, line: int) -> str:
        return f"{self._column.head[line] + ' ' * len(self._star):>{self.width}}"

    def cell(self, row: Row) -> tuple[str, str]:
        best = any(row is each for each in self._best)
        mark = "*" if best else " " * len(self._star)
        return f"{self._column.text(row) + mark:>{self.width}}", _BEST if best else ""


def _key(row: Row) -> tuple[str, str, str]:
    return _name(row.format), _name(row.loader), f"{row.num_workers}"


def _name(name: str) -> str:
    name = printable(name)
    return name if len(name) <= _NAME_WIDTH else name[: _NAME_WIDTH - 1] + "~"


def _blocks(encoding: str) -> str:
    """Characters of a bar from an eighth of a column to a whole one, or just "#"."""
    blocks = "▏▎▍▌▋▊▉█"
    try:
        blocks.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return "#"
    return blocks
