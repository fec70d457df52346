"""Pillow's pictures and the memory that their pixels lie in, without a copy in either direction."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int64, c_uint8, c_void_p
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

Memory = NDArray[np.uint8]
"""(H, W, 4) uint8 of a picture of mode RGB, the fourth channel unused; (H, W, 1) of one of mode L."""


def picture_on(pixels: Memory, mode: str) -> Picture:
    """A picture of mode L or RGB whose pixels are this array.

    `Image.frombuffer` does so for L and RGBX, but not for RGB, which lies in memory as RGBX does; and scaling RGBX costs
    a quarter more than scaling RGB, as much as another decoder saves. So RGB takes the function below `frombuffer`.
    Raises AttributeError or TypeError where a Pillow has no such function.
    """
    from PIL import Image

    size = (pixels.shape[1], pixels.shape[0])
    picture = Image.new(mode, (0, 0))
    picture = picture._new(Image.core.map_buffer(pixels, size, "raw", 0, (mode, 0, 1)))  # type: ignore[attr-defined]  # private to Pillow, so not in its types; `jpeg` uses this only after a trial has given the right pixels
    picture.readonly = 1
    return picture


class _ArrowArray(ctypes.Structure):
    """`struct ArrowArray` of the Arrow C data interface."""


_ArrowArray._fields_ = (
    *((name, c_int64) for name in ("length", "null_count", "offset", "n_buffers", "n_children")),
    ("buffers", POINTER(c_void_p)),
    ("children", POINTER(POINTER(_ArrowArray))),
    *((name, c_void_p) for name in ("dictionary", "release", "private_data")),
)

_pointer_in = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_in.argtypes = [ctypes.py_object, ctypes.c_char_p]
_pointer_in.restype = c_void_p


def memory_of(picture: Picture) -> Memory | None:
    """The pixels of a picture of mode RGB where Pillow keeps them, read-only; None where they cannot be had.

    Pillow hands them out through the Arrow PyCapsule interface if they lie in one piece, as they do up to 4 million pixels.
    They are there as long as the array is. Not used before Pillow 11.3: 11.2 never gives them back. Nor for pictures on
    somebody else's memory or without pixels, for which Pillow up to 12 looks where there is nothing.
    """
    if picture.mode != "RGB" or not _hands_out_memory() or picture.readonly or not all(picture.size):
        return None
    try:
        capsules = picture.__arrow_c_array__()
    except (ValueError, TypeError, NotImplementedError):  # not in one piece, or not in this Pillow
        return None
    outer = ctypes.cast(_pointer_in(capsules[1], b"arrow_array"), POINTER(_ArrowArray)).contents
    height, width = picture.height, picture.width
    if outer.length != height * width or outer.n_children != 1 or outer.offset:
        return None
    inner = outer.children[0].contents
    if inner.length != height * width * 4 or inner.n_buffers != 2 or inner.offset or not inner.buffers[1]:
        return None
    memory = (c_uint8 * inner.length).from_address(inner.buffers[1])
    memory.capsules = capsules  # they own it
    pixels = np.frombuffer(memory, np.uint8).reshape(height, width, 4)
    pixels.flags.writeable = False
    return pixels


@cache
def _hands_out_memory() -> bool:
    from PIL import __version__ as pillow_version

    return tuple(int(part) for part in pillow_version.split(".")[:2]) >= (11, 3)
