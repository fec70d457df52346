"""A tree of everything that turns up in folders of pictures, and what must become of each file.

`make_tree` writes it, made anew for every run; nothing is stored but one JPEG with arithmetic coding, which Pillow reads
but does not write. The usual picture is 20 x 30 pixels (height x width) with another colour in each quarter, so that a
turn, a flip or a wrong channel shows.
"""

from __future__ import annotations

import base64
import io
import os
import socket
import struct
import unicodedata
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, features

STORED, SKIPPED, LEFT_OUT = "stored", "skipped", "left out"

HEIGHT, WIDTH = 20, 30
COLOURS = (
    (200, 40, 40),
    (40, 180, 40),
    (40, 40, 200),
    (220, 200, 60),
)  # top left, top right, bottom left, bottom right
GREYS = (10, 90, 170, 250)

UNDO = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
"""EXIF orientation -> how an upright picture is laid so that the orientation lifts it again."""

ARITHMETIC = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAAMCAgMCAgMDAwMEAwMEBQgFBQQEBQoHBwYIDAoMDAsKCwsNDhIQDQ4RDgsLEBYQERMUFRUVDA8XGBYU"
    "GBIUFRT/2wBDAQMEBAUEBQkFBQkUDQsNFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBT/yQARCAAQABgD"
    "AREAAhEBAxEB/8wACgAQEAUBEBEF/9oADAMBAAIRAxEAPwD/ANIOpeCKw+lScm1P7fHRT/SHvznUICcIdnFxWbc2RSoo0HmqLr8UUPmzyQEytu1k"
    "Iw1YVcVSVSAuxnxM7lhpl1B8y1i0ht8Q/9k="
)
"""16 x 24 pixels of the same four colours, made with `jpegtran -arithmetic`."""


@dataclass(frozen=True)
class Case:
    """One file. `data` None: not an ordinary file. `size` (height, width) and `colours` of the quarters, where stored;
    `words` in the reason, where skipped; `tolerance` in levels, because JPEG and WebP lose a little.
    """

    path: str
    data: bytes | None
    becomes: str = STORED
    words: str = ""
    size: tuple[int, int] = (HEIGHT, WIDTH)
    colours: tuple[tuple[int, int, int], ...] | None = COLOURS
    notes: tuple[str, ...] = ()
    tolerance: int = 14


def quarters(colours: tuple = COLOURS, height: int = HEIGHT, width: int = WIDTH, dtype: type = np.uint8) -> np.ndarray:
    """(height, width, 3) of colours, (height, width) of numbers."""
    values = np.array(colours, dtype)
    rows, columns = np.arange(height) * 2 // height, np.arange(width) * 2 // width
    return values[rows[:, None] * 2 + columns[None, :]]


def usual(height: int = HEIGHT, width: int = WIDTH) -> Image.Image:
    return Image.fromarray(quarters(height=height, width=width))


def bytes_of(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    if kind in ("JPEG", "MPO"):
        options = {"quality": 95, "subsampling": 0, **options}
    if kind == "WEBP":
        options = {"lossless": True, "exact": True, **options}
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def exif_of(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def grey_triples(levels: tuple[int, ...] = GREYS) -> tuple[tuple[int, int, int], ...]:
    return tuple((level, level, level) for level in levels)


def png_of(width: int, height: int, depth: int, colour_type: int, rows: bytes, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG put together by hand, for what Pillow does not write. `rows` begin with their filter byte each."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in parts
    )


def png_rows(pixels: np.ndarray) -> bytes:
    big_endian = pixels.astype(pixels.dtype.newbyteorder(">"))
    return b"".join(b"\0" + row.tobytes() for row in big_endian)


def blank_png(side: int) -> bytes:
    """`side` x `side` black pixels of one bit."""
    return png_of(side, side, 1, 0, (b"\0" + bytes((side + 7) // 8)) * side)


def with_segment(jpeg: bytes, marker: int, body: bytes) -> bytes:
    return jpeg[:2] + bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body + jpeg[2:]


def with_sides(jpeg: bytes, height: int, width: int) -> bytes:
    """A JPEG whose header claims other sides."""
    frame = jpeg.index(b"\xff\xc0")
    return jpeg[: frame + 5] + struct.pack(">HH", height, width) + jpeg[frame + 9 :]


def turned_pictures() -> Iterator[Case]:
    for kind, suffix in (("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "webp"), ("TIFF", "tif")):
        for orientation in range(10):
            image = usual().transpose(UNDO[orientation]) if orientation in UNDO else usual()
            # Pillow turns TIFF files itself while it loads them, and then they have no orientation left to count.
            notes = ("turned",) if orientation in UNDO and kind != "TIFF" else ()
            data = bytes_of(image, kind, exif=exif_of(orientation))
            yield Case(f"turned/{orientation}.{suffix}", data, notes=notes)
    plain = bytes_of(usual())
    yield Case("turned/garbage.jpg", with_segment(plain, 0xE1, b"Exif\0\0" + b"\xa5" * 60))
    loop = b"II*\0\x08\0\0\0" + struct.pack("<HHHII", 1, 0x8769, 4, 1, 8) + struct.pack("<I", 8)
    yield Case("turned/exif leads to itself.jpg", with_segment(plain, 0xE1, b"Exif\0\0" + loop))
    outside = b"II*\0\xf0\xff\xff\x7f"
    yield Case("turned/exif leads outside.jpg", with_segment(plain, 0xE1, b"Exif\0\0" + outside))
    yield Case("turned/exif cut.jpg", with_segment(plain, 0xE1, b"Exif\0\0II*\0\x08\0\0\0\x05\0\x12\x01"))
    yield Case("turned/profile is garbage.jpg", bytes_of(usual(), icc_profile=b"no profile at all" * 20))


def modes() -> Iterator[Case]:
    grey = Image.fromarray(quarters(GREYS))
    half = Image.new("L", (WIDTH, HEIGHT), 128)
    rgba = usual().convert("RGBA")
    rgba.putalpha(Image.fromarray(quarters((255, 128, 1, 0))))
    palette = usual().quantize(4)
    clear, deep = ("transparent",), tuple(level * 257 for level in GREYS)
    deep_grey = Image.fromarray(quarters(deep, dtype=np.uint16))
    deep_rgb = quarters(tuple(tuple(level * 257 for level in colour) for colour in COLOURS), dtype=np.uint16)
    white_or_black = (0, 255, 255, 0)

    cmyk = bytes_of(usual().convert("CMYK"))
    yield Case("modes/cmyk.jpg", cmyk, tolerance=30)
    adobe = cmyk.index(b"Adobe")
    ycck = cmyk[: adobe + 11] + b"\x02" + cmyk[adobe + 12 :]
    yield Case("modes/ycck.jpg", ycck, colours=None)
    yield Case("modes/no adobe mark.jpg", cmyk[: adobe - 4] + cmyk[adobe + 12 :], colours=None)
    yield Case("modes/rgb.jpg", bytes_of(usual(), keep_rgb=True))
    yield Case("modes/grey.jpg", bytes_of(grey), colours=grey_triples())
    yield Case("modes/grey.png", bytes_of(grey, "PNG"), colours=grey_triples())
    data = bytes_of(Image.merge("LA", (grey, half)), "PNG")
    yield Case("modes/grey alpha.png", data, colours=grey_triples(), notes=clear)
    yield Case("modes/rgba.png", bytes_of(rgba, "PNG"), notes=clear)
    yield Case("modes/rgba.webp", bytes_of(rgba, "WEBP"), notes=clear)
    yield Case("modes/rgba.tif", bytes_of(rgba, "TIFF"), notes=clear)
    yield Case("modes/32 bits.bmp", bytes_of(rgba, "BMP"))
    bit = Image.fromarray(quarters(white_or_black)).convert("1")
    yield Case("modes/one bit.png", bytes_of(bit, "PNG"), colours=grey_triples(white_or_black))
    yield Case("modes/one bit.tif", bytes_of(bit, "TIFF", compression="group4"), colours=grey_triples(white_or_black))
    yield Case("modes/palette.png", bytes_of(palette, "PNG"))
    yield Case("modes/palette.gif", bytes_of(palette, "GIF"))
    yield Case("modes/palette index.png", bytes_of(palette, "PNG", transparency=0), notes=clear)
    yield Case("modes/palette index.gif", bytes_of(palette, "GIF", transparency=0), notes=clear)
    levels = bytes([0, 80, 160, 255])
    yield Case("modes/palette levels.png", bytes_of(palette, "PNG", transparency=levels), notes=clear)
    trns = (b"tRNS", struct.pack(">H", GREYS[0]))
    data = png_of(WIDTH, HEIGHT, 8, 0, png_rows(quarters(GREYS)), trns)
    yield Case("modes/grey trns.png", data, colours=grey_triples(), notes=clear)
    trns = (b"tRNS", struct.pack(">HHH", *COLOURS[0]))
    yield Case("modes/rgb trns.png", png_of(WIDTH, HEIGHT, 8, 2, png_rows(quarters()), trns), notes=clear)
    trns = (b"tRNS", struct.pack(">H", deep[0]))
    data = png_of(WIDTH, HEIGHT, 16, 0, png_rows(quarters(deep, dtype=np.uint16)), trns)
    yield Case("modes/deep trns.png", data, colours=grey_triples(), notes=("transparent", "16-bit"))
    for kind, suffix in (("PNG", "png"), ("TIFF", "tif"), ("PPM", "pgm")):
        data = bytes_of(deep_grey, kind)
        yield Case(f"modes/deep.{suffix}", data, colours=grey_triples(), notes=("16-bit",), tolerance=0)
    big = Image.frombytes("I;16B", (WIDTH, HEIGHT), quarters(deep, dtype=np.uint16).astype(">u2").tobytes())
    data = bytes_of(big, "TIFF")
    yield Case("modes/deep big endian.tif", data, colours=grey_triples(), notes=("16-bit",), tolerance=0)
    yield Case("modes/deep rgb.png", png_of(WIDTH, HEIGHT, 16, 2, png_rows(deep_rgb)), tolerance=1)
    whole = Image.fromarray(quarters(GREYS, dtype=np.int32))
    yield Case("modes/int32.tif", bytes_of(whole, "TIFF"), SKIPPED, "its pixels are 32-bit integers")
    real = Image.fromarray(quarters((0.0, 0.3, 0.6, 1.0), dtype=np.float32))
    yield Case("modes/float.tif", bytes_of(real, "TIFF"), SKIPPED, "its pixels are floating-point numbers")
    yield Case("modes/lab.tif", bytes_of(usual().convert("LAB"), "TIFF"), colours=None)
    if features.check("jpg_2000"):
        data = bytes_of(Image.merge("LA", (grey, half)), "JPEG2000")
        yield Case("modes/grey alpha.jp2", data, colours=grey_triples(), notes=clear)
    Image.init()
    if "AVIF" in Image.SAVE:
        yield Case("modes/plain.avif", bytes_of(usual(), "AVIF", quality=95, subsampling="4:4:4"), tolerance=25)


def kinds() -> Iterator[Case]:
    other = Image.new("RGB", (WIDTH, HEIGHT), "black")
    several: dict = {"save_all": True, "append_images": [other, usual()]}
    yield Case("kinds/progressive.jpg", bytes_of(usual(), progressive=True))
    yield Case("kinds/optimized.jpg", bytes_of(usual(), optimize=True))
    yield Case("kinds/restarts.jpg", bytes_of(usual(), restart_marker_blocks=1))
    yield Case("kinds/arithmetic.jpg", ARITHMETIC, size=(16, 24))
    odd = bytes_of(usual(33, 47), subsampling=2)
    yield Case("kinds/halved colours, odd sides.jpg", odd, size=(33, 47), tolerance=30)
    twelve = bytearray(bytes_of(usual()))
    twelve[twelve.index(b"\xff\xc0") + 4] = 12
    yield Case("kinds/12 bits.jpg", bytes(twelve), SKIPPED, "not a picture that Pillow can read")
    named = {"PNG": "png.jpg", "WEBP": "webp.JPG", "GIF": "gif.jpeg", "BMP": "bmp.jpg", "ICO": "ico.png"}
    for kind, name in named.items():
        image = usual(32, 32) if kind == "ICO" else usual()
        data = bytes_of(image, kind, sizes=[(32, 32)]) if kind == "ICO" else bytes_of(image, kind)
        yield Case(f"kinds/content is {name}", data, size=(image.height, image.width))
    yield Case("kinds/content is jpeg.png", bytes_of(usual()))
    for suffix in ("JPG", "JPEG", "JpEg", "jpe", "jfif"):
        yield Case(f"kinds/suffix.{suffix}", bytes_of(usual()))
    yield Case("kinds/plain.ppm", bytes_of(usual(), "PPM"))
    for kind, suffix in (("GIF", "gif"), ("WEBP", "webp"), ("PNG", "png"), ("TIFF", "tiff")):
        yield Case(f"kinds/frames.{suffix}", bytes_of(usual(), kind, **several), notes=("frames",))
    two = bytes_of(usual(), "MPO", save_all=True, append_images=[other])
    yield Case("kinds/frames.mpo", two, notes=("frames",))
    yield Case("kinds/frames of a phone.jpg", two, notes=("frames",))
    yield Case("kinds/one after the other.jpg", bytes_of(usual()) + bytes_of(other))
    thumbnail = bytes_of(other)
    yield Case("kinds/with a thumbnail.jpg", with_segment(bytes_of(usual()), 0xE1, b"Exif\0\0" + thumbnail))
    for name in ("no suffix", "backup.jpg~", "notes.jpg.txt", "icon.ico"):
        yield Case(f"kinds/{name}", bytes_of(usual()), LEFT_OUT)


def sizes() -> Iterator[Case]:
    for height, width in ((1, 1), (1, 400), (400, 1), (2, 3000), (3000, 2), (1000, 1000)):
        data = bytes_of(Image.new("RGB", (width, height), COLOURS[0]), "PNG")
        yield Case(f"sizes/{height}x{width}.png", data, size=(height, width), colours=COLOURS[:1] * 4)
        data = bytes_of(Image.new("RGB", (width, height), COLOURS[0]))
        yield Case(f"sizes/{height}x{width}.jpg", data, size=(height, width), colours=COLOURS[:1] * 4)
    yield Case("sizes/whole and huge.png", blank_png(14_000), SKIPPED, "too many pixels")
    claims = png_of(50_000, 50_000, 8, 2, bytes(100))
    yield Case("sizes/claims to be huge.png", claims, SKIPPED, "too many pixels")
    claims = with_sides(bytes_of(usual()), 65_000, 65_000)
    yield Case("sizes/claims to be huge.jpg", claims, SKIPPED, "too many pixels")


def broken() -> Iterator[Case]:
    noise = np.random.default_rng(0).integers(0, 256, (60, 80, 3), np.uint8)
    image = Image.fromarray(noise)
    yield Case("broken/empty.jpg", b"", SKIPPED, "empty file (0 bytes)")
    unknown = "not a picture that Pillow can read"
    for name, data in {
        "text": b"no picture\n" * 9,
        "page": b"<!DOCTYPE html><title>404</title>",
        "zeros": bytes(4096),
        "two bytes": b"\xff\xd8",
        "newlines first": b"\r\n\r\n" + bytes_of(usual()),
        "archive": b"PK\x05\x06" + bytes(18),
        "resource fork": b"\0\x05\x16\x07\0\x02\0\0Mac OS X        " + bytes(40),
    }.items():
        yield Case(f"broken/{name}.jpg", data, SKIPPED, unknown)
    for kind in ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF"):
        data = bytes_of(image, kind)
        for percent in (10, 50, 97):
            yield Case(f"broken/cut at {percent}.{kind.lower()}", data[: len(data) * percent // 100], SKIPPED)
    jpeg = bytes_of(image)
    yield Case("broken/no pixels.jpg", jpeg[: jpeg.index(b"\xff\xda")], SKIPPED)
    table = jpeg.index(b"\xff\xc4")
    yield Case("broken/huffman table.jpg", jpeg[: table + 5] + b"\xff" * 16 + jpeg[table + 21 :], SKIPPED)
    png = bytearray(bytes_of(image, "PNG"))
    png[png.index(b"IDAT") + 40] ^= 0x55
    yield Case("broken/one byte.png", bytes(png), SKIPPED)
    yield Case("broken/signature.png", b"\x89PNG\r\n\x1a\n", SKIPPED)
    whole = {"size": (60, 80), "colours": None}
    yield Case("broken/zeros follow.jpg", jpeg + bytes(1483), **whole)
    yield Case("broken/noise follows.jpg", jpeg + noise.tobytes()[:3000], **whole)


def names() -> Iterator[Case]:
    jpeg = bytes_of(usual())
    for name in (
        " space before", "space in it", "-rf", "100%", "a,b;c", 'a"b', "it's", "tab\there", "line\nbreak", "back\\slash",
        "#part?query", "star[1-3]*", "$HOME", "many.dots.v2", "日本語", "\U0001f408\u200d\u2b1b", "\u202eright to left",
        "x" * 251, unicodedata.normalize("NFC", "café"), unicodedata.normalize("NFD", "café"), "not utf-8 \udcff\udcfe",
        "CASE", "case",
    ):  # fmt: skip
        yield Case(f"names/{name}.jpg", jpeg)
    for name in (".hidden.jpg", "._photo.jpg", ".jpg", ".DS_Store", "Thumbs.db", "desktop.ini"):
        yield Case(f"names/{name}", jpeg, LEFT_OUT)
    yield Case("names/__MACOSX/photo.jpg", jpeg, LEFT_OUT)
    yield Case(".checkpoints/photo.jpg", jpeg, LEFT_OUT)
    yield Case("beside the classes.jpg", jpeg, LEFT_OUT)
    yield Case("places/deep/down/photo.jpg", jpeg)
    yield Case("places/folder.jpg/photo.jpg", jpeg)


def links_and_others() -> Iterator[Case]:
    yield Case("places/link.jpg", None)
    yield Case("places/link to folder/photo.jpg", None)
    yield Case("places/link to nothing.jpg", None, SKIPPED, "cannot be read: No such file or directory")
    yield Case("places/link to itself.jpg", None, SKIPPED, "cannot be read: Too many levels of symbolic links")
    yield Case("places/link to above", None, LEFT_OUT)
    yield Case("places/pipe.jpg", None, LEFT_OUT)
    yield Case("places/socket.jpg", None, LEFT_OUT)


def make_tree(root: Path) -> tuple[list[Case], list[Case]]:
    """Write everything under `root`; gives the cases written and those whose names the file system refuses."""
    ordinary = [*turned_pictures(), *modes(), *kinds(), *sizes(), *broken(), *names()]
    written, refused = [], []
    for case in ordinary:
        path = root / case.path
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(path, "xb") as file:
                file.write(case.data or b"")
        except OSError:  # not this name, or the same as another
            refused.append(case)
        else:
            written.append(case)
    places = root / "places"
    (places / "link.jpg").symlink_to("deep/down/photo.jpg")
    (places / "link to folder").symlink_to("deep/down")
    (places / "link to nothing.jpg").symlink_to("nothing.jpg")
    (places / "link to itself.jpg").symlink_to("link to itself.jpg")
    (places / "link to above").symlink_to("..")
    os.mkfifo(places / "pipe.jpg")
    make_socket(places, "socket.jpg")
    return written + list(links_and_others()), refused


def make_socket(folder: Path, name: str) -> None:
    """From inside the folder: the path of a socket may have 100 bytes only."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(name)
    finally:
        os.chdir(before)
