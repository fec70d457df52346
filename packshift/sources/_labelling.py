"""Which class folder gets which label: by the order of the names, or by a list."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from packshift.errors import SourceError, UsageError

STRING, NATURAL, GIVEN = "string", "natural", "given"
ORDERS = (STRING, NATURAL)

_SHOWN = 5


@dataclass(frozen=True)
class Labelling:
    """Labels count from 0 in the `order` of the class folders' names, or are the places in the list `names`.

    "string" compares names letter by letter, as torchvision does; "natural" compares runs of digits as numbers. `origin`
    says where the list comes from; a folder that is not in the list is refused, or, with `closed=False`, comes behind it.
    """

    order: str = STRING
    names: tuple[str, ...] | None = None
    origin: str = ""
    closed: bool = True

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise UsageError(f"unknown class order {self.order!r}: expected one of {', '.join(ORDERS)}")

    @property
    def recorded(self) -> str | None:
        """The word for it in a store's header; None for the default, which is not recorded."""
        if self.names is not None:
            return GIVEN
        return None if self.order == STRING else self.order

    def arrange(self, root: str, folders: Collection[str]) -> tuple[str, ...]:
        """The classes in the order of their labels. Raises SourceError where the list lacks a folder under `root`."""
        if self.names is None:
            return tuple(sorted(folders, key=natural_key if self.order == NATURAL else None))
        unknown = sorted(set(folders) - set(self.names))
        if unknown and self.closed:
            raise SourceError(
                f"{root}: {_some(unknown)}: no class of {self.origin}, which has {_some(self.names)}; rename the folder, "
                "take it away, or leave --classes-from out"
            )
        return (*self.names, *unknown)


BY_NAME = Labelling()


def natural_key(name: str) -> tuple[list[Any], str]:
    """Sorts "2" before "10", and where only leading zeros differ, as text. Upper and lower case are told apart."""
    parts = re.split("0*([0-9]+)", name)  # text and digits in turns; longer digits are a larger number
    return [(len(part), part) if place % 2 else part for place, part in enumerate(parts)], name


def _some(names: Collection[str]) -> str:
    shown = [repr(name) for name in list(names)[:_SHOWN]]
    return ", ".join(shown) + (f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else "")
