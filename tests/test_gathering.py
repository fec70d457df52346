"""Rows come out as they are in the store, in C and through torch."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packshift import gathering
from packshift.compiled import compiled
from packshift.gathering import Rows, open_queue

if TYPE_CHECKING:
    from packshift.compiled import Gathering, Queue


@pytest.fixture(params=["C", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(gathering, "compiled", lambda: None)
    elif compiled() is None:
        pytest.skip("the C part was not built (no C compiler) or is off (PACKSHIFT_TURBO=0)")
    return request.param


def table(rows: int, nbytes: int, gap: int = 0, start: int = 0) -> np.ndarray:
    """(rows, nbytes) of noise, `gap` bytes between rows, the first `start` bytes behind an address that 64 divides."""
    memory = np.random.default_rng(nbytes).integers(0, 256, 64 + start + rows * (nbytes + gap), np.uint8)
    first = memory[-memory.ctypes.data % 64 + start :]
    return np.lib.stride_tricks.as_strided(first, (rows, nbytes), (nbytes + gap, 1), writeable=False)


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
    room = np.full(out_start + len(positions) * nbytes + 64 + 64, 77, np.uint8)
    first = -room.ctypes.data % 64 + out_start
    out = room[first : first + len(positions) * nbytes].reshape(len(positions), nbytes)
    Rows(rows).gather(np.array(positions, np.int64), out)
    assert np.array_equal(out, rows[positions])
    assert (room[:first] == 77).all()
    assert (room[first + out.size :] == 77).all()


def test_positions_of_another_kind(way: str) -> None:
    rows, out = table(9, 100), np.empty((3, 100), np.uint8)
    Rows(rows).gather(np.arange(9)[::3], out)
    assert np.array_equal(out, rows[::3])
    Rows(rows).gather(np.array([1, 8, 0], np.uint8), out)
    assert np.array_equal(out, rows[[1, 8, 0]])


@pytest.mark.parametrize("position", [-1, 9, 2**62, -(2**62)])
def test_a_position_outside(way: str, position: int) -> None:
    rows, out = table(9, 100), np.zeros((2, 100), np.uint8)
    with pytest.raises(IndexError):
        Rows(rows).gather(np.array([3, position]), out)
    assert way == "torch" or not out.any()  # nothing was copied


@pytest.mark.parametrize("shape", [(2, 100), (4, 100), (3, 99)])
def test_another_room(way: str, shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="room for 3 of 100 bytes"):
        Rows(table(9, 100)).gather(np.arange(3), np.empty(shape, np.uint8))


def test_room_in_several_pieces(way: str) -> None:
    with pytest.raises(ValueError, match=r"contiguous|in one piece"):
        Rows(table(9, 100)).gather(np.arange(3), np.empty((3, 200), np.uint8)[:, ::2])


def test_flat_room(way: str) -> None:
    rows, out = table(9, 100), np.empty(300, np.uint8)
    Rows(rows).gather(np.arange(3), out)
    assert np.array_equal(out.reshape(3, 100), rows[:3])


def test_room_that_cannot_be_written_to(way: str) -> None:
    out = np.zeros(300, np.uint8)
    out.flags.writeable = False
    with pytest.raises(ValueError, match=r"read-only|can be written to"):
        Rows(table(9, 100)).gather(np.arange(3), out)
    assert not out.any()


def test_rows_that_are_not_in_one_piece(way: str) -> None:
    for rows in (table(9, 100)[:, ::2], table(9, 100).T):
        with pytest.raises(ValueError, match="in one piece"):
            Rows(rows)


needs_c = pytest.mark.skipif(
    compiled() is None,
    reason="the C part was not built (no C compiler) or is off (PACKSHIFT_TURBO=0)",
)


@needs_c
class TestGathering:
    rows = table(9, 100)

    def gathering(self, positions: object, count: int = 3) -> Gathering:
        return compiled().Rows(self.rows).gathering(positions, np.empty(count * 100, np.uint8))

    @pytest.mark.parametrize("positions", [[2, 0, 8], np.array([2, 0, 8]), np.array([2, 0, 8], "=q")])
    def test_positions(self, positions: object) -> None:
        gathering = self.gathering(positions)
        assert len(gathering) == 3
        assert np.frombuffer(gathering.positions, np.int64).tolist() == [2, 0, 8]

    @pytest.mark.parametrize(
        "positions",
        [
            [2, 0, np.int64(8)],
            [2, 0, True],
            [2, 0, 8.0],
            (2, 0, 8),
            range(3),
            np.array([2, 0, 8], np.int32),
            np.array([2, 0, 8], np.uint64),
            np.array([2, 0, 8], np.float64),
            np.array([2, 0, 8], ">i8"),
            np.array([[2, 0, 8]]),
            torch.tensor([2, 0, 8]),
            None,
        ],
    )
    def test_positions_of_another_kind(self, positions: object) -> None:
        with pytest.raises(TypeError):
            self.gathering(positions)

    @pytest.mark.parametrize("position", [-1, 9, 2**62, -(2**62), 2**63, 2**64 + 2, -(2**63) - 1])
    def test_a_position_outside(self, position: int) -> None:
        with pytest.raises(IndexError, match="from 0 to 8"):
            self.gathering([2, 0, position])
        if -(2**63) <= position < 2**63:
            with pytest.raises(IndexError, match=f"from 0 to 8, got {position}"):
                self.gathering(np.array([2, 0, position]))

    def test_positions_are_those_of_then(self) -> None:
        positions, out = np.array([2, 0, 8]), np.empty((3, 100), np.uint8)
        gathering = compiled().Rows(self.rows).gathering(positions, out)
        positions[:] = 10**9
        gone = weakref.ref(positions)
        del positions
        assert gone() is None
        gathering.run(1)
        assert np.array_equal(out, self.rows[[2, 0, 8]])
        assert gathering.begun == 3

    def test_values(self) -> None:
        values = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 9)
        picked = self.gathering([2, 0, 8]).pick(values)
        assert np.frombuffer(picked, np.int64).tolist() == values[[2, 0, 8]].tolist()
        gone = weakref.ref(values)
        del values
        assert gone() is None

    @pytest.mark.parametrize("values", [np.arange(8), np.arange(9, dtype=np.int32), np.arange(9.0), np.zeros((9, 1))])
    def test_values_of_another_kind(self, values: object) -> None:
        with pytest.raises(ValueError, match=r"int64 \(9,\)"):
            self.gathering([2, 0, 8]).pick(values)

    def test_what_it_needs_stays(self) -> None:
        """Until it has gone itself."""
        rows, out = self.rows.copy(), np.empty((3, 100), np.uint8)
        gone = weakref.ref(rows), weakref.ref(out)
        gathering = compiled().Rows(rows).gathering([2, 0, 8], out)
        del rows, out
        gathering.run(1)
        assert all(array() is not None for array in gone)
        del gathering
        assert all(array() is None for array in gone)

    def test_what_a_refused_one_would_have_needed_goes(self) -> None:
        rows, out = self.rows.copy(), np.empty((3, 100), np.uint8)
        gone = weakref.ref(rows), weakref.ref(out)
        in_c = compiled().Rows(rows)
        wrong = np.array([2, 0, 9]), np.array([2.0])
        gone += tuple(map(weakref.ref, wrong))
        for positions in ([2, 0, 9], [2, 0], [2, 0, None], *wrong):
            with pytest.raises((IndexError, TypeError, ValueError)):
                in_c.gathering(positions, out)
        del positions, wrong
        del in_c, rows, out
        assert all(array() is None for array in gone)

    @pytest.mark.parametrize(
        "rows", [b"abc", np.zeros(9, np.uint8), np.zeros((9, 9), np.int16), np.zeros((9, 9, 1), np.uint8)]
    )
    def test_rows_of_another_kind(self, rows: object) -> None:
        with pytest.raises(ValueError, match="expected rows of bytes"):
            compiled().Rows(rows)

    def test_wrong_arguments(self) -> None:
        library, out = compiled(), np.empty(300, np.uint8)
        rows = library.Rows(self.rows)
        for call in (
            lambda: rows.gathering([1]),
            lambda: rows.gathering([1], None),
            lambda: rows.gathering([2, 0, 8], out).run("1"),
            lambda: rows.gathering([2, 0, 8], out).pick(None),
            lambda: library.Rows(),
            lambda: library.Rows(None),
            lambda: library.Rows(table=self.rows),
            lambda: library.Gathering(),
            lambda: library.Queue(),
            lambda: library.Queue(threads=1),
            lambda: library.Queue(0).hand_over(rows),
            lambda: library.Queue(0).finish(rows),
        ):
            with pytest.raises(TypeError):
                call()
        with pytest.raises(ValueError, match="expected a number of threads, got -1"):
            library.Queue(-1)


class Batches:
    """Batches of several pieces each, in the making: what they will hold, and where."""

    def __init__(self, count: int, nbytes: int = 12_288) -> None:
        generator = np.random.default_rng(0)
        self.table = table(50, nbytes)
        self.rows = Rows(self.table)
        self.positions = [generator.integers(0, 50, generator.integers(1, 400)) for _ in range(count)]
        self.outs = [np.zeros(len(positions) * nbytes, np.uint8) for positions in self.positions]
        self.gatherings = [
            self.rows.in_c.gathering(positions, out) for positions, out in zip(self.positions, self.outs, strict=True)
        ]

    def is_there(self, number: int) -> bool:
        expected = self.table[self.positions[number]]
        return np.array_equal(self.outs[number].reshape(expected.shape), expected)


def begun_in_part() -> Batches:
    """By a queue that was closed meanwhile; again where its thread had done everything before that."""
    while True:
        batches, queue = Batches(30), open_queue(1)
        for each in batches.gatherings:
            queue.hand_over(each)
        while not batches.gatherings[1].begun:
            pass
        queue.close()
        assert queue.waiting == 0
        if batches.gatherings[-1].begun == 0:
            return batches


@pytest.fixture(params=[0, 1, 2, 8])
def queue(request: pytest.FixtureRequest) -> Iterator[Queue]:
    queue = open_queue(request.param)
    yield queue
    queue.close()


def copying_threads() -> int:
    return sum(comm.read_text() == "packshift-copy\n" for comm in Path("/proc/self/task").glob("*/comm"))


@needs_c
class TestQueue:
    def test_batches_are_there_when_they_are_finished(self, queue: Queue) -> None:
        batches = Batches(40)
        for number in range(40):
            queue.hand_over(batches.gatherings[number])
            if number >= 3:
                queue.finish(batches.gatherings[number - 3])
                assert batches.is_there(number - 3)
        for number in (39, 37, 38):  # in any order
            queue.finish(batches.gatherings[number])
            assert batches.is_there(number)

    def test_what_was_begun_waits_no_longer(self) -> None:
        batches, queue = Batches(3), open_queue(0)
        for each in batches.gatherings:
            queue.hand_over(each)
        assert queue.waiting == 3
        for left, number in ((2, 1), (1, 0), (0, 2)):
            queue.finish(batches.gatherings[number])
            assert queue.waiting == left
        queue.close()

    def test_they_are_copied_in_the_order_in_which_they_were_handed_over(self) -> None:
        batches, queue = Batches(30), open_queue(1)
        for each in batches.gatherings:
            queue.hand_over(each)
        for before, after in itertools.pairwise(batches.gatherings):
            while not after.begun:
                pass
            assert before.begun == len(before)
        queue.close()

    def test_a_batch_of_nothing(self, queue: Queue) -> None:
        nothing = Batches(0).rows.in_c.gathering([], np.empty(0, np.uint8))
        queue.hand_over(nothing)
        queue.finish(nothing)
        assert queue.waiting == 0

    def test_a_batch_is_handed_over_once(self) -> None:
        batches, queue = Batches(1), open_queue(0)
        queue.hand_over(batches.gatherings[0])
        with pytest.raises(ValueError, match="handed over before"):
            queue.hand_over(batches.gatherings[0])
        queue.finish(batches.gatherings[0])
        assert batches.is_there(0)

    def test_what_was_in_it_goes_with_it(self) -> None:
        batches, queue = Batches(5), open_queue(1)
        gone = [weakref.ref(out) for out in batches.outs]
        for each in batches.gatherings:
            queue.hand_over(each)
        del batches, each, queue
        assert all(out() is None for out in gone)

    @pytest.mark.parametrize("threads", [0, 1])
    def test_what_a_closed_queue_has_begun_goes_on_in_another(self, threads: int) -> None:
        """No row is copied twice, none is left out, and the first queue knows nothing any more."""
        batches = begun_in_part()
        done = [each.begun for each in batches.gatherings]
        for out, begun in zip(batches.outs, done, strict=True):
            assert out[: begun * 12_288].any() == bool(begun)
            out[: begun * 12_288] = 0
        queue = open_queue(threads)
        for each in batches.gatherings:
            queue.hand_over(each)
        for each in batches.gatherings:
            queue.finish(each)
        for number, begun in enumerate(done):
            out = batches.outs[number].reshape(-1, 12_288)
            assert not out[:begun].any()
            assert np.array_equal(out[begun:], batches.table[batches.positions[number][begun:]])
        queue.close()

    def test_what_is_in_it_stays(self, queue: Queue) -> None:
        """Also where nobody waits for it, until the queue goes."""
        batches = Batches(5)
        gone = [weakref.ref(out) for out in batches.outs]
        for each in batches.gatherings:
            queue.hand_over(each)
        queue.finish(batches.gatherings[2])
        del batches, each
        assert [out() is None for out in gone] == [False, False, True, False, False]

    def test_several_threads_finish_the_same(self, queue: Queue) -> None:
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

    def test_what_was_finished_is_not_copied_again(self, queue: Queue) -> None:
        batches = Batches(1)
        queue.hand_over(batches.gatherings[0])
        queue.finish(batches.gatherings[0])
        batches.outs[0][:] = 0
        queue.finish(batches.gatherings[0])
        assert not batches.outs[0].any()

    def test_threads_copy_without_being_waited_for(self) -> None:
        batches, queue = Batches(2), open_queue(1)
        for each in batches.gatherings:
            queue.hand_over(each)
        while not all(each.begun == len(each) for each in batches.gatherings):
            pass
        queue.close()  # comes back when the last piece is there
        assert batches.is_there(0)
        assert batches.is_there(1)

    def test_at_the_end_of_the_process_threads_of_python_may_go_on(self) -> None:
        batches, queue = Batches(3), open_queue(2)
        queue.hand_over(batches.gatherings[0])
        queue.hand_over(batches.gatherings[1])
        gathering._close_all()
        queue.hand_over(batches.gatherings[2])
        for number in (2, 0, 1):
            queue.finish(batches.gatherings[number])
            assert batches.is_there(number)

    @pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads by what Linux tells of them")
    def test_closing_ends_the_threads(self) -> None:
        for close in (True, False):  # or nobody holds it any more
            queue, batches = open_queue(3), Batches(30)
            for each in batches.gatherings:
                queue.hand_over(each)
            assert copying_threads() == 3
            if close:
                queue.close()
            del queue
            assert copying_threads() == 0

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
    def test_a_forked_child_has_no_threads_and_copies_itself(self) -> None:
        batches, queue = Batches(30), open_queue(2)
        for each in batches.gatherings:
            queue.hand_over(each)
        child = os.fork()
        if child == 0:
            try:
                signal.alarm(30)  # ends a child that waits for threads of its parent
                for number, each in enumerate(batches.gatherings):  # one or two of which they had begun
                    batches.outs[number][:] = 0
                    queue.finish(each)
                right = all(map(batches.is_there, range(30))) and queue.is_inherited and not queue.waiting
                queue.close()
                del queue
                os._exit(0 if right else 1)
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        queue.finish(batches.gatherings[29])
        assert batches.is_there(29)
        queue.close()
