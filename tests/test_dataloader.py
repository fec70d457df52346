"""The stock DataLoader, in every way people start it, gives each picture and label of the source once an epoch.

`pytest --full` runs every combination of workers, start methods, persistent_workers and formats; without it, a sample in
which each pair of a start method and a format comes once, and each number of workers with each format.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed
from helpers import make_records, write_store
from torch.utils.data import ConcatDataset, DataLoader, Dataset, DistributedSampler, Subset, random_split

from packshift import open_dataset
from packshift.record import Record
from packshift.stores import format_names

COUNT = 200
RECORDS = make_records([(10, 12)] * COUNT)
FORK_WARNS = sys.version_info >= (3, 12)
START_METHODS = ("fork", "spawn", "forkserver")

Case = tuple[int, str | None, bool]
ALL_CASES: list[Case] = [(0, None, False)] + [
    (workers, method, persistent) for workers in (1, 2, 4) for method in START_METHODS for persistent in (False, True)
]
SAMPLE_CASES: dict[str, list[Case]] = {
    "hdf5": [
        (0, None, False),
        (2, "fork", True),
        (4, "fork", False),
        (1, "spawn", True),
        (1, "forkserver", False),
    ],
    "lmdb": [
        (0, None, False),
        (1, "fork", False),
        (4, "fork", True),
        (2, "spawn", True),
        (2, "forkserver", True),
    ],
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        full = metafunc.config.getoption("full")
        pairs = [(name, case) for name in format_names() for case in (ALL_CASES if full else SAMPLE_CASES[name])]
        ids = ["{}-{}-{}-{}".format(name, *case) for name, case in pairs]
        metafunc.parametrize(("format_name", "case"), pairs, ids=ids)


@pytest.fixture
def dataset(tmp_path: Path, format_name: str) -> Dataset:
    return open_dataset(write_store(tmp_path / "store", format_name, RECORDS))


class Numbered(Dataset):
    """Adds each item's index, so that a test knows which source record a batch row must equal."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, int]:
        image, label = self.dataset[index]
        return index, image, label


def equals_source(image: torch.Tensor, record: Record) -> bool:
    return torch.equal(image.permute(1, 2, 0), torch.from_numpy(record.pixels))


def assert_whole_epoch(batches: Iterator, count: int = COUNT) -> None:
    seen = []
    for indices, images, labels in batches:
        for index, image, label in zip(indices.tolist(), images, labels.tolist(), strict=True):
            record = RECORDS[index % COUNT]
            assert equals_source(image, record), index
            assert label == record.label
            seen.append(index)
    assert sorted(seen) == list(range(count))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than CPUs is the point of the case
def test_three_epochs_after_a_read_in_the_parent(dataset: Dataset, case: Case) -> None:
    workers, method, persistent = case
    assert equals_source(dataset[0][0], RECORDS[0])
    loader = DataLoader(
        Numbered(dataset),
        batch_size=64,
        shuffle=True,
        num_workers=workers,
        multiprocessing_context=method,
        persistent_workers=persistent,
    )
    for _ in range(3):
        assert_whole_epoch(iter(loader))
    assert equals_source(dataset[COUNT - 1][0], RECORDS[-1])


def test_the_dataset_itself_collates(dataset: Dataset) -> None:
    images, labels = next(iter(DataLoader(dataset, batch_size=64)))
    assert (images.dtype, tuple(images.shape)) == (torch.uint8, (64, 3, 10, 12))
    assert labels.dtype == torch.int64
    assert labels.tolist() == [record.label for record in RECORDS[:64]]
    assert all(equals_source(image, record) for image, record in zip(images, RECORDS, strict=False))


def test_subset(dataset: Dataset) -> None:
    chosen = [5, 5, 199, 0]
    loader = DataLoader(Subset(dataset, chosen), batch_size=3, num_workers=2, multiprocessing_context="fork")
    images = [image for batch, _ in loader for image in batch]
    assert all(equals_source(image, RECORDS[index]) for image, index in zip(images, chosen, strict=True))


def test_random_split(dataset: Dataset) -> None:
    parts = random_split(Numbered(dataset), [150, 50], generator=torch.Generator().manual_seed(0))
    loaders = [DataLoader(part, batch_size=32, num_workers=1, multiprocessing_context="fork") for part in parts]
    assert_whole_epoch(batch for loader in loaders for batch in loader)


def test_concat_of_two_datasets_on_one_file(dataset: Dataset, tmp_path: Path) -> None:
    both = ConcatDataset([dataset, open_dataset(tmp_path / "store")])
    assert equals_source(both[COUNT + 7][0], RECORDS[7])
    loader = DataLoader(Numbered(both), batch_size=64, shuffle=True, num_workers=2, multiprocessing_context="fork")
    for _ in range(2):
        assert_whole_epoch(iter(loader), count=2 * COUNT)


def test_an_item_read_in_threads_while_workers_are_forked(dataset: Dataset) -> None:
    """Nothing that a fork could inherit locked: reading takes no lock of any library."""
    stop = threading.Event()

    def read() -> None:
        index = 0
        while not stop.is_set():
            assert equals_source(dataset[index % COUNT][0], RECORDS[index % COUNT])
            index += 1

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            loader = DataLoader(
                Numbered(dataset), batch_size=64, num_workers=2, multiprocessing_context="fork", timeout=60
            )
            with pytest.warns(DeprecationWarning, match="multi-threaded") if FORK_WARNS else nullcontext():
                assert_whole_epoch(iter(loader))
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def distributed_rank(rank: int, port: int, paths: list[Path], queue: torch.multiprocessing.Queue) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    epochs: list[list[int]] = []
    try:
        torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
        epochs = [epoch for path in paths for epoch in distributed_epochs(Numbered(open_dataset(path)))]
    finally:
        queue.put(epochs)  # whatever happened: the test waits for it
    torch.distributed.destroy_process_group()


def distributed_epochs(dataset: Dataset) -> list[list[int]]:
    """The indices of two epochs of this rank."""
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler, num_workers=1, multiprocessing_context="fork")
    epochs: list[list[int]] = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        epochs.append([])
        for indices, images, _ in loader:
            assert all(
                equals_source(image, RECORDS[index]) for index, image in zip(indices.tolist(), images, strict=True)
            )
            epochs[-1] += indices.tolist()
    return epochs


def test_distributed_sampler_with_two_processes(tmp_path: Path) -> None:
    """Starting them takes seconds: these two take a store of each format in turn."""
    paths = [write_store(tmp_path / name, name, RECORDS) for name in format_names()]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    ranks = [context.Process(target=distributed_rank, args=(rank, port, paths, queue)) for rank in range(2)]
    for process in ranks:
        process.start()
    seen = [queue.get() for _ in ranks]
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    assert [len(part) for part in seen] == [2 * len(paths)] * 2
    for mine, others in zip(*seen, strict=True):
        assert len(mine) == len(others) == COUNT // 2
        assert sorted(mine + others) == list(range(COUNT))
    for epochs in seen:
        assert epochs[0] != epochs[1]


def test_reading_a_truncated_store_in_a_worker_is_an_error_not_a_bus_error(dataset: Dataset, tmp_path: Path) -> None:
    loader = DataLoader(dataset, batch_size=8, num_workers=1, multiprocessing_context="fork")
    os.truncate(tmp_path / "store", os.path.getsize(tmp_path / "store") // 2)
    with pytest.raises(OSError, match=r"(?s)is damaged: it has .* bytes where .* were written"):
        next(iter(loader))
