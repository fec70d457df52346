"""Write what torchvision makes of some synthetic pictures, as CRC-32 of the pixels, for the Pillow at hand.

    python tests/data/make_torchvision_expected.py      (needs torch, torchvision and Pillow; nothing else here does)

The pictures are a formula, so no decoder or random generator takes part. Pillow 13 began to choose the order of its two
passes, which changes some pixels by one: torchvision_pillow12.json holds for Pillow 12 and earlier,
torchvision_pillow13.json from 13 on. Each names the versions it was made with.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import torchvision
from PIL import Image
from PIL import __version__ as pillow_version
from torchvision import transforms

SIZES = [
    (375, 500),
    (500, 375),
    (256, 256),
    (257, 256),
    (1, 1),
    (3, 700),
    (640, 481),
    (100, 77),
    (255, 1024),
    (2048, 37),
]
SIDES = [256, 224, 33]
STRETCHES = [(240, 320), (31, 64)]


def picture(height: int, width: int) -> Image.Image:
    y, x, channel = np.ogrid[:height, :width, :3]
    return Image.fromarray(((y * 7 + x * 13 + channel * 31 + y * x // 5) % 256).astype(np.uint8))


def crc(image: Image.Image) -> int:
    return zlib.crc32(np.asarray(image).tobytes())


def main() -> None:
    rows = []
    for height, width in SIZES:
        image = picture(height, width)
        for side in SIDES:
            crop = transforms.Compose([transforms.Resize(side), transforms.CenterCrop(side)])
            rows.append(
                {"height": height, "width": width, "size": [side, side], "fit": "crop", "crc32": crc(crop(image))}
            )
        for size in STRETCHES:
            stretched = transforms.Resize(size)(image)
            rows.append({"height": height, "width": width, "size": size, "fit": "stretch", "crc32": crc(stretched)})
    versions = {"torchvision": torchvision.__version__, "pillow": pillow_version}
    text = json.dumps({"made_with": versions, "rows": rows}, indent=1)
    generation = 13 if int(pillow_version.split(".")[0]) >= 13 else 12
    Path(__file__).with_name(f"torchvision_pillow{generation}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
