"""The compiled scaling gives Pillow's pixels, bit for bit, or leaves the picture to Pillow."""

from __future__ import annotations

import gc
import itertools
import platform
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from helpers import encoded, formula_picture
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from PIL import __version__ as pillow_version

from packshift import fitting, pillow_memory, preprocess, resampling
from packshift.compiled import compiled
from packshift.errors import ImageError
from packshift.pillow_memory import memory_of, picture_on
from packshift.preprocess import make_record
from packshift.record import Sample
from packshift.resampling import Side, can_resample, resample
from packshift.settings import FITS, LARGEST_SIDE, Preprocessing

needs_compiled = pytest.mark.skipif(
    compiled() is None or platform.machine() not in resampling._SAME_ARITHMETIC,
    reason="the C part was not built (no C compiler) or is off (PACKSHIFT_TURBO=0), or not on x86-64",
)
HANDS_OUT_MEMORY = tuple(map(int, pillow_version.split(".")[:2])) >= (11, 3)
TURNS = {
    number: getattr(Image.Transpose, name) for number, name in fitting.TURNS.items()
}  # an orientation -> what makes it upright
SIDES = st.integers(1, 80) | st.sampled_from([127, 128, 129, 300])


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 4), np.uint8)


def orientation_of(number: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = number
    return exif


def both_ways(data: bytes, settings: Preprocessing) -> tuple[object, object]:
    """(pixels, original size, notes) of a record: scaled here, and by Pillow."""
    outcomes = []
    with pytest.MonkeyPatch.context() as patch:
        for compiled in (True, False):
            patch.setattr(preprocess, "can_resample", lambda compiled=compiled: compiled)
            record = make_record(data, Sample("picture", 0), settings)
            outcomes.append((record.pixels.shape, record.pixels.tobytes(), record.original_size, record.notes))
    return outcomes[0], outcomes[1]


@pytest.fixture
def resampled(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Grows with every picture that could be scaled here: whether it was."""
    taken: list[bool] = []
    original = preprocess.resampled

    def counted(*arguments: object) -> object:
        pixels = original(*arguments)
        taken.append(pixels is not None)
        return pixels

    monkeypatch.setattr(preprocess, "resampled", counted)
    return taken


@needs_compiled
def test_it_works_here() -> None:
    assert can_resample()


@needs_compiled
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("sides", [(60, 90), (90, 60), (64, 64)])
@pytest.mark.parametrize("scaled", [(17, 23), (40, 75), (130, 99), (64, 20), (60, 31), (1, 1)])
def test_turned_then_scaled(sides: tuple[int, int], scaled: tuple[int, int], orientation: int) -> None:
    pixels = noise(*sides)
    picture = Image.fromarray(pixels[:, :, :3])
    upright = picture.transpose(TURNS[orientation]) if orientation in TURNS else picture
    height, width = scaled
    # Widths first, whatever this Pillow would do:
    between = upright.resize((width, upright.height), Image.Resampling.BILINEAR)
    expected = np.asarray(between.resize((width, height), Image.Resampling.BILINEAR))
    top, left = height // 5, width // 3
    found = resample(
        pixels,
        Side(upright.height, 0, upright.height, height, top, height),
        Side(upright.width, 0, upright.width, width, left, width),
        orientation=orientation,
    )
    assert np.array_equal(found, expected[top:, left:])


@needs_compiled
@pytest.mark.parametrize("orientation", range(1, 9))
def test_scaled_then_turned(orientation: int) -> None:
    pixels = noise(61, 83)
    box = (0, 0, 82.5, 60.25)
    scaled = Image.fromarray(pixels[:, :, :3]).resize((20, 17), Image.Resampling.BILINEAR, box)
    expected = np.asarray(scaled.transpose(TURNS[orientation]) if orientation in TURNS else scaled)
    height, width = Side(61, 0, 60.25, 17, 0, 17), Side(83, 0, 82.5, 20, 0, 20)
    if orientation in resampling.SIDEWAYS:
        height, width = width, height
    height, width = height._replace(first=3), width._replace(last=15)
    found = resample(pixels, height, width, orientation=orientation, turned_first=False)
    assert np.array_equal(found, expected[3:, :15])


@needs_compiled
@settings(max_examples=300, deadline=None)
@given(
    sides=st.tuples(SIDES, SIDES),
    target=st.tuples(SIDES, SIDES),
    fit=st.sampled_from(FITS),
    orientation=st.integers(1, 8),
    seed=st.integers(0, 99),
)
def test_any_picture(sides: tuple[int, int], target: tuple[int, int], fit: str, orientation: int, seed: int) -> None:
    data = encoded(Image.fromarray(noise(*sides, seed)[:, :, :3]), "PNG", exif=orientation_of(orientation))
    here, pillows = both_ways(data, Preprocessing(target, fit))
    assert here == pillows


@needs_compiled
@pytest.mark.skipif(not HANDS_OUT_MEMORY, reason="Pillow before 11.3 does not hand out its memory")
@pytest.mark.parametrize("fit", FITS)
def test_scaled_decoding(fit: str, resampled: list[bool]) -> None:
    for height, width, orientation in itertools.product((129, 260, 513), (140, 301), range(1, 9)):
        data = encoded(formula_picture(height, width), exif=orientation_of(orientation))
        here, pillows = both_ways(data, Preprocessing((32, 24), fit, fast_decode=True))
        assert here == pillows, (height, width, orientation)
    assert resampled.count(True) > len(resampled) / 2  # of tall ones, Pillow 13 scales the heights first


@needs_compiled
@pytest.mark.skipif(not HANDS_OUT_MEMORY, reason="Pillow before 11.3 does not hand out its memory")
def test_every_format_that_gives_rgb(resampled: list[bool]) -> None:
    picture = formula_picture(70, 90)
    for kind, options in (
        ("PNG", {}),
        ("BMP", {}),
        ("TIFF", {}),
        ("GIF", {}),
        ("WEBP", {"lossless": True}),
        ("PPM", {}),
    ):
        here, pillows = both_ways(encoded(picture, kind, **options), Preprocessing((32, 32)))
        assert here == pillows, kind
    assert resampled == [True] * 6


def test_what_is_left_to_pillow(resampled: list[bool]) -> None:
    for data, preprocessing in (
        (encoded(formula_picture(40, 50).convert("L"), "PNG"), Preprocessing((32, 32))),
        (encoded(formula_picture(40, 50), "PNG"), Preprocessing(None)),
    ):
        here, pillows = both_ways(data, preprocessing)
        assert here == pillows
    assert not any(resampled)


@needs_compiled
def test_a_picture_whose_order_of_passes_is_not_known(monkeypatch: pytest.MonkeyPatch, resampled: list[bool]) -> None:
    monkeypatch.setattr("PIL.__version__", "99.0.0")
    here, pillows = both_ways(encoded(formula_picture(300, 200), "PNG"), Preprocessing((32, 32)))
    assert here == pillows
    assert not any(resampled)


@needs_compiled
@pytest.mark.skipif(not HANDS_OUT_MEMORY, reason="Pillow before 11.3 does not hand out its memory")
@pytest.mark.parametrize(
    ("size", "target"),
    [((616_000, 1), (1, 1)), ((1, 70_000), (2, 2)), ((9, 3), (66_000, 1))],  # the first wraps to black
)
def test_very_long_sides(size: tuple[int, int], target: tuple[int, int], resampled: list[bool]) -> None:
    data = encoded(Image.new("RGB", size, "white"), "PNG")
    if max(target) > LARGEST_SIDE:
        target = (LARGEST_SIDE, 1)
    here, pillows = both_ways(data, Preprocessing(target, "stretch"))
    assert here == pillows
    assert resampled[0] == (max(size) <= resampling.LONGEST_SIDE)


@needs_compiled
def test_a_scaled_side_beyond_32_bits() -> None:
    """Pillow's error, whoever is asked first."""
    data = encoded(Image.new("RGB", (600_000, 1)), "PNG")
    with pytest.raises(ImageError, match="cannot be decoded: signed integer is greater than maximum"):
        make_record(data, Sample("long.png", 0), Preprocessing((4096, 4096), max_pixels=10**18))


@needs_compiled
@pytest.mark.parametrize(
    "change",
    [
        {"first": -1}, {"first": 9, "last": 9}, {"last": 21}, {"stop": 41.0}, {"stop": 0.0}, {"start": -1.0},
        {"size": 70_000}, {"size": 2**31 + 5, "first": 7, "last": 9},
    ],
    ids=str,
)  # fmt: skip
def test_sides_that_cannot_be(change: dict[str, float]) -> None:
    side = Side(40, 0, 40, 20, 0, 20)
    with pytest.raises(ValueError, match="cannot resample Side"):
        resample(noise(40, 40), side, side._replace(**change))


@needs_compiled
def test_threads_do_not_share_anything() -> None:
    pictures = [noise(40 + number, 50, number) for number in range(24)]

    def small(pixels: np.ndarray) -> bytes:
        return resample(pixels, Side(len(pixels), 0, len(pixels), 21, 0, 21), Side(50, 0, 50, 19, 0, 19)).tobytes()

    alone = [small(pixels) for pixels in pictures]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(small, pictures * 10)) == alone * 10


@needs_compiled
@pytest.mark.parametrize("pixels", [noise(40, 49), noise(40, 50)[:, :, :3], noise(40, 100)[:, ::2]])
def test_memory_of_another_shape(pixels: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"expected C-contiguous \(40, 50, 4\)"):
        resample(pixels, Side(40, 0, 40, 20, 0, 20), Side(50, 0, 50, 20, 0, 20))


class TestLeftToPillow:
    @pytest.fixture(autouse=True)
    def afresh(self) -> Iterator[None]:
        resampling._gives_pillows_pixels_here.cache_clear()
        yield
        resampling._gives_pillows_pixels_here.cache_clear()

    def test_not_built(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(resampling, "compiled", lambda: None)
        assert not can_resample()

    def test_another_processor(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(resampling.platform, "machine", lambda: "aarch64")
        assert not can_resample()

    @needs_compiled
    def test_other_pixels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(resampling, "resample", lambda *arguments: resample(*arguments) ^ 1)
        assert not can_resample()


@needs_compiled
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="asks Linux how much memory is taken")
def test_no_memory() -> None:
    script = """
import resource, numpy as np
from pathlib import Path
from packshift.compiled import compiled
library = compiled()
picture, out = np.zeros((60_000, 100, 4), np.uint8), np.empty((50_000, 50, 3), np.uint8)
taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + 100_000, taken + 100_000))
try:
    library.resample(picture, (0, 60_000, 60_000, 50_000, 0, 50_000, False), (0, 100, 100, 50, 0, 50, False), *TURN, out)
except MemoryError:
    print("no memory")
"""
    for turn in ("(False, True)", "(True, True)", "(True, False)"):
        text = script.replace("TURN", turn)
        ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
        assert ended.stdout == "no memory\n"


@needs_compiled
def test_buffers_of_other_lengths() -> None:
    side = (0.0, 4.0, 4, 2, 0, 2, False)
    for picture, out in ((63, 12), (64, 13), (65, 12), (0, 0)):
        with pytest.raises(ValueError, match=f"expected 64 and 12 bytes, got {picture} and {out}"):
            compiled().resample(bytes(picture), side, side, False, True, bytearray(out))


class TestMemory:
    @pytest.mark.skipif(not HANDS_OUT_MEMORY, reason="Pillow before 11.3 does not hand out its memory")
    def test_it_outlives_the_picture(self) -> None:
        pixels = noise(300, 400)[:, :, :3]
        memory = memory_of(Image.fromarray(pixels))
        assert memory is not None
        gc.collect()
        for seed in range(20):  # would take the place of what had been freed
            Image.fromarray(noise(300, 400, seed + 1)[:, :, :3])
        assert memory.shape == (300, 400, 4)
        assert np.array_equal(memory[:, :, :3], pixels)

    @pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "I;16", "F"])
    def test_other_modes_have_none(self, mode: str) -> None:
        assert memory_of(Image.new(mode, (5, 6))) is None

    @pytest.mark.parametrize("size", [(0, 0), (0, 5)])
    def test_no_pixels(self, size: tuple[int, int]) -> None:
        assert memory_of(Image.new("RGB", size)) is None

    def test_somebody_elses_memory(self) -> None:
        assert memory_of(picture_on(noise(30, 40), "RGB")) is None

    def test_an_old_pillow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """11.2 never gives the memory back."""
        for version, handed_out in (("11.2.1", False), ("11.3.0", True)):
            pillow_memory._hands_out_memory.cache_clear()
            monkeypatch.setattr("PIL.__version__", version)
            assert pillow_memory._hands_out_memory() is handed_out
        pillow_memory._hands_out_memory.cache_clear()

    def test_a_pillow_that_has_another_way_to_refuse(self) -> None:
        class Refusing(Image.Image):
            def __arrow_c_array__(self, requested_schema: object = None) -> tuple[object, object]:
                raise NotImplementedError

        picture = Refusing()
        picture._mode, picture._size = "RGB", (3, 3)
        assert memory_of(picture) is None

    @pytest.mark.skipif(not HANDS_OUT_MEMORY, reason="Pillow before 11.3 does not hand out its memory")
    def test_it_cannot_be_written_to(self) -> None:
        memory = memory_of(Image.new("RGB", (3, 3)))
        assert memory is not None
        with pytest.raises(ValueError, match="read-only"):
            memory[0, 0, 0] = 1

    def test_not_in_one_piece(self) -> None:
        assert memory_of(Image.new("RGB", (2100, 2100))) is None

    def test_a_picture_on_it(self) -> None:
        pixels = noise(30, 40)
        picture = picture_on(pixels, "RGB")
        assert picture.size == (40, 30)
        assert np.array_equal(np.asarray(picture), pixels[:, :, :3])
