"""Cold stores: exact ranges are fetched ahead while reading waits for the disk, and only then."""

from __future__ import annotations

import mmap
import os
import resource
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from helpers import make_records, write_store

from packshift import Loader, datasets, gathering, open_dataset
from packshift.cli import main
from packshift.compiled import compiled
from packshift.stores import _reader
from packshift.stores._reader import Reader


class Advised:
    """A map that remembers the advice given to the kernel."""

    def __init__(self, real: mmap.mmap) -> None:
        self.real = real
        self.advice: list[tuple[int, ...]] = []

    def madvise(self, *advice: int) -> None:
        self.advice.append(advice)
        self.real.madvise(*advice)


@pytest.fixture
def reader(tmp_path: Path, format_name: str) -> Reader:
    return Reader(write_store(tmp_path / "store", format_name, make_records([(64, 64)] * 20)))


def test_ranges_are_those_of_the_records(reader: Reader) -> None:
    reader._map = Advised(reader._map)
    reader.read_ahead(np.array([3, 17]))
    for (advice, start, length), position in zip(reader._map.advice, (3, 17), strict=True):
        first = reader.info.payload_offset + position * reader.info.stride
        assert advice == mmap.MADV_WILLNEED
        assert start % mmap.PAGESIZE == 0
        assert start <= first < start + mmap.PAGESIZE
        assert start + length == first + 64 * 64 * 3


def test_the_disk_is_waited_for_while_there_are_major_page_faults(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = 5
    monkeypatch.setattr(_reader.resource, "getrusage", lambda who: SimpleNamespace(ru_majflt=faults))
    in_c = SimpleNamespace(major_faults=lambda: faults)
    for module in (in_c, None):
        monkeypatch.setattr(_reader, "compiled", lambda module=module: module)
        fresh = Reader(reader.path)
        assert [fresh.waits_for_disk() for _ in range(3)] == [True, False, False]
        faults += 1
        assert [fresh.waits_for_disk() for _ in range(3)] == [True, False, False]


@pytest.mark.skipif(
    compiled() is None,
    reason="the C part was not built (no C compiler) or is off (PACKSHIFT_TURBO=0)",
)
def test_c_counts_the_same_page_faults() -> None:
    assert compiled().major_faults() == resource.getrusage(resource.RUSAGE_SELF).ru_majflt


@pytest.mark.parametrize("cold", [True, False])
@pytest.mark.parametrize("way", ["C", "torch"])
def test_every_batch_of_a_cold_store_asks_for_its_records(
    reader: Reader, monkeypatch: pytest.MonkeyPatch, way: str, cold: bool
) -> None:
    if way == "torch":
        for module in (gathering, datasets):
            monkeypatch.setattr(module, "compiled", lambda: None)
    asked = []
    monkeypatch.setattr(Reader, "waits_for_disk", lambda _: cold)
    monkeypatch.setattr(Reader, "read_ahead", lambda _, positions: asked.append(positions.tolist()))
    dataset = open_dataset(reader.path)
    dataset.__getitems__([3, 5])
    list(Loader(dataset, 2, sampler=[7, -1, 2]))
    assert asked == ([[3, 5], [7, 19], [2]] if cold else [])


def test_a_store_larger_than_memory_is_read_without_the_kernels_read_ahead(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reader.kernel_reads_ahead
    monkeypatch.setattr(_reader, "usable_memory", lambda: reader.file_size - 1)
    again = Reader(reader.path)
    assert not again.kernel_reads_ahead
    assert np.array_equal(again.pixels(7), reader.pixels(7))


def test_info_says_what_was_chosen_and_why(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    told = CliRunner().invoke(main, ["info", "--verbose", str(reader.path)]).stdout.splitlines()[-1]
    assert "the store fits into memory: the kernel reads ahead as it sees fit" in told
    monkeypatch.setattr(_reader, "usable_memory", lambda: 10)
    told = CliRunner().invoke(main, ["info", "--verbose", str(reader.path)]).stdout.splitlines()[-1]
    assert "larger than memory: kernel read-ahead off" in told


def test_a_cold_store_is_read_right(tmp_path: Path, format_name: str) -> None:
    records = make_records([(64, 64)] * 50)
    path = write_store(tmp_path / "store", format_name, records)
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    batch = open_dataset(path).__getitems__(list(range(49, -1, -1)))
    assert all(
        np.array_equal(image.permute(1, 2, 0).numpy(), records[49 - index].pixels)
        for index, (image, _) in enumerate(batch)
    )
