"""The rows of a batch, copied out of a store into one piece of memory."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from packshift.compiled import compiled

_WORTH_A_THREAD = 2 << 20
"""Bytes: about 0.2 ms of copying, where starting a thread takes 0.02."""


def gather(rows: torch.Tensor, positions: NDArray[np.int64], out: torch.Tensor) -> None:
    """Copy `rows[positions]` into `out`, on as many threads as torch uses for an operation here, where they are worth it.

    `rows` is (N, bytes) uint8, each row in one piece; `positions` (B,), from 0 to N - 1, else IndexError; `out` (B, bytes)
    uint8, in one piece.
    """
    library = compiled()
    if library is None:
        dtype = _widest(rows, out)
        torch.index_select(rows.view(dtype), 0, torch.from_numpy(positions), out=out.view(dtype))
        return
    positions = np.ascontiguousarray(positions, np.int64)
    count, nbytes = len(positions), rows.shape[1]
    if out.shape != (count, nbytes) or not out.is_contiguous() or rows.stride(1) != 1 or rows.stride(0) < nbytes:
        raise ValueError(f"expected rows in one piece and room for {count} of {nbytes} bytes, got {tuple(out.shape)}")
    if not library.gather(
        *(rows.data_ptr(), len(rows), rows.stride(0), nbytes),
        *(positions.ctypes.data, count, out.data_ptr()),
        min(torch.get_num_threads(), count * nbytes // _WORTH_A_THREAD),
    ):
        raise IndexError(f"expected positions from 0 to {len(rows) - 1}, got {positions.min()} to {positions.max()}")


def _widest(*tables: torch.Tensor) -> torch.dtype:
    """The widest integers that the rows of all of these can be taken for: `index_select` copies an element at a time, and 8
    bytes at a time is a third faster than 1 (for 224 x 224 pictures faster than `np.take`, too)."""
    for dtype in (torch.int64, torch.int32, torch.int16):
        numbers = (
            number
            for each in tables
            for number in (each.data_ptr(), each.storage_offset(), each.stride(0), each.shape[1])
        )
        if not any(number % dtype.itemsize for number in numbers):
            return dtype
    return torch.uint8
