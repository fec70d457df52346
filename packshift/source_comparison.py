"""Would converting the source now give the same store? Lists the folder, then decodes it again.

A problem is what would make the new store another one: a file added or removed, one with other bytes, other classes,
other pixels. A file that was skipped and still cannot be read is none. Whether a file is still the same is told by its
size and CRC-32, which the store keeps, so that "the picture was exchanged" and "another Pillow decodes it differently"
are never confused.
"""

from __future__ import annotations

import os
import warnings
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from packshift.conversion import tool_versions
from packshift.errors import ImageError, StoreError, UsageError
from packshift.findings import Findings, Progress
from packshift.preprocess import load_record
from packshift.record import Listing, Record, Sample, encode_name
from packshift.settings import Preprocessing
from packshift.sources import layout_names, scan
from packshift.sources._labelling import GIVEN, NATURAL, Labelling
from packshift.stores._reader import Reader
from packshift.threads import in_order

_PIECE = 1 << 20


def compare_with_source(
    reader: Reader,
    source: Path,
    sample: int | None,
    jobs: int,
    bad: NDArray[np.bool_],
    findings: Findings,
    progress: Progress | None,
) -> int:
    """Add to `findings` what differs; return how many pictures were decoded. `bad` records' pixels are not compared.

    Raises SourceError where the folder cannot be listed, StoreError where the store's settings are not known here.
    """
    settings, layout = _settings(reader), str(reader.info.source.get("layout"))
    if layout not in layout_names():
        raise StoreError(f"{reader.path} was made from a layout {layout!r}, which this packshift does not know")
    listing = scan(source, layout, labelling=_labelling(reader))
    if listing.classes != reader.info.classes:
        findings.add("classes", f"the source's classes are not the store's: {_first_difference(listing, reader)}")
    found, skipped = _compare_names(reader, listing, findings)
    return _compare_pictures(reader, listing, settings, found, skipped, sample, jobs, bad, findings, progress)


def _labelling(reader: Reader) -> Labelling:
    """How the store's classes came to their labels; a folder that is new is a difference, no error."""
    recorded = reader.info.source.get("class_order")
    if recorded == GIVEN:
        return Labelling(names=reader.info.classes, closed=False)
    return Labelling(NATURAL) if recorded == NATURAL else Labelling()


def _settings(reader: Reader) -> Preprocessing:
    """The preprocessing that the header records; refused where it is not exactly what this packshift would do."""
    recorded = reader.info.preprocessing
    try:
        return Preprocessing.from_json(recorded)
    except UsageError:
        raise StoreError(
            f"{reader.path} was preprocessed in a way that this packshift cannot repeat ({recorded}): "
            "compare it with the packshift that made it"
        ) from None


def _first_difference(listing: Listing, reader: Reader) -> str:
    ours, theirs = set(listing.classes), set(reader.info.classes)
    parts = [f"only in the source {name!r}" for name in sorted(ours - theirs)[:1]]
    parts += [f"only in the store {name!r}" for name in sorted(theirs - ours)[:1]]
    return ", ".join(parts) or "their order is another"


def _compare_names(reader: Reader, listing: Listing, findings: Findings) -> tuple[NDArray[np.int64], list[int]]:
    """(for every record its place in the listing, -1 where it is gone; the places of files that had been skipped)."""
    places = {listing.names.raw(place): place for place in range(len(listing))}
    found = np.full(len(reader), -1, np.int64)
    for index in range(len(reader)):
        name = reader.paths.raw(index)
        place = places.pop(name, None)
        if place is None:
            findings.add("removed", "the source has no such file any more", index, reader.paths[index])
            continue
        found[index] = place
        label = int(listing.labels[place])
        if label != reader.labels[index] and listing.classes == reader.info.classes:
            findings.add(
                "classes", f"label {reader.labels[index]} in the store, {label} now", index, reader.paths[index]
            )
    skipped = [places.pop(encode_name(each.path), -1) for each in reader.skipped]
    for place in places.values():
        findings.add("added", "a file of the source that the store does not have", path=listing.names[place])
    if (np.diff(found[found >= 0]) < 0).any():
        findings.add("classes", "the source gives the pictures in another order")
    return found, [place for place in skipped if place >= 0]


def _compare_pictures(
    reader: Reader,
    listing: Listing,
    settings: Preprocessing,
    found: NDArray[np.int64],
    skipped: list[int],
    sample: int | None,
    jobs: int,
    bad: NDArray[np.bool_],
    findings: Findings,
    progress: Progress | None,
) -> int:
    here = tool_versions()
    indices = _spread(np.flatnonzero(found >= 0), sample)
    retried = _spread(np.array(skipped, np.int64), sample)
    sizes, checksums = reader.array("source_sizes"), reader.array("source_crc32")
    pixels_differ = 0

    def compare(index: int) -> tuple[int, tuple[str, str] | None]:
        place = listing.sample(int(found[index]))
        original = int(sizes[index]), int(checksums[index])
        return index, _compare_picture(reader, listing.root, place, settings, index, original, bool(bad[index]))

    total = len(indices) + len(retried)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")  # the conversion has counted what Pillow warns of
        if sample is not None:
            _compare_sizes(reader, listing, found, set(indices.tolist()), findings)
        for done, (index, problem) in enumerate(in_order(compare, indices.tolist(), jobs), 1):
            if problem is not None:
                pixels_differ += problem[0] == "pixels"
                findings.add(*problem, index, reader.paths[index])
            if progress is not None:
                progress("pictures", done, total)
        for done, (place, readable) in enumerate(_retry(listing, settings, retried, jobs), len(indices) + 1):
            if readable:
                findings.add("added", "was skipped, and can be read now", path=listing.names[place])
            if progress is not None:
                progress("pictures", done, total)
    if pixels_differ and (difference := _tool_differences(reader.info.tools, here)):
        findings.notes.append(
            f"other tools can give other pixels from the same files, which is no damage: {difference}"
        )
    return total


def _spread(values: NDArray[np.int64], count: int | None) -> NDArray[np.int64]:
    """`count` of the values, evenly spread from the first to the last; all where there are not more."""
    if count is None or count >= len(values):
        return values
    return values[np.linspace(0, len(values) - 1, count).astype(np.int64)]


def _compare_picture(
    reader: Reader,
    root: str,
    sample: Sample,
    settings: Preprocessing,
    index: int,
    original: tuple[int, int],
    bad: bool,
) -> tuple[str, str] | None:
    """(kind, problem) of one record, or None. `original` is the (size, CRC-32) of its source at conversion."""
    try:
        record = load_record(root, sample, settings)
    except ImageError as error:
        now = _size_and_checksum(os.path.join(os.fsencode(root), encode_name(sample.name)))
        if now is None:
            return "changed", f"its source {error}"
        if now == original:
            return "pixels", f"its source is unchanged, but cannot be decoded here: {error}"
        return "changed", f"its source is not the file that was converted, and cannot be decoded: {error}"
    if (record.source_size, record.source_crc32) != original:
        return "changed", f"its source is not the file that was converted ({_sizes_text(original[0], record)})"
    return None if bad else _compare_pixels(reader.pixels(index), record.pixels)


def _sizes_text(before: int, record: Record) -> str:
    if before == record.source_size:
        return f"{before:,} bytes as before, but other ones"
    return f"{before:,} bytes then, {record.source_size:,} now"


def _compare_pixels(stored: NDArray[np.uint8], now: NDArray[np.uint8]) -> tuple[str, str] | None:
    if stored.shape != now.shape:
        height, width, _ = now.shape
        return "pixels", f"its source gives {height} x {width} pixels, stored are {stored.shape[0]} x {stored.shape[1]}"
    if np.array_equal(stored, now):
        return None
    difference = np.abs(stored.astype(np.int16) - now)
    count = int((difference.max(axis=2) > 0).sum())
    return "pixels", (
        f"its source is unchanged, but {count:,} of {stored.shape[0] * stored.shape[1]:,} pixels come out different, "
        f"by at most {difference.max()} of 255"
    )


def _size_and_checksum(path: bytes) -> tuple[int, int] | None:
    size = checksum = 0
    try:
        with open(path, "rb", buffering=0) as file:
            while piece := file.read(_PIECE):
                size, checksum = size + len(piece), zlib.crc32(piece, checksum)
    except OSError:
        return None
    return size, checksum


def _compare_sizes(
    reader: Reader, listing: Listing, found: NDArray[np.int64], decoded: set[int], findings: Findings
) -> None:
    """What the file system alone tells of the pictures that are not decoded: another size is another file."""
    root, sizes = os.fsencode(listing.root), reader.array("source_sizes")
    for index in np.flatnonzero(found >= 0).tolist():
        if index in decoded:
            continue
        try:
            size = os.stat(os.path.join(root, reader.paths.raw(index))).st_size
        except OSError as error:
            findings.add("changed", f"its source cannot be read: {error.strerror}", index, reader.paths[index])
            continue
        if size != sizes[index]:
            text = f"its source is not the file that was converted ({sizes[index]:,} bytes then, {size:,} now)"
            findings.add("changed", text, index, reader.paths[index])


def _retry(
    listing: Listing, settings: Preprocessing, places: NDArray[np.int64], jobs: int
) -> Iterator[tuple[int, bool]]:
    def readable(place: int) -> tuple[int, bool]:
        try:
            load_record(listing.root, listing.sample(place), settings)
        except ImageError:
            return place, False
        return place, True

    return in_order(readable, places.tolist(), jobs)


def _tool_differences(then: Mapping[str, str], now: Mapping[str, str]) -> str:
    names = [name for name in sorted({*then, *now}) if name != "packshift" and then.get(name) != now.get(name)]
    return ", ".join(f"{name} {then.get(name, 'none')} then, {now.get(name, 'none')} here" for name in names)
