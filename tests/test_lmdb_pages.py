"""The LMDB files that packshift lays out itself are what the engine would read, check and go on writing to."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import lmdb
import pytest
from helpers import make_records, write_store

from packshift.stores._reader import Reader
from packshift.stores.lmdb import PAGE, _Child, _fill, _Value

RECORDS_A_LEAF = 145  # (4096 - 16) // (2 + 8 + 10 + 8)
CHILDREN_A_BRANCH = 204  # (4096 - 16) // (2 + 8 + 10)


def open_store(path: Path, **options: object) -> lmdb.Environment:
    return lmdb.open(str(path), subdir=False, lock=False, **options)


@pytest.mark.parametrize("count", [1, 2, RECORDS_A_LEAF - 10, RECORDS_A_LEAF, RECORDS_A_LEAF + 1, 5 * RECORDS_A_LEAF])
def test_the_engine_reads_every_key_in_order(tmp_path: Path, count: int) -> None:
    records = make_records([(3, 4)] * count)
    reader = Reader(write_store(tmp_path / "store", "lmdb", records))
    with open_store(reader.path, readonly=True) as environment, environment.begin() as transaction:
        keys = [key for key, _ in transaction.cursor()]
        assert keys == sorted(keys)
        assert len(keys) == environment.stat()["entries"] == count + len(reader.info.arrays) + 2
        for index, record in enumerate(records):
            assert transaction.get(b"%010d" % index) == record.pixels.tobytes()
        assert transaction.get(b"labels") == reader.labels.tobytes()


@pytest.mark.parametrize("leaves", [CHILDREN_A_BRANCH - 1, CHILDREN_A_BRANCH, CHILDREN_A_BRANCH + 1])
def test_branch_pages_never_have_a_single_child(tmp_path: Path, leaves: int) -> None:
    """One leaf more than fit under a branch page: the engine refuses a branch page with one child."""
    count = (leaves - 1) * RECORDS_A_LEAF  # the named values fill the last leaf
    (record,) = make_records([(1, 1)])
    path = write_store(tmp_path / "store", "lmdb", [record] * count)
    with open_store(path, readonly=True) as environment, environment.begin() as transaction:
        assert environment.stat()["leaf_pages"] == leaves
        assert sum(1 for _ in transaction.cursor()) == environment.stat()["entries"]
        assert transaction.get(b"%010d" % (count - 1)) == record.pixels.tobytes()
        assert transaction.get(b"header") is not None


def test_the_engine_can_go_on_writing(tmp_path: Path) -> None:
    path = tmp_path / "copy"
    shutil.copy(write_store(tmp_path / "store", "lmdb", make_records([(20, 20)] * 300)), path)
    with open_store(path, map_size=1 << 26) as environment:
        with environment.begin(write=True) as transaction:
            for index in range(0, 300, 2):
                assert transaction.delete(b"%010d" % index)
            for index in range(500):
                transaction.put(b"more %d" % index, b"x" * (index * 7 % 5000))
        with environment.begin() as transaction:
            assert sum(1 for _ in transaction.cursor()) == environment.stat()["entries"]
            assert transaction.get(b"%010d" % 299) is not None


@pytest.mark.skipif(importlib.util.find_spec("lmdb.verify") is None, reason="this py-lmdb has no verify; version 3 has")
@pytest.mark.parametrize("shapes", [[(1, 1)], [(40, 30)] * 400, [(1, 1), (90, 90), (17, 3)]])
def test_the_structure_passes_the_engines_own_verifier(tmp_path: Path, shapes: list) -> None:
    from lmdb.verify import verify

    own_sizes = len(set(shapes)) > 1
    assert verify(str(write_store(tmp_path / "store", "lmdb", make_records(shapes), own_sizes=own_sizes))) == []


def test_pages_are_as_full_as_they_get() -> None:
    assert [len(group) for group in _fill(_Value(b"%010d" % index, 2, 9) for index in range(300))] == [145, 145, 10]
    assert [len(group) for group in _fill(_Child(b"%010d" % index, 2) for index in range(300))] == [204, 96]
    assert PAGE == 4096
