"""Draw the sample pictures in sample_data/photos: 4 classes x 6 small JPEGs, the same bytes for one Pillow version.

    python sample_data/make_photos.py

Everything is drawn here from scratch, so the pictures are free of anybody's rights. Per class some are landscape, some
portrait; one is greyscale and one lies on its side with an EXIF orientation that says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

PHOTOS = Path(__file__).parent / "photos"
SIZES = [(360, 270), (270, 360), (400, 260), (300, 300), (260, 380), (340, 256)]
SCALE = 2  # drawn at twice the size and shrunk, for smooth edges

Colour = tuple[int, int, int]


def blend(a: Colour, b: Colour, share: float) -> Colour:
    red, green, blue = (round(x + (y - x) * share) for x, y in zip(a, b, strict=True))
    return red, green, blue


def sky(size: tuple[int, int], top: Colour, bottom: Colour) -> Image.Image:
    width, height = size
    share = np.linspace(0, 1, height)[:, None, None]
    rows = np.array(top) * (1 - share) + np.array(bottom) * share
    return Image.fromarray(np.broadcast_to(rows, (height, width, 3)).astype(np.uint8))


def draw_mountain(rng: np.random.Generator, size: tuple[int, int]) -> Image.Image:
    width, height = size
    image = sky(size, (70, 130, 200), (250, 215, 180))
    pen = ImageDraw.Draw(image)
    radius = width // 14
    x, y = rng.integers(radius, width - radius), height // 5
    pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=(255, 240, 200))
    for layer in range(4):
        base = height * (0.45 + 0.14 * layer)
        phase, steepness = rng.uniform(0, 6, 5), rng.uniform(0.5, 1.2, 5)
        ridge = [
            (
                x,
                base
                + sum(
                    math.sin(x / width * 7 * (k + 1) + phase[k]) * steepness[k] * height / 18 / (k + 1)
                    for k in range(5)
                ),
            )
            for x in range(0, width + 8, 8)
        ]
        colour = blend((130, 150, 185), (35, 60, 50), layer / 3)
        pen.polygon([(0, height), *ridge, (width, height)], fill=colour)
    return image


def draw_flower(rng: np.random.Generator, size: tuple[int, int]) -> Image.Image:
    width, height = size
    image = sky(size, (120, 170, 90), (40, 95, 45))
    pen = ImageDraw.Draw(image)
    for _ in range(60):
        x, y, length = rng.uniform(0, width), rng.uniform(0, height), rng.uniform(0.1, 0.3) * height
        lean = rng.uniform(-0.2, 0.2) * length
        pen.line((x, y, x + lean, y + length), fill=blend((90, 150, 60), (25, 70, 30), rng.random()), width=SCALE * 3)
    petals: list[Colour] = [(235, 80, 110), (250, 200, 60), (245, 245, 250), (150, 90, 210)]
    petal = petals[rng.integers(len(petals))]
    for _ in range(3):
        x, y, radius = (
            rng.uniform(0.25, 0.75) * width,
            rng.uniform(0.25, 0.75) * height,
            rng.uniform(0.1, 0.2) * min(size),
        )
        count = int(rng.integers(6, 12))
        for k in range(count):
            angle = 2 * math.pi * k / count
            px, py, pr = x + math.cos(angle) * radius, y + math.sin(angle) * radius, radius * 0.55
            pen.ellipse((px - pr, py - pr, px + pr, py + pr), fill=blend(petal, (255, 255, 255), 0.1 * (k % 3)))
        pen.ellipse((x - radius / 2, y - radius / 2, x + radius / 2, y + radius / 2), fill=(200, 140, 30))
    return image


def draw_house(rng: np.random.Generator, size: tuple[int, int]) -> Image.Image:
    width, height = size
    image = sky(size, (150, 195, 235), (225, 235, 240))
    pen = ImageDraw.Draw(image)
    pen.rectangle((0, height * 0.75, width, height), fill=(95, 150, 80))
    walls: list[Colour] = [(225, 200, 160), (190, 100, 80), (235, 235, 225)]
    wall = walls[rng.integers(len(walls))]
    left, right = width * rng.uniform(0.12, 0.25), width * rng.uniform(0.72, 0.88)
    top, bottom = height * rng.uniform(0.4, 0.5), height * 0.82
    pen.polygon([(left - 20, top), ((left + right) / 2, top * 0.45), (right + 20, top)], fill=(120, 55, 45))
    pen.rectangle((left, top, right, bottom), fill=wall, outline=(70, 60, 55), width=SCALE)
    step = (right - left) / 4
    for k in (0, 1, 2, 3):
        x = left + step * k + step * 0.25
        pen.rectangle(
            (x, top + 30, x + step * 0.5, top + 30 + step * 0.5),
            fill=(250, 225, 130),
            outline=(70, 60, 55),
            width=SCALE,
        )
    pen.rectangle((left + step * 1.6, bottom - step, left + step * 2.3, bottom), fill=(100, 65, 40))
    return image


def draw_boat(rng: np.random.Generator, size: tuple[int, int]) -> Image.Image:
    width, height = size
    image = sky(size, (245, 190, 140), (250, 225, 190))
    pen = ImageDraw.Draw(image)
    sea = height * 0.62
    for k in range(40):
        y = sea + (height - sea) * k / 40
        pen.rectangle((0, y, width, height), fill=blend((70, 140, 170), (15, 55, 95), k / 40))
    for _ in range(2):
        x, y, length = (
            rng.uniform(0.3, 0.7) * width,
            sea + rng.uniform(0.04, 0.25) * height,
            rng.uniform(0.15, 0.3) * width,
        )
        mast = length * 1.3
        pen.line((x, y, x, y - mast), fill=(80, 50, 30), width=SCALE * 3)
        pen.polygon([(x + 6, y - mast), (x + 6, y - 12), (x + length * 0.8, y - 12)], fill=(250, 250, 245))
        pen.polygon([(x - 6, y - mast * 0.8), (x - 6, y - 12), (x - length * 0.5, y - 12)], fill=(215, 60, 50))
        hull = [
            (x - length, y),
            (x + length, y),
            (x + length * 0.7, y + length * 0.28),
            (x - length * 0.7, y + length * 0.28),
        ]
        pen.polygon(hull, fill=(110, 60, 35))
    return image


DRAW: dict[str, Callable[[np.random.Generator, tuple[int, int]], Image.Image]] = {
    "boat": draw_boat,
    "flower": draw_flower,
    "house": draw_house,
    "mountain": draw_mountain,
}


def make_photo(name: str, number: int) -> Image.Image:
    """Draw one picture and give it the grain of a photograph."""
    rng = np.random.default_rng([sorted(DRAW).index(name), number])
    width, height = SIZES[number]
    large = DRAW[name](rng, (width * SCALE, height * SCALE))
    image = large.resize((width, height), Image.Resampling.LANCZOS).filter(ImageFilter.GaussianBlur(0.4))
    grain = rng.normal(0, 4, (height, width, 1))
    return Image.fromarray(np.clip(np.asarray(image) + grain, 0, 255).astype(np.uint8))


def main() -> None:
    for name in DRAW:
        (PHOTOS / name).mkdir(parents=True, exist_ok=True)
        for number in range(len(SIZES)):
            image = make_photo(name, number)
            options: dict[str, object] = {"quality": 82, "optimize": True}
            if (name, number) == ("house", 3):
                image = image.convert("L")
            if (name, number) == ("mountain", 1):  # stored on its side; orientation 6 turns it upright
                image = image.transpose(Image.Transpose.ROTATE_90)
                exif = Image.Exif()
                exif[0x0112] = 6
                options["exif"] = exif
            image.save(PHOTOS / name / f"{name}_{number + 1}.jpg", **options)


if __name__ == "__main__":
    main()
