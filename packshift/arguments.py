"""Checks that several functions make of what they are given."""

from __future__ import annotations

import operator
import re
from typing import Any

from packshift.errors import UsageError


def at_least_one(name: str, value: Any) -> int:
    """`value` as an int; raises UsageError where it is not a whole number of at least 1."""
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise UsageError(f"{name} {value!r}: expected a whole number of at least 1")
    return number


_UNITS = {"": 1, "B": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for ending, base in (("B", 1000), ("IB", 1024))
}


def parse_bytes(name: str, value: Any) -> int:
    """Bytes: a whole number of them, or text such as "8GB" (powers of 1,000) or "7.5 GiB" (of 1,024).

    "8G" is refused: to some programs it means the one, to others the other. Raises UsageError for that and for 0.
    """
    number = 0
    if isinstance(value, str):
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?B|)", value.strip().upper())
        if found and found[2] in _UNITS:
            number = int(float(found[1]) * _UNITS[found[2]])
    elif isinstance(value, int) and not isinstance(value, bool):
        number = value
    if number < 1:
        raise UsageError(f"{name} {value!r}: expected bytes, or a number with a unit: 512MB, 8GB, 7.5GiB")
    return number
