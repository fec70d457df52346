"""Stores of every released format version stay readable, and this version writes exactly what it wrote before."""

from __future__ import annotations

import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from packshift import open_dataset
from packshift.stores import format_names, get_format
from packshift.stores._reader import Reader

GOLDEN = Path(__file__).parent / "golden"
sys.path.insert(0, str(GOLDEN))

from helpers import write_store  # noqa: E402
from make_golden import SKIPPED, golden_name, golden_records  # noqa: E402

pytestmark = pytest.mark.parametrize("own_sizes", [False, True], ids=["one-size", "own-sizes"])


def golden_path(format_name: str, own_sizes: bool) -> Path:
    return GOLDEN / golden_name(1, own_sizes, get_format(format_name).suffixes[0])


def test_version_1_is_read(format_name: str, own_sizes: bool) -> None:
    path, records = golden_path(format_name, own_sizes), golden_records(own_sizes)
    reader, dataset = Reader(path), open_dataset(path)
    assert (reader.info.version, len(dataset)) == (1, len(records))
    assert reader.info.classes == ("class0", "class1", "class2")
    assert dataset.paths == [record.name for record in records]
    assert list(reader.skipped) == SKIPPED
    for index, record in enumerate(records):
        image, label = dataset[index]
        assert np.array_equal(image.permute(1, 2, 0).numpy(), record.pixels)
        assert label == record.label
        assert reader.checksum_matches(index)


def test_version_1_is_written_to_the_byte(format_name: str, own_sizes: bool, tmp_path: Path) -> None:
    again = write_store(
        tmp_path / "again", format_name, golden_records(own_sizes), own_sizes=own_sizes, skipped=SKIPPED
    )
    golden = golden_path(format_name, own_sizes).read_bytes()
    if format_name == "hdf5" and not made_with_this_library():
        # Another HDF5 library may lay its own bookkeeping out differently; the datasets must be equal all the same.
        with h5py.File(again) as new, h5py.File(golden_path(format_name, own_sizes)) as old:
            assert set(new) == set(old)
            assert all(np.array_equal(new[name][()], old[name][()]) for name in old if name != "header")
    else:
        assert again.read_bytes() == golden


def made_with_this_library() -> bool:
    return h5py.version.hdf5_version_tuple[:2] == (2, 0)


def test_there_is_a_golden_store_for_every_format(own_sizes: bool) -> None:
    assert all(golden_path(name, own_sizes).is_file() for name in format_names())
