"""Rows come out as they are in the store, in C and through torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packshift import gathering
from packshift.compiled import compiled
from packshift.gathering import gather


@pytest.fixture(params=["C", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(gathering, "compiled", lambda: None)
    elif compiled() is None:
        pytest.skip("packshift was installed where there is no C compiler")
    return request.param


def table(rows: int, nbytes: int, gap: int = 0, start: int = 0) -> torch.Tensor:
    """(rows, nbytes) of noise, `gap` bytes between rows, the first `start` bytes behind an address that 64 divides."""
    memory = np.random.default_rng(nbytes).integers(0, 256, 64 + start + rows * (nbytes + gap), np.uint8)
    first = -memory.ctypes.data % 64 + start
    return torch.from_numpy(memory).as_strided((rows, nbytes), (nbytes + gap, 1), first)


@settings(max_examples=300, deadline=None)
@given(
    nbytes=st.integers(1, 700) | st.sampled_from([3072, 4096, 12_288]),
    gap=st.sampled_from([0, 1, 16, 1000]),
    start=st.integers(0, 17),
    out_start=st.sampled_from([0, 1, 16]),
    positions=st.lists(st.integers(0, 29), max_size=40),
)
def test_any_rows(nbytes: int, gap: int, start: int, out_start: int, positions: list[int]) -> None:
    rows = table(30, nbytes, gap, start)
    room = torch.full((out_start + len(positions) * nbytes + 64 + 64,), 77, dtype=torch.uint8)
    first = -room.data_ptr() % 64 + out_start
    out = room[first : first + len(positions) * nbytes].view(len(positions), nbytes)
    gather(rows, np.array(positions, np.int64), out)
    assert torch.equal(out, rows[torch.tensor(positions, dtype=torch.int64)])
    assert (room[:first] == 77).all()
    assert (room[first + out.numel() :] == 77).all()


def test_positions_of_another_kind(way: str) -> None:
    rows, out = table(9, 100), torch.empty((3, 100), dtype=torch.uint8)
    gather(rows, np.arange(9)[::3], out)
    assert torch.equal(out, rows[::3])


@pytest.mark.parametrize("position", [-1, 9, 2**62, -(2**62)])
def test_a_position_outside(way: str, position: int) -> None:
    rows, out = table(9, 100), torch.zeros((2, 100), dtype=torch.uint8)
    with pytest.raises(IndexError):
        gather(rows, np.array([3, position]), out)
    assert way == "torch" or not out.any()  # nothing was copied


@pytest.mark.parametrize("shape", [(2, 100), (4, 100), (3, 99)])
def test_another_room(shape: tuple[int, int]) -> None:
    if compiled() is None:
        pytest.skip("packshift was installed where there is no C compiler; torch makes room itself")
    with pytest.raises(ValueError, match="room for 3 of 100 bytes"):
        gather(table(9, 100), np.arange(3), torch.empty(shape, dtype=torch.uint8))
