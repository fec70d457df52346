"""What `packshift bench` found out, in words: the columns of its tables, sizes, the verdict. For terminal and HTML alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packshift.bench_results import STAGES, Bench, Row
from packshift.text import counted, human_bytes, human_time, printable

PICTURES = "jpeg"  # the format of those who read the pictures themselves
MEMORY_COLUMNS_EXPLAINED = (
    "Look at total: what the kernel cannot take back from all processes together, the figure that gets a job killed. "
    "USS is what a process holds alone, page cache that only it has mapped included; PSS adds its share of what several "
    "hold. RSS counts the page cache of a mapped file in full in every process that reads it, so that LMDB looks huge; "
    "the kernel takes that back when it is needed."
)

_MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Column:
    """A figure of a case: its head in two short lines, its full name, and which value is best (`max`, `min`, neither)."""

    head: tuple[str, str]
    name: str
    value: Callable[[Row], float | None]
    show: Callable[[float], str]
    best: Callable[[Iterable[float]], float] | None = None

    def text(self, row: Row) -> str:
        value = self.value(row)
        return "-" if value is None else self.show(value)


def number(value: float) -> str:
    """Three digits or all before the point: 0.123, 4.56, 78.9, 12,345."""
    if abs(value) >= 10_000_000:
        return f"{value:.2e}"
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"


def _whole(value: float) -> str:
    return number(value) if abs(value) >= 10_000_000 else f"{value:,.0f}"


def _percent(value: float) -> str:
    return f"{value * 100:.1f}%" if 0 < abs(value) < 0.1 else f"{value * 100:.0f}%"


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


SPEED_COLUMNS = (
    Column(("", "images/s"), "images/s", lambda row: row.images_per_s, number, max),
    Column(("", "spread"), "spread of the runs", lambda row: row.images_per_s_spread, _percent),
    Column(("% of", "limit"), "share of the machine's limit", lambda row: row.limit_fraction, _percent),
    Column(("", "MB/s"), "MB/s", lambda row: row.mb_per_s, number),
    Column(("first", "batch ms"), "first batch, ms", lambda row: _milliseconds(row.first_batch_s), number, min),
    Column(("CPU s", "per 1k"), "CPU s per 1,000 images", lambda row: row.cpu_s_per_1k, number, min),
)
MEMORY_COLUMNS = (
    Column(("worker", "RSS"), "worker RSS, MB", lambda row: row.worker_rss_mb, _whole),
    Column(("worker", "PSS"), "worker PSS, MB", lambda row: row.worker_pss_mb, _whole),
    Column(("worker", "USS"), "worker USS, MB", lambda row: row.worker_uss_mb, _whole, min),
    Column(("main", "USS"), "main process USS, MB", lambda row: row.main_uss_mb, _whole, min),
    Column(("shared", "memory"), "shared memory in flight, MB", lambda row: row.shm_mb, _whole),
    Column(("", "total"), "total, MB", lambda row: row.total_mb, _whole, min),
)
CONSUMER_COLUMNS = (
    Column(("total", "MB"), "total memory, MB", lambda row: row.total_mb, _whole, min),
    Column(("consumer", "busy"), "consumer busy", lambda row: row.busy, _percent, max),
    Column(("iterations", "per s"), "iterations/s", lambda row: row.batches_per_s, number, max),
    Column(("", "images/s"), "images/s", lambda row: row.images_per_s, number, max),
)


def best_rows(column: Column, rows: Sequence[Row]) -> list[Row]:
    """The rows whose cell is the best of a column, as it is shown; none where all cells are the same.

    Cold and warm cases are not compared with each other.
    """
    if column.best is None:
        return []
    found = []
    for cold in (False, True):
        measured = [row for row in rows if row.cold == cold and column.value(row) is not None]
        shown = {column.text(row) for row in measured}
        if len(shown) > 1:
            best = column.best(value for row in measured if (value := column.value(row)) is not None)
            found += [row for row in measured if column.text(row) == column.show(best)]
    return found


STAGES_TITLE = "where the time goes, ms per picture, one thread"
STAGES_EXPLAINED = (
    "read: bytes of the file, or pixels of the store, from the page cache; convert: orientation, RGB, scaling, cutting; "
    "transfer: what a DataLoader with num_workers=0 adds."
)
STAGES_HEAD = ("format", *STAGES, "in all")


def stage_lines(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Cells under STAGES_HEAD for each format whose time was split: milliseconds, each stage with its share."""
    for row in rows:
        total = sum(row.stages.values())
        if total:
            yield printable(row.format), *(_stage(row.stages.get(name), total) for name in STAGES), number(total)


def _stage(milliseconds: float | None, total: float) -> str:
    return "-" if milliseconds is None else f"{number(milliseconds)} ({milliseconds / total:.0%})"


def case_text(row: Row) -> str:
    """A case in words: "lmdb, dataloader, 2 workers"."""
    unit = "thread" if row.loader == "threads" else "worker"
    return f"{printable(row.format)}, {printable(row.loader)}, {counted(row.num_workers, unit)}"


_CIRCUMSTANCES: tuple[tuple[str, Callable[[Row], Any]], ...] = (
    ("batch size {}", lambda row: row.batch_size),
    ("prefetch factor {}", lambda row: row.prefetch_factor),
    ("start method {}", lambda row: row.start_method),
    ("{} page cache", lambda row: "cold" if row.cold else "warm"),
)


def _values(circumstance: Callable[[Row], Any], rows: Sequence[Row]) -> list[Any]:
    return [value for value in dict.fromkeys(map(circumstance, rows)) if value is not None]


def grouped(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows under what sets them apart besides format, loader and workers; one group "" where nothing does."""
    differing = [(words, value) for words, value in _CIRCUMSTANCES if len(_values(value, rows)) > 1]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        group = ", ".join(words.format(value(row)) for words, value in differing if value(row) is not None)
        groups.setdefault(group, []).append(row)
    return groups


def common_text(rows: Sequence[Row]) -> str:
    """What all rows have in common besides format, loader and workers, as far as it applies to them."""
    values = [(words, _values(value, rows)) for words, value in _CIRCUMSTANCES]
    return ", ".join(words.format(found[0]) for words, found in values if len(found) == 1)


def consumer_text(settings: Mapping[str, Any]) -> str:
    """What the consumer did with each batch; "" where there was none."""
    if settings.get("step_ms"):
        return f"a consumer that works {settings['step_ms']:g} ms on each batch"
    if settings.get("step_matmul"):
        return "a consumer that multiplies matrices on each batch" + _matrix_size(settings["step_matmul"])
    return ""


def _matrix_size(value: Any) -> str:
    return "" if isinstance(value, bool) else f" (step_matmul {value})"


@dataclass(frozen=True)
class Size:
    """A format on disk: MB for the pictures of the run, and seconds to make it, None where it was there."""

    format: str
    megabytes: float
    seconds: float | None

    def making(self, images: int) -> str:
        if self.format == PICTURES:
            return "the pictures themselves"
        if self.seconds is None:
            return "was there"
        rate = f", {images / self.seconds:,.0f} images/s" if self.seconds else ""
        return f"converted in {human_time(self.seconds)}{rate}"


def sizes(rows: Sequence[Row]) -> list[Size]:
    return list(dict.fromkeys(Size(row.format, row.store_mb, row.convert_s) for row in rows if row.store_mb))


def size_text(size: Size) -> str:
    return human_bytes(size.megabytes * _MEGABYTE)


def heading_text(bench: Bench) -> str:
    pictures = (
        counted(bench.images, "picture")
        if bench.images == bench.source_images
        else f"{bench.images:,} of {counted(bench.source_images, 'picture')}"
    )
    facts = [pictures, counted(len(bench.rows), "case"), human_time(bench.seconds), common_text(bench.rows)]
    return ", ".join(fact for fact in facts if fact)


def setting_texts(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and values of the machine or the settings, in words; what is not set is left out.

    Whole numbers under a name that ends with `_bytes` are sizes.
    """
    for name, value in values.items():
        if value is None:
            continue
        words = printable(str(name)).replace("_", " ")
        if isinstance(value, (int, float)) and not isinstance(value, bool) and words.endswith(" bytes"):
            yield words.removesuffix(" bytes"), human_bytes(value)
        else:
            yield words, _value_text(value)


def _value_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {text}" for name, text in setting_texts(value))
    if isinstance(value, (list, tuple)):
        return ", ".join(_value_text(each) for each in value)
    return f"{value:,}" if isinstance(value, int) and abs(value) >= 10_000 else printable(str(value))


def verdict_texts(bench: Bench) -> list[str]:
    """The recommendation, its reason, and what it costs: a sentence each."""
    if bench.verdict is None:
        measured = any(row.error is None for row in bench.rows)
        return ["No recommendation: " + ("too few cases were measured." if measured else "no case could be measured.")]
    row = bench.verdict.row
    figures = [f"{number(row.images_per_s)} images/s"] if row.images_per_s is not None else []
    baseline = _fastest_on_pictures(bench.rows, row.cold)
    if row.format != PICTURES and baseline and row.images_per_s:
        figures.append(f"{row.images_per_s / baseline:.1f} times the fastest {PICTURES} case")
    if row.total_mb is not None:
        figures.append(f"{human_bytes(row.total_mb * _MEGABYTE)} of memory in all")
    sentences = [
        f"Use {printable(row.format)} with loader {printable(row.loader)}, num_workers={row.num_workers}"
        + (": " + ", ".join(figures) if figures else "")
        + ".",
        printable(bench.verdict.reason),
        _costs(bench),
    ]
    return [sentence for sentence in sentences if sentence]


def _fastest_on_pictures(rows: Sequence[Row], cold: bool) -> float | None:
    return max((row.images_per_s or 0 for row in rows if row.format == PICTURES and row.cold == cold), default=None)


def _costs(bench: Bench) -> str:
    verdict = bench.verdict
    if verdict is None or verdict.row.format == PICTURES:
        return "There is nothing to convert." if verdict else ""
    costs = []
    if verdict.disk_mb is not None:
        costs.append(f"{human_bytes(verdict.disk_mb * _MEGABYTE)} on disk")
    if verdict.convert_s is not None:
        costs.append(f"about {human_time(verdict.convert_s)} to convert")
    if (epochs := verdict.epochs_to_pay_back) is not None:
        paid = "within the first epoch" if epochs <= 1 else f"after {number(epochs)} epochs"
        costs.append(f"paid for {paid}")
    pictures = "The picture" if bench.source_images == 1 else f"All {bench.source_images:,} pictures"
    return f"{pictures}: {', '.join(costs)}." if costs else ""


def note_texts(bench: Bench) -> list[str]:
    """What a reader should know about the figures; of cold cases also how cold they were."""
    shares = [row.resident_before for row in bench.rows if row.cold and row.resident_before is not None]
    cold = (
        f"cold cases: at most {_percent(max(shares))} of a file was in the page cache when a run began"
        if shares
        else ""
    )
    return [printable(note) for note in (cold, *bench.notes) if note]
