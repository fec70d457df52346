"""Source layouts: one file a layout, found by their names.

A layout is a module of this package without a leading underscore that has a `LAYOUT` (see `Layout`). It finds files,
labels and their order; it never opens one.
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from packshift.errors import SourceError, UsageError
from packshift.sources._labelling import BY_NAME, Labelling

if TYPE_CHECKING:
    from packshift.record import Listing
    from packshift.sources._tree import Tree

AUTO = "auto"


class Layout(Protocol):
    """What one file of this package provides."""

    name: str

    def fits(self, tree: Tree) -> bool:
        """Whether `tree` looks like this layout. Exactly one layout should say so for any tree with a picture."""
        ...

    def arrange(self, tree: Tree, labelling: Labelling) -> Listing:
        """The pictures of `tree` with their labels, in the order in which they are stored."""
        ...


@cache
def layout_names() -> tuple[str, ...]:
    """Names of all layouts, sorted, without importing any of them ("class-folders" is `class_folders.py`)."""
    modules = (module.name for module in pkgutil.iter_modules(__path__))
    return tuple(sorted(name.replace("_", "-") for name in modules if not name.startswith("_")))


def get_layout(name: str) -> Layout:
    if name not in layout_names():
        raise UsageError(f"unknown layout {name!r}: expected {AUTO} or one of {', '.join(layout_names())}")
    found: Layout = import_module(f"{__name__}.{name.replace('-', '_')}").LAYOUT
    return found


def scan(
    root: str | os.PathLike[str],
    layout: str = AUTO,
    progress: Callable[[int], None] | None = None,
    labelling: Labelling = BY_NAME,
) -> Listing:
    """List the pictures under `root`, calling `progress` with the number of files found so far now and then.

    Raises SourceError where the folder is missing, unreadable, holds no picture, or a class folder that `labelling` lacks.
    """
    from packshift.sources._tree import read_tree

    tree = read_tree(Path(root), progress)
    candidates = [get_layout(name) for name in (layout_names() if layout == AUTO else [layout])]
    chosen = next((candidate for candidate in candidates if layout != AUTO or candidate.fits(tree)), None)
    listing = chosen.arrange(tree, labelling) if chosen is not None else None
    if listing is None or not len(listing):
        raise SourceError(_nothing_found(tree, layout))
    return listing


def _nothing_found(tree: Tree, layout: str) -> str:
    if layout == AUTO:
        expected = f"no pictures in {tree.root}: expected {tree.root}/CLASS/*.jpg, or *.jpg directly in it; "
    else:
        expected = f"no pictures in {tree.root} in the layout {layout} (see --layout); "
    if tree.is_empty:
        return expected + "the folder is empty"
    found = [f"{reason}: {count:,} ({tree.examples(reason)})" for reason, count in tree.ignored.items()]
    found += [f"folders: {len(tree.folders):,}"] if tree.folders else []
    return expected + "found " + ", ".join(found)
