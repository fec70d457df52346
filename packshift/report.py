"""Results as text for people and as JSON for programs."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from packshift.conversion import Report
from packshift.duplicates import Duplicates, find_duplicates
from packshift.export import ExportReport
from packshift.machine import usable_memory
from packshift.planning import Outlook, Plan
from packshift.preprocess import NOTES
from packshift.record import Listing
from packshift.sources._labelling import GIVEN, NATURAL, natural_key
from packshift.sources._tree import OUTSIDE_CLASS
from packshift.stores._reader import Reader
from packshift.text import counted, human_bytes, human_time, printable
from packshift.verification import Verification

_CLASSES_SHOWN = 20
_NAMES_SHOWN = 3
_KINDS_SHOWN = 10
_SPLITS = frozenset(["train", "training", "val", "valid", "validation", "dev", "eval", "test", "testing"])


def plan_text(plan: Plan) -> str:
    listing = plan.listing
    classes = _classes_text(plan) if listing.labelled else "no class folders: every label will be -1"
    lines = [
        f"{printable(listing.root)}: {counted(len(listing), 'picture')}, {classes}",
        f"{printable(str(plan.target))}: {plan.format.name}, {plan.settings.describe()}, {counted(plan.jobs, 'job')}",
    ]
    notes = [*_listing_notes(listing), *_numeric_order_note(listing), *_split_note(plan)]
    return "\n".join(lines + [f"note: {note}" for note in notes])


def _classes_text(plan: Plan) -> str:
    classes = counted(len(plan.listing.classes), "class")
    if plan.listing.class_order == GIVEN:
        return f"{classes} as in {printable(os.fsdecode(plan.options.classes_from or ''))}"
    return classes if plan.listing.class_order is None else f"{classes} in {plan.listing.class_order} order"


def outlook_text(outlook: Outlook) -> str:
    """The forecast of a conversion in a line or two."""
    lines = [
        f"forecast: {human_bytes(outlook.store_bytes)} on disk ({human_bytes(outlook.free_bytes)} are free)"
        + (f", about {human_time(outlook.seconds)}" if outlook.seconds is not None else "")
    ]
    if outlook.unreadable:
        lines.append(f"{outlook.unreadable:,} of {outlook.sampled:,} pictures tried cannot be read")
    return "\n".join(lines)


def outlook_json(outlook: Outlook) -> dict[str, Any]:
    return asdict(outlook)


def warning_text(plan: Plan) -> str:
    """What must be told even to those who want to hear nothing: pictures that were left out."""
    count = plan.listing.ignored.get(OUTSIDE_CLASS, 0)
    if not count:
        return ""
    shown = _some(plan.listing.ignored_examples[OUTSIDE_CLASS], count)
    return f"packshift: left out, {OUTSIDE_CLASS}: {count:,} ({shown})"


def _listing_notes(listing: Listing) -> Iterator[str]:
    for reason, count in listing.ignored.items():
        yield f"left out, {reason}: {count:,} ({_some(listing.ignored_examples[reason], count)})"
    empty = listing.empty_classes
    if empty:
        what = "classes" if listing.class_order == GIVEN else "class folders"
        yield f"{what} without a picture, which keep their label: {len(empty):,} ({_some(empty[:_NAMES_SHOWN], len(empty))})"


def _numeric_order_note(listing: Listing) -> Iterator[str]:
    """Where names are numbers, and the order of text, which nobody asked for, is not that of the numbers."""
    classes = listing.classes
    if listing.class_order is not None or not all(name.isascii() and name.isdigit() for name in classes):
        return
    by_number = sorted(classes, key=natural_key)
    surprise = next((label for label, name in enumerate(classes) if name != by_number[label]), None)
    if surprise is not None:
        yield (
            "class folders are sorted as text, as torchvision does, not as numbers: "
            f"label {surprise} is folder {classes[surprise]!r}, not {by_number[surprise]!r} "
            "(--class-order natural changes that)"
        )


def _split_note(plan: Plan) -> Iterator[str]:
    """Where the folders taken for classes are the parts of a data set, whose classes lie one level below."""
    parts = sorted(plan.listing.classes, key=lambda name: not name.lower().startswith("train"))
    names = plan.listing.names
    if plan.listing.class_order == GIVEN or not parts or not all(name.lower() in _SPLITS for name in parts):
        return
    if not any(names.raw(index).count(b"/") > 1 for index in range(len(names))):
        return
    first = plan.target.with_name(f"{parts[0]}{plan.target.suffix}")
    commands = []
    for part in parts:
        words = [os.path.join(plan.listing.root, part), str(plan.target.with_name(f"{part}{plan.target.suffix}"))]
        words += ["--classes-from", str(first)] if part != parts[0] else []
        commands.append(f"packshift convert {printable(shlex.join(words))}")
    yield f"{', '.join(parts)}: names of a data set's parts, not of classes; to convert each: {'; '.join(commands)}"


def _some(names: Sequence[str], count: int) -> str:
    shown = ", ".join(printable(name) for name in names)
    return shown + (", ..." if count > len(names) else "")


def report_text(report: Report) -> str:
    ratio = report.store_bytes / report.source_bytes if report.source_bytes else 0.0
    lines = [
        f"{report.written:,} of {counted(report.found, 'picture')} written to {printable(report.target)}"
        + (f", {len(report.skipped):,} skipped" if report.skipped else "")
        + (f"; {report.carried_on:,} by an earlier run" if report.carried_on else ""),
        f"{human_bytes(report.store_bytes)} on disk, {ratio:.1f} times the {human_bytes(report.source_bytes)} "
        "of the pictures",
        f"{report.seconds:.1f} s, {report.images_per_s:,.0f} images/s",
    ]
    lines += [f"{NOTES.get(note, note)}: {count:,}" for note, count in sorted(report.notes.items())]
    lines += _duplicate_lines(report.duplicates)
    if report.messages:
        lines.append("decoders said, of so many pictures (N stands for numbers):")
        lines += _shortened(
            [f"  {count:>7,}  {printable(kind)}" for kind, count in _by_count(report.messages)],
            _KINDS_SHOWN,
            False,
            "--json lists all",
        )
    return "\n".join(lines)


def _duplicate_lines(duplicates: Duplicates) -> list[str]:
    if not duplicates.count:
        return []
    other = f", {duplicates.other_label:,} of them under another label" if duplicates.other_label else ""
    shown = "; ".join(f"{printable(later)} is {printable(first)}" for first, later in duplicates.examples)
    more = "; ..." if duplicates.count > len(duplicates.examples) else ""
    return [f"the same file again under another name (kept): {duplicates.count:,}{other} ({shown}{more})"]


def _by_count(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def report_json(report: Report) -> dict[str, Any]:
    return asdict(report)


def info_json(reader: Reader) -> dict[str, Any]:
    info = reader.info
    counts = np.bincount(reader.labels, minlength=len(info.classes)) if info.labelled else np.zeros(0, np.int64)
    return {
        "path": str(reader.path),
        "format": info.format,
        "version": info.version,
        "count": info.count,
        "image": {"shape": info.shape, "dtype": "uint8", "layout": "HWC", "channels": "RGB"},
        "labelled": info.labelled,
        "classes": [{"name": name, "count": int(count)} for name, count in zip(info.classes, counts, strict=True)],
        "preprocessing": dict(info.preprocessing),
        "source": dict(info.source),
        "notes": dict(info.notes),
        "duplicates": asdict(find_duplicates(reader)),
        "store_bytes": reader.file_size,
        "tools": dict(info.tools),
        "skipped": [asdict(skipped) for skipped in reader.skipped],
    }


def info_text(reader: Reader, *, all_classes: bool = False, all_skipped: bool = False) -> str:
    facts = info_json(reader)
    shape = facts["image"]["shape"]
    source_bytes = facts["source"].get("bytes", 0)
    rows = [
        ("store", f"{printable(facts['path'])}: {facts['format']}, format version {facts['version']}"),
        ("images", f"{facts['count']:,}, {_shape_text(shape)}, uint8 RGB, stored height x width x channel"),
        ("size", f"{human_bytes(facts['store_bytes'])} (pictures: {human_bytes(source_bytes)})"),
        (
            "preprocessing",
            ", ".join(f"{key} {value}" for key, value in facts["preprocessing"].items() if value is not None),
        ),
        ("notes", "; ".join(f"{NOTES.get(note, note)}: {count:,}" for note, count in facts["notes"].items()) or "none"),
        ("duplicates", _duplicates_text(facts["duplicates"])),
        ("made with", ", ".join(f"{name} {version}" for name, version in facts["tools"].items())),
        ("classes", _info_classes_text(facts)),
    ]
    lines = [f"{name:<14} {text}" for name, text in rows]
    lines += _shortened(
        [f"  {index:>5}  {printable(row['name'])}  {row['count']:,}" for index, row in enumerate(facts["classes"])],
        _CLASSES_SHOWN,
        all_classes,
        "--json lists all",
    )
    lines.append(f"{'skipped':<14} {counted(len(facts['skipped']), 'file')}")
    lines += _shortened(
        [f"  {printable(row['path'])}: {row['reason']}" for row in facts["skipped"]],
        _CLASSES_SHOWN,
        all_skipped,
        "--skipped lists all",
    )
    return "\n".join(lines)


def _info_classes_text(facts: Mapping[str, Any]) -> str:
    if not facts["labelled"]:
        return "none: every label is -1"
    orders = {GIVEN: ", in the order of a list that was given", NATURAL: ", in natural order"}
    return f"{len(facts['classes']):,}" + orders.get(str(facts["source"].get("class_order")), "")


def _duplicates_text(duplicates: Mapping[str, Any]) -> str:
    if not duplicates["count"]:
        return "none"
    shown = "; ".join(f"{printable(later)} is {printable(first)}" for first, later in duplicates["examples"])
    more = "; ..." if duplicates["count"] > len(duplicates["examples"]) else ""
    return f"{duplicates['count']:,} ({duplicates['other_label']:,} under another label): {shown}{more}"


def reading_text(reader: Reader) -> str:
    """How packshift reads this store on this machine, and why."""
    sizes = f"store {human_bytes(reader.file_size)}, memory {human_bytes(usable_memory())}"
    if reader.kernel_reads_ahead:
        how = "the store fits into memory: the kernel reads ahead as it sees fit"
    else:
        how = "the store is larger than memory: kernel read-ahead off, each batch's records fetched by exact ranges"
    return f"{'reading':<14} from a map of the file; {how} ({sizes})"


def _shape_text(shape: Sequence[int] | None) -> str:
    return "each in its own size" if shape is None else f"{shape[0]} x {shape[1]} (height x width)"


def _shortened(lines: list[str], limit: int, everything: bool, hint: str) -> list[str]:
    if everything or len(lines) <= limit:
        return lines
    return [*lines[:limit], f"  ... and {len(lines) - limit:,} more ({hint})"]


def verification_text(verification: Verification) -> str:
    """The summary; problems are told apart from it, one a line (`str(problem)`)."""
    name = printable(verification.path)
    speed = verification.store_bytes / verification.seconds if verification.seconds else 0.0
    size = f"{counted(verification.count, 'record')}, {human_bytes(verification.store_bytes)}"
    if verification.sound:
        lines = [f"{name}: sound: every byte is what was written; {size}"]
    else:
        lines = [f"{name}: not sound: {counted(verification.faults, 'problem')}; {size}"]
    if verification.pictures is not None and verification.source is not None:
        differs = f"{counted(verification.differences, 'difference')}" if verification.differences else "no difference"
        decoded = counted(verification.pictures, "picture")
        lines.append(f"{printable(verification.source)}: {differs}; {decoded} decoded")
    lines.append(f"{verification.seconds:.1f} s" + ("" if verification.pictures else f", {human_bytes(speed)}/s"))
    return "\n".join(lines)


def verification_json(verification: Verification) -> dict[str, Any]:
    return {"passed": verification.passed, "sound": verification.sound, **asdict(verification)}


def export_text(report: ExportReport) -> str:
    count = report.written + len(report.skipped)
    lines = [
        f"{report.written:,} of {counted(count, 'record')} written to {printable(report.target)} as "
        f"{report.image_format}, {human_bytes(report.file_bytes)}",
        f"{report.seconds:.1f} s",
    ]
    return "\n".join(lines)


def export_json(report: ExportReport) -> dict[str, Any]:
    return asdict(report)
