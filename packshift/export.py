"""A store back to plain files: one picture a record, under the names that the source had, in class folders.

Two things shape it. Stores may come from strangers, so every name is checked before anything is written: no file is
ever made outside the target folder. And converting the exported folder again has to give the same records in the same
order, which is the order of the names. A new suffix can change that order ("a.jpg" comes before "a.jpg (1).jpg", but
"a.png" behind it), or make two names one. `_choose_names` finds, for every record, the plainest name that keeps order.
"""

from __future__ import annotations

import errno
import io
import os
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from packshift.arguments import at_least_one
from packshift.errors import DamagedStoreError, TargetError, UsageError
from packshift.machine import usable_cpus
from packshift.record import Skipped, decode_name, encode_name
from packshift.sources._labelling import natural_key
from packshift.sources._tree import SUFFIXES
from packshift.stores._reader import Reader
from packshift.text import printable
from packshift.threads import in_order

IMAGE_FORMATS = {"png": b".png", "jpeg": b".jpg"}

_REPLACED, _APPENDED, _KEPT = range(3)
_COSTS = (0, 1, 1000)
_NEVER = 1 << 60
_LONGEST_PATH = 4096  # bytes; no system that packshift runs on opens a longer one
_PNG_LEVEL = 3  # zlib's; 6, its default, takes twice the time for files 4 % smaller (124 photos of 256 x 256)

ExportProgress = Callable[[str, int, int], None]
"""Called with ("pictures", pictures done, pictures in all)."""


@dataclass(frozen=True)
class ExportReport:
    """What an export did.

    `written` + len(`skipped`) = records in the store; `skipped` are the damaged ones. `file_bytes` is the size of all
    files. `notes` say what converting the folder again would not give back.
    """

    path: str
    target: str
    image_format: str
    written: int
    skipped: Sequence[Skipped]
    classes: tuple[str, ...]
    file_bytes: int
    seconds: float
    notes: tuple[str, ...]


def export_store(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    image_format: str = "png",
    quality: int = 90,
    jobs: int | None = None,
    progress: ExportProgress | None = None,
) -> ExportReport:
    """Write every record of a store as a picture under `target`, a folder that is new or empty.

    `image_format` is "png" (lossless) or "jpeg" with `quality` 1 to 100. `jobs` threads encode (default: the CPUs that
    this process may use). A damaged record is left out and listed. An export that ends early leaves what is written.

    Raises StoreError; UsageError; TargetError where `target` cannot be written; DamagedStoreError, before anything is
    written, where a name in the store would lead out of `target`.
    """
    started = time.perf_counter()
    if image_format not in IMAGE_FORMATS:
        raise UsageError(f"unknown image format {image_format!r}: expected one of {', '.join(IMAGE_FORMATS)}")
    if at_least_one("quality", quality) > 100:
        raise UsageError(f"quality {quality}: expected a number from 1 to 100")
    threads = usable_cpus() if jobs is None else at_least_one("jobs", jobs)
    reader, folder = Reader(path), Path(target)
    for array in reader.info.arrays:
        reader.array(array)  # checked before anything is written
    names = _Names(reader, IMAGE_FORMATS[image_format])
    _make_folder(folder)
    for name in reader.info.classes:
        _make_folders(folder, os.path.join(os.fsencode(folder), encode_name(name)))

    def write(index: int) -> int | Skipped:
        try:
            if not reader.checksum_matches(index):
                return Skipped(reader.paths[index], "damaged: its pixels do not match their checksum")
        except DamagedStoreError:
            return Skipped(reader.paths[index], "damaged: it does not lie in the file")
        data = _encode(reader.pixels(index), image_format, quality, _record_name(reader, index))
        _write_file(folder, os.path.join(os.fsencode(folder), names[index]), data)
        return len(data)

    written, file_bytes, skipped = 0, 0, []
    for done, outcome in enumerate(in_order(write, range(len(reader)), threads), 1):
        if isinstance(outcome, Skipped):
            skipped.append(outcome)
        else:
            written, file_bytes = written + 1, file_bytes + outcome
        if progress is not None:
            progress("pictures", done, len(reader))
    return ExportReport(
        path=str(reader.path),
        target=str(folder),
        image_format=image_format,
        written=written,
        skipped=tuple(skipped),
        classes=reader.info.classes,
        file_bytes=file_bytes,
        seconds=time.perf_counter() - started,
        notes=tuple(names.notes()),
    )


class _Names:
    """The relative path of every exported file; `names[index]`, bytes with "/" between the parts.

    Raises DamagedStoreError where a name of the store is not one of a file inside a folder.
    """

    def __init__(self, reader: Reader, suffix: bytes) -> None:
        self._paths = reader.paths
        self._labels = reader.labels
        self._classes = [encode_name(name) for name in reader.info.classes]
        self._suffix = suffix
        self._hidden = 0
        for name in self._classes:
            if not _is_safe_part(name):
                raise _unsafe(reader, f"its class {printable(decode_name(name))!r}")
        self._reserved = self._check(reader)
        self._choices, self._in_order = _choose_names(self)
        self._class_option = _class_option(reader)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> bytes:
        return self.candidate(index, self._choices[index])

    def original(self, index: int) -> bytes:
        """The path of a record in a source folder that would give it its label."""
        path = self._paths.raw(index)
        if not self._classes:
            return path
        folder = self._classes[int(self._labels[index])] + b"/"
        return path if path.startswith(folder) else folder + path

    def order(self, index: int) -> tuple[int, bytes]:
        """What `sources` sorts records by."""
        return int(self._labels[index]), self.original(index)

    def candidate(self, index: int, choice: int) -> bytes:
        original = self.original(index)
        if choice == _KEPT:
            return original
        stem, suffix = os.path.splitext(original)
        if choice == _REPLACED and suffix.lower() in SUFFIXES:
            return stem + self._suffix
        return original + self._suffix

    def possible(self, index: int, choice: int) -> bool:
        """Whether a name fits into a folder and is no folder's."""
        name = self.candidate(index, choice)
        last = name.rpartition(b"/")[2]
        if choice == _KEPT and os.path.splitext(name)[1].lower() not in SUFFIXES:
            return False
        return len(last) <= 255 and name not in self._reserved

    def notes(self) -> Iterator[str]:
        if self._class_option:
            yield (
                "the labels do not follow the string order of the class folders: converting the folder again gives them with "
                f"{self._class_option}"
            )
        if not self._in_order:
            yield (
                "the store's records are not in the order in which packshift convert lists files: converting the folder "
                "again gives the same pictures in another order"
            )
        kept = self._choices.count(_KEPT)
        if kept:
            yield (
                f"files that keep the suffix of the source although they hold {self._suffix[1:].decode()}, so that their "
                f"order stays: {kept:,}"
            )
        if self._hidden:
            yield f"files with hidden names, which packshift convert leaves out: {self._hidden:,}"

    def _check(self, reader: Reader) -> set[bytes]:
        """Check every path; return the folders that could be taken for an exported file."""
        reserved = set()
        for index in range(len(self)):
            path = self._paths.raw(index)
            parts = path[: _LONGEST_PATH + 1].split(b"/")
            if len(path) > _LONGEST_PATH or not all(map(_is_safe_part, parts)):
                shown = printable(decode_name(path[:200]))
                raise _unsafe(reader, f"the path {shown!r} of its record {index}")
            self._hidden += any(part.startswith(b".") for part in parts)
            original = self.original(index)
            while b"/" in original:
                original = original.rpartition(b"/")[0]
                if os.path.splitext(original)[1].lower() in SUFFIXES:
                    reserved.add(original)
        return reserved


def _class_option(reader: Reader) -> str:
    """The option of packshift convert that gives the store's classes their labels; "" where it needs none."""
    classes = list(reader.info.classes)
    if classes == sorted(classes):
        return ""
    natural = classes == sorted(classes, key=natural_key)
    return "--class-order natural" if natural else f"--classes-from {printable(shlex.quote(str(reader.path)))}"


def _is_safe_part(part: bytes) -> bool:
    return part not in (b"", b".", b"..") and b"\0" not in part and b"/" not in part


def _unsafe(reader: Reader, what: str) -> DamagedStoreError:
    return DamagedStoreError(
        f"{reader.path}: {what} is not the name of a file inside a folder; nothing was written, and packshift convert "
        "does not make such a store"
    )


def _choose_names(names: _Names) -> tuple[bytearray, bool]:
    """For every record the cheapest of its candidates such that all names rise, as the records do; and whether they do.

    The shortest way through (record, candidate), where a step leads from a name to a larger one. Keeping all names as
    they are is always a way. Where the records themselves do not rise, every name gets the suffix behind it: that makes
    no two names one.
    """
    if _all_rise(names):
        return bytearray(len(names)), True
    steps = bytearray(len(names))
    costs, last = [0 if choice == _REPLACED else _NEVER for choice in range(3)], [(-1, b"")] * 3
    before = (-1, b"")
    for index in range(len(names)):
        order = names.order(index)
        if order <= before:
            return bytearray([_APPENDED]) * len(names), False
        before = order
        here = [(order[0], names.candidate(index, choice)) for choice in range(3)]
        best = [_step(names, index, choice, here[choice], last, costs) for choice in range(3)]
        costs = [cost for cost, _ in best]
        if min(costs) >= _NEVER:
            return bytearray([_APPENDED]) * len(names), False
        steps[index] = sum(origin << 2 * choice for choice, (_, origin) in enumerate(best))
        last = here
    choices = bytearray(len(names))
    choice = costs.index(min(costs))
    for index in range(len(names) - 1, -1, -1):
        choices[index] = choice
        choice = steps[index] >> 2 * choice & 3
    return choices, True


def _all_rise(names: _Names) -> bool:
    """Whether the plainest names do, which they nearly always do."""
    before = last = (-1, b"")
    for index in range(len(names)):
        order = names.order(index)
        name = (order[0], names.candidate(index, _REPLACED))
        if order <= before or name <= last or not names.possible(index, _REPLACED):
            return False
        before, last = order, name
    return True


def _step(
    names: _Names, index: int, choice: int, name: tuple[int, bytes], last: Sequence[tuple[int, bytes]], costs: list[int]
) -> tuple[int, int]:
    """(least cost of giving a record this candidate, the choice for the record before it)."""
    if not names.possible(index, choice):
        return _NEVER, 0
    cost, origin = min((costs[origin] if last[origin] < name else _NEVER, origin) for origin in range(3))
    return min(_NEVER, cost + _COSTS[choice]), origin


def _make_folder(folder: Path) -> None:
    try:
        os.mkdir(folder)
    except FileExistsError:
        _check_empty(folder)
    except FileNotFoundError as error:
        raise TargetError(f"{folder}: the folder {folder.parent} does not exist; make it first") from error
    except OSError as error:
        raise TargetError(f"{folder}: cannot make the folder: {error.strerror}") from error


def _check_empty(folder: Path) -> None:
    try:
        with os.scandir(folder) as entries:
            first = next(entries, None)
    except NotADirectoryError as error:
        raise TargetError(f"{folder} is a file: expected the name of a new folder, or an empty one") from error
    except OSError as error:
        raise TargetError(f"{folder}: cannot list the folder: {error.strerror}") from error
    if first is not None:
        raise TargetError(f"{folder} is not empty (it has {first.name!r}): choose a new or an empty folder")


def _record_name(reader: Reader, index: int) -> str:
    return f"record {index} ({printable(reader.paths[index])})"


def _encode(pixels: NDArray[np.uint8], image_format: str, quality: int, name: str) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    options = {"compress_level": _PNG_LEVEL} if image_format == "png" else {"quality": quality}
    try:
        Image.fromarray(pixels).save(buffer, image_format, **options)
    except (OSError, ValueError) as error:
        height, width, _ = pixels.shape
        raise TargetError(f"{name}: {width} x {height} pixels cannot be encoded as {image_format}: {error}") from error
    return buffer.getvalue()


def _write_file(folder: Path, path: bytes, data: bytes) -> None:
    _make_folders(folder, os.path.dirname(path))
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise _failure(folder, path, error) from error
    try:
        try:
            with open(fd, "wb", buffering=0) as file:
                left = memoryview(data)
                while left:
                    left = left[file.write(left) :]
        except OSError as error:
            raise _failure(folder, path, error) from error
    except BaseException:
        os.unlink(path)
        raise


def _make_folders(folder: Path, path: bytes) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise _failure(folder, path, error) from error


def _failure(folder: Path, path: bytes, error: OSError) -> TargetError:
    name = printable(decode_name(path))
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return TargetError(
            f"{folder}: the disk is full; make room, or export elsewhere. What was written so far is left there"
        )
    if isinstance(error, FileExistsError):
        return TargetError(
            f"{name} exists: two records have this name (on a file system that ignores case?), or something else writes "
            f"into {folder}. What was written so far is left there"
        )
    return TargetError(f"{name}: cannot be written: {error.strerror}. What was written so far is left in {folder}")
