"""Batch transforms move and scale pixels as torchvision does, picture by picture."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import formula_picture

from packshift.errors import UsageError
from packshift.transforms import CenterCrop, Compose, RandomCrop, RandomHorizontalFlip, ToFloat, crop_each

EXPECTED = json.loads((Path(__file__).parent / "data" / "torchvision_transforms.json").read_text())


def batch_of(count: int = 3) -> torch.Tensor:
    """(B, C, H, W) channels last; the first picture is the one that torchvision's answers are for."""
    pictures = [np.asarray(formula_picture(EXPECTED["height"], EXPECTED["width"], seed)) for seed in range(count)]
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2)


def crc(image: torch.Tensor) -> int:
    return zlib.crc32(image.permute(1, 2, 0).contiguous().numpy().tobytes())


@pytest.mark.parametrize("row", EXPECTED["center_crop"], ids=lambda row: str(row["size"]))
def test_center_crop(row: dict) -> None:
    out = CenterCrop(tuple(row["size"]))(batch_of())
    assert crc(out[0]) == row["crc32"]
    assert out.is_contiguous(memory_format=torch.channels_last)


def test_crop() -> None:
    rows = EXPECTED["crop"]
    same = batch_of(1).expand(len(rows), -1, -1, -1)
    out = crop_each(same, (20, 30), [row["top"] for row in rows], [row["left"] for row in rows])
    assert [crc(image) for image in out] == [row["crc32"] for row in rows]


def test_horizontal_flip() -> None:
    images = batch_of()
    assert crc(RandomHorizontalFlip(1.0)(images)[0]) == EXPECTED["horizontal_flip"]
    assert torch.equal(RandomHorizontalFlip(0.0)(images), images)
    assert torch.equal(images, batch_of())


def test_to_float() -> None:
    out = ToFloat(EXPECTED["mean"], EXPECTED["std"])(batch_of())
    assert out.dtype == torch.float32
    assert out.is_contiguous(memory_format=torch.channels_last)
    for channel, y, x, value in EXPECTED["normalized"]:
        assert out[0, channel, y, x].item() == pytest.approx(value, abs=2e-6)
    plain = ToFloat()(batch_of())
    assert torch.allclose(plain, batch_of().float() / 255, atol=1e-7)


def test_random_crop_takes_each_picture_at_a_place_of_its_own() -> None:
    images = batch_of(1).expand(400, -1, -1, -1)
    out = RandomCrop((35, 48))(images, torch.Generator().manual_seed(0))
    places = {}
    for top in range(3):
        for left in range(3):
            places[crc(images[0, :, top : top + 35, left : left + 48])] = (top, left)
    seen = [places[crc(image)] for image in out]
    assert set(seen) == {(top, left) for top in range(3) for left in range(3)}
    assert max(seen.count(place) for place in set(seen)) < 90  # 44 expected


def test_random_flip_mirrors_about_as_many_as_asked_for() -> None:
    images = batch_of(1).expand(1000, -1, -1, -1)
    out = RandomHorizontalFlip(0.3)(images, torch.Generator().manual_seed(0))
    mirrored = sum(not torch.equal(image, images[0]) for image in out)
    assert 250 < mirrored < 350


def test_the_generator_decides() -> None:
    transform = Compose([RandomCrop(20), RandomHorizontalFlip(), lambda images: images.to(torch.int16), torch.neg])
    first, again, other = (transform(batch_of(20), torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.dtype == torch.int16


def test_what_cannot_be_right() -> None:
    with pytest.raises(UsageError, match=r"cannot cut 38 x 38 \(height x width\) out of pictures of 37 x 50"):
        RandomCrop(38)(batch_of())
    with pytest.raises(UsageError, match="cannot cut"):
        CenterCrop((37, 51))(batch_of())
    with pytest.raises(UsageError, match="at least 1 pixel"):
        RandomCrop(0)
    with pytest.raises(UsageError, match="probability"):
        RandomHorizontalFlip(1.5)
    with pytest.raises(UsageError, match="above 0"):
        ToFloat(std=(1, 0, 1))
    with pytest.raises(UsageError, match="3 channels: mean and std are given for 1"):
        ToFloat((0,), (1,))(batch_of())


def test_they_say_what_they_are() -> None:
    transform = Compose([RandomCrop(20), CenterCrop((4, 5)), RandomHorizontalFlip(0.1), ToFloat()])
    assert repr(transform) == (
        "Compose([RandomCrop((20, 20)), CenterCrop((4, 5)), RandomHorizontalFlip(0.1), "
        "ToFloat((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))])"
    )
