"""What is written in C: built when packshift is installed where there is a C compiler, and done in other ways without.

`PACKSHIFT_TURBO=0` in the environment turns it off.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, c_double, c_int32, c_int64, c_size_t, c_void_p
from functools import cache
from importlib.util import find_spec

_INTERFACE = 4
"""`packshift_interface` of _compiling.h: changes with every structure and list of arguments."""


class SideStruct(ctypes.Structure):
    """`struct side` of _resampling.c."""

    _fields_ = (
        *((name, c_double) for name in ("start", "stop")),
        *((name, c_int32) for name in ("length", "size", "first", "last", "mirrored")),
    )


class BatchStruct(ctypes.Structure):
    """`struct batch` of _gathering.c."""

    _fields_ = (
        ("first", c_void_p),
        ("length", c_int64),
        *((name, c_size_t) for name in ("stride", "n")),
        ("positions", c_void_p),
        ("count", c_size_t),
        ("out", c_void_p),
        *((name, c_size_t) for name in ("begun", "taking_part")),
        ("next", c_void_p),
    )


@cache
def compiled() -> ctypes.CDLL | None:
    """The functions of _gathering.c and _resampling.c, or None where they were not built or are not wanted."""
    if os.environ.get("PACKSHIFT_TURBO") == "0":
        return None
    place = find_spec("packshift._compiled")
    if place is None or place.origin is None:
        return None
    try:
        library = ctypes.CDLL(place.origin)
        interface = c_int32.in_dll(library, "packshift_interface").value
    except (OSError, ValueError):  # built for another system, or of another version
        return None
    if interface != _INTERFACE:
        return None
    library.resample.argtypes = [c_void_p, POINTER(SideStruct), POINTER(SideStruct), c_int32, c_int32, c_void_p]
    batch = POINTER(BatchStruct)
    library.gather.argtypes = [batch, c_size_t]
    library.open_queue.argtypes = [c_size_t]
    library.end_threads.argtypes = library.free_queue.argtypes = [c_void_p]
    library.hand_over.argtypes = library.finish.argtypes = [c_void_p, batch]
    library.resample.restype = library.gather.restype = library.hand_over.restype = c_int32
    library.open_queue.restype = c_void_p
    library.finish.restype = library.end_threads.restype = library.free_queue.restype = None
    return library
