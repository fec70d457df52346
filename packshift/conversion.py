"""The conversion: read and preprocess pictures on several threads, write them in order, publish the store whole.

Threads rather than processes: Pillow gives up the interpreter lock while it decodes and resizes, so two threads keep
two cores busy, and no pixels have to be copied from process to process. The calling thread writes. It hands out `BATCH`
pictures at a time, which spares it most of the switching between threads (3 % of the time with two jobs), and at most
`BATCHES_PER_JOB` batches a job beyond the one it waits for, so memory does not depend on how many pictures there are.
"""

from __future__ import annotations

import os
import stat
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packshift._version import __version__
from packshift.arguments import at_least_one
from packshift.errors import ImageError, SourceError, StoreError, TargetError, UsageError
from packshift.machine import usable_cpus
from packshift.preprocess import Preprocessing, load_record, parse_background, parse_size
from packshift.record import Listing, Record, Sample, Skipped
from packshift.sources import AUTO, scan
from packshift.stores import format_of_target
from packshift.stores._format import Format
from packshift.stores._partial import PartialFile, partial_file
from packshift.stores._reader import Reader
from packshift.stores._writer import Description, Writer

ON_ERROR = ("skip", "stop")
BATCH = 4
BATCHES_PER_JOB = 4

Progress = Callable[[int, int], None]
"""Called with (pictures done, pictures in all) after each picture, from the thread that called `convert`."""


@dataclass(frozen=True)
class Plan:
    """What a conversion is going to do: shown before it does it."""

    listing: Listing
    target: Path
    format: Format
    settings: Preprocessing
    jobs: int
    on_error: str
    overwrite: bool


@dataclass(frozen=True)
class Report:
    """What a conversion did.

    `found` = `written` + len(`skipped`). Sizes are in bytes: `source_bytes` of the pictures written, `store_bytes` of
    the store. `images_per_s` counts written pictures over `seconds`, scanning and syncing included. `notes` counts
    pictures by what was done to them beyond the settings, `ignored` files that are not pictures, by reason.
    """

    target: str
    format: str
    found: int
    written: int
    skipped: Sequence[Skipped]
    classes: tuple[str, ...]
    empty_classes: tuple[str, ...]
    source_bytes: int
    store_bytes: int
    seconds: float
    images_per_s: float
    notes: Mapping[str, int]
    ignored: Mapping[str, int]
    ignored_examples: Mapping[str, Sequence[str]]


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    size: int | str | tuple[int, int] | None = 256,
    fit: str = "crop",
    background: str | tuple[int, int, int] | None = None,
    fast_decode: bool = False,
    layout: str = AUTO,
    format: str | None = None,
    jobs: int | None = None,
    on_error: str = "skip",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Convert a folder of pictures into one store file of uint8 pixels (H, W, 3), and return what was done.

    `size` is 256, (height, width) or None (every picture keeps its own), `fit` one of "crop", "pad", "stretch".
    `background` is the colour over which transparent pictures are laid (default: transparency is dropped), `fast_decode`
    decodes large JPEGs smaller, which changes pixels a little. The format follows the target's suffix unless `format`
    names it. `jobs` threads decode (default: the CPUs this process may use); the store's bytes do not depend on them.
    With `on_error="stop"` the first unreadable picture ends the run.

    The target appears when it is whole, or not at all; an existing one is replaced only with `overwrite=True`, in the
    last moment. Raises UsageError, SourceError, TargetError, and with "stop" ImageError.
    """
    started = time.perf_counter()
    plan = make_plan(
        source,
        target,
        size=size,
        fit=fit,
        background=background,
        fast_decode=fast_decode,
        layout=layout,
        format=format,
        jobs=jobs,
        on_error=on_error,
        overwrite=overwrite,
    )
    return run_plan(plan, progress=progress, started=started)


def make_plan(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    size: int | str | tuple[int, int] | None = 256,
    fit: str = "crop",
    background: str | tuple[int, int, int] | None = None,
    fast_decode: bool = False,
    layout: str = AUTO,
    format: str | None = None,
    jobs: int | None = None,
    on_error: str = "skip",
    overwrite: bool = False,
) -> Plan:
    """Check every argument and list the source; write nothing. Arguments and errors are those of `convert`."""
    if on_error not in ON_ERROR:
        raise UsageError(f"unknown on_error {on_error!r}: expected one of {', '.join(ON_ERROR)}")
    number_of_jobs = usable_cpus() if jobs is None else at_least_one("jobs", jobs)
    settings = Preprocessing(parse_size(size), fit, fast_decode, parse_background(background))
    source, target = _checked_path(source, "source"), _checked_path(target, "target")
    chosen = format_of_target(target, format)
    path = _checked_target(target, overwrite=overwrite)
    return Plan(scan(source, layout), path, chosen, settings, number_of_jobs, on_error, overwrite)


def run_plan(plan: Plan, *, progress: Progress | None = None, started: float | None = None) -> Report:
    """Carry out a plan. `started` is the `time.perf_counter()` from which seconds count (default: now)."""
    started = time.perf_counter() if started is None else started
    skipped: list[Skipped] = []
    with partial_file(plan.target) as file:
        writer = Writer(file, plan.format, plan.settings.shape)
        for done, outcome in enumerate(_outcomes(plan), 1):
            if isinstance(outcome, Record):
                writer.append(outcome)
            else:
                if plan.on_error == "stop":
                    reason = outcome.reason.rstrip(".")
                    raise ImageError(f"{outcome.path}: {reason}. Nothing was written (--on-error stop)")
                skipped.append(outcome)
                writer.skip(outcome)
            if progress is not None:
                progress(done, len(plan.listing))
        if not len(writer):
            raise SourceError(
                f"none of the {len(plan.listing):,} pictures in {plan.listing.root} can be read; the first, "
                f"{skipped[0].path}: {skipped[0].reason}"
            )
        if len(writer) + len(skipped) != len(plan.listing):
            raise TargetError(f"{plan.target}: {len(plan.listing)} pictures went in, {len(writer)} came out")
        writer.finish(_description(plan))
        store = _read_back(file, plan)
        file.publish(overwrite=plan.overwrite)
    seconds = time.perf_counter() - started
    return Report(
        target=str(plan.target),
        format=plan.format.name,
        found=len(plan.listing),
        written=len(writer),
        skipped=tuple(skipped),
        classes=plan.listing.classes,
        empty_classes=plan.listing.empty_classes,
        source_bytes=store.info.source["bytes"],
        store_bytes=store.file_size,
        seconds=seconds,
        images_per_s=len(writer) / seconds,
        notes=store.info.notes,
        ignored=plan.listing.ignored,
        ignored_examples=plan.listing.ignored_examples,
    )


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


def _outcomes(plan: Plan) -> Iterator[Record | Skipped]:
    """One outcome per listed picture, in the listing's order."""
    count = len(plan.listing)
    waiting: deque[Future[list[Record | Skipped]]] = deque()
    pool = ThreadPoolExecutor(plan.jobs, thread_name_prefix="packshift-decode")
    with _quiet_warnings():
        try:
            for batch in _batches(count, plan.jobs):
                waiting.append(_submit(pool, plan, batch))
                if len(waiting) > plan.jobs * BATCHES_PER_JOB:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _submit(pool: ThreadPoolExecutor, plan: Plan, batch: range) -> Future[list[Record | Skipped]]:
    try:
        return pool.submit(_load_batch, plan, batch)
    except RuntimeError as error:  # the system gives no more threads
        raise UsageError(f"jobs {plan.jobs}: {error}; use fewer") from error


def _batches(count: int, jobs: int) -> Iterator[range]:
    """0 .. count - 1 in batches; the last ones are single pictures, so that all jobs end at the same time."""
    singles = max(0, count - 2 * BATCH * jobs) // BATCH * BATCH
    yield from (range(first, first + BATCH) for first in range(0, singles, BATCH))
    yield from (range(index, index + 1) for index in range(singles, count))


def _load_batch(plan: Plan, indices: range) -> list[Record | Skipped]:
    return [_load(plan.listing.root, plan.listing.sample(index), plan.settings) for index in indices]


def _load(root: str, sample: Sample, settings: Preprocessing) -> Record | Skipped:
    try:
        return load_record(root, sample, settings)
    except ImageError as error:
        return Skipped(sample.name, str(error))


_quiet = warnings.catch_warnings()
_quiet_lock = threading.Lock()
_quiet_depth = 0


@contextmanager
def _quiet_warnings() -> Iterator[None]:
    """Pillow warns, once a picture, of things that are counted in the report or change no pixel."""
    global _quiet, _quiet_depth  # the filters are the process's: conversions in several threads share one change
    with _quiet_lock:
        _quiet_depth += 1
        if _quiet_depth == 1:
            _quiet.__enter__()
            warnings.filterwarnings("ignore", module=r"PIL\.")
    try:
        yield
    finally:
        with _quiet_lock:
            _quiet_depth -= 1
            if _quiet_depth == 0:
                _quiet.__exit__(None, None, None)
                _quiet = warnings.catch_warnings()


def _read_back(file: PartialFile, plan: Plan) -> Reader:
    """Open the finished file as users will, with packshift and with the format's own library."""
    try:
        store = Reader(file.path, format=plan.format.name)
        plan.format.check(file.path, store.info)
    except StoreError as error:
        reason = str(error).replace(str(file.path), str(plan.target))
        raise TargetError(f"{plan.target}: what was written cannot be read back: {reason}") from error
    return store


def _description(plan: Plan) -> Description:
    return Description(
        classes=plan.listing.classes,
        preprocessing=plan.settings.to_json(),
        source={"layout": plan.listing.layout, "found": len(plan.listing)},
        tools=tool_versions(),
    )


def tool_versions() -> dict[str, str]:
    """Versions of everything that decides about a store's pixels."""
    from PIL import __version__ as pillow_version
    from PIL import features

    versions: dict[str, Any] = {"packshift": __version__, "pillow": pillow_version}
    for library, feature in (
        ("libjpeg-turbo", "libjpeg_turbo"),
        ("libjpeg", "jpg"),
        ("zlib", "zlib"),
        ("webp", "webp"),
    ):
        versions[library] = features.version(feature)
    return {name: str(version) for name, version in versions.items() if version is not None}
