"""What several tests share: pictures of known pixels, folders of them, and references computed another way."""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

from packshift.record import Record, Skipped
from packshift.stores import get_format
from packshift.stores._partial import partial_file
from packshift.stores._writer import Description, Writer

REPOSITORY = Path(__file__).parent.parent
SAMPLE_PHOTOS = REPOSITORY / "sample_data" / "photos"

FORKED_DECODERS = [
    pytest.mark.usefixtures("forked_decoders"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]
"""For tests of what a conversion does, not of how its decoding processes start; see the fixture."""


def formula_picture(height: int, width: int, seed: int = 0) -> Image.Image:
    """A picture in which neighbouring pixels and channels differ, so that a shift or a swap shows."""
    y, x, channel = np.ogrid[:height, :width, :3]
    return Image.fromarray(((y * 7 + x * 13 + channel * 31 + y * x // 5 + seed * 17) % 256).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def save(path: Path, image: Image.Image, kind: str = "JPEG", **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(image, kind, **options))
    return path


def make_folder(root: Path, classes: Sequence[str], per_class: int, size: tuple[int, int] = (40, 60)) -> Path:
    for label, name in enumerate(classes):
        for number in range(per_class):
            image = formula_picture(size[0] + number, size[1] - number, seed=label * 100 + number)
            save(root / name / f"{number:04}.jpg", image)
    return root


def resize_and_crop(path: Path, side: int) -> NDArray[np.uint8]:
    """torchvision's Resize(side) and CenterCrop(side) on the upright RGB picture, written out in Pillow."""
    with Image.open(path) as opened:
        image = ImageOps.exif_transpose(opened).convert("RGB")
    width, height = image.size
    if width <= height:
        image = image.resize((side, int(side * height / width)), Image.Resampling.BILINEAR)
    else:
        image = image.resize((int(side * width / height), side), Image.Resampling.BILINEAR)
    left, top = round((image.width - side) / 2.0), round((image.height - side) / 2.0)
    return np.asarray(image.crop((left, top, left + side, top + side)))


def image_folder_samples(root: Path) -> list[tuple[Path, int]]:
    """What torchvision's ImageFolder lists for a tree of JPEGs one level deep: sorted classes, sorted names."""
    classes = sorted(folder.name for folder in root.iterdir() if folder.is_dir())
    return [(path, label) for label, name in enumerate(classes) for path in sorted((root / name).iterdir())]


def make_records(shapes: Iterable[tuple[int, int]], classes: int = 3, seed: int = 0) -> list[Record]:
    rng = np.random.default_rng(seed)
    return [
        Record(
            name=f"class{index % classes}/picture {index}.jpg",
            label=index % classes,
            pixels=rng.integers(0, 256, (height, width, 3), dtype=np.uint8),
            source_size=1000 + index,
            source_crc32=zlib.crc32(b"%d" % index),
            original_size=(height * 2, width * 2),
            notes=("turned",) if index % 2 else (),
        )
        for index, (height, width) in enumerate(shapes)
    ]


def write_store(
    target: Path,
    format_name: str,
    records: Sequence[Record],
    *,
    classes: Sequence[str] = ("class0", "class1", "class2"),
    own_sizes: bool = False,
    skipped: Sequence[Skipped] = (),
) -> Path:
    """A store of given records, with descriptions that no version of any library changes."""
    description = Description(
        classes=tuple(classes),
        preprocessing={"mode": "RGB"},
        source={"layout": "class-folders", "found": len(records) + len(skipped)},
        tools={"packshift": "0"},
    )
    with partial_file(target) as file:
        writer = Writer(file, get_format(format_name), None if own_sizes else records[0].pixels.shape)
        for record in records:
            writer.append(record)
        for each in skipped:
            writer.skip(each)
        writer.finish(description)
        file.publish(overwrite=False)
    return target
