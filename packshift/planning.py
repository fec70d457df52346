"""What a conversion is going to do and what it will take: known, shown and checked before the first byte is written."""

from __future__ import annotations

import os
import stat
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from packshift.errors import ImageError, TargetError, UsageError
from packshift.options import Options
from packshift.pool import DecodingPool
from packshift.preprocess import size_in_header
from packshift.record import Listing
from packshift.settings import Preprocessing
from packshift.sources import scan
from packshift.stores import format_of_target
from packshift.stores._format import Format
from packshift.stores._partial import partial_path
from packshift.text import human_bytes

SAMPLE = 200
"""Pictures that are decoded to forecast the time, spread evenly over the listing."""

_HEADERS = 1000  # pictures whose headers are read to forecast the size where each keeps its own
_WORTH_SAMPLING = 100 * SAMPLE
_SIDE_BYTES = 68  # per record: label, checksums, sizes, offsets, and its key in an index; its name comes on top
_OWN_SIZE_BYTES = 20  # offset and shape


@dataclass(frozen=True)
class Plan:
    """What a conversion is going to do: shown before it does it.

    `settings`, `jobs` and `max_errors` (how many files may be skipped; None: any number) follow from `options`.
    """

    listing: Listing
    target: Path
    format: Format
    options: Options
    settings: Preprocessing
    jobs: int
    max_errors: int | None


@dataclass(frozen=True)
class Outlook:
    """What a conversion will take.

    `store_bytes` is the size of the store, computed where all records have one size and otherwise estimated from the
    headers of up to 1,000 pictures. `free_bytes` is the room on the disk, with what an earlier run left counted in.
    `seconds` is estimated from `sampled` pictures decoded for it, of which `unreadable` could not be read; None where
    none were.
    """

    pictures: int
    store_bytes: int
    free_bytes: int
    seconds: float | None
    sampled: int
    unreadable: int


def make_plan(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    options: Options,
    *,
    scanning: Callable[[int], None] | None = None,
) -> Plan:
    """Check the paths and list the source; write nothing. Errors are those of `convert`.

    `scanning` is called with the number of files found, every thousand of them.
    """
    source, target = _checked_path(source, "source"), _checked_path(target, "target")
    chosen = format_of_target(target, options.format)
    path = _checked_target(target, overwrite=options.overwrite)
    listing = scan(source, options.layout, scanning, options.labelling())
    return Plan(
        listing,
        path,
        chosen,
        options,
        options.preprocessing(),
        options.processes(),
        options.error_limit(len(listing)),
    )


def look_ahead(plan: Plan, *, decode: bool | None = None) -> Outlook:
    """Forecast what `plan` will take. `decode=True` decodes up to `SAMPLE` pictures for the time it will take.

    The default decodes them where that is less than 1 % of the work.
    """
    count = len(plan.listing)
    decode = count >= _WORTH_SAMPLING if decode is None else decode
    seconds, sampled, unreadable = _timed_sample(plan) if decode else (None, 0, 0)
    return Outlook(count, _store_bytes(plan), _free_bytes(plan.target), seconds, sampled, unreadable)


def check_room(plan: Plan, outlook: Outlook) -> None:
    """Raise TargetError where the disk cannot hold the store, unless the plan is forced."""
    if outlook.store_bytes > outlook.free_bytes and not plan.options.force:
        raise TargetError(
            f"{plan.target}: the store will take about {human_bytes(outlook.store_bytes)}, and only "
            f"{human_bytes(outlook.free_bytes)} are free in {plan.target.parent}: make room, write elsewhere, choose a "
            "smaller size, or start nevertheless with --force"
        )


def _spread(count: int, most: int) -> Iterator[int]:
    """Up to `most` indices, evenly spread over `count`."""
    number = min(count, most)
    return (index * count // number for index in range(number))


def _timed_sample(plan: Plan) -> tuple[float, int, int]:
    """(seconds for all pictures, pictures decoded for this, how many of them cannot be read)."""
    count = len(plan.listing)
    indices = list(_spread(count, SAMPLE))
    unreadable = 0
    with DecodingPool(plan.listing.root, plan.settings, min(plan.jobs, len(indices))) as pool:
        pool.wait_until_ready()
        started = time.perf_counter()
        for outcome in pool.outcomes((plan.listing.sample(index) for index in indices), len(indices)):
            unreadable += outcome.entry is None
        seconds = time.perf_counter() - started
    return seconds / len(indices) * count, len(indices), unreadable


def _store_bytes(plan: Plan) -> int:
    count = len(plan.listing)
    start = plan.format.first_frame() + plan.format.fixed_bytes
    names = len(plan.listing.names.data)
    if plan.settings.shape is not None:
        height, width, channels = plan.settings.shape
        return start + names + count * (_framed(plan, height * width * channels) + _SIDE_BYTES)
    sizes = [size for size in (_own_size(plan, index) for index in _spread(count, _HEADERS)) if size]
    each = float(np.mean([_framed(plan, size) for size in sizes])) if sizes else 0.0
    return start + names + int(count * (each + _SIDE_BYTES + _OWN_SIZE_BYTES))


def _framed(plan: Plan, nbytes: int) -> int:
    front, behind = plan.format.frame(plan.format.first_frame(), nbytes)
    return len(front) + nbytes + behind


def _own_size(plan: Plan, index: int) -> int:
    """Bytes of pixels of one picture, by its header; 0 where that cannot be read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of large pictures: the conversion counts them
            height, width = size_in_header(plan.listing.root, plan.listing.sample(index), plan.settings)
    except ImageError:
        return 0
    return height * width * 3


def _free_bytes(target: Path) -> int:
    disk = os.statvfs(target.parent)
    try:
        left = os.lstat(partial_path(target)).st_blocks * 512
    except OSError:
        left = 0
    return disk.f_bavail * disk.f_frsize + left


def _checked_path(path: str | os.PathLike[str], role: str) -> Path:
    name = os.fsdecode(path)
    if not name or "\0" in name:
        raise UsageError(f"{role} {name!r}: expected the name of a file or folder")
    return Path(name)


def _checked_target(target: Path, *, overwrite: bool) -> Path:
    """The path to write, a link at its end followed; raises TargetError where it cannot be."""
    path = Path(os.path.realpath(target)) if os.path.islink(target) else target
    folder = path.parent
    try:
        folder_mode, mode = _mode(folder), _mode(path)
    except OSError as error:
        raise TargetError(f"{target} cannot be written: {error.strerror}") from error
    if folder_mode is None:
        raise TargetError(f"{target}: the folder {folder} does not exist: create it first")
    if not stat.S_ISDIR(folder_mode):
        raise TargetError(f"{target}: {folder} is a file, not a folder")
    if mode is not None and stat.S_ISDIR(mode):
        raise TargetError(f"{target} is a folder: expected the name of a file to write, such as {target / 'out.lmdb'}")
    if mode is not None and not stat.S_ISREG(mode):
        raise TargetError(f"{target} is not a regular file: expected the name of a file to write")
    if mode is not None and not overwrite:
        raise TargetError(f"{target} exists: choose another name, or replace it with --overwrite")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise TargetError(f"{target}: the folder {folder} is not writable")
    return path


def _mode(path: Path) -> int | None:
    """What kind of file `path` is; None where there is none."""
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
