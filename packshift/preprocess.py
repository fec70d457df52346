"""From the bytes of a picture to pixels: decode, orient, make RGB, resize. Pure: same bytes and settings, same pixels.

The default equals `torchvision.transforms.Resize(256)` followed by `CenterCrop(256)` on the upright RGB PIL image, bit
for bit: the same filter (Pillow's BILINEAR, which averages when it shrinks), the same rounding of the longer side
(down) and of the crop's corner (half to even).
"""

from __future__ import annotations

import errno
import io
import operator
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from packshift.arguments import at_least_one
from packshift.checksum import crc32
from packshift.errors import ImageError, SourceError, UsageError
from packshift.jpeg import SCALES, jpeg_decoder, load_jpeg, memory_of_jpeg
from packshift.pillow_memory import Memory, memory_of, picture_on
from packshift.pixel_limit import bomb_reason, check_pixels, pixels_up_to, scaled_limit
from packshift.record import Record, Sample, encode_name
from packshift.resampling import LONGEST_SIDE, SIDEWAYS, Pixels, Side, can_resample, resample
from packshift.text import counted

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

FITS = ("crop", "pad", "stretch")
LARGEST_SIDE = 65_535

NOTES = {
    "16-bit": "16 bits per channel, scaled to 8",
    "background": "transparency laid over the background colour",
    "enlarged": "smaller than the target size, enlarged",
    "frames": "several frames, the first taken",
    "transparent": "transparency dropped, as convert('RGB') does",
    "turned": "turned upright as the EXIF orientation says",
}
"""What can happen to a picture beyond the settings: key -> words for the report, which adds how many there were."""

_ORIENTATION = 0x0112
_TURNS: Mapping[object, str] = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""EXIF orientation -> how Pillow's `transpose` makes the picture upright."""

_EXIF_ERRORS = (OSError, ValueError, SyntaxError, TypeError, KeyError, IndexError, struct.error, ZeroDivisionError)


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


Lap = Callable[[str], None]
"""Called with the name of a stage when it is over."""


def no_lap(stage: str) -> None:
    """For those who do not want to know."""


_NOT_THE_FILES_FAULT = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}


def get_ready() -> None:
    """Import and try out all that decoding may need: once, before processes are forked, rather than in each."""
    from PIL import Image

    Image.preinit()
    jpeg_decoder()
    can_resample()


def load_record(root: str, sample: Sample, settings: Preprocessing, *, lap: Lap = no_lap) -> Record:
    """Read, decode and preprocess one picture under `root`; `lap` hears when "read" and "decode" are over.

    Raises ImageError where the file is at fault; where the process is (no memory, too many open files), MemoryError or
    SourceError, which must end a conversion: another run would give another store.
    """
    path = os.path.join(os.fsencode(root), encode_name(sample.name))
    try:
        with open(path, "rb", buffering=0) as file:
            before = os.fstat(file.fileno())
            data = file.readall()
            after = os.fstat(file.fileno())
    except OSError as error:
        if error.errno in _NOT_THE_FILES_FAULT:
            raise SourceError(
                f"{sample.name}: {error.strerror}: use fewer jobs, or raise the limit (ulimit)"
            ) from error
        raise ImageError(f"cannot be read: {error.strerror}") from error
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise ImageError("changed while it was read")
    lap("read")
    return make_record(data, sample, settings, mtime_ns=after.st_mtime_ns, lap=lap)


def size_in_header(root: str, sample: Sample, settings: Preprocessing) -> tuple[int, int]:
    """(height, width) in pixels as a picture's header says, before it is turned upright; decodes nothing.

    Raises ImageError where the header cannot be read, or says more pixels than the settings allow.
    """
    from PIL import Image

    try:
        with (
            pixels_up_to(settings.max_pixels),
            Image.open(os.path.join(os.fsencode(root), encode_name(sample.name))) as image,
        ):
            check_pixels(image.size, settings.max_pixels)
            return image.height, image.width
    except (ImageError, MemoryError):
        raise
    except (
        Exception
    ) as error:  # raised again as ImageError: plugins raise whatever a broken file makes them stumble over
        raise ImageError(f"its header cannot be read: {error}") from error


def make_record(
    data: bytes, sample: Sample, settings: Preprocessing, *, mtime_ns: int = 0, lap: Lap = no_lap
) -> Record:
    """Decode and preprocess one picture. Raises ImageError with the reason where that cannot be done."""
    try:
        with pixels_up_to(settings.max_pixels):
            pixels, (height, width), notes = _preprocessed(data, settings, lap)
    except (ImageError, MemoryError):
        raise
    except (
        Exception
    ) as error:  # raised again as ImageError: plugins raise whatever a broken file makes them stumble over
        raise ImageError(_reason(data, error, settings)) from error
    if settings.size is not None and _enlarges(height, width, settings):
        notes.append("enlarged")
    return Record(
        name=sample.name,
        label=sample.label,
        pixels=pixels,
        source_size=len(data),
        source_crc32=crc32(data),
        source_mtime_ns=mtime_ns,
        original_size=(height, width),
        notes=tuple(notes),
    )


def _preprocessed(data: bytes, settings: Preprocessing, lap: Lap) -> tuple[Pixels, tuple[int, int], list[str]]:
    """The pixels of the first frame as they are stored, the (height, width) of the upright original, the notes on it."""
    from PIL import Image
    from PIL.JpegImagePlugin import JpegImageFile

    if not data:
        raise ImageError("empty file (0 bytes)")
    notes: list[str] = []
    image: Picture | None
    memory: Memory | None
    scale, memory = 1, None
    with Image.open(io.BytesIO(data)) as opened:
        check_pixels(opened.size, settings.max_pixels)
        if isinstance(opened, JpegImageFile):
            orientation, (width, height) = _orientation(opened), opened.size
            scale, size = _scaled_decoding(opened.size, orientation, settings)
            memory = memory_of_jpeg(opened, data, scale)
            image = load_jpeg(opened, data, scale) if memory is None else None
        else:
            opened.load()
            image, orientation, (width, height) = opened, _orientation(opened), opened.size
        lap("decode")
        if image is not None:
            image = _to_rgb(image, notes, settings.background)
        if _has_more_frames(opened):
            notes.append("frames")
    original = height, width
    if orientation in _TURNS:
        notes.append("turned")
    if orientation in SIDEWAYS:
        height, width = width, height
    if settings.size is not None and can_resample():
        visible = memory if image is None else memory_of(image)
        pixels = None if visible is None else _resampled(visible, orientation, original, scale, settings)
        if pixels is not None:
            return pixels, (height, width), notes
    if image is None:
        assert memory is not None  # one of the two; not a user's data
        image = picture_on(memory, opened.mode)
    if scale > 1:
        # The last row and column may reach beyond the picture; the box does not.
        box = (0, 0, original[1] / scale, original[0] / scale)
        image = image.resize(size, Image.Resampling.BILINEAR, box)
    return _fit(_upright(image, orientation), height, width, settings), (height, width), notes


def _scaled_decoding(
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


def _upright(image: Picture, orientation: object) -> Picture:
    from PIL.Image import Transpose

    turn = _TURNS.get(orientation)
    return image if turn is None else image.transpose(Transpose[turn])


def _orientation(image: Picture) -> object:
    """The EXIF orientation; a broken EXIF block has none. TIFF files are upright once loaded and have none left."""
    try:
        return image.getexif().get(_ORIENTATION)
    except _EXIF_ERRORS:
        return None


def _has_more_frames(image: Picture) -> bool:
    """Asked last: some plugins have to leave the first frame to know."""
    try:
        return bool(getattr(image, "is_animated", False))
    except (OSError, ValueError, SyntaxError, EOFError, struct.error):
        return False


def _to_rgb(image: Picture, notes: list[str], background: tuple[int, int, int] | None) -> Picture:
    """The picture as RGB or L, without transparency."""
    from PIL import Image

    transparent = image.has_transparency_data
    if transparent:
        notes.append("transparent" if background is None else "background")
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
        # Pillow clips 16-bit grey to 255 instead of scaling it; it reads PGM of any depth as I, scaled to 65,535.
        notes.append("16-bit")
        levels = np.asarray(image)
        grey = Image.fromarray((levels.astype(np.uint32) >> 8).astype(np.uint8))
        if not transparent or background is None:
            return grey
        opaque = Image.fromarray(np.where(levels == image.info["transparency"], 0, 255).astype(np.uint8))
        return Image.composite(grey.convert("RGB"), Image.new("RGB", image.size, background), opaque)
    if image.mode in ("I", "F"):
        kind = "32-bit integers" if image.mode == "I" else "floating-point numbers"
        raise ImageError(f"its pixels are {kind}, whose range is not known; save it with 8 or 16 bits first")
    if transparent and background is not None:
        canvas = Image.new("RGBA", image.size, (*background, 255))
        return Image.alpha_composite(canvas, image.convert("RGBA")).convert("RGB")
    if image.mode in ("RGB", "L"):
        return image
    return image.convert("RGB")


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


def _fit(image: Picture, height: int, width: int, settings: Preprocessing) -> Pixels:
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


def _resampled(
    memory: Memory, orientation: object, original: tuple[int, int], scale: int, settings: Preprocessing
) -> Pixels | None:
    """What `_fit` makes of a picture that lies in memory as in its file, or None where Pillow has to.

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


def _enlarges(height: int, width: int, settings: Preprocessing) -> bool:
    inner_height, inner_width = _scaled_size(height, width, settings)
    return inner_height > height or inner_width > width


def _reason(data: bytes, error: Exception, settings: Preprocessing) -> str:
    """A short reason for a picture that Pillow does not read."""
    from PIL import Image, UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return f"not a picture that Pillow can read (it begins with {data[:8]!r})"
    if isinstance(error, Image.DecompressionBombError):
        return bomb_reason(error, settings.max_pixels)
    text = " ".join(str(error).split()) or type(error).__name__
    return f"cannot be decoded: {text}"
