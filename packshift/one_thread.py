"""What one thread needs for a picture with nothing around it: the machine's own limit, and where the time goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch

from packshift.datasets import ImageFolderDataset, StoreDataset
from packshift.errors import UsageError

PAGE = 4096


@dataclass(frozen=True)
class OneThread:
    """Pictures per second, and the milliseconds of one picture by stage; None: a store has no such stage."""

    images_per_s: float
    read_ms: float
    decode_ms: float | None = None
    convert_ms: float | None = None


def touch(images: torch.Tensor) -> int:
    """Read one byte of every page of a dense tensor; returns their sum, so that no one can skip it."""
    flat = images.as_strided((images.numel(),), (1,))
    return int(flat.view(torch.uint8)[::PAGE].sum())


def pass_over_pictures(dataset: ImageFolderDataset, indices: Iterator[int], seconds: float) -> OneThread:
    """Read, decode and convert one picture after the other for `seconds`, with a clock around each stage.

    The code is the dataset's own. Reading is from the page cache where the file is in it; converting is all that makes
    the pixels of a decoded picture an item: orientation, RGB, scaling, cutting, copies, the checksum of the file.
    """
    touch(torch.from_numpy(dataset._pixels(next(indices))))  # the first one imports
    clock = _Clock()
    images = 0
    started = time.perf_counter()
    while (took := time.perf_counter() - started) < seconds or not images:
        clock.start()
        pixels = dataset._pixels(next(indices), clock.lap)
        clock.lap("convert")  # a copy that may be written to
        touch(torch.from_numpy(pixels))
        images += 1
    read, decode, convert = (clock.seconds[stage] * 1000 / images for stage in ("read", "decode", "convert"))
    return OneThread(images / took, read, decode, convert)


class _Clock:
    """Adds up the seconds of each stage."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("read", "decode", "convert"), 0.0)
        self.start()

    def start(self) -> None:
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] += now - self._last
        self._last = now


def pass_over_store(dataset: StoreDataset, indices: Iterator[int], seconds: float, batch_size: int) -> OneThread:
    """Gather batches from the map into one buffer, which is used again, for `seconds`: all that there is to reading."""
    batches = _gathered(dataset, indices, batch_size)
    touch(next(batches))
    images = 0
    started = time.perf_counter()
    while (took := time.perf_counter() - started) < seconds or not images:
        batch = next(batches)
        touch(batch)
        images += len(batch)
    return OneThread(images / took, took * 1000 / images)


def _gathered(dataset: StoreDataset, indices: Iterator[int], batch_size: int) -> Iterator[torch.Tensor]:
    torch.set_num_threads(1)
    rows = dataset._rows
    if rows is None:
        raise UsageError(f"{dataset.path}: its pictures are of different sizes, which make no batches")
    out = torch.empty((batch_size, rows.shape[1]), dtype=rows.dtype)
    while True:
        positions = torch.tensor(list(islice(indices, batch_size)))
        yield torch.index_select(rows, 0, positions, out=out).view(torch.uint8)
