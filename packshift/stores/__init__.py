"""Stores: one file a format, found by their names.

A format is a module of this package without a leading underscore that has a `FORMAT` (see `_format.Format`). Nothing
else lists the formats: the command line, the benchmarks and the contract tests ask here. Modules are imported when a
format is used, their libraries when something is written or checked with them.
"""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from packshift.errors import UsageError

if TYPE_CHECKING:
    from packshift.stores._format import Format


@cache
def format_names() -> tuple[str, ...]:
    """Names of all formats, sorted, without importing any of them."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")))


@cache
def get_format(name: str) -> Format:
    if name not in format_names():
        raise UsageError(f"unknown format {name!r}: expected one of {', '.join(format_names())}")
    found: Format = import_module(f"{__name__}.{name}").FORMAT
    return found


def formats() -> list[Format]:
    return [get_format(name) for name in format_names()]


def suffixes_text() -> str:
    """The suffixes for messages: ".h5 or .hdf5 (hdf5), .lmdb (lmdb)"."""
    return ", ".join(f"{' or '.join(known.suffixes)} ({known.name})" for known in formats())


def format_of_target(target: Path, name: str | None = None) -> Format:
    """The format asked for by `name`, or else by the target's suffix (case does not matter)."""
    if name is not None:
        return get_format(name)
    for known in formats():
        if target.suffix.lower() in known.suffixes:
            return known
    raise UsageError(
        f"cannot tell the format of {str(target)!r} from its suffix: expected {suffixes_text()}, "
        "or name it with --format"
    )
