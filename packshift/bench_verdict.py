"""What a benchmark's rows mean: which case to take, and what limits the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from packshift.bench_results import Row, Verdict
from packshift.bench_sources import PICTURES, Prepared
from packshift.text import counted, human_bytes

NOISE = 0.10
"""Speeds that differ by less than this share of the faster one count as equal."""

_BUSY = 0.9  # share of the time from which on a consumer counts as busy all the time

_PICTURES_NOISE_MB, _STORE_NOISE_MB = 64.0, 4.0
"""By how much memory of a process that leaks nothing grows in a short run. Decoders' buffers are of all sizes: photos of 10
megapixels left up to 40 MB behind in one process, pictures of 500 x 375 up to 6 MB, stores less than 1 MB."""

_BATCH_NOISE = 2
"""How many more batches of each worker can be on their way at the end than at the beginning: seen were 1.4 for two."""


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
    busiest = max((row.busy or 0.0 for row in measured), default=0.0) if step else 0.0
    best_picture, best_store = _best_speeds(measured)
    stay = 0.0 < best_store * (1 - NOISE) <= best_picture
    if best_picture and best_store and not step:
        yield from _what_stores_gain(measured, best_picture, best_store, stay=stay)
    yield from _what_limits(measured, stay=stay, advice=busiest <= _BUSY)
    if busiest > _BUSY:
        yield "where the consumer is busy all the time, faster loading gains nothing"


def notes_on_growth(rows: Sequence[Row], source_images: int) -> Iterator[str]:
    """A warning where memory grew by more than noise in every run, for the case where it grows most per picture."""
    growing = [row for row in rows if row.growth_mb is not None and row.growth_mb > growth_noise_mb(row)]
    if not growing:
        return
    worst = max(growing, key=lambda row: row.growth_mb_per_1k or 0.0)
    slope = worst.growth_mb_per_1k or 0.0
    others = f" (and {counted(len(growing) - 1, 'other case')})" if len(growing) > 1 else ""
    yield (
        f"memory grows with {_name(worst)}{others}: {slope:,.1f} MB per 1,000 pictures, which over an epoch of "
        f"{source_images:,} pictures would be {human_bytes(slope * source_images * 1000)}; a longer run (--seconds, "
        "--epochs) tells whether it goes on"
    )


def growth_noise_mb(row: Row) -> float:
    """MB by which the memory of a healthy case may grow in a short run: of each process, and of batches on their way."""
    process = _PICTURES_NOISE_MB if row.format == PICTURES else _STORE_NOISE_MB
    batch = (row.mb_per_s or 0.0) / row.batches_per_s if row.batches_per_s else 0.0
    return process * (1 + _processes(row)) + _BATCH_NOISE * batch * row.num_workers


def _best_speeds(measured: Sequence[Row]) -> tuple[float, float]:
    """Images/s of the fastest case of the pictures, and of the stores; 0 where there is none."""
    pictures = [row.images_per_s or 0.0 for row in measured if row.format == PICTURES]
    stores = [row.images_per_s or 0.0 for row in measured if row.format != PICTURES]
    return max(pictures, default=0.0), max(stores, default=0.0)


def _what_stores_gain(measured: Sequence[Row], best_picture: float, best_store: float, *, stay: bool) -> Iterator[str]:
    pictures = [row for row in measured if row.format == PICTURES]
    if best_store <= best_picture * 1.5:
        stores = "; stay with the pictures" if stay else ""
        yield f"there is little to win: the pictures load about as fast as the stores{stores}"
    elif not any(row.stages for row in pictures):
        share = max((row.limit_fraction or 0.0) for row in pictures)
        yield f"decoding and resizing is what limits the pictures: they reach {share:.0%} of decoding alone"


def _what_limits(measured: Sequence[Row], *, stay: bool, advice: bool) -> Iterator[str]:
    """For each format whose time was split: the longest stage, and with `advice` what shortens it."""
    for row in measured:
        total = sum(row.stages.values())
        if not total:
            continue
        shares = {stage: value / total for stage, value in row.stages.items()}
        words, help = _pictures_limit(shares) if row.format == PICTURES else _stores_limit(shares)
        told = advice and not (stay and row.format == PICTURES)
        yield f"{row.format}: {words} of the time of a picture in one thread" + (f": {help}" if told else "")


def _pictures_limit(shares: Mapping[str, float]) -> tuple[str, str]:
    """What takes most of the time, with its share, and what shortens it."""
    decode, convert = shares.get("decode", 0.0), shares.get("convert", 0.0)
    read, transfer = shares.get("read", 0.0), shares.get("transfer", 0.0)
    if decode + convert >= max(read, transfer):
        return f"decoding is {decode:.0%} and converting {convert:.0%}", "a store saves both"
    if read >= transfer:
        return f"reading is {read:.0%}", "a store is one file, opened once"
    return f"transfer is {transfer:.0%}", "a store hands over a batch in one piece"


def _stores_limit(shares: Mapping[str, float]) -> tuple[str, str]:
    read, transfer = shares.get("read", 0.0), shares.get("transfer", 0.0)
    if read >= transfer:
        return f"reading is {read:.0%}", "smaller pictures (--size) are copied faster"
    return f"transfer is {transfer:.0%}", "larger batches (--batch-size) have less of it"
