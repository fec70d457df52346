"""What becomes of every picture: the settings, from a user's words to the store's header and back."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from packshift.arguments import at_least_one
from packshift.errors import UsageError
from packshift.text import counted

FITS = ("crop", "pad", "stretch")
LARGEST_SIDE = 65_535


@dataclass(frozen=True)
class Preprocessing:
    """The settings. `size` is (height, width) in pixels, or None: every picture keeps its own size.

    `fit` says how a picture of another shape comes to `size`: "crop" covers it and cuts the middle out, "pad" fits
    inside and centres on black, "stretch" ignores the aspect ratio. With `fast_decode` a JPEG is decoded 2, 4 or 8 times
    smaller where that is still at least twice the scaled size in both directions. `background` is the (red, green, blue)
    over which transparent pictures are laid; without it transparency is dropped, as `convert("RGB")` does. A picture of
    more than `max_pixels` is an error; None: as Pillow is set, which by default refuses more than 178,956,970.
    """

    size: tuple[int, int] | None = (256, 256)
    fit: str = "crop"
    fast_decode: bool = False
    background: tuple[int, int, int] | None = None
    max_pixels: int | None = None

    def __post_init__(self) -> None:
        if self.fit not in FITS:
            raise UsageError(f"unknown fit {self.fit!r}: expected one of {', '.join(FITS)}")
        if self.fast_decode and self.size is None:
            raise UsageError("fast_decode (--fast-decode) needs a size: with size none every pixel is kept")
        if self.size is not None and not all(1 <= side <= LARGEST_SIDE for side in self.size):
            raise UsageError(f"size {self.size}: expected sides from 1 to {LARGEST_SIDE:,} pixels")

    @property
    def shape(self) -> tuple[int, int, int] | None:
        """(H, W, 3) of every record, or None where each keeps its own."""
        return None if self.size is None else (*self.size, 3)

    def describe(self) -> str:
        """What will be done, in words."""
        text = self._describe_size()
        if self.fast_decode:
            text += ", large JPEGs decoded smaller"
        if self.background is not None:
            text += ", transparent ones over #{:02x}{:02x}{:02x}".format(*self.background)
        if self.max_pixels is not None:
            text += f", those of more than {counted(self.max_pixels, 'pixel')} skipped"
        return text

    def _describe_size(self) -> str:
        if self.size is None:
            return "upright, RGB, every picture in its own size"
        height, width = self.size
        target = f"{height} x {width} (height x width)"
        if self.fit == "stretch":
            return f"upright, RGB, stretched to {target}"
        if self.fit == "pad":
            return f"upright, RGB, fitted into {target}, centred on black"
        return f"upright, RGB, scaled to cover {target}, middle cut out"

    def to_json(self) -> dict[str, Any]:
        """For the store's header; `fast_decode`, `background` and `max_pixels` only where they are used."""
        settings: dict[str, Any] = {
            "orientation": "as EXIF says",
            "mode": "RGB",
            "size": None if self.size is None else list(self.size),
            "fit": None if self.size is None else self.fit,
            "filter": None if self.size is None else "Pillow BILINEAR (antialiased)",
            "range": [0, 255],
        }
        if self.fast_decode:
            settings["fast_decode"] = True
        if self.background is not None:
            settings["background"] = list(self.background)
        if self.max_pixels is not None:
            settings["max_pixels"] = self.max_pixels
        return settings

    @classmethod
    def from_json(cls, recorded: Mapping[str, Any]) -> Preprocessing:
        """The settings whose `to_json` is `recorded`; raises UsageError where there are none."""
        size, fit, background = recorded.get("size"), recorded.get("fit"), recorded.get("background")
        settings = cls(
            None if size is None else _pair(_integers(size)),
            "crop" if size is None else str(fit),
            recorded.get("fast_decode") is True,
            None if background is None else parse_background(_colour(_integers(background))),
            parse_max_pixels(recorded.get("max_pixels")),
        )
        if settings.to_json() != recorded:
            raise UsageError(f"preprocessing {recorded}: expected what this packshift does")
        return settings


def _pair(numbers: list[int]) -> tuple[int, int]:
    if len(numbers) != 2:
        raise UsageError(f"size {numbers}: expected height and width")
    return numbers[0], numbers[1]


def _colour(numbers: list[int]) -> tuple[int, int, int]:
    if len(numbers) != 3:
        raise UsageError(f"background {numbers}: expected red, green and blue")
    return numbers[0], numbers[1], numbers[2]


def _integers(values: object) -> list[int]:
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise UsageError(f"{values!r}: expected a list of numbers")
    return values


def parse_size(size: int | str | tuple[int, int] | None) -> tuple[int, int] | None:
    """(height, width) from 256, "256", "240x320" (height x width), (240, 320), or None from None and "none".

    Raises UsageError for anything else.
    """
    if size is None or size == "none":
        return None
    if isinstance(size, str):
        sides: list[Any] = [int(side) if _is_number(side) else side for side in size.lower().split("x")]
    else:
        sides = list(size) if isinstance(size, (tuple, list)) else [size]
    try:
        numbers = [operator.index(side) for side in sides if not isinstance(side, bool)]
    except TypeError:
        numbers = []
    if len(numbers) != len(sides) or len(numbers) not in (1, 2):
        raise UsageError(
            f"size {str(size)[:40]!r}: expected a number such as 224, HEIGHTxWIDTH such as 240x320 (in Python a pair of "
            "numbers), or none"
        )
    return numbers[0], numbers[-1]


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 8


def parse_background(colour: str | tuple[int, int, int] | None) -> tuple[int, int, int] | None:
    """(red, green, blue) from a name or notation that `PIL.ImageColor` knows, from three numbers, or None from None.

    Raises UsageError for anything else.
    """
    if colour is None:
        return None
    numbers: list[int] = []
    try:
        if isinstance(colour, str):
            from PIL import ImageColor

            numbers = list(ImageColor.getrgb(colour))
        else:
            numbers = [operator.index(level) for level in colour]
    except (TypeError, ValueError):
        pass
    if len(numbers) != 3 or not all(0 <= level <= 255 for level in numbers):
        raise UsageError(
            f"background {str(colour)[:40]!r}: expected a colour such as white or #ff8000 (in Python also three numbers "
            "from 0 to 255), without transparency"
        )
    return numbers[0], numbers[1], numbers[2]


def parse_max_pixels(limit: int | None) -> int | None:
    """The limit as an int, or None from None; raises UsageError for anything but a whole number of at least 1."""
    return None if limit is None else at_least_one("max_pixels", limit)
