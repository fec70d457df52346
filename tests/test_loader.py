"""Loader gives what DataLoader gives, from threads, in memory that is used again only when nobody can see it."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import make_folder, make_records, write_store
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, default_collate, random_split

from packshift import ImageFolderDataset, Loader, buffers, open_dataset
from packshift import loader as loader_module
from packshift.compiled import compiled
from packshift.datasets import StoreDataset
from packshift.errors import UsageError
from packshift.gathering import open_queue
from packshift.transforms import Compose, RandomCrop, RandomHorizontalFlip, ToFloat

COUNT = 103
RECORDS = make_records([(9, 14)] * COUNT)


@pytest.fixture
def dataset(tmp_path: Path, format_name: str) -> Dataset:
    return open_dataset(write_store(tmp_path / "store", format_name, RECORDS))


def index_of(image: torch.Tensor) -> int:
    """Which record an image is; fails where it is none."""
    (index,) = (
        n for n, record in enumerate(RECORDS) if torch.equal(image.permute(1, 2, 0), torch.from_numpy(record.pixels))
    )
    return index


def indices_of(batches: Iterator) -> list[int]:
    found = []
    for images, labels in batches:
        for image, label in zip(images, labels.tolist(), strict=True):
            found.append(index_of(image))
            assert label == RECORDS[found[-1]].label
    return found


def loader_threads() -> int:
    """Of Python, and of C, which only Linux tells of."""
    in_c = 0
    for comm in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # it has ended meanwhile
            in_c += comm.read_text() == "packshift-copy\n"
    return in_c + sum(thread.name.startswith("packshift-loader") for thread in threading.enumerate())


def loader_threads_become(count: int) -> bool:
    """A thread in C names itself when it gets a core."""
    deadline = time.monotonic() + 10
    while loader_threads() != count:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_in_order(dataset: Dataset, threads: int) -> None:
    loader = Loader(dataset, 10, threads=threads)
    assert len(loader) == 11
    assert indices_of(loader) == list(range(COUNT))


def test_equals_the_stock_loader(dataset: Dataset) -> None:
    for ours, stock in zip(Loader(dataset, 10), DataLoader(dataset, 10), strict=True):
        assert type(ours) is type(stock)
        for mine, theirs in zip(ours, stock, strict=True):
            assert torch.equal(mine, theirs)
            assert mine.dtype == theirs.dtype
        assert ours[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("threads", [1, 2])
def test_every_epoch_holds_everything_once_in_an_order_of_its_own(dataset: Dataset, threads: int) -> None:
    loader = Loader(dataset, 16, shuffle=True, threads=threads, seed=3)
    epochs = [indices_of(loader) for _ in range(3)]
    assert all(sorted(epoch) == list(range(COUNT)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_order_depends_on_seed_and_epoch_alone(dataset: Dataset) -> None:
    first = Loader(dataset, 16, shuffle=True, seed=3)
    epochs = [indices_of(first) for _ in range(3)]
    resumed = Loader(dataset, 7, shuffle=True, threads=3, prefetch=1, seed=3)
    resumed.set_epoch(2)
    assert indices_of(resumed) == epochs[2]
    torch.manual_seed(5)
    unseeded = indices_of(Loader(dataset, 16, shuffle=True))
    torch.manual_seed(5)
    assert indices_of(Loader(dataset, 16, shuffle=True)) == unseeded


def test_drop_last(dataset: Dataset) -> None:
    loader = Loader(dataset, 10, drop_last=True)
    assert len(loader) == len(list(loader)) == 10


def test_samplers(dataset: Dataset) -> None:
    assert indices_of(Loader(dataset, 3, sampler=[5, 5, 102, 0])) == [5, 5, 102, 0]
    assert len(Loader(dataset, 3, sampler=[5, 5, 102, 0], drop_last=True)) == 1
    parts = [DistributedSampler(dataset, num_replicas=2, rank=rank, shuffle=True, seed=1) for rank in range(2)]
    loaders = [Loader(dataset, 8, sampler=sampler) for sampler in parts]
    for epoch in range(2):
        for loader in loaders:
            loader.set_epoch(epoch)
        assert [sampler.epoch for sampler in parts] == [epoch, epoch]
        assert set(indices_of(loaders[0]) + indices_of(loaders[1])) == set(range(COUNT))


class TestMemory:
    def test_all_batches_of_an_epoch_can_be_kept(self, dataset: Dataset) -> None:
        assert indices_of(list(Loader(dataset, 4, threads=2))) == list(range(COUNT))

    def test_one_view_can_be_kept(self, dataset: Dataset) -> None:
        loader = Loader(dataset, 4)
        kept = next(iter(loader))[0][3]
        for _ in range(5):
            indices_of(loader)
        assert index_of(kept) == 3

    def test_without_the_guard_a_kept_view_would_change(
        self, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The two tests above can fail: here the memory is given back while it is in use."""

        def at_once(memory: object, give_back: Callable[[object], None]) -> None:
            give_back(memory)

        monkeypatch.setattr(buffers, "weakref", SimpleNamespace(ref=at_once))
        batches = list(Loader(dataset, 4))
        # Not one of the first batches, which are the first of the next epoch, too, and so were copied last.
        assert not torch.equal(batches[5][0].permute(0, 2, 3, 1)[3], torch.from_numpy(RECORDS[23].pixels))

    def test_memory_is_used_again(self, dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
        pool = buffers.BufferPool()
        monkeypatch.setattr(buffers, "_pool", pool)
        places = set()
        for _ in range(5):
            for images, _ in Loader(dataset, 10, drop_last=True, threads=1, prefetch=2):
                places.add(images.data_ptr())
        del images
        gc.collect()
        assert len(places) <= 6
        assert 0 < pool.idle_bytes <= buffers.MOST_IDLE * 10 * 9 * 14 * 3

    def test_what_is_in_flight_is_kept_for_the_next_epoch(
        self, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pool = buffers.BufferPool()
        monkeypatch.setattr(buffers, "_pool", pool)
        indices_of(Loader(dataset, 5, drop_last=True, threads=3, prefetch=2))
        assert buffers.MOST_IDLE < pool.idle_bytes / (5 * 9 * 14 * 3) <= 8

    def test_most_of_what_was_held_goes_back_to_the_system(self) -> None:
        pool = buffers.BufferPool()
        held = [pool.take(1000) for _ in range(20)]
        memory = [weakref.ref(buffer) for buffer in pool._lent]
        held.clear()
        assert pool.idle_bytes == buffers.MOST_IDLE * 1000
        assert sum(buffer() is not None for buffer in memory) == buffers.MOST_IDLE

    def test_the_smallest_that_fits_is_used_again(self) -> None:
        pool = buffers.BufferPool()
        places = {}
        for nbytes in (4000, 1000, 2000):
            places[nbytes] = pool.take(nbytes)
        addresses = {nbytes: array.ctypes.data for nbytes, array in places.items()}
        del places, nbytes
        assert pool.take(1500).ctypes.data == addresses[2000]
        kept = [pool.take(900), pool.take(900)]
        assert [array.ctypes.data for array in kept] == [addresses[1000], addresses[2000]]
        assert pool.take(900).ctypes.data != addresses[4000], "four times as large would be a waste"

    def test_in_process_dataloader_uses_memory_again_too(self, dataset: Dataset) -> None:
        places = {images.data_ptr() for _ in range(5) for images, _ in DataLoader(dataset, 10, drop_last=True)}
        assert len(places) <= 4


class Begun:
    """Counts the batches that stores begin to copy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        begin = StoreDataset._begin_batch

        def counted(store: StoreDataset, indices: np.ndarray) -> tuple:
            self.count += 1
            return begin(store, indices)

        monkeypatch.setattr(StoreDataset, "_begin_batch", counted)

    def during(self, loader: Loader) -> int:
        before = self.count
        for _ in loader:
            pass
        return self.count - before


def order_of(loader: Loader, epoch: int, **changed: object) -> list[int]:
    arguments = {"shuffle": loader.shuffle, "drop_last": loader.drop_last, "seed": loader.seed, **changed}
    fresh = Loader(
        arguments.pop("dataset", loader.dataset), arguments.pop("batch_size", loader.batch_size), **arguments
    )
    fresh.set_epoch(epoch)
    return indices_of(fresh)


@pytest.mark.skipif(
    compiled() is None,
    reason="the C part was not built (no C compiler) or is off (PACKSHIFT_TURBO=0)",
)
class TestAhead:
    """The first batches of an epoch are copied during the last steps of the one before."""

    @pytest.mark.parametrize("threads", [1, 3])
    @pytest.mark.parametrize("batch_size", [4, 60, 200])
    def test_it_is_begun_once(
        self, dataset: Dataset, monkeypatch: pytest.MonkeyPatch, threads: int, batch_size: int
    ) -> None:
        begun = Begun(monkeypatch)
        loader = Loader(dataset, batch_size, shuffle=True, threads=threads)
        ahead = min(threads * loader.prefetch, len(loader))
        assert [begun.during(loader) for _ in range(3)] == [len(loader) + ahead, len(loader), len(loader)]
        assert indices_of(loader) == order_of(loader, 3)

    def test_it_is_the_batch_that_was_copied(self, dataset: Dataset) -> None:
        loader = Loader(dataset, 10, shuffle=True)
        indices_of(loader)
        kept = loader._ahead[0].batch.parts[0]
        (images, _), *rest = loader
        assert images.data_ptr() == kept.data_ptr()
        assert indices_of([(images, torch.tensor([RECORDS[index_of(image)].label for image in images]))]) + indices_of(
            rest
        ) == order_of(loader, 1)

    @pytest.mark.parametrize(
        "change",
        [
            lambda loader: loader.set_epoch(7),
            lambda loader: setattr(loader, "batch_size", 9),
            lambda loader: setattr(loader, "batch_size", 11),
            lambda loader: setattr(loader, "shuffle", False),
            lambda loader: setattr(loader, "seed", 4),
            lambda loader: setattr(loader, "dataset", Subset(loader.dataset, list(range(100, 3, -1)))),
            lambda loader: setattr(loader, "dataset", open_dataset(loader.dataset.path)),
            lambda loader: loader.dataset.close(),
            lambda loader: setattr(loader, "threads", 3),
            lambda loader: setattr(loader, "transform", torch.clone),
        ],
    )
    def test_what_has_changed_meanwhile_counts(self, dataset: Dataset, change: Callable) -> None:
        loader = Loader(dataset, 10, shuffle=True, seed=3)
        indices_of(loader)
        change(loader)
        epoch = loader._epoch
        for later in (epoch, epoch + 1):
            assert indices_of(loader) == order_of(loader, later)

    def test_it_is_given_once(self, dataset: Dataset) -> None:
        loader = Loader(Subset(dataset, [4, 5, 6] * 5), 3)
        for _ in range(3):
            batches = list(loader)
            assert indices_of(batches) == [4, 5, 6] * 5
            assert len({images.data_ptr() for images, _ in batches}) == 5

    def test_two_iterations_of_the_same_epoch_share_nothing(self, dataset: Dataset) -> None:
        loader = Loader(dataset, 10)
        indices_of(loader)
        firsts = [next(iter(loader))[0] for _ in range(2)]
        assert firsts[0].data_ptr() != firsts[1].data_ptr()

    def test_a_subset_whose_indices_change(self, dataset: Dataset) -> None:
        part = Subset(dataset, list(range(50)))
        loader = Loader(part, 10)
        assert indices_of(loader) == list(range(50))
        part.indices[3] = 77
        assert indices_of(loader) == [0, 1, 2, 77, *range(4, 50)]

    def test_another_store_of_the_same_length(self, dataset: Dataset, tmp_path: Path) -> None:
        other = open_dataset(write_store(tmp_path / "other", "lmdb", RECORDS[::-1]))
        loader = Loader(dataset, 10)
        indices_of(loader)
        loader.dataset = other
        assert indices_of(loader) == list(range(COUNT))[::-1]

    def test_a_sampler_is_asked_when_its_epoch_begins(self, dataset: Dataset) -> None:
        class Counting(list):
            asked = 0

            def __iter__(self) -> Iterator[int]:
                self.asked += 1
                return super().__iter__()

        sampler = Counting(range(30))
        for epoch in range(3):
            indices_of(Loader(dataset, 10, sampler=sampler))
            assert sampler.asked == epoch + 1
        loader = Loader(dataset, 10, sampler=sampler)
        indices_of(loader)
        assert loader._ahead == []

    def test_an_error_is_raised_in_the_epoch_that_it_belongs_to(
        self, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begin, begun = StoreDataset._begin_batch, []

        def begin_eleven(store: StoreDataset, indices: np.ndarray) -> tuple:
            begun.append(indices)
            if len(begun) > 11:
                raise OSError("the disk is gone")
            return begin(store, indices)

        monkeypatch.setattr(StoreDataset, "_begin_batch", begin_eleven)
        loader = Loader(dataset, 10)
        assert indices_of(loader) == list(range(COUNT))
        with pytest.raises(OSError, match="the disk is gone"):
            next(iter(loader))

    def test_threads_end_with_the_epoch(self, dataset: Dataset) -> None:
        loader = Loader(dataset, 10, threads=3)
        for _ in range(3):
            indices_of(loader)
            assert len(loader._ahead) == 6
            assert loader_threads() == 0

    def test_leaving_the_loop_early_keeps_nothing(self, dataset: Dataset) -> None:
        loader = Loader(dataset, 10)
        for _ in loader:
            break
        gc.collect()
        assert loader._ahead == []
        assert indices_of(loader) == list(range(COUNT))

    def test_a_copy_of_the_loader_has_none(self, dataset: Dataset) -> None:
        loader = Loader(dataset, 10, shuffle=True)
        indices_of(loader)
        for another in (copy.copy(loader), pickle.loads(pickle.dumps(loader))):
            assert another._ahead == []
            assert indices_of(another) == order_of(loader, 1)
        assert indices_of(loader) == order_of(loader, 1)

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
    def test_a_child_that_is_forked_meanwhile_copies_it_again(self, dataset: Dataset) -> None:
        """A thread of its parent may have been copying it."""
        loader = Loader(dataset, 10)
        indices_of(loader)
        loader._ahead[0].batch._images[:] = 0  # as if it had copied nothing
        child = os.fork()
        if child == 0:
            try:
                pictures = [image for images, _ in loader for image in images.permute(0, 2, 3, 1).numpy()]
                expected = [record.pixels for record in RECORDS]
                os._exit(0 if all(np.array_equal(*pair) for pair in zip(pictures, expected, strict=True)) else 1)
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        assert not next(iter(loader))[0].any(), "the parent has not used it"


class TestTransform:
    def test_is_applied_and_depends_on_the_seed_alone(self, dataset: Dataset) -> None:
        transform = Compose([RandomCrop(8), RandomHorizontalFlip(), ToFloat()])
        runs = []
        for threads in (1, 3):
            batches = list(Loader(dataset, 10, shuffle=True, seed=1, threads=threads, transform=transform))
            runs.append(torch.cat([images for images, _ in batches]))
        assert torch.equal(runs[0], runs[1])
        assert (runs[0].dtype, tuple(runs[0].shape)) == (torch.float32, (COUNT, 3, 8, 8))

    def test_any_callable_will_do(self, dataset: Dataset) -> None:
        images, labels = next(iter(Loader(dataset, 4, transform=lambda images: images.float().mean((2, 3)))))
        assert tuple(images.shape) == (4, 3)
        assert labels.tolist() == [0, 1, 2, 0]


class Pictures(Dataset):
    """Batches that are no list of parts."""

    def __init__(self, kind: Callable) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> object:
        return self.kind(torch.full((3, 2, 2), index))


def test_a_transform_where_images_are_all_there_is() -> None:
    batches = list(Loader(Pictures(torch.clone), 2, transform=lambda images: images.float() + images.shape[0]))
    assert [(tuple(batch.shape), batch.unique().tolist()) for batch in batches] == [
        ((2, 3, 2, 2), [2.0, 3.0]),
        ((2, 3, 2, 2), [4.0, 5.0]),
    ]


def test_a_transform_where_it_cannot_know_the_images() -> None:
    with pytest.raises(TypeError, match="the dataset's batches are dict: transform them in the loop"):
        list(Loader(Pictures(lambda picture: {"image": picture}), 2, transform=torch.clone))


class TestThreads:
    def test_an_error_reaches_the_loop_at_its_batch(self, dataset: Dataset) -> None:
        def fail_on_the_third(images: torch.Tensor) -> torch.Tensor:
            if index_of(images[0]) == 20:
                raise RuntimeError("no good")
            return images

        batches = iter(Loader(dataset, 10, transform=fail_on_the_third))
        assert len([next(batches), next(batches)]) == 2
        with pytest.raises(RuntimeError, match="no good"):
            next(batches)
        assert loader_threads() == 0

    @pytest.mark.parametrize("transform", [None, torch.clone])
    def test_leaving_the_loop_stops_the_threads(self, dataset: Dataset, transform: Callable | None) -> None:
        for _ in Loader(dataset, 4, threads=3, transform=transform):
            if compiled() is not None or transform is not None:
                assert loader_threads_become(3)
            break
        gc.collect()
        assert loader_threads() == 0

    @pytest.mark.skipif(
        compiled() is None,
        reason="the C part was not built (no C compiler) or is off (PACKSHIFT_TURBO=0)",
    )
    def test_a_loop_that_waits_takes_part_in_copying(self, dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
        taken_part = threading.Event()

        class ThreadsAfterTheLoop:
            def __init__(self, threads: int) -> None:
                self.queue = open_queue(threads)

            def __getattr__(self, name: str) -> object:
                return getattr(self.queue, name)

            def finish(self, gathering: object) -> None:
                if threading.current_thread() is not threading.main_thread():
                    taken_part.wait(5)
                self.queue.finish(gathering)
                if threading.current_thread() is threading.main_thread():
                    taken_part.set()

        monkeypatch.setattr(loader_module, "open_queue", ThreadsAfterTheLoop)
        monkeypatch.setattr(loader_module, "usable_cpus", lambda: 2)
        assert indices_of(iter([next(iter(Loader(dataset, 10, transform=torch.clone)))])) == list(range(10))
        assert taken_part.is_set()

    @pytest.mark.skipif(
        compiled() is None,
        reason="the C part was not built (no C compiler) or is off (PACKSHIFT_TURBO=0)",
    )
    def test_copying_needs_no_thread_of_python(self, dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(loader_module, "_start_threads", None)
        assert indices_of(Loader(dataset, 10, threads=2)) == list(range(COUNT))
        assert indices_of(Loader(Subset(dataset, [5, 7]), 1)) == [5, 7]

    def test_a_child_that_was_forked_in_the_loop_ends(self, dataset: Dataset) -> None:
        """As the workers of a DataLoader do that is used in a loop over a Loader."""
        for _ in Loader(dataset, 20):
            assert indices_of(DataLoader(dataset, 50, num_workers=2, multiprocessing_context="fork")) == list(
                range(COUNT)
            )

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
    @pytest.mark.parametrize("transform", [None, torch.Tensor.detach])
    def test_a_forked_child_can_go_on_with_the_loop(self, dataset: Dataset, transform: Callable | None) -> None:
        batches = iter(Loader(dataset, 4, threads=2, transform=transform))
        next(batches)
        child = os.fork()
        if child == 0:
            try:
                signal.alarm(60)  # ends a child that waits for threads of its parent
                # not torch, which waits for threads that a forked child lacks
                pictures = [image for images, _ in batches for image in images.permute(0, 2, 3, 1).numpy()]
                expected = [record.pixels for record in RECORDS[4:]]
                right = all(np.array_equal(*pair) for pair in zip(pictures, expected, strict=True))
                del batches
                gc.collect()
                os._exit(0 if right else 1)
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        assert indices_of(batches) == list(range(4, COUNT))

    def test_the_process_ends_while_a_daemon_iterates(self, tmp_path: Path) -> None:
        path = write_store(tmp_path / "store", "lmdb", RECORDS)
        script = f"""
import threading, time
from packshift import Loader, open_dataset
dataset, batches = open_dataset({str(path)!r}), [0]
def iterate():
    while True:
        for _ in Loader(dataset, 2, threads=4, prefetch=4):
            batches[0] += 1
for _ in range(4):
    threading.Thread(target=iterate, daemon=True).start()
while batches[0] < 200:
    time.sleep(0.01)
"""
        ended = subprocess.run([sys.executable, "-c", script], timeout=120, capture_output=True, text=True)
        # As any daemon may be that uses it; "recursively" where two are at once.
        said_then = {"terminate called without an active exception", "terminate called recursively"}
        stopped_in_torch = bool(ended.stderr) and said_then.issuperset(ended.stderr.splitlines())
        assert ended.returncode == (-signal.SIGABRT if stopped_in_torch else 0), ended.stderr

    def test_no_more_threads(self, dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
        start = threading.Thread.start

        def start_two(thread: threading.Thread) -> None:
            if loader_threads() == 2:
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", start_two)
        with pytest.raises(RuntimeError, match=r"does not give 5 threads .*use fewer"):
            list(Loader(dataset, 4, threads=5, transform=torch.clone))
        gc.collect()
        assert loader_threads() == 0

    def test_torch_keeps_its_number_of_threads(self, dataset: Dataset) -> None:
        before = torch.get_num_threads()
        inside = set()
        for _ in Loader(dataset, 4, threads=2, transform=lambda images: inside.add(torch.get_num_threads()) or images):
            assert torch.get_num_threads() == before
        assert inside == {1}
        elsewhere = []
        thread = threading.Thread(target=lambda: elsewhere.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert elsewhere == [before]

    def test_two_iterations_at_once(self, dataset: Dataset) -> None:
        loader = Loader(dataset, 10)
        pairs = zip(loader, loader, strict=True)
        assert all(torch.equal(one[0], other[0]) for one, other in pairs)


def test_pictures_straight_from_the_folder(tmp_path: Path) -> None:
    dataset = ImageFolderDataset(make_folder(tmp_path / "src", ["a", "b"], 5), size=16)
    images, labels = next(iter(Loader(dataset, 10, threads=2)))
    expected = default_collate([dataset[index] for index in range(10)])
    assert torch.equal(images, expected[0])
    assert torch.equal(labels, expected[1])


class TestParts:
    """Parts of a store are copied as the whole is."""

    def test_subset_of_a_subset(self, dataset: Dataset) -> None:
        part = Subset(Subset(dataset, range(10, 60)), [40, -1, 3, 3])
        assert indices_of(Loader(part, 3)) == [50, 59, 13, 13]

    def test_random_split(self, dataset: Dataset) -> None:
        parts = random_split(dataset, [80, 23], torch.Generator().manual_seed(1))
        assert sorted(indices_of(Loader(parts[0], 9, shuffle=True)) + indices_of(Loader(parts[1], 9))) == list(
            range(COUNT)
        )

    def test_indices_from_the_end(self, dataset: Dataset) -> None:
        assert indices_of(Loader(dataset, 2, sampler=[-1, 0, -COUNT])) == [COUNT - 1, 0, 0]

    @pytest.mark.parametrize("wrong", [COUNT, -COUNT - 1])
    def test_an_index_out_of_range_is_told_at_its_batch(self, dataset: Dataset, wrong: int) -> None:
        for batches in (
            iter(Loader(dataset, 1, sampler=[4, 2, wrong])),
            iter(Loader(Subset(dataset, [4, 2, wrong]), 1)),
        ):
            assert indices_of([next(batches), next(batches)]) == [4, 2]
            with pytest.raises(IndexError, match=f"{wrong} is out of range for {COUNT} items"):
                next(batches)


class Blank(StoreDataset):
    def __getitems__(self, indices: Sequence[int]) -> list:
        return [(image * 0, label) for image, label in super().__getitems__(indices)]


class Twice(StoreDataset):
    def __getitems__(self, indices: Sequence[int]) -> Sequence:
        return super().__getitems__(indices + indices) if indices else []


def test_a_dataset_is_asked_for_a_list_as_by_the_stock_loader(tmp_path: Path) -> None:
    dataset = Twice(write_store(tmp_path / "store", "lmdb", RECORDS))
    assert indices_of(Loader(dataset, 2, sampler=[3, 5])) == [3, 5, 3, 5]


class BlankItems(StoreDataset):
    def __getitem__(self, index: int) -> tuple:
        return super().__getitem__(index)[0] * 0, 0


@pytest.mark.parametrize("kind", [Blank, BlankItems, partial(StoreDataset, transform=lambda image: image * 0)])
def test_a_dataset_that_does_more_than_copy_is_asked(tmp_path: Path, kind: Callable) -> None:
    dataset = kind(write_store(tmp_path / "store", "lmdb", RECORDS))
    assert not any(images.any() for images, _ in Loader(dataset, 10))
    assert not any(images.any() for images, _ in Loader(Subset(dataset, range(20)), 10))


class Squares(Dataset):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"square": index * index}


def test_any_other_dataset() -> None:
    assert [batch["square"].tolist() for batch in Loader(Squares(), 4)] == [[0, 1, 4, 9], [16, 25, 36, 49], [64, 81]]


def test_arguments_that_cannot_be_right(dataset: Dataset) -> None:
    for wrong in ({"batch_size": 0}, {"threads": 0}, {"prefetch": 0}, {"threads": "2"}, {"transform": 3}):
        with pytest.raises(UsageError, match="expected"):
            Loader(dataset, **wrong)
    with pytest.raises(UsageError, match="exclude each other"):
        Loader(dataset, shuffle=True, sampler=[1])
