"""One pass over a folder: which files are pictures, by their names, and what else there is.

Hidden names are left out on every level (they are editors', file managers' and archivers' leavings, and a hidden folder
taken for a class would shift every label), as are the few well-known ones without a dot. Links are followed, and a
picture's place is that of the link; a folder that leads back into itself is entered once.
"""

from __future__ import annotations

import os
import stat
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from packshift.errors import SourceError
from packshift.record import decode_name

SUFFIXES = frozenset(
    b".jpg .jpeg .jpe .jfif .png .gif .bmp .tif .tiff .webp .ppm .pgm .pbm .pnm .avif .jp2 .mpo".split()
)
_JUNK = frozenset(name.encode() for name in ("Thumbs.db", "desktop.ini", "__MACOSX", "@eaDir"))

HIDDEN = "hidden or system files and folders"
OTHER_SUFFIX = "files with other suffixes"
NOT_A_FILE = "pipes, sockets or devices"
LOOP = "folders that lead back into themselves"
OUTSIDE_CLASS = "pictures beside the class folders"

_EXAMPLES = 3
_PROGRESS_STEP = 1000


@dataclass
class Tree:
    """What a folder holds. All paths are bytes relative to `root`, with "/" between the parts.

    `folders` are those directly under the root; `pictures` all pictures on any level, not sorted.
    """

    root: Path
    folders: list[bytes] = field(default_factory=list)
    pictures: list[bytes] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)
    _examples: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    @property
    def is_empty(self) -> bool:
        return not (self.folders or self.pictures or self.ignored)

    def ignore(self, reason: str, path: bytes) -> None:
        self.ignored[reason] += 1
        if len(self._examples[reason]) < _EXAMPLES:
            self._examples[reason].append(decode_name(path))

    def examples(self, reason: str) -> str:
        names = self._examples[reason]
        more = ", ..." if self.ignored[reason] > len(names) else ""
        return ", ".join(repr(name) for name in names) + more

    @property
    def all_examples(self) -> dict[str, tuple[str, ...]]:
        return {reason: tuple(names) for reason, names in self._examples.items()}


def read_tree(root: Path, progress: Callable[[int], None] | None = None) -> Tree:
    """Walk `root` once, calling `progress` with the number of files found, every thousand files.

    Raises SourceError where the root, or a folder in it, cannot be read.
    """
    tree = Tree(root)
    try:
        is_folder = stat.S_ISDIR(os.stat(root).st_mode)
    except FileNotFoundError:
        raise SourceError(f"source folder {root} does not exist: expected a folder of pictures") from None
    except OSError as error:
        raise SourceError(f"source folder {root} cannot be read: {error.strerror}") from error
    if not is_folder:
        raise SourceError(f"source {root} is not a folder: expected a folder of pictures")
    _walk(tree, os.fsencode(root), progress or (lambda _: None))
    return tree


def _walk(tree: Tree, root: bytes, progress: Callable[[int], None]) -> None:
    # Explicit stack: a folder can be nested deeper than Python likes to recurse.
    waiting: list[tuple[bytes, bytes, tuple[tuple[int, int], ...]]] = [(root, b"", ())]
    found = 0
    while waiting:
        folder, prefix, above = waiting.pop()
        here = _identity(folder)
        if here in above:
            tree.ignore(LOOP, prefix)
            continue
        for entry in _entries(folder):
            found += 1
            if found % _PROGRESS_STEP == 0:
                progress(found)
            path = prefix + b"/" + entry.name if prefix else entry.name
            if entry.name.startswith(b".") or entry.name in _JUNK:
                tree.ignore(HIDDEN, path)
            elif _is_folder(entry):
                if not prefix:
                    tree.folders.append(path)
                waiting.append((entry.path, path, (*above, here)))
            elif os.path.splitext(entry.name)[1].lower() not in SUFFIXES:
                tree.ignore(OTHER_SUFFIX, path)
            elif not _may_be_read(entry):
                tree.ignore(NOT_A_FILE, path)
            else:
                tree.pictures.append(path)


def _identity(folder: bytes) -> tuple[int, int]:
    try:
        found = os.stat(folder)
    except OSError as error:
        raise SourceError(f"cannot list the folder {os.fsdecode(folder)}: {error.strerror}") from error
    return found.st_dev, found.st_ino


def _entries(folder: bytes) -> Iterator[os.DirEntry[bytes]]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError as error:
        raise SourceError(f"cannot list the folder {os.fsdecode(folder)}: {error.strerror}") from error


def _is_folder(entry: os.DirEntry[bytes]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself
        return False


def _may_be_read(entry: os.DirEntry[bytes]) -> bool:
    """A regular file, or a link that leads nowhere: reading that fails later, with its name and reason."""
    try:
        return entry.is_file() or (entry.is_symlink() and not os.path.exists(entry.path))
    except OSError:
        return True
