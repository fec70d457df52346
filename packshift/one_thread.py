"""What one thread needs for a picture: the machine's own limit, and where the time of a DataLoader without workers goes.

All stages are clocked in the same stretch of time, so that a machine that gets slower or faster touches all of them alike.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from packshift.datasets import ImageFolderDataset, StoreDataset
from packshift.errors import UsageError

PAGE = 4096


@dataclass(frozen=True)
class OneThread:
    """Milliseconds of one picture by stage; a store decodes and converts nothing (None).

    `limit_images_per_s` is the speed without "transfer": pixels and nothing around them.
    """

    limit_images_per_s: float
    read_ms: float
    decode_ms: float | None
    convert_ms: float | None
    transfer_ms: float


def touch(images: torch.Tensor) -> int:
    """Read one byte of every page of a dense tensor; returns their sum, so that no one can skip it."""
    flat = images.as_strided((images.numel(),), (1,))
    return int(flat.view(torch.uint8)[::PAGE].sum())


def pass_over_pictures(dataset: ImageFolderDataset, order: Sampler[int], seconds: float, batch_size: int) -> OneThread:
    """Load batches for `seconds`, with a clock around the stages of each picture; what is left is transfer.

    Reading is from the page cache where the file is in it. Converting is all that makes a decoded picture an item:
    orientation, RGB, scaling, cutting, copies, the checksum of the file.
    """
    torch.set_num_threads(1)
    batches = iter(DataLoader(dataset, _affordable(dataset, seconds, batch_size), sampler=order))
    next(batches)  # imports, buffers
    clock = _Clock()
    dataset._lap = clock.lap
    images, took = 0, 0.0
    while took < seconds or not images:
        loaded, passed = _clocked(batches)
        took += passed
        images += loaded
    read, decode, convert = (clock.seconds[stage] * 1000 / images for stage in ("read", "decode", "convert"))
    pixels = read + decode + convert
    return OneThread(1000 / pixels, read, decode, convert, max(0.0, took * 1000 / images - pixels))


def _affordable(dataset: ImageFolderDataset, seconds: float, batch_size: int) -> int:
    """The largest batch that is loaded in about `seconds`."""
    dataset[0]  # imports
    started = time.perf_counter()
    dataset[0]
    return max(1, min(batch_size, int(seconds / (time.perf_counter() - started))))


class _Clock:
    """Adds up the seconds that pass until each lap."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now


def pass_over_store(dataset: StoreDataset, order: Sampler[int], seconds: float, batch_size: int) -> OneThread:
    """Gather batches from the map into one buffer, in turns with those of a DataLoader, for `seconds` altogether.

    The gather, into a buffer that is used again, is all that there is to reading; what the DataLoader takes longer is
    transfer.
    """
    torch.set_num_threads(1)
    bare, loaded = _gathered(dataset, iter(order), batch_size), iter(DataLoader(dataset, batch_size, sampler=order))
    next(bare)
    next(loaded)
    gathering = loading = 0.0
    rounds = 0
    while gathering + loading < seconds or not rounds:
        gathering += _clocked(bare)[1]
        loading += _clocked(loaded)[1]
        rounds += 1
    read = gathering * 1000 / (rounds * batch_size)
    return OneThread(1000 / read, read, None, None, max(0.0, loading * 1000 / (rounds * batch_size) - read))


def _clocked(batches: Iterator[Any]) -> tuple[int, float]:
    """Load a batch and touch every page; (pictures, seconds). It is given back at once, so that its buffer is used again."""
    started = time.perf_counter()
    batch = next(batches)
    touch(batch[0])
    return len(batch[0]), time.perf_counter() - started


def _gathered(dataset: StoreDataset, indices: Iterator[int], batch_size: int) -> Iterator[tuple[torch.Tensor]]:
    rows = dataset._rows
    if rows is None:
        raise UsageError(f"{dataset.path}: its pictures are of different sizes, which make no batches")
    out = np.empty((batch_size, rows.nbytes), np.uint8)
    while True:
        rows.gather(np.array(list(islice(indices, batch_size))), out)
        yield (torch.from_numpy(out),)
