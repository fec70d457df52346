"""Windows into shared memory: their own bytes and nobody else's, with large pages or without."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from helpers import make_records, write_store
from torch.utils.data import DataLoader

from packshift import open_dataset, windows
from packshift.slots import SlotRing
from packshift.windows import LARGE_PAGE, Window, file_size_for, open_window, place_after

SIZES = (4 * LARGE_PAGE + 12_288, LARGE_PAGE, 65_536, 3 * LARGE_PAGE - 4096, 4096 * 17)

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="slots are made on Linux only")


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("test")
    yield fd
    os.close(fd)


def places(fd: int) -> list[tuple[int, int]]:
    """(offset, capacity) of windows one behind the other; the file is made as long as they need."""
    found, end = [], 4096
    for capacity in SIZES:
        offset = place_after(end, capacity)
        end = offset + capacity
        os.ftruncate(fd, max(os.fstat(fd).st_size, file_size_for(offset, capacity)))
        found.append((offset, capacity))
    return found


def filled(window: Window, value: int) -> bool:
    return bool((window.array(window.capacity) == value).all())


@pytest.mark.parametrize("advice", [windows._MADV_COLLAPSE, 12_345])
def test_each_window_holds_its_own_bytes(fd: int, monkeypatch: pytest.MonkeyPatch, advice: int) -> None:
    monkeypatch.setattr(windows, "_MADV_COLLAPSE", advice)  # a kernel that does not know it refuses
    here = [open_window(fd, *place) for place in places(fd)]
    for number, window in enumerate(here, 1):
        window.take_large_pages()
        window.array(window.capacity)[:] = number
    there = [open_window(fd, *place) for place in places(fd)]
    for number, (window, other) in enumerate(zip(here, there, strict=True), 1):
        assert window.address == window.array(1).ctypes.data
        assert filled(window, number)
        assert filled(other, number)


@pytest.mark.parametrize("gone", range(len(SIZES)))
def test_memory_that_is_given_back_is_the_windows_own(fd: int, gone: int) -> None:
    all_of_them = [open_window(fd, *place) for place in places(fd)]
    for window in all_of_them:
        window.array(window.capacity)[:] = 7
    before = os.fstat(fd).st_blocks * 512
    all_of_them[gone].give_back_memory()
    assert before - os.fstat(fd).st_blocks * 512 == SIZES[gone]
    assert [filled(window, 7) for window in all_of_them] == [number != gone for number in range(len(SIZES))]
    assert filled(all_of_them[gone], 0)


def test_large_pages_take_no_more_memory_than_the_window(fd: int) -> None:
    for place in places(fd):
        open_window(fd, *place).take_large_pages()
    assert os.fstat(fd).st_blocks * 512 <= sum(SIZES)


def test_a_large_window_begins_where_a_large_page_can(fd: int) -> None:
    """As far as the kernel goes on giving the same address for the same length, which it need not."""
    kept = [(open_window(fd, *place), capacity) for place in places(fd) for capacity in place[1:]]
    aligned = [window.array(1).ctypes.data % LARGE_PAGE == 0 for window, capacity in kept if capacity >= LARGE_PAGE]
    assert any(aligned)


def test_no_address_will_do(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = iter(range(4096, 1 << 20, 4096))
    monkeypatch.setattr(windows, "_address_of", lambda memory: next(addresses))
    (offset, capacity), *_ = places(fd)
    window = open_window(fd, offset, capacity)
    window.array(capacity)[:] = 5
    assert os.pread(fd, 3, offset) == b"\5\5\5"
    assert os.pread(fd, 3, offset + capacity - 3) == b"\5\5\5"
    assert np.count_nonzero(np.frombuffer(os.pread(fd, offset, 0), np.uint8)) == 0


def test_the_smallest_slot_that_has_room_is_taken() -> None:
    ring = SlotRing()
    taken = [ring.take(nbytes) for nbytes in (40_000, 80_000, 8000, 20_000)]
    del taken
    for nbytes, index in ((5000, 2), (9000, 3), (30_000, 0), (50_000, 1)):
        slot, _ = ring.take(nbytes)
        assert slot.index == index


def test_threads_of_a_worker_take_slots_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ring, look = SlotRing(), SlotRing._free_slot

    def look_long(ring: SlotRing, nbytes: int) -> object:
        slot = look(ring, nbytes)
        time.sleep(0.005)
        return slot

    monkeypatch.setattr(SlotRing, "_free_slot", look_long)
    for _ in range(2):  # new slots, and free ones
        with ThreadPoolExecutor(8) as pool:
            taken = list(pool.map(ring.take, [5000] * 8))
        assert len({slot.index for slot, _ in taken}) == len({slot.offset for slot, _ in taken}) == 8
        del taken


def test_a_small_slot_after_a_large_one_leaves_the_large_one_mappable() -> None:
    ring = SlotRing()
    taken = ring.take(5 * LARGE_PAGE + 100)
    assert taken is not None
    slot, array = taken
    array[:] = 9
    assert ring.take(5000) is not None
    in_the_parent = open_window(ring.fd, slot.offset, slot.window.capacity)
    assert bool((in_the_parent.array(array.nbytes) == 9).all())
    assert ring.nbytes == slot.window.capacity + 8192


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_large_batches_stay_what_they_are(tmp_path: Path, method: str) -> None:
    """Batches of 5 MB and a short last one of 0.6 MB, all of them kept to the end."""
    records = make_records([(160, 320)] * 36)
    dataset = open_dataset(write_store(tmp_path / "store", "lmdb", records))
    loader = DataLoader(dataset, 34, num_workers=2, multiprocessing_context=method)
    kept = [images for _ in range(3) for images, _ in loader]
    for number, images in enumerate(kept):
        first = 34 * (number % 2)
        expected = np.stack([record.pixels for record in records[first : first + 34]])
        assert np.array_equal(images.permute(0, 2, 3, 1).numpy(), expected)
