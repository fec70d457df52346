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
from typing import TYPE_CHECKING, Any

import numpy as np

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
    """Decode the first frame of a JPEG that is open but not loaded, `scale` times smaller (1, 2, 4 or 8).

    `data` is the whole file. Gives a picture of mode L, RGB or CMYK, of the width and height of the file divided by
    `scale`, rounded up. Raises what Pillow raises for a broken file.
    """
    simplejpeg = _simplejpeg()
    if simplejpeg is not None:
        width, height = (-(-side // scale) for side in opened.size)
        decoded = _turbo_picture(simplejpeg, opened.mode, data, height, width)
        if decoded is not None:
            return decoded
    if scale > 1:
        opened.draft(None, (opened.width // scale, opened.height // scale))
    opened.decodermaxblock = max(opened.decodermaxblock, len(data))  # in one go: 2 % of the decoding
    opened.load()
    return opened


def _turbo_picture(simplejpeg: ModuleType, mode: str, data: bytes, height: int, width: int) -> Picture | None:
    """The picture in the scale that gives these sides, or None where Pillow has to decode."""
    if mode not in _COLOURS:
        return None
    try:
        pixels = simplejpeg.decode_jpeg(data, _COLOURS[mode], min_height=height, min_width=width, strict=True)
    except ValueError:  # broken, or of a kind it does not know
        return None
    return _on_memory(pixels, mode, (width, height)) if pixels.shape[:2] == (height, width) else None


def _on_memory(pixels: np.ndarray[Any, Any], mode: str, size: tuple[int, int]) -> Picture:
    """A picture whose pixels are this array, without a copy.

    `Image.frombuffer` does so for L and RGBX, but not for RGB, which lies in memory as RGBX does; and scaling RGBX costs
    a quarter more than scaling RGB, as much as simplejpeg saves. So RGB takes the function below `frombuffer`;
    `_gives_pillows_pixels` has tried it.
    """
    from PIL import Image

    picture = Image.new(mode, (0, 0))
    picture = picture._new(Image.core.map_buffer(pixels, size, "raw", 0, (mode, 0, 1)))  # type: ignore[attr-defined]  # in no stub of Pillow
    picture.readonly = 1
    return picture


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
                found = _turbo_picture(simplejpeg, mode, buffer.getvalue(), expected.height, expected.width)
            except (AttributeError, TypeError):  # a simplejpeg or a Pillow without one of these functions or arguments
                return False
            if found is None or found.resize((20, 10)).tobytes() != expected.resize((20, 10)).tobytes():
                return False
            if found.tobytes() != expected.tobytes():
                return False
    return True
