"""The classes of another data set, so that a name has the same label in both: from a store, or from a text file."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

from packshift.errors import NotAStoreError, SourceError
from packshift.record import decode_name
from packshift.stores._reader import Reader

_EXPECTED = "expected a packshift store with classes, or a text file with one class name per line"
_LONGEST_LINE = 1 << 12  # bytes, more than a folder's name can have
_BOM = b"\xef\xbb\xbf"


def read_classes(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """The class names in the order of their labels. Empty lines of a text file are left out, bytes are kept as they are.

    Raises SourceError where the file holds no such list, StoreError where it is a store that cannot be read.
    """
    if not os.path.exists(path):
        raise SourceError(f"{os.fspath(path)} does not exist: {_EXPECTED}")
    try:
        names = Reader(path).info.classes
    except NotAStoreError:
        names = tuple(_lines(path))
    if not names:
        raise SourceError(f"{os.fspath(path)} has no classes: {_EXPECTED}")
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        raise SourceError(f"{os.fspath(path)} has the class {name!r} {count:,} times: expected each name once")
    return names


def _lines(path: str | os.PathLike[str]) -> Iterator[str]:
    if not os.path.isfile(path):
        raise SourceError(f"{os.fspath(path)} is not a regular file: {_EXPECTED}")
    try:
        with open(path, "rb") as file:
            number = 0
            while line := file.readline(_LONGEST_LINE):
                number += 1
                name = (line.removeprefix(_BOM) if number == 1 else line).rstrip(b"\r\n")
                if b"\0" in name or b"/" in name or name in (b".", b"..") or len(line) == _LONGEST_LINE:
                    raise SourceError(f"{os.fspath(path)}: line {number} is not the name of a folder: {_EXPECTED}")
                if name.strip():
                    yield decode_name(name)
    except OSError as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(f"{os.fspath(path)} cannot be read: {error.strerror}") from error
