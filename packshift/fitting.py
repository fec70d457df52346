"""A decoded picture made upright and brought to the size asked for: by packshift's own scaling, or by Pillow, to the same
pixels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from packshift.errors import ImageError
from packshift.jpeg import SCALES
from packshift.pillow_memory import Memory
from packshift.pixel_limit import scaled_limit
from packshift.resampling import LONGEST_SIDE, SIDEWAYS, Pixels, Side, resample
from packshift.settings import Preprocessing

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

TURNS: Mapping[object, str] = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""EXIF orientation -> how Pillow's `transpose` makes the picture upright."""


def scaled_decoding(
    original: tuple[int, int], orientation: object, settings: Preprocessing
) -> tuple[int, tuple[int, int]]:
    """How many times smaller a JPEG of this (width, height) is decoded, and the (width, height) to which it is then scaled
    as it lies in the file; (1, `original`) where it is decoded whole. Never below twice that size."""
    if settings.fast_decode:
        width, height = original
        if orientation in SIDEWAYS:
            scaled_width, scaled_height = _scaled_size(width, height, settings)
        else:
            scaled_height, scaled_width = _scaled_size(height, width, settings)
        for scale in SCALES:
            if width >= 2 * scale * scaled_width and height >= 2 * scale * scaled_height:
                return scale, (scaled_width, scaled_height)
    return 1, original


class _Placement(NamedTuple):
    """Where a picture lies in the size asked for: it is scaled to `height` x `width`, and what begins at `top`, `left` of
    that is kept; where those are negative, there is a black border instead."""

    height: int
    width: int
    top: int
    left: int


def _place(height: int, width: int, settings: Preprocessing) -> _Placement:
    """`height` and `width` are those of the upright original."""
    assert settings.size is not None  # the caller's case; not a user's data
    target_height, target_width = settings.size
    scaled_height, scaled_width = _scaled_size(height, width, settings)
    if settings.fit == "pad":
        border = (target_height - scaled_height) // 2, (target_width - scaled_width) // 2
        return _Placement(scaled_height, scaled_width, -border[0], -border[1])
    top, left = round((scaled_height - target_height) / 2.0), round((scaled_width - target_width) / 2.0)
    return _Placement(scaled_height, scaled_width, top, left)


def fitted(image: Picture, height: int, width: int, settings: Preprocessing) -> Pixels:
    """(H, W, 3) uint8 of the size asked for, from the upright picture; `height` and `width` are those of the original."""
    from PIL import Image

    if settings.size is None:
        return _rgb_pixels(image)
    target_height, target_width = settings.size
    target = (target_width, target_height)
    place = _place(height, width, settings)
    limit = scaled_limit(settings.max_pixels)
    if limit is not None and place.height * place.width > limit:
        raise ImageError(
            f"too elongated: a picture of {width} x {height} pixels that covers {target_width} x {target_height} would "
            f"have {place.width * place.height:,}, over the limit of {limit:,} (--max-pixels raises it)"
        )
    if place.width > target_width and _widths_come_first(image.size[::-1], (place.height, place.width)):
        # Columns that are cut off need not go through the second pass.
        image = image.resize((place.width, image.height), Image.Resampling.BILINEAR)
        image = image.crop((place.left, 0, place.left + target_width, image.height))
        image = image.resize((target_width, place.height), Image.Resampling.BILINEAR)
    elif image.size != (place.width, place.height):
        image = image.resize((place.width, place.height), Image.Resampling.BILINEAR)
    if settings.fit == "pad" and image.size != target:
        canvas = Image.new(image.mode, target)
        canvas.paste(image, (-place.left, -place.top))
        image = canvas
    elif image.size != target:
        left = place.left if image.width == place.width else 0
        image = image.crop((left, place.top, left + target_width, place.top + target_height))
    return _rgb_pixels(image)


def resampled(
    memory: Memory, orientation: object, original: tuple[int, int], scale: int, settings: Preprocessing
) -> Pixels | None:
    """What `fitted` makes of a picture that lies in memory as in its file, or None where Pillow has to.

    `original` is the file's (height, width). One that was decoded `scale` times smaller is scaled before it is turned.
    """
    assert settings.size is not None  # the caller's case; not a user's data
    if memory.shape[2] != 4:
        return None
    height, width = original
    lengths = memory.shape[:2]
    if orientation in SIDEWAYS:
        height, width, lengths = width, height, lengths[::-1]
    place = _place(height, width, settings)
    limit = scaled_limit(settings.max_pixels)
    if limit is not None and place.height * place.width > limit:
        return None
    if max(*lengths, place.height, place.width) > LONGEST_SIDE:
        return None
    before, after = lengths, (place.height, place.width)
    if scale > 1 and orientation in SIDEWAYS:
        before, after = before[::-1], after[::-1]
    if before[0] != after[0] and before[1] != after[1] and not _widths_come_first(before, after):
        return None
    sides = (
        Side(length, 0, side / scale, scaled, max(0, start), min(scaled, start + target))
        for length, side, scaled, start, target in zip(
            lengths, (height, width), (place.height, place.width), (place.top, place.left), settings.size, strict=True
        )
    )
    pixels = resample(memory, *sides, orientation=orientation, turned_first=scale == 1)
    if pixels.shape[:2] == settings.size:
        return pixels
    canvas = np.zeros((*settings.size, 3), np.uint8)
    top, left = max(0, -place.top), max(0, -place.left)
    canvas[top : top + len(pixels), left : left + pixels.shape[1]] = pixels
    return canvas


def _widths_come_first(before: tuple[int, int], after: tuple[int, int]) -> bool:
    """Whether Pillow, scaling one (height, width) to another, does all columns before any row, for certain.

    Up to version 12 it always did; 13 begins with the rows where that saves enough (its Resample.c); later ones are not
    known. Which pass comes first decides about the rounding.
    """
    from PIL import __version__ as pillow_version

    major = pillow_version.split(".")[0]
    fewer_rows, fewer_columns = before[0] - after[0], before[1] - after[1]
    if not fewer_rows or not fewer_columns:
        return False  # one pass only
    return major in ("11", "12") or (major == "13" and not (fewer_rows > 0 and fewer_rows > 2 * fewer_columns))


def upright(image: Picture, orientation: object) -> Picture:
    from PIL.Image import Transpose

    turn = TURNS.get(orientation)
    return image if turn is None else image.transpose(Transpose[turn])


def _rgb_pixels(image: Picture) -> Pixels:
    """(H, W, 3) uint8, read-only, of a picture of mode RGB or L."""
    if image.mode == "L":
        image = image.convert("RGB")
    return np.frombuffer(image.tobytes(), np.uint8).reshape(image.height, image.width, 3)


def _scaled_size(height: int, width: int, settings: Preprocessing) -> tuple[int, int]:
    """(height, width) after scaling, before cutting or padding."""
    assert settings.size is not None  # the caller's case; not a user's data
    target_height, target_width = settings.size
    if settings.fit == "stretch":
        return target_height, target_width
    wide = width * target_height > height * target_width
    by_height = wide if settings.fit == "crop" else not wide
    if by_height:
        return target_height, max(1, int(target_height * width / height))
    return max(1, int(target_width * height / width)), target_width


def enlarges(height: int, width: int, settings: Preprocessing) -> bool:
    inner_height, inner_width = _scaled_size(height, width, settings)
    return inner_height > height or inner_width > width
