"""Rows come out as they are in the store, in C and through torch."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packshift import gathering
from packshift.compiled import compiled
from packshift.gathering import Gathering, GatheringQueue, Rows


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
    Rows(rows).gather(np.array(positions, np.int64), out)
    assert torch.equal(out, rows[torch.tensor(positions, dtype=torch.int64)])
    assert (room[:first] == 77).all()
    assert (room[first + out.numel() :] == 77).all()


def test_positions_of_another_kind(way: str) -> None:
    rows, out = table(9, 100), torch.empty((3, 100), dtype=torch.uint8)
    Rows(rows).gather(np.arange(9)[::3], out)
    assert torch.equal(out, rows[::3])


@pytest.mark.parametrize("position", [-1, 9, 2**62, -(2**62)])
def test_a_position_outside(way: str, position: int) -> None:
    rows, out = table(9, 100), torch.zeros((2, 100), dtype=torch.uint8)
    with pytest.raises(IndexError):
        Rows(rows).gather(np.array([3, position]), out)
    assert way == "torch" or not out.any()  # nothing was copied


@pytest.mark.parametrize("shape", [(2, 100), (4, 100), (3, 99)])
def test_another_room(way: str, shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="room for 3 of 100 bytes"):
        Rows(table(9, 100)).gather(np.arange(3), torch.empty(shape, dtype=torch.uint8))


def test_flat_room(way: str) -> None:
    rows, out = table(9, 100), torch.empty(300, dtype=torch.uint8)
    Rows(rows).gather(np.arange(3), out)
    assert torch.equal(out.view(3, 100), rows[:3])


def test_room_that_is_channels_last(way: str) -> None:
    rows = table(9, 4 * 5 * 3)
    out = torch.empty((3, 3, 4, 5), dtype=torch.uint8, memory_format=torch.channels_last)
    Rows(rows).gather(np.arange(3), out)
    assert torch.equal(out.permute(0, 2, 3, 1), rows[:3].view(3, 4, 5, 3))
    with pytest.raises(ValueError, match="in one piece"):
        Rows(rows).gather(np.arange(3), torch.empty((3, 8, 5, 3), dtype=torch.uint8).permute(0, 3, 1, 2)[:, :, ::2])


def test_rows_that_are_not_in_one_piece() -> None:
    for rows in (table(9, 100)[:, ::2], table(9, 100).T):
        with pytest.raises(ValueError, match="in one piece"):
            Rows(rows)


needs_c = pytest.mark.skipif(compiled() is None, reason="packshift was installed where there is no C compiler")


class Batches:
    """Batches of several pieces each, in the making: what they will hold, and where."""

    def __init__(self, count: int, nbytes: int = 12_288) -> None:
        generator = np.random.default_rng(0)
        self.rows = Rows(table(50, nbytes))
        self.positions = [generator.integers(0, 50, generator.integers(1, 400)) for _ in range(count)]
        self.outs = [torch.zeros(len(positions) * nbytes, dtype=torch.uint8) for positions in self.positions]
        self.gatherings = [
            Gathering(self.rows, positions, out) for positions, out in zip(self.positions, self.outs, strict=True)
        ]

    def is_there(self, number: int) -> bool:
        expected = self.rows.table.numpy()[
            self.positions[number]
        ]  # not torch, which waits for threads that a forked child lacks
        return np.array_equal(self.outs[number].numpy().reshape(expected.shape), expected)


@pytest.fixture(params=[0, 1, 2, 8])
def queue(request: pytest.FixtureRequest) -> Iterator[GatheringQueue]:
    queue = GatheringQueue(request.param)
    yield queue
    queue.close()


def copying_threads() -> int:
    return sum(comm.read_text() == "packshift-copy\n" for comm in Path("/proc/self/task").glob("*/comm"))


@needs_c
class TestQueue:
    def test_batches_are_there_when_they_are_finished(self, queue: GatheringQueue) -> None:
        batches = Batches(40)
        for number in range(40):
            queue.hand_over(batches.gatherings[number])
            if number >= 3:
                queue.finish(batches.gatherings[number - 3])
                assert batches.is_there(number - 3)
        for number in (39, 37, 38):  # in any order
            queue.finish(batches.gatherings[number])
            assert batches.is_there(number)

    def test_they_wait_in_the_order_in_which_they_were_handed_over(self) -> None:
        batches, queue = Batches(3), GatheringQueue(0)
        for each in batches.gatherings:
            queue.hand_over(each)
        first, second, third = (each.batch for each in batches.gatherings)
        assert [first.next, second.next, third.next] == [ctypes.addressof(second), ctypes.addressof(third), None]
        queue.finish(batches.gatherings[1])
        assert first.next == ctypes.addressof(third)
        queue.close()

    def test_several_threads_finish_the_same(self, queue: GatheringQueue) -> None:
        batches = Batches(20)
        with ThreadPoolExecutor(4) as pool:
            for number, gathering in enumerate(batches.gatherings):
                queue.hand_over(gathering)
                together = threading.Barrier(4)

                def finish(gathering: Gathering, number: int, together: threading.Barrier) -> bool:
                    together.wait()
                    queue.finish(gathering)
                    return batches.is_there(number)

                assert all(pool.map(finish, [gathering] * 4, [number] * 4, [together] * 4))

    def test_what_was_finished_is_not_copied_again(self, queue: GatheringQueue) -> None:
        batches = Batches(1)
        queue.hand_over(batches.gatherings[0])
        queue.finish(batches.gatherings[0])
        batches.outs[0].zero_()
        queue.finish(batches.gatherings[0])
        assert not batches.outs[0].any()

    def test_threads_copy_without_being_waited_for(self) -> None:
        batches, queue = Batches(2), GatheringQueue(1)
        for each in batches.gatherings:
            queue.hand_over(each)
        while not all(each.all_begun for each in batches.gatherings):
            pass
        queue.close()  # comes back when the last piece is there
        assert batches.is_there(0)
        assert batches.is_there(1)

    def test_at_the_end_of_the_process_threads_of_python_may_go_on(self) -> None:
        batches, queue = Batches(3), GatheringQueue(2)
        queue.hand_over(batches.gatherings[0])
        queue.hand_over(batches.gatherings[1])
        gathering._close_all()
        queue.hand_over(batches.gatherings[2])
        for number in (2, 0, 1):
            queue.finish(batches.gatherings[number])
            assert batches.is_there(number)

    @pytest.mark.parametrize("position", [-1, 50])
    def test_a_position_outside(self, queue: GatheringQueue, position: int) -> None:
        out = torch.zeros((2, 12_288), dtype=torch.uint8)
        with pytest.raises(IndexError, match="from 0 to 49"):
            queue.hand_over(Gathering(Batches(0).rows, np.array([3, position]), out))
        assert not out.any()

    @pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads by what Linux tells of them")
    def test_closing_ends_the_threads(self) -> None:
        for close in (GatheringQueue.close, GatheringQueue.__init__):  # or nobody holds it any more
            queue, batches = GatheringQueue(3), Batches(30)
            for each in batches.gatherings:
                queue.hand_over(each)
            assert copying_threads() == 3
            if close is GatheringQueue.close:
                queue.close()
            del queue
            assert copying_threads() == 0

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
    def test_a_forked_child_has_no_threads_and_copies_itself(self) -> None:
        batches, queue = Batches(30), GatheringQueue(2)
        for each in batches.gatherings:
            queue.hand_over(each)
        child = os.fork()
        if child == 0:
            try:
                signal.alarm(30)  # ends a child that waits for threads of its parent
                unfinished = batches.gatherings[29].batch
                unfinished.begun, unfinished.taking_part = unfinished.count, 1  # by such a thread
                batches.outs[29].numpy()[:] = 0  # not torch, see is_there
                queue.finish(batches.gatherings[29])
                right = batches.is_there(29)
                queue.close()
                os._exit(0 if right else 1)
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        queue.finish(batches.gatherings[29])
        assert batches.is_there(29)
        queue.close()
