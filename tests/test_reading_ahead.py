"""Cold stores: exact ranges are fetched ahead while reading waits for the disk, and only then."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from helpers import make_records, write_store

from packshift import Loader, open_dataset
from packshift.cli import main
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


def test_ranges_are_those_of_the_records_and_stop_when_the_cache_is_warm(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = [5]
    monkeypatch.setattr(_reader.resource, "getrusage", lambda who: SimpleNamespace(ru_majflt=faults[0]))
    reader._map = Advised(reader._map)
    reader.read_ahead(np.array([3, 17]))
    for (advice, start, length), position in zip(reader._map.advice, (3, 17), strict=True):
        first = reader.info.payload_offset + position * reader.info.stride
        assert advice == mmap.MADV_WILLNEED
        assert start % mmap.PAGESIZE == 0
        assert start <= first < start + mmap.PAGESIZE
        assert start + length == first + 64 * 64 * 3
    reader.read_ahead(np.array([4]))
    assert len(reader._map.advice) == 2, "nothing was read from the disk since: the page cache is warm"
    faults[0] += 1
    reader.read_ahead(np.array([5]))
    assert len(reader._map.advice) == 3


def test_every_batch_asks_for_its_records(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(Reader, "read_ahead", lambda _, positions: asked.append(positions.tolist()))
    dataset = open_dataset(reader.path)
    dataset.__getitems__([3, 5])
    list(Loader(dataset, 2, sampler=[7, -1, 2]))
    assert asked == [[3, 5], [7, 19], [2]]


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
