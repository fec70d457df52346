"""What is written in C: built when packshift is installed where there is a C compiler, and done in other ways without.

`PACKSHIFT_TURBO=0` in the environment turns it off.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for those who name the types
    from packshift._compiled import Gathering as Gathering
    from packshift._compiled import Queue as Queue
    from packshift._compiled import Rows as Rows

_INTERFACE = 5
"""`INTERFACE` of _compiling.h: changes with everything that _compiled.pyi says."""


@cache
def compiled() -> ModuleType | None:
    """`packshift._compiled`, or None where it was not built or is not wanted."""
    if os.environ.get("PACKSHIFT_TURBO") == "0":
        return None
    try:
        module = import_module("packshift._compiled")
    except ImportError:  # not built, or for another system
        return None
    return module if getattr(module, "INTERFACE", None) == _INTERFACE else None
