"""What every format must do, whatever it is: each test runs once per format that packshift finds."""

from __future__ import annotations

import errno
import gc
import json
import os
import pickle
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import make_folder, make_records, resize_and_crop, write_store
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packshift import HDF5Dataset, ImageFolderDataset, LMDBDataset, convert, open_dataset
from packshift.errors import (
    ChangedStoreError,
    DamagedStoreError,
    NewerVersionError,
    NotAStoreError,
    StoreError,
    TargetError,
    UnfinishedStoreError,
)
from packshift.record import Record, Skipped
from packshift.stores import _header, get_format
from packshift.stores._format import HeaderPlace
from packshift.stores._partial import partial_file
from packshift.stores._reader import Reader
from packshift.stores._writer import Writer

CLASSES = {"lmdb": LMDBDataset, "hdf5": HDF5Dataset}


def open_files(path: Path) -> int:
    """Descriptors and maps of this process on a file."""
    real = os.path.realpath(path)
    descriptors = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return descriptors.count(real) + Path("/proc/self/maps").read_text().count(real)


class TestRecords:
    def test_records_come_back_in_order_with_labels_and_paths(self, tmp_path: Path, format_name: str) -> None:
        records = make_records([(9, 7)] * 1200)
        reader = Reader(write_store(tmp_path / "store", format_name, records))
        assert len(reader) == 1200
        assert reader.labels.tolist() == [record.label for record in records]
        assert reader.paths == [record.name for record in records]
        for index, record in enumerate(records):
            assert np.array_equal(reader.pixels(index), record.pixels), index

    def test_records_of_own_sizes_come_back(self, tmp_path: Path, format_name: str) -> None:
        records = make_records([(1, 1), (40, 3), (3, 500), (64, 64)])
        reader = Reader(write_store(tmp_path / "store", format_name, records, own_sizes=True))
        assert reader.info.shape is None
        for index, record in enumerate(records):
            assert np.array_equal(reader.pixels(index), record.pixels)

    def test_one_record_is_enough(self, tmp_path: Path, format_name: str) -> None:
        dataset = open_dataset(write_store(tmp_path / "store", format_name, make_records([(5, 5)])))
        assert len(dataset) == 1
        assert torch.equal(dataset[0][0], dataset[-1][0])

    def test_side_arrays_and_header_come_back(self, tmp_path: Path, format_name: str) -> None:
        records = make_records([(4, 6)] * 5)
        skipped = [Skipped("class0/bad\udcff.jpg", "empty file"), Skipped("class1/x\n.jpg", "cut short")]
        reader = Reader(write_store(tmp_path / "store", format_name, records, skipped=skipped))
        assert reader.info.shape == (4, 6, 3)
        assert reader.info.classes == ("class0", "class1", "class2")
        assert reader.info.notes == {"turned": 2}
        assert reader.info.source == {
            "layout": "class-folders",
            "found": 7,
            "skipped": 2,
            "bytes": sum(range(1000, 1005)),
        }
        assert list(reader.skipped) == skipped
        assert reader.array("source_sizes").tolist() == [record.source_size for record in records]
        assert reader.array("source_crc32").tolist() == [record.source_crc32 for record in records]
        assert reader.array("original_sizes").tolist() == [list(record.original_size) for record in records]
        assert reader.array("checksums").tolist() == [zlib.crc32(record.pixels) for record in records]

    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_any_records_come_back(
        self, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory, format_name: str
    ) -> None:
        """Round trip by property: sizes, labels, names in any bytes that a file name may have."""
        side = st.integers(1, 50)
        own_sizes = data.draw(st.booleans())
        shape = data.draw(st.tuples(side, side))
        names = st.binary(min_size=1, max_size=300).filter(lambda name: b"\0" not in name).map(os.fsdecode)
        records = [
            Record(
                name=data.draw(names),
                label=data.draw(st.integers(0, 1)),
                pixels=np.full((*(data.draw(st.tuples(side, side)) if own_sizes else shape), 3), index % 256, np.uint8),
                source_size=data.draw(st.integers(0, 2**40)),
                source_crc32=data.draw(st.integers(0, 2**32 - 1)),
                original_size=data.draw(st.tuples(st.integers(1, 2**31 - 1), st.integers(1, 2**31 - 1))),
            )
            for index in range(data.draw(st.integers(1, 6)))
        ]
        target = tmp_path_factory.mktemp("any") / "store"
        reader = Reader(write_store(target, format_name, records, classes=("a", "b"), own_sizes=own_sizes))
        assert reader.paths == [record.name for record in records]
        assert reader.labels.tolist() == [record.label for record in records]
        assert reader.array("source_sizes").tolist() == [record.source_size for record in records]
        assert reader.array("original_sizes").tolist() == [list(record.original_size) for record in records]
        for index, record in enumerate(records):
            assert np.array_equal(reader.pixels(index), record.pixels)
            assert reader.checksum_matches(index)

    def test_the_bytes_depend_on_the_records_alone(self, tmp_path: Path, format_name: str) -> None:
        first = write_store(tmp_path / "first", format_name, make_records([(20, 30)] * 7))
        second = write_store(tmp_path / "second", format_name, make_records([(20, 30)] * 7))
        assert first.read_bytes() == second.read_bytes()

    def test_the_file_is_as_long_as_its_content(self, tmp_path: Path, format_name: str) -> None:
        """No sparse gigabytes: what `ls` shows is what the disk holds and what a copy will take."""
        store = write_store(tmp_path / "store", format_name, make_records([(64, 64)] * 100))
        found = store.stat()
        payload = 100 * 64 * 64 * 3
        assert payload < found.st_size < payload * 1.5
        assert found.st_blocks * 512 >= found.st_size

    def test_a_disk_that_is_full_when_the_length_is_set(
        self, tmp_path: Path, format_name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An error inside what h5py calls back into: it must come out as itself, whatever h5py makes of it."""
        real = os.ftruncate

        def ftruncate(fd: int, nbytes: int) -> None:
            if nbytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(fd, nbytes)

        monkeypatch.setattr(os, "ftruncate", ftruncate)
        with pytest.raises(TargetError, match="the disk is full after"):
            write_store(tmp_path / "store", format_name, make_records([(8, 8)]))
        assert list(tmp_path.iterdir()) == []


class TestDataset:
    def test_items_are_owned_writable_uint8_tensors_and_int_labels(self, store: Path, pictures: Path) -> None:
        dataset = open_dataset(store)
        image, label = dataset[5]
        assert (image.dtype, tuple(image.shape), type(label)) == (torch.uint8, (3, 32, 32), int)
        expected = resize_and_crop(pictures / dataset.paths[5], 32)
        assert np.array_equal(image.permute(1, 2, 0).numpy(), expected)
        image.add_(1)
        assert np.array_equal(dataset[5][0].permute(1, 2, 0).numpy(), expected)
        kept = [dataset[index][0] for index in range(len(dataset))]
        dataset.close()
        del dataset
        gc.collect()
        assert np.array_equal(kept[5].permute(1, 2, 0).numpy(), expected)

    def test_indices(self, store: Path) -> None:
        dataset = open_dataset(store)
        last = dataset[11]
        for index in (-1, np.int64(11), torch.tensor(11)):
            assert torch.equal(dataset[index][0], last[0])
        for index in (12, -13):
            with pytest.raises(IndexError, match="12 items"):
                dataset[index]
        for index in (slice(0, 2), [0, 1], "0", 1.0):
            with pytest.raises(TypeError, match="expected an integer"):
                dataset[index]

    def test_labels_and_paths_from_the_first_to_the_last(self, store: Path) -> None:
        dataset = open_dataset(store)
        assert dataset.classes == ("ant", "bee", "cow")
        assert dataset.class_to_idx == {"ant": 0, "bee": 1, "cow": 2}
        assert (dataset[0][1], dataset[-1][1]) == (0, 2)
        assert dataset.targets.tolist() == [0] * 4 + [1] * 4 + [2] * 4
        assert (dataset.paths[0], dataset.paths[-1]) == ("ant/0000.jpg", "cow/0003.jpg")
        assert dataset.meta(-1) | {"source_crc32": 0, "source_size": 0} == {
            "path": "cow/0003.jpg",
            "label": 2,
            "class": "cow",
            "source_size": 0,
            "source_crc32": 0,
            "original_size": (43, 57),
        }

    def test_transforms_are_applied(self, store: Path) -> None:
        dataset = open_dataset(
            store, transform=lambda image: image.float() / 255, target_transform=lambda label: label * 10
        )
        image, label = dataset[11]
        assert image.dtype == torch.float32
        assert label == 20

    def test_equals_the_pictures_themselves(self, store: Path, pictures: Path) -> None:
        dataset, folder = open_dataset(store), ImageFolderDataset(pictures, size=32)
        assert len(dataset) == len(folder)
        assert dataset.paths == folder.paths
        assert dataset.classes == folder.classes
        for index in range(len(folder)):
            assert torch.equal(dataset[index][0], folder[index][0])
            assert dataset[index][1] == folder[index][1]

    def test_pickles_small_before_and_after_use(self, tmp_path: Path, format_name: str) -> None:
        small, large = (
            open_dataset(write_store(tmp_path / name, format_name, make_records([(6, 6)] * count)))
            for name, count in (("small", 10), ("large", 5000))
        )
        before = len(pickle.dumps(large))
        image, label = large[4999]
        assert large.targets[3] == 0
        assert large.paths[4999].endswith("4999.jpg")
        assert large.classes
        again = pickle.loads(pickle.dumps(large))
        assert torch.equal(again[4999][0], image)
        assert again[4999][1] == label
        assert before == len(pickle.dumps(large)) <= len(pickle.dumps(small)) + 20
        assert before < 2000

    def test_nothing_is_open_after_the_constructor_or_after_close(self, store: Path, format_name: str) -> None:
        dataset = CLASSES[format_name](store)
        gc.collect()
        assert open_files(store) == 0
        with dataset:
            dataset[0]
            assert open_files(store) > 0
        gc.collect()
        assert open_files(store) == 0
        assert dataset[0][1] == 0

    def test_many_reads_open_nothing_more(self, store: Path) -> None:
        dataset = open_dataset(store)
        dataset[0]
        before = open_files(store)
        for index in range(1000):
            dataset[index % len(dataset)]
        assert open_files(store) == before

    def test_two_datasets_on_one_file_do_not_disturb_each_other(self, store: Path, tmp_path: Path) -> None:
        link = tmp_path / "link to store"
        link.symlink_to(store)
        hard = tmp_path / "second name"
        os.link(store, hard)
        first, second, third, fourth = (open_dataset(path) for path in (store, store, link, hard))
        expected = first[3][0]
        assert all(torch.equal(other[3][0], expected) for other in (second, third, fourth))
        second.close()
        del third
        gc.collect()
        assert torch.equal(first[3][0], expected)
        assert torch.equal(fourth[3][0], expected)

    def test_a_relative_path_survives_a_change_of_folder(
        self, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(store.parent)
        dataset = open_dataset(store.name)
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert dataset[0][1] == 0

    def test_repr_says_what_it_is(self, store: Path, format_name: str) -> None:
        assert repr(open_dataset(store)) == f"{CLASSES[format_name].__name__}({str(store)!r}: 12 images 3x32x32 uint8)"

    def test_unlabelled(self, pictures: Path, tmp_path: Path, suffix: str) -> None:
        target = tmp_path / f"flat{suffix}"
        convert(pictures / "ant", target, size=16)
        dataset = open_dataset(target)
        assert dataset.classes == ()
        assert dataset.targets.tolist() == [-1] * 4
        assert dataset[2][1] == -1
        assert dataset.meta(0)["class"] is None

    def test_an_old_dataset_notices_a_new_store_under_its_name(self, store: Path, tmp_path: Path, suffix: str) -> None:
        reading, waiting = open_dataset(store), open_dataset(store)
        expected = reading[0][0]
        convert(make_folder(tmp_path / "other", ["x"], 3), store, size=32, overwrite=True)
        assert torch.equal(reading[0][0], expected)
        with pytest.raises(
            ChangedStoreError, match=r"was replaced since this dataset was opened; make the dataset again"
        ):
            waiting[0]


class TestOtherFiles:
    """A file that is not a whole store of this version gives one line that names it and says what to do."""

    def refusal(self, path: Path, expected: type[StoreError]) -> str:
        with pytest.raises(expected) as caught:
            open_dataset(path)
        message = str(caught.value)
        assert "\n" not in message
        assert str(path) in message
        return message

    def test_missing(self, tmp_path: Path) -> None:
        assert "No such file" in self.refusal(tmp_path / "nothing", StoreError)

    def test_zero_length(self, tmp_path: Path, suffix: str) -> None:
        path = tmp_path / f"empty{suffix}"
        path.touch()
        assert "is empty" in self.refusal(path, NotAStoreError)

    def test_text(self, tmp_path: Path, suffix: str) -> None:
        path = tmp_path / f"text{suffix}"
        path.write_text("hello\n" * 2000)
        assert "b'hello\\nhe'" in self.refusal(path, NotAStoreError)

    def test_folder(self, tmp_path: Path) -> None:
        assert "ImageFolderDataset" in self.refusal(tmp_path, NotAStoreError)

    def test_the_other_format(self, store: Path, format_name: str) -> None:
        other = next(kind for name, kind in CLASSES.items() if name != format_name)
        with pytest.raises(NotAStoreError, match=f"is of format {format_name}, not {other.format}"):
            other(store)

    @pytest.mark.parametrize("share", [0.0005, 0.01, 0.5, 0.99, 0.99999])
    def test_truncated(self, store: Path, share: float) -> None:
        size = store.stat().st_size
        os.truncate(store, max(40, int(size * share)))
        assert "damaged" in (message := self.refusal(store, StoreError)) or "not a packshift store" in message

    def test_truncated_message_gives_both_sizes(self, store: Path) -> None:
        size = store.stat().st_size
        os.truncate(store, size - 4096)
        message = self.refusal(store, DamagedStoreError)
        assert f"{size - 4096:,} bytes where {size:,} were written" in message

    def test_longer(self, store: Path) -> None:
        with store.open("ab") as file:
            file.write(bytes(4096))
        assert f"where {store.stat().st_size - 4096:,} were written" in self.refusal(store, DamagedStoreError)

    def test_unfinished(self, tmp_path: Path, format_name: str) -> None:
        copy = tmp_path / "copy"
        with partial_file(tmp_path / "store") as file:
            writer = Writer(file, get_format(format_name), (8, 8, 3))
            for record in make_records([(8, 8)] * 3):
                writer.append(record)
            shutil.copy(file.path, copy)
        assert "unfinished conversion" in self.refusal(copy, UnfinishedStoreError)

    def test_newer_version(self, tmp_path: Path, format_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_header, "VERSION", 7)
        path = write_store(tmp_path / "store", format_name, make_records([(8, 8)]))
        monkeypatch.undo()
        message = self.refusal(path, NewerVersionError)
        assert "version 7" in message
        assert "update packshift" in message

    @pytest.mark.parametrize("number", [float("nan"), float("inf"), "1e999"])
    def test_a_header_with_no_json_number(
        self, number: float | str, tmp_path: Path, format_name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Python's parser takes them, and every JSON document made from the header would be broken."""
        text = json.dumps({"magic": "packshift", "version": 1, "x": number}).replace('"1e999"', "1e999")
        monkeypatch.setattr(get_format(format_name), "find_header", lambda view, path: place)
        path = write_store(tmp_path / "store", format_name, make_records([(40, 40)]))
        data = path.read_bytes()[:5000] + text.encode()
        path.write_bytes(data)
        place = HeaderPlace(5000, len(text), zlib.crc32(text.encode()), len(data))
        assert "its header is not JSON" in self.refusal(path, NotAStoreError)

    @pytest.mark.parametrize("where", ["class", "skipped"])
    def test_a_name_that_no_file_can_have(self, where: str, tmp_path: Path, format_name: str) -> None:
        """A lone surrogate that stands for no byte: it could not even be written out again."""
        path = write_store(
            tmp_path / "store",
            format_name,
            make_records([(4, 4)]),
            classes=["\ud800"] if where == "class" else ["class0"],
            skipped=[Skipped("\ud800" if where == "skipped" else "x.jpg", "empty file")],
        )
        with pytest.raises(DamagedStoreError, match=r"makes no sense|list of skipped files cannot be read"):
            assert Reader(path).skipped is None

    @pytest.mark.parametrize("name", ["labels", "paths", "path_offsets", "checksums", "skipped"])
    def test_a_changed_byte_in_a_side_array_is_noticed(self, store: Path, name: str) -> None:
        place = Reader(store).info.arrays[name]
        flip_byte(store, place.offset)
        reader = Reader(store)
        with pytest.raises(DamagedStoreError, match=f"array '{name}' does not match its checksum"):
            reader.array(name)

    def test_a_changed_byte_in_the_header_is_noticed(self, store: Path) -> None:
        flip_byte(store, store.read_bytes().index(b'"classes":["ant"') + 12)
        assert "does not match its checksum" in self.refusal(store, DamagedStoreError)

    def test_a_changed_pixel_is_noticed(self, store: Path) -> None:
        info = Reader(store).info
        flip_byte(store, info.payload_offset + 7 * info.stride + 100)
        reader = Reader(store)
        assert [index for index in range(len(reader)) if not reader.checksum_matches(index)] == [7]


def flip_byte(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x40]))
