"""Transforms on whole batches, for `Loader(transform=...)` or any batch of pictures.

A batch is (B, C, H, W), as the loaders give it: uint8, channels last. What comes out is channels last, too, in memory
that is used again (`buffers`). A random transform draws for each picture apart, from `generator` or from torch's default
one; `Loader` passes a generator that depends on its seed, the epoch and the batch alone, never on its threads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from packshift.batches import place_for
from packshift.errors import UsageError

Size = int | tuple[int, int]


class BatchTransform(ABC):
    """A transform that takes a batch and, if it draws random numbers, the generator to draw them from."""

    @abstractmethod
    def __call__(self, images: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor: ...


class Compose(BatchTransform):
    """One transform after another. Others than those of this module are called with the images alone."""

    def __init__(self, transforms: Sequence[Callable[..., torch.Tensor]]) -> None:
        self.transforms = list(transforms)

    def __call__(self, images: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        for transform in self.transforms:
            images = apply(transform, images, generator)
        return images

    def __repr__(self) -> str:
        return f"Compose({self.transforms})"


def apply(
    transform: Callable[..., torch.Tensor], images: torch.Tensor, generator: torch.Generator | None
) -> torch.Tensor:
    """Call a transform of ours with the generator, any other callable with the images alone."""
    if isinstance(transform, BatchTransform):
        return transform(images, generator)
    return transform(images)


class RandomCrop(BatchTransform):
    """Cut a rectangle of `size` (a side, or (height, width)) out of each picture, each at a place of its own.

    As torchvision's RandomCrop without padding: all places are equally likely. Raises UsageError where a picture is
    smaller than `size`.
    """

    def __init__(self, size: Size) -> None:
        self.size = _pair(size)

    def __call__(self, images: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        height, width = _room(images, self.size)
        tops = torch.randint(height + 1, (len(images),), generator=generator).tolist()
        lefts = torch.randint(width + 1, (len(images),), generator=generator).tolist()
        return crop_each(images, self.size, tops, lefts)

    def __repr__(self) -> str:
        return f"RandomCrop({self.size})"


class CenterCrop(BatchTransform):
    """Cut the middle out: a rectangle of `size` (a side, or (height, width)), rounded as torchvision's CenterCrop does.

    Raises UsageError where the pictures are smaller than `size`.
    """

    def __init__(self, size: Size) -> None:
        self.size = _pair(size)

    def __call__(self, images: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        height, width = _room(images, self.size)
        top, left = round(height / 2.0), round(width / 2.0)
        out = _empty(images, self.size, images.dtype)
        out.copy_(images[:, :, top : top + self.size[0], left : left + self.size[1]])
        return out

    def __repr__(self) -> str:
        return f"CenterCrop({self.size})"


class RandomHorizontalFlip(BatchTransform):
    """Mirror each picture left to right with probability `p`."""

    def __init__(self, p: float = 0.5) -> None:
        if not 0 <= p <= 1:
            raise UsageError(f"p {p}: expected a probability from 0 to 1")
        self.p = p

    def __call__(self, images: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        chosen = torch.rand(len(images), generator=generator) < self.p
        out = _empty(images, (images.shape[2], images.shape[3]), images.dtype)
        for index, mirrored in enumerate(chosen.tolist()):
            out[index].copy_(images[index].flip(-1) if mirrored else images[index])
        return out

    def __repr__(self) -> str:
        return f"RandomHorizontalFlip({self.p})"


class ToFloat(BatchTransform):
    """uint8 0 .. 255 to float32: value / 255, then minus `mean` and divided by `std` per channel where they are given.

    As torchvision's ToTensor and Normalize, to within one part in a million of the range.
    """

    def __init__(self, mean: Sequence[float] = (0.0, 0.0, 0.0), std: Sequence[float] = (1.0, 1.0, 1.0)) -> None:
        if len(mean) != len(std) or not all(value > 0 for value in std):
            raise UsageError(f"mean {mean}, std {std}: expected a number per channel in each, those of std above 0")
        self.mean, self.std = tuple(mean), tuple(std)

    def __call__(self, images: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        if images.shape[1] != len(self.mean):
            raise UsageError(f"a batch with {images.shape[1]} channels: mean and std are given for {len(self.mean)}")
        shift = torch.tensor(self.mean).mul(255)[:, None, None]
        scale = torch.tensor(self.std).mul(255).reciprocal()[:, None, None]
        out = _empty(images, (images.shape[2], images.shape[3]), torch.float32)
        for picture, result in zip(images, out, strict=True):  # a picture at a time stays in the processor's cache
            torch.sub(picture, shift, out=result)
            result.mul_(scale)
        return out

    def __repr__(self) -> str:
        return f"ToFloat({self.mean}, {self.std})"


def crop_each(images: torch.Tensor, size: tuple[int, int], tops: Sequence[int], lefts: Sequence[int]) -> torch.Tensor:
    """A rectangle of `size` (height, width) out of each picture, with its upper left corner at (top, left)."""
    height, width = size
    out = _empty(images, size, images.dtype)
    for picture, result, top, left in zip(images, out, tops, lefts, strict=True):
        result.copy_(picture[:, top : top + height, left : left + width])
    return out


def _pair(size: Size) -> tuple[int, int]:
    height, width = (size, size) if isinstance(size, int) else size
    if height < 1 or width < 1:
        raise UsageError(f"size {size}: expected at least 1 pixel in each direction")
    return height, width


def _room(images: torch.Tensor, size: tuple[int, int]) -> tuple[int, int]:
    """By how much the pictures are (higher, wider) than `size`."""
    height, width = images.shape[2] - size[0], images.shape[3] - size[1]
    if height < 0 or width < 0:
        raise UsageError(
            f"cannot cut {size[0]} x {size[1]} (height x width) out of pictures of {images.shape[2]} x {images.shape[3]}"
        )
    return height, width


def _empty(images: torch.Tensor, size: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised batch (B, C, height, width), channels last, where `images` are."""
    batch, channels = images.shape[:2]
    if images.device.type != "cpu":
        return torch.empty((batch, channels, *size), dtype=dtype, device=images.device).contiguous(
            memory_format=torch.channels_last
        )
    place = place_for((batch, *size, channels), dtype)
    return place.finish(place.tensor.permute(0, 3, 1, 2))
