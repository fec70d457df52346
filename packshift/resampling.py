"""Pillow's bilinear scaling number for number, but only of the part of the picture that is kept, and with the vector
instructions that Pillow does without.

Pillow scales in two passes with whole numbers in between, so the result is exactly determined by its weights and by which
pass comes first (its Resample.c). A picture that lies on its side or is mirrored need not be turned before: the weights
are. The loops are in C (`packshift.compiled`); without, or where what they give is not what Pillow gives, Pillow scales.
"""

from __future__ import annotations

import platform
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from packshift.compiled import compiled
from packshift.pillow_memory import memory_of

Pixels = NDArray[np.uint8]

SIDEWAYS = frozenset({5, 6, 7, 8})
"""EXIF orientations in which the picture's width lies along the file's height."""

LONGEST_SIDE = 65_535
"""Of longer ones Pillow rounds the box to 32 bits, and so many weights may add up to more than 1, which it clips."""

_MIRRORED_WIDTH = frozenset({2, 3, 6, 7})  # of the upright picture, against where it lies in the file
_MIRRORED_HEIGHT = frozenset({3, 4, 7, 8})
_SAME_ARITHMETIC = ("x86_64", "AMD64")  # elsewhere compilers may round a * b + c once instead of twice


class Side(NamedTuple):
    """How a side of the upright picture is scaled: `start` to `stop` of its `length` pixels to `size`, of which those from
    `first` to `last` are wanted."""

    length: int
    start: float
    stop: float
    size: int
    first: int
    last: int


def can_resample() -> bool:
    """Whether `resample` works in this process: it was built, is wanted, and gives Pillow's pixels."""
    return compiled() is not None and _gives_pillows_pixels_here()


def resample(
    pixels: Pixels, height: Side, width: Side, *, orientation: object = 1, turned_first: bool = True
) -> Pixels:
    """Scale, cut and turn upright: read-only (last - first of `height`, last - first of `width`, 3) uint8.

    Needs `can_resample`, and sides of at most `LONGEST_SIDE`, before and after.

    `pixels` is (H, W, 4) uint8, C-contiguous, as it lies in a file of that EXIF orientation; the fourth channel is not
    looked at. `height` and `width` are sides of the upright picture. The pixels are those of Pillow where it does the
    widths before the heights, either of the picture turned upright before or (not `turned_first`) of the picture as it lies
    in the file. Raises MemoryError.
    """
    library = compiled()
    assert library is not None  # the caller has asked `can_resample`; not a user's data
    sideways = orientation in SIDEWAYS
    in_memory = (width.length, height.length, 4) if sideways else (height.length, width.length, 4)
    if pixels.shape != in_memory or not pixels.flags.c_contiguous:
        raise ValueError(f"expected C-contiguous {in_memory}, got {pixels.shape}")
    for side in (height, width):
        right = 0 <= side.first < side.last <= side.size and 0 <= side.start < side.stop <= side.length
        if not right or max(side.length, side.size) > LONGEST_SIDE:
            raise ValueError(f"cannot resample {side}")
    upright: Pixels = np.empty((height.last - height.first, width.last - width.first, 3), np.uint8)
    library.resample(
        pixels,
        (height.start, height.stop, height.length, *height[3:], orientation in _MIRRORED_HEIGHT),
        (width.start, width.stop, width.length, *width[3:], orientation in _MIRRORED_WIDTH),
        sideways,
        turned_first,
        upright,
    )
    upright.flags.writeable = False
    return upright


@cache
def _gives_pillows_pixels_here() -> bool:
    return platform.machine() in _SAME_ARITHMETIC and _gives_pillows_pixels()


def _gives_pillows_pixels() -> bool:
    """Compare with Pillow on a picture made for this, where it lies and made smaller and larger, whole and of a part."""
    from PIL import Image

    y, x, channel = np.ogrid[:67, :91, :4]
    pixels = ((y * 7 + x * 13 + channel * 31 + y * x // 5) % 256).astype(np.uint8)
    picture = Image.fromarray(pixels[:, :, :3].copy())
    memory = memory_of(picture)
    if memory is not None and not np.array_equal(memory[:, :, :3], pixels[:, :, :3]):
        return False
    for height, width, stop_y, stop_x in ((31, 43, 67, 91), (67, 50, 67, 91), (100, 95, 67, 91), (7, 9, 66.25, 90.5)):
        expected = picture.resize((width, height), Image.Resampling.BILINEAR, (0, 0, stop_x, stop_y))
        found = resample(pixels, Side(67, 0, stop_y, height, 0, height), Side(91, 0, stop_x, width, 0, width))
        if found.tobytes() != expected.tobytes():
            return False
    return True
