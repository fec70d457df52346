"""Write torchvision_transforms.json: what torchvision's transforms make of a synthetic picture.

    python tests/data/make_torchvision_transforms.py      (needs torch, torchvision and Pillow; nothing else here does)

Cropping and flipping move pixels, so a CRC-32 tells everything; of the floats some values are kept.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import torch
import torchvision
from make_torchvision_expected import picture
from torchvision.transforms import functional as F  # noqa: N812

HEIGHT, WIDTH = 37, 50
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def crc(image: torch.Tensor) -> int:
    return zlib.crc32(image.permute(1, 2, 0).contiguous().numpy().tobytes())


def main() -> None:
    image = F.pil_to_tensor(picture(HEIGHT, WIDTH))
    normalized = F.normalize(F.to_tensor(picture(HEIGHT, WIDTH)), MEAN, STD)
    places = [(channel, y, x) for channel in range(3) for y in (0, 11, 36) for x in (0, 23, 49)]
    expected = {
        "made_with": {"torchvision": torchvision.__version__, "torch": torch.__version__},
        "height": HEIGHT,
        "width": WIDTH,
        "center_crop": [
            {"size": size, "crc32": crc(F.center_crop(image, list(size)))}
            for size in ((32, 32), (33, 33), (37, 50), (5, 48))
        ],
        "crop": [
            {"top": top, "left": left, "crc32": crc(F.crop(image, top, left, 20, 30))}
            for top, left in ((0, 0), (17, 20), (3, 11))
        ],
        "horizontal_flip": crc(F.hflip(image)),
        "mean": MEAN,
        "std": STD,
        "normalized": [[channel, y, x, normalized[channel, y, x].item()] for channel, y, x in places],
    }
    Path(__file__).with_name("torchvision_transforms.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
