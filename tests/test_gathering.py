"""Rows come out as they are in the store, in C and through torch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packshift import gathering
from packshift.compiled import compiled
from packshift.gathering import Gathering, gather, shown_to


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
def test_another_room(way: str, shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="room for 3 of 100 bytes"):
        gather(table(9, 100), np.arange(3), torch.empty(shape, dtype=torch.uint8))


def test_flat_room(way: str) -> None:
    rows, out = table(9, 100), torch.empty(300, dtype=torch.uint8)
    gather(rows, np.arange(3), out)
    assert torch.equal(out.view(3, 100), rows[:3])


@pytest.fixture
def shared() -> tuple[Gathering, torch.Tensor, torch.Tensor]:
    """A batch of several pieces, what it will hold, and where."""
    if compiled() is None:
        pytest.skip("packshift was installed where there is no C compiler; torch shares nothing")
    rows, positions = table(50, 12_288), np.random.default_rng(0).integers(0, 50, 300)
    out = torch.zeros((300, 12_288), dtype=torch.uint8)
    return Gathering(rows, positions, out), rows[torch.from_numpy(positions)], out


def test_several_threads_take_part(shared: tuple[Gathering, torch.Tensor, torch.Tensor]) -> None:
    gathering, expected, out = shared
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(gathering.take_part) for _ in range(4)]:
            assert done.result()
    assert torch.equal(out, expected)
    assert gathering._progress[1] == 300  # each row once
    out.zero_()
    assert gathering.take_part()
    assert not out.any()  # nothing is left to do


def test_what_somebody_else_has_begun_is_left_to_him(shared: tuple[Gathering, torch.Tensor, torch.Tensor]) -> None:
    gathering, expected, out = shared
    gathering._progress[:] = [100, 100]
    assert gathering.take_part()
    assert not out[:100].any()
    assert torch.equal(out[100:], expected[100:])


def test_comes_back_when_all_rows_are_there(shared: tuple[Gathering, torch.Tensor, torch.Tensor]) -> None:
    gathering, _, _ = shared
    gathering._progress[:] = [100, 0]  # somebody copies the first 100 rows
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(gathering.take_part)
        assert wait([done], timeout=0.05).not_done
        gathering._progress[1] += 100
        assert done.result(timeout=60)


def test_is_shown_before_it_begins() -> None:
    if compiled() is None:
        pytest.skip("packshift was installed where there is no C compiler; torch shares nothing")
    rows, out = table(9, 100), torch.zeros((3, 100), dtype=torch.uint8)
    seen = []
    with shown_to(lambda gathering: seen.append((gathering, bool(out.any())))):
        gather(rows, np.arange(3), out)
    gather(rows, np.arange(3), out)
    assert [begun for _, begun in seen] == [False]
