"""What a benchmark's rows mean: which case to take, and what limits the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from packshift.bench_results import Row, Verdict
from packshift.bench_sources import PICTURES, Prepared

NOISE = 0.10
"""Speeds that differ by less than this share of the faster one count as equal."""


def verdict_of(rows: Sequence[Row], prepared: Prepared) -> Verdict | None:
    """The cheapest row within noise of the fastest: fewer processes first, then less disk."""
    measured = [row for row in rows if row.images_per_s]
    if not measured:
        return None
    fastest = max(measured, key=lambda row: row.images_per_s or 0.0)
    best_speed = fastest.images_per_s or 0.0
    equal = [row for row in measured if (row.images_per_s or 0.0) >= best_speed * (1 - NOISE)]
    chosen = min(equal, key=lambda row: (_processes(row), round(row.store_mb, 1), -(row.images_per_s or 0.0)))
    scale = prepared.source_images / prepared.images
    pictures = max(
        (row for row in measured if row.format == PICTURES), key=lambda row: row.images_per_s or 0.0, default=None
    )
    convert_s = None if chosen.convert_s is None else chosen.convert_s * scale
    return Verdict(
        row=chosen,
        reason=_reason(chosen, fastest, pictures, len(equal)),
        disk_mb=chosen.store_mb * scale,
        convert_s=convert_s,
        epochs_to_pay_back=_epochs_to_pay_back(chosen, pictures, convert_s, prepared.source_images),
    )


def _processes(row: Row) -> int:
    return row.num_workers if row.loader == "dataloader" else 0


def _reason(chosen: Row, fastest: Row, pictures: Row | None, equal: int) -> str:
    speed, best = chosen.images_per_s or 0.0, fastest.images_per_s or 0.0
    if chosen is fastest:
        words = f"{speed:,.0f} images/s, the fastest"
        words += f", and of {equal} within {NOISE:.0%} of each other the cheapest" if equal > 1 else ""
    else:
        words = (
            f"{speed:,.0f} images/s, {speed / best:.0%} of the fastest ({_name(fastest)}, {best:,.0f}), which is within "
            f"noise ({NOISE:.0%}), with fewer processes or less disk"
        )
    if pictures is not None and pictures.images_per_s and chosen.format != PICTURES:
        words += f"; {speed / pictures.images_per_s:,.1f} times the best of the pictures themselves ({_name(pictures)})"
    return words


def _name(row: Row) -> str:
    unit = "threads" if row.loader == "threads" else "workers"
    return f"{row.format}, {row.loader}, {row.num_workers} {unit}"


def _epochs_to_pay_back(chosen: Row, pictures: Row | None, convert_s: float | None, images: int) -> float | None:
    if convert_s is None or pictures is None or not pictures.images_per_s or not chosen.images_per_s:
        return None
    saved = images / pictures.images_per_s - images / chosen.images_per_s
    return convert_s / saved if saved > 0 else None


def notes_on(rows: Sequence[Row], *, cold: bool, step: bool) -> Iterator[str]:
    """What a reader of the rows should know."""
    measured = [row for row in rows if row.images_per_s]
    if cold:
        yield "cold: the data was dropped from the page cache before each run; one epoch, start of the workers included"
        left = [row.resident_before for row in measured if row.resident_before]
        if left:
            yield (
                f"up to {max(left):.1%} of the data stayed in the page cache: another process maps it, or it was not on "
                "disk yet"
            )
    else:
        yield "warm: the data is in the page cache, as in every epoch but the first where memory is large enough"
    checksums = {row.checksum for row in measured if row.checksum}
    if len(checksums) > 1 and not cold:
        yield (
            "the cases did not load the same pixels: "
            + ", ".join(
                f"{row.format} {row.checksum}" for row in measured if row.num_workers == measured[0].num_workers
            )
        )
    pictures = [row for row in measured if row.format == PICTURES]
    stores = [row for row in measured if row.format != PICTURES]
    if pictures and stores and not step:
        best_picture = max(row.images_per_s or 0.0 for row in pictures)
        best_store = max(row.images_per_s or 0.0 for row in stores)
        share = max((row.limit_fraction or 0.0) for row in pictures)
        if best_store > best_picture * 1.5:
            yield f"decoding and resizing is what limits the pictures: they reach {share:.0%} of decoding alone"
        else:
            yield "there is little to win: the pictures load about as fast as the stores"
    if step:
        busiest = max(measured, key=lambda row: row.busy or 0.0, default=None)
        if busiest is not None and (busiest.busy or 0.0) > 0.9:
            yield "where the consumer is busy all the time, faster loading gains nothing"
