"""Checks that several functions make of what they are given."""

from __future__ import annotations

import operator
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
