"""The pixels of a JPEG, from Pillow or from libjpeg-turbo through the optional package simplejpeg (`packshift[turbo]`).

Both use the same library, so the pixels are the same and only the way to them is shorter. Pillow opens every file first:
it reads the header, the orientation and the number of frames, and refuses what has too many pixels. Whatever simplejpeg
does not decode without a complaint goes to Pillow, which then judges it and words the error. `PACKSHIFT_TURBO=0` in the
environment turns simplejpeg off.
"""

from __future__ import annotations

import io
import itertools
import os
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from packshift.pillow_memory import Memory, picture_on

if TYPE_CHECKING:
    from PIL.Image import Image as Picture
    from PIL.JpegImagePlugin import JpegImageFile

SCALES = (8, 4, 2)
"""How many times smaller a JPEG can be decoded, largest first."""

_COLOURS = {"L": "GRAY", "RGB": "RGBX"}
"""Pillow's mode of a JPEG -> simplejpeg's name for the bytes that Pillow keeps for it: RGB has an unused fourth one."""


def jpeg_decoder() -> str:
    """Which one decodes JPEGs in this process: "simplejpeg" or "Pillow"."""
    return "Pillow" if _simplejpeg() is None else "simplejpeg"


def load_jpeg(opened: JpegImageFile, data: bytes, scale: int = 1) -> Picture:
    """Decode the first frame of a JPEG that is open but not loaded with Pillow, `scale` times smaller (1, 2, 4 or 8).

    `data` is the whole file. Gives a picture of mode L, RGB or CMYK, of the width and height of the file divided by
    `scale`, rounded up. Raises what Pillow raises for a broken file.
    """
    if scale > 1:
        opened.draft(None, (opened.width // scale, opened.height // scale))
    opened.decodermaxblock = max(opened.decodermaxblock, len(data))  # in one go: 2 % of the decoding
    opened.load()
    return opened


def memory_of_jpeg(opened: JpegImageFile, data: bytes, scale: int = 1) -> Memory | None:
    """The same from simplejpeg, as it lies in memory; None where Pillow has to decode the file."""
    simplejpeg = _simplejpeg()
    if simplejpeg is None:
        return None
    width, height = (-(-side // scale) for side in opened.size)
    return _turbo_pixels(simplejpeg, opened.mode, data, height, width)


def _turbo_pixels(simplejpeg: ModuleType, mode: str, data: bytes, height: int, width: int) -> Memory | None:
    """The pixels in the scale that gives these sides, or None where Pillow has to decode."""
    if mode not in _COLOURS:
        return None
    try:
        pixels: Memory = simplejpeg.decode_jpeg(data, _COLOURS[mode], min_height=height, min_width=width, strict=True)
    except ValueError:  # broken, or of a kind it does not know
        return None
    return pixels if pixels.shape[:2] == (height, width) else None


@cache
def _simplejpeg() -> ModuleType | None:
    """simplejpeg, where it is installed, wanted, and gives Pillow's pixels."""
    if os.environ.get("PACKSHIFT_TURBO") == "0":
        return None
    try:
        import simplejpeg
    except (ImportError, ValueError):  # ValueError: built for another numpy
        return None
    return simplejpeg if _gives_pillows_pixels(simplejpeg) else None


def _gives_pillows_pixels(simplejpeg: ModuleType) -> bool:
    """Compare both on pictures made for this, grey and with halved colours, of odd sides, whole and scaled."""
    from PIL import Image

    y, x, channel = np.ogrid[:45, :61, :3]
    picture = Image.fromarray(((y * 7 + x * 13 + channel * 31 + y * x // 5) % 256).astype(np.uint8))
    for mode, scale in itertools.product(_COLOURS, (1, *SCALES)):
        buffer = io.BytesIO()
        picture.convert(mode).save(buffer, "JPEG", quality=90)
        with Image.open(buffer) as expected:
            expected.draft(None, (expected.width // scale, expected.height // scale))
            expected.load()
            try:
                pixels = _turbo_pixels(simplejpeg, mode, buffer.getvalue(), expected.height, expected.width)
                if pixels is None:
                    return False
                found = picture_on(pixels, mode)
            except (AttributeError, TypeError):  # a simplejpeg or a Pillow without one of these functions or arguments
                return False
            if found.resize((20, 10)).tobytes() != expected.resize((20, 10)).tobytes():
                return False
            if found.tobytes() != expected.tobytes():
                return False
    return True
