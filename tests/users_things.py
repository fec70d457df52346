"""Datasets and steps such as users have, in a module of their own, where the processes of trials find them."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
from torch.utils.data import Dataset


class Noise(Dataset[Any]):
    """Dicts with a float image of `values` values; an item takes `cost_s` seconds to make."""

    def __init__(self, count: int = 64, values: int = 1000, cost_s: float = 0.0) -> None:
        self.count, self.values, self.cost_s = count, values, cost_s

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.cost_s)
        return {"image": torch.full((self.values,), float("nan")), "label": index, "name": str(index)}


class Deadly(Noise):
    """Its tenth item kills the process that reads it."""

    def __getitem__(self, index: int) -> Any:
        if index == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Step:
    """Works `work_s` seconds, and holds `mb` MB since its first batch."""

    def __init__(self, work_s: float, mb: int = 0) -> None:
        self.work_s, self.mb = work_s, mb
        self.held: bytearray | None = None

    def __call__(self, batch: Any) -> None:
        assert batch["image"].ndim == 2
        if self.held is None:
            self.held = bytearray(b"x") * (self.mb * 1_000_000)
        time.sleep(self.work_s)


def names_only(items: list[Any]) -> list[str]:
    return [item["name"] for item in items]


def images_only(items: list[Any]) -> torch.Tensor:
    return torch.stack([item["image"] for item in items])
