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
import zlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from packshift.errors import ImageError, SourceError, UsageError
from packshift.record import Record, Sample, encode_name

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

FITS = ("crop", "pad", "stretch")
LARGEST_SIDE = 65_535

NOTES = {
    "16-bit": "16 bits per channel, scaled to 8",
    "enlarged": "smaller than the target size, enlarged",
    "frames": "several frames, the first taken",
    "transparent": "transparency dropped, as convert('RGB') does",
    "turned": "turned upright as the EXIF orientation says",
}
"""What can happen to a picture beyond the settings: key -> words for the report, which adds how many there were."""

_ORIENTATION = 0x0112
_EXIF_ERRORS = (OSError, ValueError, SyntaxError, TypeError, KeyError, IndexError, struct.error, ZeroDivisionError)


@dataclass(frozen=True)
class Preprocessing:
    """The settings. `size` is (height, width) in pixels, or None: every picture keeps its own size.

    `fit` says how a picture of another shape comes to `size`: "crop" covers it and cuts the middle out, "pad" fits
    inside and centres on black, "stretch" ignores the aspect ratio.
    """

    size: tuple[int, int] | None = (256, 256)
    fit: str = "crop"

    def __post_init__(self) -> None:
        if self.fit not in FITS:
            raise UsageError(f"unknown fit {self.fit!r}: expected one of {', '.join(FITS)}")
        if self.size is not None and not all(1 <= side <= LARGEST_SIDE for side in self.size):
            raise UsageError(f"size {self.size}: expected sides from 1 to {LARGEST_SIDE:,} pixels")

    @property
    def shape(self) -> tuple[int, int, int] | None:
        """(H, W, 3) of every record, or None where each keeps its own."""
        return None if self.size is None else (*self.size, 3)

    def describe(self) -> str:
        """What will be done, in words."""
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
        return {
            "orientation": "as EXIF says",
            "mode": "RGB",
            "size": None if self.size is None else list(self.size),
            "fit": None if self.size is None else self.fit,
            "filter": None if self.size is None else "Pillow BILINEAR (antialiased)",
            "range": [0, 255],
        }


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


_NOT_THE_FILES_FAULT = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}


def load_record(root: str, sample: Sample, settings: Preprocessing) -> Record:
    """Read, decode and preprocess one picture under `root`.

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
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns) or len(data) != after.st_size:
        raise ImageError("changed while it was read")
    return replace(make_record(data, sample, settings), source_mtime_ns=after.st_mtime_ns)


def size_in_header(root: str, sample: Sample) -> tuple[int, int]:
    """(height, width) in pixels as a picture's header says, before it is turned upright; decodes nothing.

    Raises ImageError where the header cannot be read.
    """
    from PIL import Image

    try:
        with Image.open(os.path.join(os.fsencode(root), encode_name(sample.name))) as image:
            return image.height, image.width
    except Exception as error:  # Pillow's plugins raise whatever a broken file makes them stumble over
        raise ImageError(f"its header cannot be read: {error}") from error


def make_record(data: bytes, sample: Sample, settings: Preprocessing) -> Record:
    """Decode and preprocess one picture. Raises ImageError with the reason where that cannot be done."""
    try:
        image, notes = _decode(data)
        height, width = image.height, image.width
        pixels = _resize(image, settings)
    except (ImageError, MemoryError):
        raise
    except Exception as error:  # Pillow's plugins raise whatever a broken file makes them stumble over
        raise ImageError(_reason(data, error)) from error
    if settings.size is not None and _enlarges(height, width, settings):
        notes.append("enlarged")
    return Record(
        name=sample.name,
        label=sample.label,
        pixels=pixels,
        source_size=len(data),
        source_crc32=zlib.crc32(data),
        original_size=(height, width),
        notes=tuple(notes),
    )


def _decode(data: bytes) -> tuple[Picture, list[str]]:
    """The first frame, whole, upright and RGB, and the notes on it."""
    from PIL import Image

    if not data:
        raise ImageError("empty file (0 bytes)")
    notes: list[str] = []
    with Image.open(io.BytesIO(data)) as opened:
        opened.load()
        orientation = _orientation(opened)
        rgb = _to_rgb(opened, notes)
        if _has_more_frames(opened):
            notes.append("frames")
    turns = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
    if orientation in turns:
        notes.append("turned")
        rgb = rgb.transpose(turns[orientation])
    return rgb, notes


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


def _to_rgb(image: Picture, notes: list[str]) -> Picture:
    from PIL import Image

    if image.mode == "RGB":
        if "transparency" in image.info:
            notes.append("transparent")
        return image
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
        # Pillow clips 16-bit grey to 255 instead of scaling it; it reads PGM of any depth as I, scaled to 65,535.
        notes.append("16-bit")
        return Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        kind = "32-bit integers" if image.mode == "I" else "floating-point numbers"
        raise ImageError(f"its pixels are {kind}, whose range is not known; save it with 8 or 16 bits first")
    if image.has_transparency_data:
        notes.append("transparent")
    return image.convert("RGB")


def _resize(image: Picture, settings: Preprocessing) -> np.ndarray[Any, np.dtype[np.uint8]]:
    from PIL import Image

    if settings.size is None:
        return np.asarray(image)
    height, width = settings.size
    inner_height, inner_width = _scaled_size(image.height, image.width, settings)
    if Image.MAX_IMAGE_PIXELS is not None and inner_height * inner_width > 2 * Image.MAX_IMAGE_PIXELS:
        raise ImageError(
            f"too elongated: a picture of {image.width} x {image.height} pixels that covers {width} x {height} would have "
            f"{inner_width * inner_height:,}, over Pillow's limit of {2 * Image.MAX_IMAGE_PIXELS:,}"
        )
    if (image.height, image.width) != (inner_height, inner_width):
        image = image.resize((inner_width, inner_height), Image.Resampling.BILINEAR)
    if settings.fit == "pad" and image.size != (width, height):
        canvas = Image.new("RGB", (width, height))
        canvas.paste(image, ((width - inner_width) // 2, (height - inner_height) // 2))
        image = canvas
    elif image.size != (width, height):
        left, top = round((inner_width - width) / 2.0), round((inner_height - height) / 2.0)
        image = image.crop((left, top, left + width, top + height))
    return np.asarray(image)


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


def _reason(data: bytes, error: Exception) -> str:
    """A short reason for a picture that Pillow does not read."""
    from PIL import Image, UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return f"not a picture that Pillow can read (it begins with {data[:8]!r})"
    if isinstance(error, Image.DecompressionBombError):
        return f"too many pixels: {error}"
    text = " ".join(str(error).split()) or type(error).__name__
    return f"cannot be decoded: {text}"
