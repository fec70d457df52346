"""Pixels are those of torchvision's Resize and CenterCrop on the upright RGB picture, bit for bit."""

from __future__ import annotations

import io
import json
import os
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from helpers import encoded, formula_picture, save
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from PIL import __version__ as pillow_version

from packshift import preprocess
from packshift.errors import ImageError, UsageError
from packshift.fitting import _widths_come_first
from packshift.pixel_limit import pixels_up_to
from packshift.preprocess import load_record, make_record
from packshift.record import Record, Sample
from packshift.settings import Preprocessing, parse_background, parse_max_pixels, parse_size

PILLOW_GENERATION = 13 if int(pillow_version.split(".")[0]) >= 13 else 12
EXPECTED = json.loads((Path(__file__).parent / "data" / f"torchvision_pillow{PILLOW_GENERATION}.json").read_text())
OWN_SIZE = Preprocessing(None)
SIDE = st.integers(1, 90)


def record_of(image: Image.Image, preprocessing: Preprocessing, kind: str = "PNG", **options: object) -> Record:
    return make_record(encoded(image, kind, **options), Sample("picture", 0), preprocessing)


def failure(data: bytes) -> str:
    with pytest.raises(ImageError) as caught:
        make_record(data, Sample("picture", 0), Preprocessing())
    return str(caught.value)


@pytest.mark.parametrize("row", EXPECTED["rows"], ids=lambda row: "{height}x{width}-{fit}-{size}".format(**row))
def test_equals_what_torchvision_gave(row: dict) -> None:
    """The expected checksums come from torchvision itself: tests/data/make_torchvision_expected.py."""
    image = formula_picture(row["height"], row["width"])
    pixels = record_of(image, Preprocessing(tuple(row["size"]), row["fit"])).pixels
    assert zlib.crc32(pixels.tobytes()) == row["crc32"]


@settings(max_examples=150, deadline=None)
@given(height=SIDE, width=SIDE, target=st.tuples(SIDE, SIDE))
def test_crop_equals_resizing_whole_then_cutting(height: int, width: int, target: tuple[int, int]) -> None:
    """For any sizes, also where the columns are cut between Pillow's two passes."""
    check_crop(formula_picture(height, width), target)


ELONGATED = st.one_of(
    st.tuples(st.integers(1, 4), st.integers(1, 700)),
    st.tuples(st.integers(1, 700), st.integers(1, 4)),
    st.tuples(st.integers(1, 40), st.integers(300, 500)),
    st.tuples(st.integers(300, 500), st.integers(1, 40)),
    st.tuples(st.integers(100, 400), st.integers(100, 400)),
)


@settings(max_examples=120, deadline=None)
@given(sides=ELONGATED, target=st.one_of(st.tuples(SIDE, SIDE), ELONGATED), seed=st.integers(0, 99))
def test_crop_of_elongated_pictures_too(sides: tuple[int, int], target: tuple[int, int], seed: int) -> None:
    noise = np.random.default_rng(seed).integers(0, 256, (*sides, 3), np.uint8)
    assume(max(sides) * max(target) / min(sides) < 30_000)
    check_crop(Image.fromarray(noise), target)


def test_grey_pictures_too() -> None:
    """They are scaled as grey and made RGB at the end."""
    check_crop(formula_picture(61, 97).convert("L").convert("RGB"), (40, 40))
    grey = record_of(formula_picture(61, 97).convert("L"), Preprocessing((40, 40)))
    rgb = record_of(formula_picture(61, 97).convert("L").convert("RGB"), Preprocessing((40, 40)))
    assert np.array_equal(grey.pixels, rgb.pixels)


@pytest.mark.parametrize(
    ("version", "source", "scaled", "expected"),
    [
        ("11.0.0", (375, 500), (256, 341), True),
        ("12.2.0", (900, 500), (300, 450), True),
        ("13.0.0", (375, 500), (256, 341), True),
        ("13.0.0", (900, 500), (300, 450), False),
        ("13.0.0", (300, 500), (300, 400), False),
        ("14.0.0", (375, 500), (256, 341), False),
    ],
)
def test_columns_are_cut_between_the_passes_only_where_their_order_is_known(
    monkeypatch: pytest.MonkeyPatch, version: str, source: tuple[int, int], scaled: tuple[int, int], expected: bool
) -> None:
    monkeypatch.setattr("PIL.__version__", version)
    assert _widths_come_first(source, scaled) is expected


def check_crop(image: Image.Image, target: tuple[int, int]) -> None:
    height, width = image.height, image.width
    scale_by_height = width * target[0] > height * target[1]
    if scale_by_height:
        scaled = image.resize((max(1, int(target[0] * width / height)), target[0]), Image.Resampling.BILINEAR)
    else:
        scaled = image.resize((target[1], max(1, int(target[1] * height / width))), Image.Resampling.BILINEAR)
    left, top = round((scaled.width - target[1]) / 2.0), round((scaled.height - target[0]) / 2.0)
    expected = np.asarray(scaled.crop((left, top, left + target[1], top + target[0])))
    assert np.array_equal(record_of(image, Preprocessing(target)).pixels, expected)


@settings(max_examples=80, deadline=None)
@given(height=SIDE, width=SIDE, target=st.tuples(SIDE, SIDE), fit=st.sampled_from(["crop", "pad", "stretch"]))
def test_every_size_and_fit_gives_the_shape_asked_for(
    height: int, width: int, target: tuple[int, int], fit: str
) -> None:
    pixels = record_of(formula_picture(height, width), Preprocessing(target, fit)).pixels
    assert pixels.shape == (*target, 3)
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous


def test_pad_keeps_the_whole_picture_in_the_middle_of_black() -> None:
    white = Image.new("RGB", (100, 50), "white")
    pixels = record_of(white, Preprocessing((40, 40), "pad")).pixels
    assert (pixels[10:30] == 255).all()
    assert (pixels[:10] == 0).all()
    assert (pixels[30:] == 0).all()


def test_own_size_keeps_every_pixel() -> None:
    image = formula_picture(31, 57)
    record = record_of(image, OWN_SIZE)
    assert np.array_equal(record.pixels, np.asarray(image))
    assert record.original_size == (31, 57)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_all_orientations_come_out_upright(kind: str, orientation: int) -> None:
    upright = Image.fromarray(np.kron(np.arange(6, dtype=np.uint8).reshape(2, 3) * 50, np.ones((16, 16), np.uint8)))
    stored = upright.convert("RGB")
    undo = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    if orientation in undo:
        stored = stored.transpose(undo[orientation])
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"quality": 100} if kind in ("JPEG", "WEBP") else {}
    record = record_of(stored, OWN_SIZE, kind, exif=exif, **options)
    assert record.original_size == (32, 48)
    assert np.abs(record.pixels.astype(int) - np.asarray(upright)[:, :, None]).max() <= 4


@pytest.mark.parametrize("orientation", [0, 9, 77])
def test_an_impossible_orientation_is_none(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = formula_picture(20, 30)
    assert np.array_equal(record_of(image, OWN_SIZE, exif=exif).pixels, np.asarray(image))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_a_broken_exif_block_does_not_matter() -> None:
    data = encoded(formula_picture(20, 30), "JPEG")
    garbage = b"Exif\0\0" + b"II*\0\xff\xff\xff\x7f" + b"\x99" * 40
    block = b"\xff\xe1" + struct.pack(">H", len(garbage) + 2) + garbage
    record = make_record(data[:2] + block + data[2:], Sample("picture", 0), OWN_SIZE)
    assert record.original_size == (20, 30)


class TestModes:
    def ramp(self) -> NDArray[np.uint8]:
        return np.tile(np.arange(256, dtype=np.uint8), (4, 1))

    @pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"])
    def test_equals_pillows_own_conversion(self, mode: str) -> None:
        image = formula_picture(24, 40)
        image = image.convert("L").convert(mode) if mode == "LA" else image.convert(mode)
        data = encoded(image, "JPEG" if mode in ("CMYK", "YCbCr") else "PNG")
        with Image.open(io.BytesIO(data)) as opened:
            expected = np.asarray(opened.convert("RGB"))
        assert np.array_equal(make_record(data, Sample("picture", 0), OWN_SIZE).pixels, expected)

    def test_red_cmyk_comes_back_red(self) -> None:
        data = encoded(Image.new("RGB", (16, 16), (255, 0, 0)).convert("CMYK"), "JPEG", quality=95)
        red, green, blue = make_record(data, Sample("picture", 0), OWN_SIZE).pixels[8, 8].tolist()
        assert red > 245
        assert green < 10
        assert blue < 10

    @pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
    def test_16_bit_grey_is_scaled_not_clipped(self, kind: str) -> None:
        deep = Image.fromarray(self.ramp().astype(np.uint16) * 257)
        record = record_of(deep, OWN_SIZE, kind)
        assert np.array_equal(record.pixels, np.repeat(self.ramp()[:, :, None], 3, axis=2))
        assert record.notes == ("16-bit",)

    @pytest.mark.parametrize("dtype", [np.int32, np.float32])
    def test_pixels_without_a_known_range_are_refused(self, dtype: type) -> None:
        data = encoded(Image.fromarray(self.ramp().astype(dtype)), "TIFF")
        assert "whose range is not known" in failure(data)

    @pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
    def test_transparency_is_dropped_as_pillow_does_and_noted(self, mode: str) -> None:
        image = Image.new("RGBA", (10, 10), (255, 0, 0, 0)).convert(mode)
        options = {"transparency": 0} if mode == "P" else {}
        record = record_of(image, OWN_SIZE, **options)
        assert record.notes == ("transparent",)
        assert record.pixels[5, 5, 0] > 50

    def test_only_the_first_frame_counts(self) -> None:
        frames = [Image.new("RGB", (8, 8), colour) for colour in ("blue", "red", "lime")]
        record = record_of(frames[0], OWN_SIZE, "GIF", save_all=True, append_images=frames[1:])
        assert record.pixels[4, 4].tolist() == [0, 0, 255]
        assert record.notes == ("frames",)


class TestBrokenFiles:
    @pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "GIF"])
    @pytest.mark.parametrize("share", [0.2, 0.6, 0.9])
    def test_cut_short(self, kind: str, share: float) -> None:
        data = encoded(formula_picture(120, 160), kind)
        assert failure(data[: int(len(data) * share)])

    def test_empty(self) -> None:
        assert failure(b"") == "empty file (0 bytes)"

    def test_not_a_picture(self) -> None:
        assert failure(b"<html><body>404</body>") == "not a picture that Pillow can read (it begins with b'<html><b')"

    def test_a_picture_that_grows_beyond_the_limit_when_it_is_scaled(self) -> None:
        assert failure(encoded(formula_picture(1, 20_000), "PNG")).startswith("too elongated: a picture of 20000 x 1")

    def test_a_decompression_bomb_is_an_error_of_its_own_file(self, monkeypatch: pytest.MonkeyPatch) -> None:
        data = encoded(formula_picture(100, 100), "PNG")
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
        assert failure(data) == "too many pixels: 10,000, over the limit of 2,000 (--max-pixels sets another)"


class TestMaxPixels:
    """Another limit than Pillow's, which is 2,000 pixels here, with a warning above 1,000."""

    PICTURES: ClassVar = {
        "PNG": encoded(formula_picture(50, 100), "PNG"),
        "JPEG": encoded(formula_picture(50, 100)),
        "GIF": encoded(formula_picture(50, 100), "GIF"),
        "WEBP": encoded(formula_picture(50, 100), "WEBP"),
        "TIFF": encoded(formula_picture(50, 100), "TIFF"),
        "MPO": encoded(
            formula_picture(50, 100), "MPO", save_all=True, append_images=[formula_picture(50, 100)]
        ),  # several of its kind check the limit once more while they decode
    }

    @pytest.fixture(autouse=True)
    def pillow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)

    @pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
    @pytest.mark.parametrize("kind", PICTURES)
    @pytest.mark.parametrize(("limit", "told"), [(4999, 4999), (1, 1), (2400, 2400), (None, 2000)])
    def test_a_picture_over_it_is_an_error_of_its_own_file(self, kind: str, limit: int | None, told: int) -> None:
        with pytest.raises(ImageError) as caught:
            make_record(self.PICTURES[kind], Sample("picture", 0), Preprocessing((8, 8), max_pixels=limit))
        assert str(caught.value) == f"too many pixels: 5,000, over the limit of {told:,} (--max-pixels sets another)"
        assert Image.MAX_IMAGE_PIXELS == 1000

    @pytest.mark.parametrize("kind", PICTURES)
    @pytest.mark.parametrize("limit", [5000, 10**12])
    def test_a_larger_one_lets_pictures_through_without_a_warning(self, kind: str, limit: int) -> None:
        record = make_record(self.PICTURES[kind], Sample("picture", 0), Preprocessing(None, max_pixels=limit))
        assert record.pixels.shape == (50, 100, 3)
        assert Image.MAX_IMAGE_PIXELS == 1000

    def test_a_smaller_one_is_about_the_file_not_about_what_it_is_scaled_to(self) -> None:
        data = encoded(formula_picture(10, 10), "PNG")
        record = make_record(data, Sample("picture", 0), Preprocessing((40, 40), max_pixels=100))
        assert record.pixels.shape == (40, 40, 3)

    def test_it_is_the_limit_of_what_pictures_are_scaled_to_where_it_is_larger(self) -> None:
        data = encoded(formula_picture(1, 100), "PNG")
        words = "would have 10,000, over the limit of 9,999"
        with pytest.raises(ImageError, match=words):
            make_record(data, Sample("picture", 0), Preprocessing((10, 10), max_pixels=9999))
        assert make_record(data, Sample("picture", 0), Preprocessing((10, 10), max_pixels=10_000)).pixels.any()

    def test_pillow_is_left_as_it_was_by_many_threads(self) -> None:
        def read(limit: int) -> tuple[int, ...]:
            return make_record(
                self.PICTURES["WEBP"], Sample("picture", 0), Preprocessing(None, max_pixels=limit)
            ).pixels.shape

        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(read, [5000, 10**7, 10**6] * 40)) == {(50, 100, 3)}
        assert Image.MAX_IMAGE_PIXELS == 1000

    def test_a_child_forked_meanwhile_has_pillows_limit(self) -> None:
        with pixels_up_to(10**6):
            pid = os.fork()
            if not pid:
                os._exit(Image.MAX_IMAGE_PIXELS == 1000)
            assert Image.MAX_IMAGE_PIXELS == 10**6
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1

    def test_pillow_without_a_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
        with pytest.raises(ImageError, match="over the limit of 4,999"):
            make_record(self.PICTURES["PNG"], Sample("picture", 0), Preprocessing(None, max_pixels=4999))
        assert make_record(self.PICTURES["PNG"], Sample("picture", 0), Preprocessing(None)).pixels.any()
        assert Image.MAX_IMAGE_PIXELS is None

    @pytest.mark.parametrize("limit", [0, -1, 2.5, "many"])
    def test_limits_that_cannot_be(self, limit: object) -> None:
        with pytest.raises(UsageError, match=r"^max_pixels .*: expected a whole number of at least 1"):
            parse_max_pixels(limit)


@pytest.mark.parametrize(
    ("given_size", "expected"),
    [
        (224, (224, 224)),
        (np.int64(32), (32, 32)),
        ("224", (224, 224)),
        ("240x320", (240, 320)),
        ((240, 320), (240, 320)),
        ("none", None),
        (None, None),
    ],
)
def test_sizes_that_can_be_given(given_size: object, expected: object) -> None:
    assert parse_size(given_size) == expected


@pytest.mark.parametrize(
    "given_size",
    ["", "x", "12x", "1x2x3", "-4", "big", "٣", "9" * 5000, (1, 2, 3), (), (2.7, 30), 32.0, b"32", True, (None, 3)],
)
def test_sizes_that_cannot(given_size: object) -> None:
    with pytest.raises(UsageError, match="expected"):
        parse_size(given_size)


@pytest.mark.parametrize("size", [(0, 5), (5, 70_000)])
def test_sizes_out_of_range(size: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match="from 1 to 65,535"):
        Preprocessing(size)


class TestBackground:
    """Transparent red over white must be white, half of it pink; without a background it stays red."""

    WHITE = Preprocessing(None, background=(255, 255, 255))

    def pictures(self) -> dict[str, bytes]:
        red = Image.new("RGB", (8, 8), (255, 0, 0))
        black = Image.new("L", (8, 8), 0)
        clear = Image.new("L", (8, 8), 0)
        rgba = red.copy()
        rgba.putalpha(clear)
        palette = red.quantize(2)
        return {
            "RGBA": encoded(rgba, "PNG"),
            "LA": encoded(Image.merge("LA", (black, clear)), "PNG"),
            "P index": encoded(palette, "PNG", transparency=palette.getpixel((0, 0))),
            "P levels": encoded(palette, "PNG", transparency=bytes(256)),
            "P index GIF": encoded(palette, "GIF", transparency=palette.getpixel((0, 0))),
            "RGB tRNS": encoded(red, "PNG", transparency=(255, 0, 0)),
            "L tRNS": encoded(black, "PNG", transparency=0),
            "1 tRNS": encoded(black.convert("1"), "PNG", transparency=0),
            "I;16 tRNS": encoded(Image.new("I;16", (8, 8), 300), "PNG", transparency=300),
            "WebP": encoded(rgba, "WEBP", lossless=True, exact=True),
            "TIFF": encoded(rgba, "TIFF"),
        }

    def test_every_kind_of_transparency(self) -> None:
        for kind, data in self.pictures().items():
            over_white = make_record(data, Sample("picture", 0), self.WHITE)
            assert (over_white.pixels == 255).all(), kind
            assert "background" in over_white.notes, kind
            dropped = make_record(data, Sample("picture", 0), OWN_SIZE)
            assert dropped.pixels.max(axis=(0, 1)).tolist() in ([255, 0, 0], [0, 0, 0], [1, 1, 1]), kind
            assert "transparent" in dropped.notes, kind

    def test_half_transparent(self) -> None:
        image = Image.new("RGBA", (8, 8), (255, 0, 0, 128))
        assert record_of(image, self.WHITE).pixels[0, 0].tolist() == [255, 127, 127]

    def test_what_is_opaque_in_16_bit_grey_stays(self) -> None:
        levels = np.tile(np.array([300, 40_000], np.uint16), (4, 4))
        record = record_of(Image.fromarray(levels), self.WHITE, transparency=300)
        assert record.pixels[0, :2, 0].tolist() == [255, 40_000 >> 8]

    def test_opaque_pictures_do_not_change(self) -> None:
        record = record_of(formula_picture(20, 30), self.WHITE)
        assert np.array_equal(record.pixels, np.asarray(formula_picture(20, 30)))
        assert record.notes == ()

    @pytest.mark.parametrize("colour", ["#ff8000", "#FF8000", "rgb(255, 128, 0)", (255, 128, 0), [255, 128, 0]])
    def test_colours_that_can_be_given(self, colour: object) -> None:
        assert parse_background(colour) == (255, 128, 0)

    @pytest.mark.parametrize(
        "colour", ["", "no colour", "#ff800080", (1, 2), (1, 2, 256), (1, 2, 3, 4), 7, (1.5, 2, 3)]
    )
    def test_colours_that_cannot(self, colour: object) -> None:
        with pytest.raises(UsageError, match=r"^background .*: expected a colour such as white"):
            parse_background(colour)


def test_new_settings_are_in_the_header_only_where_they_are_used() -> None:
    assert not {"background", "fast_decode", "max_pixels"} & set(Preprocessing().to_json())
    new = {"fast_decode": True, "background": [1, 2, 3], "max_pixels": 1000}
    all_of_them = Preprocessing(fast_decode=True, background=(1, 2, 3), max_pixels=1000)
    assert all_of_them.to_json() == {**Preprocessing().to_json(), **new}
    assert all_of_them.describe().endswith(
        "middle cut out, large JPEGs decoded smaller, transparent ones over #010203, those of more than 1,000 pixels skipped"
    )


class TestFilesThatChange:
    """A file that another program writes to while it is read is an error of that file."""

    def load(self, path: Path) -> Record:
        return load_record(str(path.parent), Sample(path.name, 0), OWN_SIZE)

    def test_time_and_checksum_are_those_of_the_file(self, tmp_path: Path) -> None:
        path = save(tmp_path / "photo.jpg", formula_picture(20, 30))
        record = self.load(path)
        assert record.source_mtime_ns == path.stat().st_mtime_ns
        assert record.source_crc32 == zlib.crc32(path.read_bytes())

    @pytest.mark.parametrize("change", ["longer", "rewritten"])
    def test_change(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
        path = save(tmp_path / "photo.jpg", formula_picture(20, 30))
        looks = iter(range(9))

        def look(descriptor: int) -> os.stat_result:
            if next(looks) == 1 and change == "longer":
                path.write_bytes(path.read_bytes() + b"more")
            elif change == "rewritten":
                os.utime(path, ns=(1, next(looks)))
            return os.stat(descriptor)

        monkeypatch.setattr(preprocess.os, "fstat", look)
        with pytest.raises(ImageError, match=r"^changed while it was read$"):
            self.load(path)

    def test_gone(self, tmp_path: Path) -> None:
        with pytest.raises(ImageError, match="cannot be read: No such file"):
            self.load(tmp_path / "gone.jpg")


@pytest.mark.parametrize(
    "settings",
    [
        Preprocessing(),
        Preprocessing(None),
        Preprocessing((20, 30), "pad", fast_decode=True),
        Preprocessing((20, 30), "stretch", background=(1, 2, 255)),
        Preprocessing(max_pixels=10**9),
    ],
)
def test_settings_come_back_from_json(settings: Preprocessing) -> None:
    recorded = settings.to_json()
    assert Preprocessing.from_json(recorded) == settings
    for key, value in {
        "size": [0, 5],
        "fit": "squeeze",
        "filter": "nearest",
        "new": 1,
        "background": [1, 2],
        "max_pixels": 0,
    }.items():
        with pytest.raises(UsageError, match=r"expected|unknown"):
            Preprocessing.from_json({**recorded, key: value})
