"""Batches from workers in reused shared memory: right in every combination, never overwritten while anybody can see them,
and nothing left behind."""

from __future__ import annotations

import copy
import errno
import gc
import itertools
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from helpers import make_records, write_store
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, default_collate, random_split

from packshift import LMDBDataset, batches, buffers, open_dataset, slots
from packshift.stores import format_names

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="slots need memfd, which only Linux has; elsewhere batches go torch's way"
)

COUNT = 150
HEIGHT, WIDTH = 40, 48
START_METHODS = ("fork", "spawn", "forkserver")


def numbered_records() -> list:
    """Records whose first four pixels spell their index."""
    records = make_records([(HEIGHT, WIDTH)] * COUNT)
    for index, record in enumerate(records):
        record.pixels[0, :4, 0] = np.frombuffer(np.int32(index).tobytes(), np.uint8)
    return records


RECORDS = numbered_records()


@pytest.fixture
def dataset(tmp_path: Path, format_name: str) -> Dataset:
    return open_dataset(write_store(tmp_path / "store", format_name, RECORDS))


@pytest.fixture
def lmdb_dataset(tmp_path: Path) -> Dataset:
    """For what does not depend on the format."""
    return open_dataset(write_store(tmp_path / "store", "lmdb", RECORDS))


@pytest.fixture(autouse=True, scope="module")
def only_what_is_new_is_collected() -> Iterator[None]:
    """`gc.collect` after each test would go through all that torch has made, too."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def nothing_is_left_in_dev_shm() -> Iterator[None]:
    before = left_in_dev_shm()
    yield
    gc.collect()
    deadline = time.monotonic() + 5
    while (left := left_in_dev_shm() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def left_in_dev_shm() -> set[str]:
    """Names of this process and of processes that have ended; those of other running programs are their business.

    Torch's names say who made them. multiprocessing's semaphores do not, but whoever uses them has them mapped.
    """
    names = {name: re.match(r"torch_(\d+)_", name) for name in os.listdir("/dev/shm")}
    own = os.getpid()
    left = {
        name
        for name, made_by in names.items()
        if made_by is None or int(made_by[1]) == own or not os.path.exists(f"/proc/{made_by[1]}")
    }
    return left - mapped_by_others() if left else left


def mapped_by_others() -> set[str]:
    """What running programs that are no children of this process have mapped of /dev/shm."""
    ours = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    found: set[str] = set()
    for pid in psutil.pids():
        if pid not in ours:
            with suppress(OSError):  # ended, or not ours to look into
                found |= set(re.findall(r"/dev/shm/(\S+)", Path(f"/proc/{pid}/maps").read_text()))
    return found


def index_of(image: torch.Tensor) -> int:
    return int(np.frombuffer(bytes(image[0, 0, :4].tolist()), np.int32)[0])


def check(images: torch.Tensor, labels: torch.Tensor | None = None) -> list[int]:
    """Every image equals its source record, and every label; returns the indices."""
    indices = [index_of(image) for image in images]
    expected = torch.from_numpy(np.stack([RECORDS[index].pixels for index in indices]))
    assert torch.equal(images.permute(0, 2, 3, 1), expected)
    if labels is not None:
        assert labels.tolist() == [RECORDS[index].label for index in indices]
    return indices


def check_epoch(loader: Any, expected: list[int] | None = None) -> int:
    """Returns the most slots in use at once; later their workers may have ended, and be forgotten."""
    seen: list[int] = []
    in_use = 0
    for images, labels in loader:
        seen += check(images, labels)
        in_use = max(in_use, sum(slots_in_use()))
    assert sorted(seen) == (list(range(COUNT)) if expected is None else sorted(expected))
    return in_use


def workers(dataset: Dataset, method: str = "fork", count: int = 2, **options: Any) -> DataLoader:
    options = {"batch_size": 16, "shuffle": True, **options}
    return DataLoader(dataset, num_workers=count, multiprocessing_context=method, **options)


def slots_in_use() -> list[int]:
    return [len(peer.windows) for peer in slots._peers.values()]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every spawned worker imports torch, which takes seconds. Without --full they read hdf5 with persistent_workers in
    one test, and lmdb without in another."""
    if "method" not in metafunc.fixturenames:
        return
    combined = "persistent" in metafunc.fixturenames
    sample = "hdf5" if combined else "lmdb"
    cases = [
        (name, method, persistent) if combined else (name, method)
        for name in format_names()
        for method in START_METHODS
        for persistent in ((False, True) if combined else (False,))
        if metafunc.config.getoption("full") or method != "spawn" or (name, persistent) == (sample, combined)
    ]
    metafunc.parametrize(("format_name", "method", "persistent") if combined else ("format_name", "method"), cases)


class TestEveryCombination:
    def test_start_methods(self, dataset: Dataset, method: str, persistent: bool) -> None:
        assert dataset[0][1] == 0
        loader = workers(dataset, method, persistent_workers=persistent)
        for _ in range(3 if persistent or method == "fork" else 2):
            assert check_epoch(loader) > 0

    def test_subset_split_and_concat(self, dataset: Dataset) -> None:
        check_epoch(workers(Subset(dataset, [3, 3, 149, 0]), batch_size=3), [3, 3, 149, 0])
        parts = random_split(dataset, [100, 50])
        check_epoch([batch for part in parts for batch in workers(part)])
        check_epoch(workers(ConcatDataset([dataset, open_dataset(dataset.path)])), list(range(COUNT)) * 2)

    @pytest.mark.parametrize("batch_size", [1, 7, 64, 150])
    def test_last_short_batch(self, dataset: Dataset, batch_size: int) -> None:
        check_epoch(workers(dataset, batch_size=batch_size, persistent_workers=True))

    def test_batches_that_grow_and_shrink(self, lmdb_dataset: Dataset) -> None:
        sizes = [3, 40, 1, 60, 46]
        bounds = np.cumsum([0, *sizes])
        chunks = [list(range(start, stop)) for start, stop in itertools.pairwise(bounds.tolist())]
        loader = DataLoader(lmdb_dataset, batch_sampler=chunks, num_workers=1, multiprocessing_context="fork")
        check_epoch(loader)

    @pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
    def test_pin_memory(self, dataset: Dataset) -> None:
        check_epoch(workers(dataset, pin_memory=True))

    def test_channels_last_and_writable(self, dataset: Dataset) -> None:
        for images, labels in workers(dataset):
            assert images.is_contiguous(memory_format=torch.channels_last)
            assert type(images) is torch.Tensor
            assert type(labels) is torch.Tensor
            images.add_(1)
            labels.add_(1)
        check_epoch(workers(dataset))


class TestNeverOverwritten:
    def test_all_batches_can_be_kept(self, dataset: Dataset, method: str) -> None:
        kept = list(workers(dataset, method, batch_size=2))  # more batches than slots
        assert len(kept) == 75 > 2 * slots.MOST_SLOTS
        check_epoch(kept)

    def test_one_view_can_be_kept_for_the_whole_run(self, dataset: Dataset) -> None:
        loader = workers(dataset, persistent_workers=True)
        images, _ = next(iter(loader))
        view, array, flat = images[3], images[5].numpy(), images.permute(0, 2, 3, 1).reshape(-1)[:10]
        copies = view.clone(), array.copy(), flat.clone()
        del images
        for _ in range(8):
            check_epoch(loader)
        assert torch.equal(view, copies[0])
        assert np.array_equal(array, copies[1])
        assert torch.equal(flat, copies[2])

    @pytest.mark.parametrize("what", ["list", "view"])
    def test_without_the_guard_these_two_fail(
        self, lmdb_dataset: Dataset, what: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The proof that the tests above can fail: here the parent gives a slot back as soon as it has it."""
        lend = slots._Peer.lend

        def lend_and_free(peer: Any, index: int, *rest: Any) -> torch.Tensor:
            tensor = lend(peer, index, *rest)
            peer.free(index)
            return tensor

        monkeypatch.setattr(slots._Peer, "lend", lend_and_free)
        monkeypatch.setattr(slots, "_give_back", lambda *_: None)
        monkeypatch.setattr(slots, "_peers", {})
        loader = workers(lmdb_dataset, count=1, persistent_workers=True)
        if what == "list":
            kept = list(loader)
            with pytest.raises(AssertionError):
                check_epoch(kept)
        else:
            view = next(iter(loader))[0][3]
            before = view.clone()
            changed = False
            for _ in range(8):
                for _ in loader:  # by chance the same picture may lie there for a while
                    changed = changed or not torch.equal(view, before)
            assert changed

    def test_slots_are_used_again(self, dataset: Dataset) -> None:
        loader = workers(dataset, batch_size=4, persistent_workers=True, prefetch_factor=2)
        for _ in range(6):
            check_epoch(loader)
        in_use = [len(peer.windows) for peer in slots._peers.values() if not peer.is_gone()]
        assert len(in_use) == 2
        assert max(in_use) <= 2 + 3, "the prefetched ones, one being filled, one or two that the loop holds"

    def test_a_child_forked_while_a_batch_is_held_keeps_seeing_it(self, lmdb_dataset: Dataset) -> None:
        loader = workers(lmdb_dataset, count=1, batch_size=8, persistent_workers=True)
        batches = iter(loader)
        images, labels = next(batches)
        go_on, child_reads = os.pipe(), None
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)  # never outlive a parent whose test has failed
            torch.set_num_threads(1)  # as DataLoader's workers do: the parent's threads are not there after a fork
            child_reads = os.read(go_on[0], 1)
            try:
                check(images, labels)
            except AssertionError:
                os._exit(1)
            os._exit(0 if child_reads else 2)
        (peer,) = (peer for peer in slots._peers.values() if peer.held)
        (index,) = peer.held
        del images
        for _ in batches:
            pass
        for _ in range(4):
            check_epoch(loader)
        assert index in peer.waiting
        os.write(go_on[1], b"!")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        check_epoch(loader)
        assert index not in peer.waiting
        for end in go_on:
            os.close(end)

    def test_train_and_validation_loaders_take_turns(self, lmdb_dataset: Dataset) -> None:
        """Each epoch forks validation workers while a training batch is still held; slots must not be used up by that."""
        train = workers(lmdb_dataset, count=1, persistent_workers=True)
        for _ in range(12):
            for images, labels in train:
                check(images, labels)
            check_epoch(workers(lmdb_dataset, count=1))
        assert max(slots_in_use()) < 10


class KeepsAll(LMDBDataset):
    """A subclass with items of its own."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image, _ = super().__getitem__(index)
        return image, -1


def half_and_brighter(image: torch.Tensor) -> torch.Tensor:
    return image[:, ::2, ::2].float() + 1


def as_list(samples: Any) -> tuple[int, list]:
    return len(samples), [(image.clone(), label) for image, label in samples]


def part_of_the_batch(samples: Any) -> torch.Tensor:
    return default_collate(samples)[0][:, :, :, :]


def twice(samples: Any) -> list:
    images, labels = default_collate(samples)
    return [images, labels, images]


_seen: list = []


def the_first_again(samples: Any) -> list:
    """Sends the same batch object with every message."""
    _seen.append(default_collate(samples))
    return _seen[0]


def the_first_twice(samples: Any) -> list:
    """Sends the same batch object with the first two messages, and lets go of it."""
    _seen.append(default_collate(samples))
    return _seen[0] if len(_seen) == 1 else _seen.pop(0)


def changed_in_place(samples: Any) -> list:
    images, labels = default_collate(samples)
    images.add_(0)
    images.resize_(2, 3, HEIGHT, WIDTH)
    return [images, labels[:2]]


def copied_and_pickled(samples: Any) -> list:
    images, labels = default_collate(samples)
    assert torch.equal(pickle.loads(pickle.dumps(images)), images)
    assert torch.equal(copy.deepcopy(images), images)
    return [copy.copy(images), labels]


def as_it_is(samples: Any) -> Any:
    return samples


def in_a_tuple(samples: Any) -> Any:
    return samples, len(samples)


class TestWhatUsersAdd:
    def test_a_collate_function_gets_a_sequence_of_samples(self, dataset: Dataset) -> None:
        for length, samples in workers(dataset, collate_fn=as_list):
            assert length == len(samples)
            check(torch.stack([image for image, _ in samples]), torch.tensor([label for _, label in samples]))

    @pytest.mark.parametrize("collate", [as_it_is, in_a_tuple])
    def test_a_collate_function_may_give_back_what_it_got(self, dataset: Dataset, collate: Callable) -> None:
        kept = list(workers(dataset, collate_fn=collate))
        for batch in [batch if collate is as_it_is else batch[0] for batch in kept]:
            check(torch.stack([image for image, _ in batch]), torch.tensor([label for _, label in batch]))
            check(*default_collate(batch))
        batch = pickle.loads(pickle.dumps(dataset.__getitems__([4, 9])))
        assert check(*default_collate(batch)) == [4, 9]

    def test_a_batch_behaves_as_a_list(self, dataset: Dataset) -> None:
        batch = dataset.__getitems__([4, 9, 2])
        assert len(batch) == 3
        assert [label for _, label in batch] == [batch[0][1], batch[1][1], batch[-1][1]]
        assert [index_of(image) for image, _ in batch[::-1]] == [2, 9, 4]
        images, labels = zip(*batch, strict=True)
        assert check(torch.stack(images), torch.tensor(labels)) == [4, 9, 2]
        assert len(batch + batch) == len(["another"] + batch) + 2 == 6  # noqa: RUF005
        assert isinstance(batch[0], tuple)
        with pytest.raises(IndexError):
            batch[3]

    @pytest.mark.parametrize("collate", [part_of_the_batch, twice, copied_and_pickled])
    def test_what_is_made_of_a_batch_arrives_right(self, lmdb_dataset: Dataset, collate: Callable) -> None:
        kept = list(workers(lmdb_dataset, collate_fn=collate, batch_size=6))
        for batch in kept:
            for part in batch if isinstance(batch, list) else [batch]:
                if part.dim() == 4:
                    check(part)

    def test_a_batch_sent_again_is_sent_as_a_copy(self, lmdb_dataset: Dataset) -> None:
        kept = list(workers(lmdb_dataset, count=1, batch_size=10, shuffle=False, collate_fn=the_first_again))
        assert len(kept) == 15
        for images, labels in kept:
            assert check(images, labels) == list(range(10))

    @pytest.mark.parametrize("gone", [0, 1])
    def test_of_a_batch_sent_twice_one_can_go(self, lmdb_dataset: Dataset, gone: int) -> None:
        batches = iter(workers(lmdb_dataset, count=1, batch_size=10, shuffle=False, collate_fn=the_first_twice))
        kept = [next(batches), next(batches)]
        del kept[gone]
        assert len(list(batches)) == 13
        assert check(*kept[0]) == list(range(10))

    def test_a_batch_that_was_resized_is_sent_as_it_is(self, lmdb_dataset: Dataset) -> None:
        loader = workers(lmdb_dataset, count=1, batch_size=10, drop_last=True, collate_fn=changed_in_place)
        assert all(images.shape == (2, 3, HEIGHT, WIDTH) for images, _ in loader)

    def test_a_subclass_with_items_of_its_own(self, tmp_path: Path) -> None:
        dataset = KeepsAll(write_store(tmp_path / "store", "lmdb", RECORDS))
        for loader in (workers(dataset), workers(Subset(dataset, range(COUNT))), DataLoader(dataset, 8)):
            assert all((labels == -1).all() and check(images) for images, labels in loader)

    def test_transforms_are_applied_and_their_results_travel_in_slots_too(self, tmp_path: Path) -> None:
        path = write_store(tmp_path / "store", "hdf5", RECORDS)
        dataset = open_dataset(path, transform=half_and_brighter, target_transform=str)
        kept = list(workers(dataset, shuffle=False, batch_size=10, count=1))
        assert [text for _, texts in kept for text in texts] == [str(record.label) for record in RECORDS]
        expected = torch.stack(
            [half_and_brighter(torch.from_numpy(record.pixels).permute(2, 0, 1)) for record in RECORDS]
        )
        assert torch.equal(torch.cat([images for images, _ in kept]), expected)
        assert sum(slots_in_use()) > 0

    @pytest.mark.parametrize(
        "indices",
        [
            *([], [2], [-1, 0], [5, -COUNT], [np.int64(3)], [torch.tensor(3)], [True, 4], (3, 1), range(7)),
            *(np.array([1, 2]), np.array([3], np.uint8), np.array([-2, 0], np.int32), torch.tensor([8, 4])),
        ],
    )
    def test_batched_reading_equals_reading_one_by_one(self, dataset: Dataset, indices: Any) -> None:
        batch = dataset.__getitems__(indices)
        assert len(batch) == len(indices)
        for (image, label), index in zip(batch, indices, strict=True):
            assert torch.equal(image, dataset[index][0])
            assert label == dataset[index][1]

    def test_indices_out_of_range(self, dataset: Dataset) -> None:
        for index in (COUNT, -COUNT - 1):
            with pytest.raises(IndexError, match=f"index {index} is out of range for {COUNT} items"):
                dataset.__getitems__([0, index])
        with pytest.raises(IndexError):
            dataset.__getitems__([2**70])

    @pytest.mark.parametrize(
        "indices", [[0, 1.0], [None], ["1"], [[0, 1]], np.array([0.0]), np.array([[0, 1]]), [slice(2)]]
    )
    def test_indices_that_are_none(self, dataset: Dataset, indices: Any) -> None:
        with pytest.raises(TypeError, match="expected an integer"):
            dataset.__getitems__(indices)


def other_labels(batch: Any) -> Any:
    parts = default_collate(batch)
    parts[1] = parts[1] + 1
    return parts


def labels_changed_in_place(batch: Any) -> Any:
    parts = default_collate(batch)
    parts[1] += 1
    return parts


def labels_made_shorter(batch: Any) -> Any:
    parts = default_collate(batch)
    parts[1].resize_(3)
    return parts


def labels_all_the_first(batch: Any) -> Any:
    parts = default_collate(batch)
    parts[1].as_strided_(parts[1].shape, (0,))
    return parts


def labels_put_elsewhere(batch: Any) -> Any:
    parts = default_collate(batch)
    parts[1].set_(torch.arange(len(batch)))
    return parts


def half_the_labels(batch: Any) -> Any:
    parts = default_collate(batch)
    parts[1] = parts[1][::2]
    return parts


def half_the_images(batch: Any) -> Any:
    parts = default_collate(batch)
    parts[0] = parts[0][::2]
    return parts


def images_turned_in_place(batch: Any) -> Any:
    parts = default_collate(batch)
    parts[0].transpose_(2, 3)
    return parts


def images_narrowed_in_place(batch: Any) -> Any:
    parts = default_collate(batch)
    parts[0].as_strided_((2, 3), (5, 1), 7)
    return parts


def images_put_elsewhere(batch: Any) -> Any:
    parts = default_collate(batch)
    parts[0].set_(torch.arange(7, dtype=torch.uint8))
    return parts


def nothing_but_images(batch: Any) -> Any:
    parts = default_collate(batch)
    del parts[1]
    return parts


def the_other_way_round(batch: Any) -> Any:
    parts = default_collate(batch)
    parts.reverse()
    return parts


def one_more(batch: Any) -> Any:
    parts = default_collate(batch)
    parts.append(len(parts[1]))
    return parts


def the_same_twice(batch: Any) -> Any:
    parts = default_collate(batch)
    return [parts, parts]


@pytest.mark.parametrize(
    "collate_fn",
    [
        *(default_collate, other_labels, labels_changed_in_place, labels_made_shorter, half_the_labels),
        *(labels_put_elsewhere, labels_all_the_first),
        *(half_the_images, images_turned_in_place, images_narrowed_in_place, images_put_elsewhere),
        *(nothing_but_images, the_other_way_round, one_more, the_same_twice),
    ],
)
def test_what_a_collate_fn_makes_of_the_list(lmdb_dataset: Dataset, collate_fn: Callable[[Any], Any]) -> None:
    """A batch travels as one object as long as it is as it was made."""
    sent = list(workers(lmdb_dataset, shuffle=False, collate_fn=collate_fn))
    here = list(DataLoader(lmdb_dataset, batch_size=16, collate_fn=collate_fn))
    for theirs, ours in zip(sent, here, strict=True):
        assert type(theirs) is list
        assert flat_lists(theirs) == flat_lists(ours)


def flat_lists(parts: Any) -> Any:
    """Tensors as lists, so that `==` compares them."""
    if isinstance(parts, list):
        return [flat_lists(part) for part in parts]
    if isinstance(parts, torch.Tensor):
        assert type(parts) is torch.Tensor
        return parts.dtype, parts.tolist()
    return parts


def images_are_shared(batch: Any) -> bool:
    images, _ = default_collate(batch)
    return bool(images.is_shared()) and images.is_contiguous(memory_format=torch.channels_last)


class TestOtherWays:
    def test_beyond_the_slots(self, lmdb_dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(slots, "MOST_SLOTS", 1)
        check_epoch(list(workers(lmdb_dataset)))

    def test_beyond_the_slots_a_batch_is_copied_once(
        self, lmdb_dataset: Dataset, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(slots, "MOST_SLOTS", 0)
        shared = DataLoader(
            lmdb_dataset, 4, num_workers=1, multiprocessing_context="fork", collate_fn=images_are_shared
        )
        assert all(shared)

    def test_without_memfd(self, lmdb_dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(os, "memfd_create")
        check_epoch(list(workers(lmdb_dataset)))

    def test_dev_shm_too_small(
        self, lmdb_dataset: Dataset, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """Slots are not in /dev/shm. Where there are none and /dev/shm is full, pipes do; never a bus error."""

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(slots, "MOST_SLOTS", 0)
        monkeypatch.setattr(batches.os, "posix_fallocate", full)
        monkeypatch.setattr(batches.warnings, "warn", lambda text, *_, **__: os.write(2, f"{text}\n".encode()))
        check_epoch(list(workers(lmdb_dataset, count=2)))
        (warned,) = capfd.readouterr().err.splitlines()
        assert "/dev/shm has room for" in warned
        assert "a batch takes 0.1 MB ([Errno 28] No space left on device)" in warned


SCRIPT = """
import os, signal, sys
from torch.utils.data import DataLoader
from packshift import open_dataset

def train(how):
    loader = DataLoader(open_dataset(sys.argv[1]), batch_size=8, num_workers=2, persistent_workers=True)
    for number, (images, labels) in enumerate(loader):
        if number == 3:
            children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
            print(os.getpid(), *children, flush=True)
            if how == "exception":
                raise RuntimeError("in the loop")
            if how == "kill worker":
                os.kill(int(children[0]), signal.SIGKILL)
            if how == "kill parent":
                os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    trainings = []
    for how in sys.argv[2:]:
        trainings.append(os.fork())
        if not trainings[-1]:
            os.dup2(os.open(f"{how}.out", os.O_WRONLY | os.O_CREAT), 1)
            os.dup2(os.open(f"{how}.err", os.O_WRONLY | os.O_CREAT), 2)
            train(how)
            break
    else:
        for pid in trainings:
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_nothing_is_left_however_it_ends(lmdb_dataset: Dataset, tmp_path: Path) -> None:
    """No name in /dev/shm (see the fixture), no process, and so no memory: a memfd lives as long as who has it open.

    The trainings are forked from one process, which has imported torch and done nothing else, and run side by side:
    workers whose parent is gone notice it after 5 seconds.
    """
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    codes = {"end": 0, "exception": 1, "kill worker": 1, "kill parent": -signal.SIGKILL}
    command = [sys.executable, str(script), lmdb_dataset.path, *codes]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert dict(zip(codes, map(int, done.stdout.split()), strict=True)) == codes
    errors = {how: (tmp_path / f"{how}.err").read_text() for how in codes}
    assert errors["end"] == ""
    assert "RuntimeError: in the loop" in errors["exception"]
    assert "exited unexpectedly" in errors["kill worker"] or "killed by signal" in errors["kill worker"]
    pids = [[int(pid) for pid in (tmp_path / f"{how}.out").read_text().split()] for how in codes]
    assert [len(each) for each in pids] == [3] * len(codes)
    deadline = time.monotonic() + 30
    while any(os.path.exists(f"/proc/{pid}") for each in pids for pid in each):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize("count", [0, 1])
def test_batches_that_outlive_python_are_not_given_back(lmdb_dataset: Dataset, tmp_path: Path, count: int) -> None:
    """By then names of modules may be gone. What is registered first runs last."""
    script = tmp_path / "train.py"
    script.write_text(f"""
import atexit

def at_last():
    vars(buffers).clear()
    vars(slots).clear()
    batches.clear()

atexit.register(at_last)
from torch.utils.data import DataLoader
from packshift import buffers, open_dataset, slots

if __name__ == "__main__":
    batches = list(DataLoader(open_dataset({lmdb_dataset.path!r}), 16, num_workers={count}))
    in_slots = sum(len(peer.held) for peer in slots._peers.values())
    in_buffers = len(buffers.shared_pool()._lent)
    print(in_slots, in_buffers)
""")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    in_slots, in_buffers = map(int, done.stdout.split())
    assert (in_slots > 4, in_buffers > buffers.MOST_IDLE) == (count > 0, count == 0)


def test_memory_of_ended_workers_is_given_back(lmdb_dataset: Dataset) -> None:
    """Workers that end give the memory of free slots back, though the parent still has it mapped; so does the parent."""
    check_epoch(workers(lmdb_dataset, batch_size=50))
    gc.collect()
    sizes = [os.fstat(peer.fd).st_blocks * 512 for peer in slots._peers.values() if peer.is_gone()]
    assert sizes
    assert sum(sizes) <= len(sizes) * 2 * slots._CONTROL
    check_epoch(workers(lmdb_dataset))
    assert all(not peer.is_gone() or peer.held for peer in slots._peers.values()) or len(slots._peers) <= 4


def test_memory_of_many_batches_held_at_once_is_given_back(lmdb_dataset: Dataset) -> None:
    loader = workers(lmdb_dataset, count=1, batch_size=5, persistent_workers=True)
    kept = list(loader)
    (peer,) = (peer for peer in slots._peers.values() if not peer.is_gone())
    in_use = os.fstat(peer.fd).st_blocks * 512
    assert len(peer.windows) >= 25
    del kept
    check_epoch(loader)
    assert os.fstat(peer.fd).st_blocks * 512 < in_use / 2
    check_epoch(loader)


def test_shared_memory_in_flight_is_what_the_slots_say(lmdb_dataset: Dataset) -> None:
    nbytes = 16 * HEIGHT * WIDTH * 3
    loader = workers(lmdb_dataset, count=1, persistent_workers=True, drop_last=True)
    for _ in range(3):
        assert len([index for images, labels in loader for index in check(images, labels)]) == 144
    (peer,) = (peer for peer in slots._peers.values() if not peer.is_gone())
    size = os.fstat(peer.fd).st_size
    pages = -(-nbytes // 4096) * 4096
    assert (size - slots._CONTROL) % pages == 0
    assert len(peer.windows) <= (size - slots._CONTROL) // pages <= 6


def test_a_message_from_a_worker_that_is_gone_is_a_clear_error() -> None:
    with pytest.raises(
        RuntimeError, match=r"shared memory of DataLoader worker 4194304 cannot be opened \(No such file"
    ):
        slots._attach(4194304, 3, b"0" * 16)


def end_while_sending(path: str, own_name: str) -> None:
    """A worker whose sender is not done when the worker is."""

    def send() -> None:
        time.sleep(0.2)
        Path(path).write_text("sent")

    slots._own_ring()
    threading.Thread(target=send, name=own_name, daemon=True).start()


@pytest.mark.parametrize(("name", "sent"), [(slots._SENDER, True), ("another", False)])
def test_a_worker_waits_for_what_it_sends(tmp_path: Path, name: str, sent: bool) -> None:
    worker = multiprocessing.get_context("fork").Process(target=end_while_sending, args=(str(tmp_path / "sent"), name))
    worker.start()
    worker.join(30)
    assert worker.exitcode == 0
    assert (tmp_path / "sent").exists() == sent


def test_the_sender_is_known_by_its_name() -> None:
    queue: multiprocessing.Queue = multiprocessing.get_context("fork").Queue()
    queue.put(1)
    assert slots._SENDER in [thread.name for thread in threading.enumerate()]
    assert queue.get() == 1
    queue.close()
    queue.join_thread()


def test_a_sender_that_does_not_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "_PATIENCE_SECONDS", 0.05)
    over = threading.Event()
    sender = threading.Thread(target=over.wait, name=slots._SENDER)
    sender.start()
    slots._wait_for_senders()
    assert sender.is_alive()
    over.set()
    sender.join()
