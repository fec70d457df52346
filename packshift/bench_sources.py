"""The data that a benchmark reads: stores that are there, and those made for it from a sample of a folder's pictures."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from packshift.conversion import convert
from packshift.errors import UsageError
from packshift.record import Listing
from packshift.sources import scan
from packshift.stores import get_format
from packshift.stores._reader import Reader

PICTURES = "jpeg"
"""The name of the pictures themselves among the formats, whatever files they are."""


@dataclass(frozen=True)
class Place:
    """Where one format's data lies, or the `error` for want of which there is none."""

    path: str
    store_mb: float
    convert_s: float | None
    error: str | None = None


@dataclass
class Prepared:
    """The data of each format; `images` is how many pictures every case reads."""

    places: dict[str, Place]
    images: int
    source_images: int
    notes: list[str]
    made_here: bool


def prepare(
    sources: Sequence[str | os.PathLike[str]],
    formats: Sequence[str],
    most: int,
    size: tuple[int, int] | None,
    fit: str,
    stack: ExitStack,
) -> Prepared:
    """Find or make the data of each of `formats`, of up to `most` pictures; what is made is removed with `stack`."""
    folders = [source for source in sources if os.path.isdir(source)]
    stores = [source for source in sources if not os.path.isdir(source)]
    if not sources or len(folders) > 1:
        raise UsageError(f"expected one folder of pictures, or stores, or both; got {len(folders)} folders")
    places: dict[str, Place] = {}
    counts: list[int] = []
    for store in stores:
        reader = Reader(store)
        if reader.info.format in places:
            raise UsageError(
                f"{os.fspath(store)}: there is another store of format {reader.info.format}: bench one at a time"
            )
        if reader.info.shape is None:
            raise UsageError(f"{os.fspath(store)}: its pictures are of different sizes, which make no batches")
        places[reader.info.format] = Place(str(reader.path), reader.file_size / 1e6, None)
        counts.append(len(reader))
    notes: list[str] = []
    source_images = max(counts, default=0)
    if folders:
        listing = scan(folders[0])
        source_images = len(listing)
        folder, count = _sample_folder(listing, most, stack)
        counts.append(count)
        if count < source_images:
            notes.append(f"measured on {count:,} of {source_images:,} pictures, evenly spread")
        _add_from_folder(places, folder, formats, size, fit, stack, notes)
    wanted = {name: place for name, place in places.items() if name in formats}
    if not wanted:
        raise UsageError(f"none of the formats {', '.join(formats)} is there: give a folder of pictures, or stores")
    return Prepared(wanted, min([*counts, most]), source_images, notes, bool(folders) and not stores)


def _sample_folder(listing: Listing, most: int, stack: ExitStack) -> tuple[str, int]:
    """A folder with up to `most` of the pictures, as links in their class folders: (path, number)."""
    if len(listing) <= most:
        return listing.root, len(listing)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="packshift-bench-")))
    for position in range(most):
        name = listing.names[position * len(listing) // most]
        link = folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.abspath(os.path.join(listing.root, name)))
    for name in listing.classes:
        (folder / name).mkdir(exist_ok=True)  # empty ones keep their label
    return str(folder), most


def _add_from_folder(
    places: dict[str, Place],
    folder: str,
    formats: Sequence[str],
    size: tuple[int, int] | None,
    fit: str,
    stack: ExitStack,
    notes: list[str],
) -> None:
    work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="packshift-bench-")))
    for name in formats:
        if name in places or name == PICTURES:
            continue
        target = work / f"store{get_format(name).suffixes[0]}"
        try:
            report = convert(folder, target, size=size, fit=fit)
        except ImportError as error:
            places[name] = Place("", 0.0, None, f"its library is missing: {error}")
            continue
        places[name] = Place(str(target), report.store_bytes / 1e6, report.seconds)
        if report.skipped:
            note = f"{len(report.skipped):,} pictures cannot be read ({report.skipped[0].path}, ...) and are left out"
            if note not in notes:
                notes.append(note)
    if PICTURES in formats:
        listing = scan(folder)
        nbytes = sum(
            os.stat(os.path.join(os.fsencode(folder), listing.names.raw(index))).st_size
            for index in range(len(listing))
        )
        places[PICTURES] = Place(folder, nbytes / 1e6, None)
