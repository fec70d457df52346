"""What `packshift bench` finds out, as values: one row a case, the machine, the verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

STAGES = ("read", "decode", "convert", "transfer")
"""Where the time of a picture goes, in this order."""


@dataclass(frozen=True)
class Row:
    """One case: a format read by a loader with so many workers. Medians over its runs; MB are 1,000,000 bytes.

    `error` says why there is no measurement; then all figures behind it are None. `images_per_s_spread` is (highest -
    lowest) / median of the runs. `first_batch_s` runs from the start of iterating to the first batch, workers' start
    included. `busy` is the share of the time in which the consumer worked on batches (`step_ms`, `step_matmul`).

    Memory of a worker is the mean over the workers, None without any. RSS counts pages that several processes map in
    each of them, PSS shares them out, USS leaves them out. `shm_mb` is shared memory in flight; `total_mb` what the
    kernel cannot take back from all processes together, the figure that gets a job killed.

    `limit_images_per_s` is the machine's own limit for this format, measured in the same run (a gather from the page
    cache in one thread; for pictures, decoding alone on as many CPUs as the case has processes), `limit_fraction` the
    speed as a share of it. `store_mb` is the size on disk, `convert_s` the time to make the store, None where it was there.
    `cold` cases read from the disk, not from the page cache; `resident_before` is the share of the file's pages that were
    in the page cache when such a run began.

    In the first case of each format, `read_ms`, `decode_ms`, `convert_ms` and `transfer_ms` say where the milliseconds of
    one picture go in one thread of a DataLoader without workers: transfer is what comes on top of the pixels. A store
    does not decode or convert (None). Not measured in `cold` cases.

    `growth_mb_per_1k` is how much more of `total_mb` there is after 1,000 pictures of the timed part, `growth_mb` the
    least growth from beginning to end of it in any run: what a single run grows by is mostly noise. Not in `cold` cases.
    """

    format: str
    loader: str
    num_workers: int
    batch_size: int
    prefetch_factor: int | None
    start_method: str | None
    cold: bool
    error: str | None
    store_mb: float
    convert_s: float | None
    images_per_s: float | None = None
    images_per_s_spread: float | None = None
    images_per_s_runs: tuple[float, ...] = ()
    batches_per_s: float | None = None
    mb_per_s: float | None = None
    first_batch_s: float | None = None
    cpu_s_per_1k: float | None = None
    busy: float | None = None
    worker_rss_mb: float | None = None
    worker_pss_mb: float | None = None
    worker_uss_mb: float | None = None
    main_rss_mb: float | None = None
    main_pss_mb: float | None = None
    main_uss_mb: float | None = None
    shm_mb: float | None = None
    total_mb: float | None = None
    limit_images_per_s: float | None = None
    limit_fraction: float | None = None
    resident_before: float | None = None
    read_ms: float | None = None
    decode_ms: float | None = None
    convert_ms: float | None = None
    transfer_ms: float | None = None
    growth_mb: float | None = None
    growth_mb_per_1k: float | None = None
    checksum: str | None = None

    @property
    def stages(self) -> dict[str, float]:
        """Milliseconds of one picture by stage, those that there are."""
        found = {name: getattr(self, f"{name}_ms") for name in STAGES}
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class Verdict:
    """Which case to use: the cheapest within noise of the fastest, and what it costs.

    `epochs_to_pay_back` is after how many epochs over all pictures the conversion has cost less time than it saved,
    compared with the fastest case that reads the pictures themselves; None where there is nothing to compare with or to
    win. `disk_mb` and `convert_s` are for all pictures of the source.
    """

    row: Row
    reason: str
    disk_mb: float | None
    convert_s: float | None
    epochs_to_pay_back: float | None


@dataclass(frozen=True)
class Bench:
    """All that one run found. `images` is how many pictures each case read from, `source_images` how many there are.

    `machine` holds CPU, cores allowed, memory, limits, kernel and versions; `settings` the options; `notes` what a reader
    should know about these figures (bottlenecks, checksums that differ, cases that were not run).
    """

    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    images: int
    source_images: int
    rows: tuple[Row, ...]
    verdict: Verdict | None
    notes: tuple[str, ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
