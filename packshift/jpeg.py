"""The pixels of a JPEG, from Pillow or from libjpeg-turbo through the optional package simplejpeg (`packshift[turbo]`).

Both use the same library, so the pixels are the same and only the way to them is shorter. Pillow opens every file first:
it reads the header, the orientation and the number of frames, and refuses what has too many pixels. Whatever simplejpeg
does not decode without a complaint goes to Pillow, which then judges it and words the error. `PACKSHIFT_TURBO=0` in the
environment turns simplejpeg off.
"""

from __future__ import annotations

import io
import os
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image as Picture
    from PIL.JpegImagePlugin import JpegImageFile

SCALES = (8, 4, 2)
"""How many times smaller a JPEG can be decoded, largest first."""

_LAYOUTS = {"L": ("GRAY", "L"), "RGB": ("RGBX", "RGBX")}
"""Pillow's mode of a JPEG -> simplejpeg's name for the bytes, and the mode in which Pillow uses them without a copy."""


def jpeg_decoder() -> str:
    """Which one decodes JPEGs in this process: "simplejpeg" or "Pillow"."""
    return "Pillow" if _simplejpeg() is None else "simplejpeg"


def load_jpeg(opened: JpegImageFile, data: bytes, scale: int = 1) -> Picture:
    """Decode the first frame of a JPEG that is open but not loaded, `scale` times smaller (1, 2, 4 or 8).

    `data` is the whole file. Gives a picture of mode L, RGB, RGBX (the fourth byte means nothing) or CMYK, of the width
    and height of the file divided by `scale`, rounded up. Raises what Pillow raises for a broken file.
    """
    width, height = (-(-side // scale) for side in opened.size)
    pixels = _turbo_pixels(opened.mode, data, height, width, scale)
    if pixels is not None:
        from PIL import Image

        mode = _LAYOUTS[opened.mode][1]
        return Image.frombuffer(mode, (width, height), pixels, "raw", mode, 0, 1)
    if scale > 1:
        opened.draft(None, (opened.width // scale, opened.height // scale))
    opened.decodermaxblock = max(opened.decodermaxblock, len(data))  # in one go: 2 % of the decoding
    opened.load()
    return opened


def _turbo_pixels(mode: str, data: bytes, height: int, width: int, scale: int) -> np.ndarray[Any, Any] | None:
    """(height, width, 1 or 4) uint8, or None where Pillow has to decode."""
    simplejpeg = _simplejpeg()
    if simplejpeg is None or mode not in _LAYOUTS:
        return None
    try:
        pixels: np.ndarray[Any, Any] = simplejpeg.decode_jpeg(
            data, _LAYOUTS[mode][0], min_height=height, min_width=width, min_factor=scale, strict=True
        )
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
    """Compare both on a picture made for this, with halved colours and odd sides, whole and scaled."""
    from PIL import Image

    y, x, channel = np.ogrid[:45, :61, :3]
    picture = Image.fromarray(((y * 7 + x * 13 + channel * 31 + y * x // 5) % 256).astype(np.uint8))
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=90, subsampling=2)
    data = buffer.getvalue()
    for scale in (1, *SCALES):
        with Image.open(io.BytesIO(data)) as expected:
            if scale > 1:
                expected.draft(None, (expected.width // scale, expected.height // scale))
            expected.load()
            try:
                pixels = simplejpeg.decode_jpeg(
                    data, "RGBX", min_height=expected.height, min_width=expected.width, min_factor=scale
                )
            except (ValueError, TypeError):  # TypeError: a version without one of these arguments
                return False
            if not np.array_equal(pixels[:, :, :3], np.asarray(expected)):
                return False
    return True
