"""From the bytes of a picture to pixels: decode, orient, make RGB, resize. Pure: same bytes and settings, same pixels.

The default equals `torchvision.transforms.Resize(256)` followed by `CenterCrop(256)` on the upright RGB PIL image, bit
for bit: the same filter (Pillow's BILINEAR, which averages when it shrinks), the same rounding of the longer side
(down) and of the crop's corner (half to even).
"""

from __future__ import annotations

import errno
import io
import os
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from packshift.checksum import crc32
from packshift.errors import ImageError, SourceError
from packshift.fitting import TURNS, enlarges, fitted, resampled, scaled_decoding, upright
from packshift.jpeg import jpeg_decoder, load_jpeg, memory_of_jpeg
from packshift.pillow_memory import Memory, memory_of, picture_on
from packshift.pixel_limit import bomb_reason, check_pixels, pixels_up_to
from packshift.record import Record, Sample, encode_name
from packshift.resampling import SIDEWAYS, Pixels, can_resample
from packshift.settings import Preprocessing

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

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
_EXIF_ERRORS = (OSError, ValueError, SyntaxError, TypeError, KeyError, IndexError, struct.error, ZeroDivisionError)

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
    if settings.size is not None and enlarges(height, width, settings):
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
            scale, size = scaled_decoding(opened.size, orientation, settings)
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
    if orientation in TURNS:
        notes.append("turned")
    if orientation in SIDEWAYS:
        height, width = width, height
    if settings.size is not None and can_resample():
        visible = memory if image is None else memory_of(image)
        pixels = None if visible is None else resampled(visible, orientation, original, scale, settings)
        if pixels is not None:
            return pixels, (height, width), notes
    if image is None:
        assert memory is not None  # one of the two; not a user's data
        image = picture_on(memory, opened.mode)
    if scale > 1:
        # The last row and column may reach beyond the picture; the box does not.
        box = (0, 0, original[1] / scale, original[0] / scale)
        image = image.resize(size, Image.Resampling.BILINEAR, box)
    return fitted(upright(image, orientation), height, width, settings), (height, width), notes


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


def _reason(data: bytes, error: Exception, settings: Preprocessing) -> str:
    """A short reason for a picture that Pillow does not read."""
    from PIL import Image, UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return f"not a picture that Pillow can read (it begins with {data[:8]!r})"
    if isinstance(error, Image.DecompressionBombError):
        return bomb_reason(error, settings.max_pixels)
    text = " ".join(str(error).split()) or type(error).__name__
    return f"cannot be decoded: {text}"
