"""JPEGs: simplejpeg gives what Pillow gives, or leaves the file to Pillow; scaled decoding keeps to its rule."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import encoded, formula_picture
from odd_pictures import ARITHMETIC, UNDO, broken, exif_of, kinds, modes, sizes
from PIL import Image

from packshift import jpeg, preprocess
from packshift.errors import ImageError, UsageError
from packshift.preprocess import make_record
from packshift.record import Record, Sample
from packshift.settings import Preprocessing

simplejpeg = pytest.importorskip("simplejpeg")
SETTINGS = (Preprocessing(None), Preprocessing((32, 32)), Preprocessing((16, 16), fast_decode=True))


@pytest.fixture(params=["simplejpeg", "Pillow"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use(monkeypatch, request.param)
    return request.param


def use(monkeypatch: pytest.MonkeyPatch, decoder: str) -> None:
    monkeypatch.setattr(jpeg, "_simplejpeg", lambda: simplejpeg if decoder == "simplejpeg" else None)


def outcome(data: bytes, settings: Preprocessing) -> object:
    """Everything that a store would keep of a picture, or the reason why it would not."""
    try:
        record = make_record(data, Sample("picture", 0), settings)
    except ImageError as error:
        return str(error)
    return record.pixels.shape, record.pixels.tobytes(), record.original_size, record.notes


def both_decoders(monkeypatch: pytest.MonkeyPatch, data: bytes, settings: Preprocessing) -> tuple[object, object]:
    outcomes = []
    for decoder in ("simplejpeg", "Pillow"):
        use(monkeypatch, decoder)
        outcomes.append(outcome(data, settings))
    return outcomes[0], outcomes[1]


def count_turbo(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Grows with every JPEG that simplejpeg is given: whether simplejpeg decoded it."""
    taken: list[bool] = []
    original = jpeg._turbo_pixels

    def counted(*arguments: object) -> object:
        pixels = original(*arguments)
        taken.append(pixels is not None)
        return pixels

    monkeypatch.setattr(jpeg, "_turbo_pixels", counted)
    return taken


def every_structure() -> Iterator[bytes]:
    """Odd sides, every subsampling, several qualities, progressive, restart markers, own tables, grey."""
    rng = np.random.default_rng(0)
    for height, width in itertools.product((1, 2, 7, 8, 9, 16, 17, 33), repeat=2):
        noise = rng.integers(0, 256, (height, width, 3), np.uint8)
        for subsampling in ("444", "422", "420", "440", "411"):
            yield simplejpeg.encode_jpeg(noise, (1, 50, 95)[(height + width) % 3], "RGB", subsampling)
        image = Image.fromarray(noise)
        yield encoded(image, progressive=True, quality=90)
        yield encoded(image, optimize=True, restart_marker_blocks=1, quality=40)
        yield encoded(image.convert("L"), progressive=True)
        yield encoded(image, keep_rgb=True)


def test_every_structure_gives_the_same_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = count_turbo(monkeypatch)
    for number, data in enumerate(every_structure()):
        for settings in SETTINGS:
            turbo, plain = both_decoders(monkeypatch, data, settings)
            assert turbo == plain, number
    assert len(taken) > 1000
    assert all(taken)


def test_odd_and_broken_files_have_the_same_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pixels, notes and sizes, and the reason in the same words."""
    monkeypatch.setattr("warnings.warn", lambda *arguments, **options: None)
    jpegs = [case for case in [*modes(), *kinds(), *sizes(), *broken()] if (case.data or b"")[:2] == b"\xff\xd8"]
    assert len(jpegs) > 30
    for case in jpegs:
        for settings in SETTINGS:
            turbo, plain = both_decoders(monkeypatch, case.data, settings)
            assert turbo == plain, case.path


def test_damage_anywhere_has_the_same_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warnings.warn", lambda *arguments, **options: None)
    rng = np.random.default_rng(1)
    good = [encoded(formula_picture(40, 56)), encoded(formula_picture(40, 56), progressive=True)]
    taken = count_turbo(monkeypatch)
    for number in range(300):
        data = bytearray(good[number % 2])
        frame = max(data.find(b"\xff\xc0"), data.find(b"\xff\xc2"))
        place = int(rng.integers(2, len(data)))
        if frame <= place < frame + 10:
            continue  # another size, perhaps a huge one: slow, and tested elsewhere
        data[place] = int(rng.integers(0, 256))
        turbo, plain = both_decoders(monkeypatch, bytes(data), SETTINGS[0])
        assert turbo == plain, (number, place)
    assert {True, False} == set(taken)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (encoded(formula_picture(20, 30).convert("CMYK")), "four colours"),
        (ARITHMETIC, "arithmetic coding"),
        (encoded(formula_picture(20, 30))[:-40], "cut short"),
    ],
)
def test_what_simplejpeg_does_not_decode(monkeypatch: pytest.MonkeyPatch, data: bytes, why: str) -> None:
    use(monkeypatch, "simplejpeg")
    taken = count_turbo(monkeypatch)
    outcome(data, Preprocessing(None))
    assert taken == [False] or why == "arithmetic coding"  # some builds of simplejpeg know it


def test_the_pixel_limit_comes_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "simplejpeg")
    taken = count_turbo(monkeypatch)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert str(outcome(encoded(formula_picture(20, 30)), Preprocessing(None))).startswith("too many pixels")
    assert taken == []


def test_a_build_with_other_pixels_is_not_used() -> None:
    def off_by_one(*arguments: object, **options: object) -> np.ndarray:
        return simplejpeg.decode_jpeg(*arguments, **options) ^ 1

    def old(data: bytes, colorspace: str) -> np.ndarray:
        return simplejpeg.decode_jpeg(data, colorspace)

    assert jpeg._gives_pillows_pixels(simplejpeg)
    assert not jpeg._gives_pillows_pixels(SimpleNamespace(decode_jpeg=off_by_one))
    assert not jpeg._gives_pillows_pixels(SimpleNamespace(decode_jpeg=old))


@pytest.mark.parametrize(("switch", "expected"), [("0", "Pillow"), ("1", "simplejpeg")])
def test_the_switch(switch: str, expected: str) -> None:
    program = "from packshift.jpeg import jpeg_decoder; print(jpeg_decoder())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**preprocess.os.environ, "PACKSHIFT_TURBO": switch},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == expected


class TestFastDecode:
    def smooth(self, height: int, width: int) -> Image.Image:
        y, x = np.ogrid[:height, :width]
        channels = [np.sin(y / 40 + phase) * np.cos(x / 60 + phase) * 100 + 128 for phase in (0, 1, 2)]
        return Image.fromarray(np.stack(channels, axis=2).astype(np.uint8))

    def record(self, data: bytes, **settings: object) -> Record:
        return make_record(data, Sample("picture", 0), Preprocessing((32, 32), **settings))

    def scales(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        used: list[int] = []
        original = preprocess.memory_of_jpeg

        def counted(opened: object, data: bytes, scale: int = 1) -> object:
            used.append(scale)
            return original(opened, data, scale)

        monkeypatch.setattr(preprocess, "memory_of_jpeg", counted)
        return used

    @pytest.mark.parametrize(
        ("height", "width", "scale"),
        [
            (512, 512, 8), (512, 900, 8), (511, 512, 4), (256, 256, 4), (255, 400, 2), (128, 128, 2), (127, 128, 1),
            (127, 900, 1), (30, 30, 1),
        ],
    )  # fmt: skip
    def test_at_least_twice_the_target_remains(
        self, decoder: str, monkeypatch: pytest.MonkeyPatch, height: int, width: int, scale: int
    ) -> None:
        used = self.scales(monkeypatch)
        data = encoded(self.smooth(height, width), quality=95)
        fast, whole = self.record(data, fast_decode=True), self.record(data)
        assert used == [scale, 1]
        assert fast.original_size == (height, width)
        assert fast.notes == whole.notes
        difference = np.abs(fast.pixels.astype(int) - whole.pixels)
        assert difference.max() <= 4
        assert (scale == 1) == (difference.max() == 0)

    @pytest.mark.parametrize("fit", ["crop", "pad", "stretch"])
    @pytest.mark.parametrize("orientation", range(1, 9))
    def test_upright_and_in_place(self, decoder: str, orientation: int, fit: str) -> None:
        """Sides that 8 does not divide: the part of the last block beyond the picture must not move anything."""
        image = self.smooth(601, 403)
        stored = image.transpose(UNDO[orientation]) if orientation in UNDO else image
        data = encoded(stored, quality=95, exif=exif_of(orientation))
        fast, whole = (
            make_record(data, Sample("picture", 0), Preprocessing((32, 24), fit, fast)) for fast in (True, False)
        )
        assert fast.original_size == whole.original_size == (601, 403)
        assert fast.notes == whole.notes == (("turned",) if orientation in UNDO else ())
        assert np.abs(fast.pixels.astype(int) - whole.pixels).max() <= 5

    def test_both_decoders_give_the_same_pixels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for height, width, subsampling in itertools.product((129, 260, 513, 777), (140, 301, 530), (0, 1, 2)):
            data = encoded(formula_picture(height, width), subsampling=subsampling)
            turbo, plain = both_decoders(monkeypatch, data, Preprocessing((32, 32), fast_decode=True))
            assert turbo == plain, (height, width, subsampling)

    def test_other_formats_do_not_change(self) -> None:
        data = encoded(self.smooth(512, 512), "PNG")
        assert np.array_equal(self.record(data, fast_decode=True).pixels, self.record(data).pixels)

    def test_needs_a_size(self) -> None:
        with pytest.raises(UsageError, match="needs a size"):
            Preprocessing(None, fast_decode=True)
