"""The torch face of a store: a path that reads, never a handle that has to be carried about.

A dataset keeps the store's path, its identity and a few numbers; the file is mapped at the first read of each process
and by nobody before. So a dataset pickles in a few hundred bytes at any time, and works under fork, spawn and
forkserver without a worker_init_fn.
"""

from __future__ import annotations

import operator
import os
from abc import abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from packshift.batches import Batch, BatchSample, memory_for_images
from packshift.compiled import compiled
from packshift.errors import ImageError, NotAStoreError
from packshift.gathering import Rows, threads_for
from packshift.options import Options
from packshift.preprocess import Lap, load_record, no_lap
from packshift.record import Names, StoreInfo
from packshift.sources import AUTO, scan
from packshift.sources._labelling import STRING
from packshift.stores._reader import Reader

if TYPE_CHECKING:
    from packshift.compiled import Gathering

Transform = Callable[[Any], Any]
Item = tuple[Any, Any]


class PictureDataset(Dataset[Item]):
    """What all packshift datasets share. Items are `(image, label)`.

    `image` is a uint8 tensor (3, H, W) that owns its memory and may be written to (a channels-last view, as the pixels
    are stored), `label` an int, -1 throughout where the source had no class folders. `transform` is called with the
    image, `target_transform` with the label, as in torchvision.
    """

    def __init__(self, transform: Transform | None, target_transform: Transform | None) -> None:
        self.transform = transform
        self.target_transform = target_transform

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def classes(self) -> tuple[str, ...]:
        """Class names in the order of their labels."""

    @property
    @abstractmethod
    def targets(self) -> NDArray[np.int64]:
        """(N,) int64, read-only: the label of every item."""

    @property
    @abstractmethod
    def paths(self) -> Sequence[str]:
        """(N,) path of every item relative to the source folder, decoded as they are asked for."""

    @abstractmethod
    def _pixels(self, index: int) -> NDArray[np.uint8]:
        """(H, W, 3) uint8 of one item, in memory of its own."""

    @property
    def class_to_idx(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.classes)}

    def __getitem__(self, index: int) -> Item:
        position = self._position(index)
        image: Any = torch.from_numpy(self._pixels(position)).permute(2, 0, 1)
        label: Any = int(self.targets[position])
        if self.transform is not None:
            image = self.transform(image)
        if self.target_transform is not None:
            label = self.target_transform(label)
        return image, label

    def __getitems__(self, indices: Sequence[int] | NDArray[np.int64]) -> Sequence[Item]:
        """The items of a whole batch, as DataLoader asks for them; `default_collate` takes them as a finished batch."""
        if self._makes_items_itself():
            return [self[index] for index in indices]
        if len(indices) and self.transform is None and self.target_transform is None:
            batch = self._batch(indices)
            if batch is not None:
                return batch
        return [BatchSample(self[index]) for index in indices]

    @classmethod
    def _makes_items_itself(cls) -> bool:
        """Whether a subclass overrides `__getitem__`: then a batch is made of what that returns."""
        return cls.__getitem__ is not PictureDataset.__getitem__

    def _batch(self, indices: Sequence[int] | NDArray[np.int64]) -> Batch | None:
        """Items gathered in one go, or None where that cannot be done."""
        return None

    def _positions(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """`_position` of each index, int64 (B,). All at once where they are plain: one by one costs as much as a gather."""
        plain = _plain_positions(indices, len(self))
        return np.array([self._position(index) for index in indices], np.int64) if plain is None else plain

    def _position(self, index: int) -> int:
        """`index` as 0 .. len - 1; accepts anything that is an integer, negative ones count from the end."""
        try:
            position = operator.index(index)
        except TypeError:
            raise TypeError(
                f"index {index!r}: expected an integer; for several items use torch.utils.data.Subset or a DataLoader"
            ) from None
        count = len(self)
        if not -count <= position < count:
            raise IndexError(f"index {position} is out of range for {count} items")
        return position % count


def _plain_positions(indices: Sequence[int] | NDArray[np.int64], count: int) -> NDArray[np.int64] | None:
    """(B,) int64; None where not all are integers from 0 to `count` - 1.

    For a list, as DataLoader gives it, without what numpy does to find out what is in it: after a gather, when none of its
    code is in the processor's cache, that takes three times as long.
    """
    if type(indices) is list:
        try:
            positions = np.frombuffer(array("q", indices), np.int64)
        except (TypeError, OverflowError):
            return None
        return positions if min(indices) >= 0 and max(indices) < count else None
    positions = np.asarray(indices)
    if positions.dtype.kind not in "iu" or positions.ndim != 1:
        return None
    positions = positions.astype(np.int64, copy=False)
    return positions if positions.view(np.uint64).max() < count else None  # as unsigned ones, those below 0 are large


class StoreDataset(PictureDataset):
    """A dataset over a store of any format; `LMDBDataset` and `HDF5Dataset` take one format only.

    Raises StoreError where the file is not a whole store. Nothing stays open after the constructor. `close()` releases
    the map; the next read makes it again. Items, and what was read of `targets` and `paths`, stay valid.
    """

    format: str | None = None

    def __init__(
        self,
        path: str | os.PathLike[str],
        transform: Transform | None = None,
        target_transform: Transform | None = None,
    ) -> None:
        super().__init__(transform, target_transform)
        self.path = os.path.abspath(path)
        reader = Reader(self.path, format=self.format)
        self._identity = reader.identity
        self._length = reader.info.count
        self._shape = reader.info.shape
        self._reader: Reader | None = None
        self._known_rows: Rows | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None, "_known_rows": None}

    @property
    def _store(self) -> Reader:
        if self._reader is None:
            self._reader = Reader(self.path, format=self.format, identity=self._identity)
        return self._reader

    def __len__(self) -> int:
        return self._length

    @property
    def info(self) -> StoreInfo:
        """The store's header: format version, counts, classes, preprocessing, tool versions."""
        return self._store.info

    @property
    def classes(self) -> tuple[str, ...]:
        return self._store.info.classes

    @property
    def targets(self) -> NDArray[np.int64]:
        return self._store.labels

    @property
    def paths(self) -> Names:
        return self._store.paths

    def meta(self, index: int) -> dict[str, Any]:
        """Where one item came from: path, label, class; size (bytes), CRC-32 and (height, width) of the source."""
        position = self._position(index)
        store = self._store
        label = int(store.labels[position])
        return {
            "path": store.paths[position],
            "label": label,
            "class": store.info.classes[label] if store.info.labelled else None,
            "source_size": int(store.array("source_sizes")[position]),
            "source_crc32": int(store.array("source_crc32")[position]),
            "original_size": tuple(store.array("original_sizes")[position].tolist()),
        }

    def _pixels(self, index: int) -> NDArray[np.uint8]:
        return self._store.pixels(index).copy()

    def _batch(self, indices: Sequence[int] | NDArray[np.int64]) -> Batch | None:
        rows, shape = self._rows, self._shape
        if rows is None or shape is None:
            return None
        if rows.in_c is not None:
            gathering, batch = self._begin_batch(indices)
            gathering.run(threads_for(len(indices) * rows.nbytes))
            return batch
        positions = self._positions(indices)
        if self._store.waits_for_disk():
            self._store.read_ahead(positions)
        memory = memory_for_images(len(positions), shape)
        rows.gather(positions, memory.flat)
        return Batch(memory.images, self.targets[positions], memory.finish)

    @property
    def _copies_batches(self) -> bool:
        """Whether `_begin_batch` gives what `__getitems__` does."""
        as_here = type(self).__getitems__ is PictureDataset.__getitems__ and not self._makes_items_itself()
        plain = as_here and self.transform is None and self.target_transform is None
        return plain and self._shape is not None and compiled() is not None

    def _begin_batch(self, indices: Sequence[int] | NDArray[np.int64]) -> tuple[Gathering, Batch]:
        """The items, and the copying, not yet begun, that fills them. Has them read from the disk meanwhile, where that is
        waited for. Where there are `_rows`, and C."""
        rows = self._rows
        assert (
            rows is not None
        )  # this and the next two: whoever calls this has asked `_copies_batches`; not a user's data
        assert rows.in_c is not None
        assert self._shape is not None
        memory = memory_for_images(len(indices), self._shape)
        try:
            gathering: Gathering = rows.in_c.gathering(indices, memory.flat)
        except (IndexError, TypeError):  # from the end, out of range, or integers of other kinds
            gathering = rows.in_c.gathering(self._positions(indices), memory.flat)
        if self._store.waits_for_disk():
            self._store.read_ahead(np.frombuffer(gathering.positions, np.int64))
        labels = np.frombuffer(gathering.pick(self.targets), np.int64)
        return gathering, Batch(memory.images, labels, memory.finish)

    @property
    def _rows(self) -> Rows | None:
        """All records, over the map."""
        if self._known_rows is None and self._store.rows is not None:
            self._known_rows = Rows(self._store.rows)
        return self._known_rows

    def close(self) -> None:
        self._reader = self._known_rows = None

    def __enter__(self) -> StoreDataset:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        shape = "of various sizes" if self._shape is None else f"{self._shape[2]}x{self._shape[0]}x{self._shape[1]}"
        return f"{type(self).__name__}({self.path!r}: {self._length:,} images {shape} uint8)"


class LMDBDataset(StoreDataset):
    """A dataset over an LMDB store made by `packshift convert`; see `StoreDataset`."""

    format = "lmdb"


class HDF5Dataset(StoreDataset):
    """A dataset over an HDF5 store made by `packshift convert`; see `StoreDataset`."""

    format = "hdf5"


class ImageFolderDataset(PictureDataset):
    """The same pixels straight from the pictures, decoded at every read: what a store saves, and what it must equal.

    The arguments behind `target_transform` are those of `convert`. An unreadable picture raises ImageError when it is
    read; a store would have left it out, so with such pictures the indices of the two differ.
    """

    _lap: Lap = staticmethod(no_lap)

    def __init__(
        self,
        root: str | os.PathLike[str],
        transform: Transform | None = None,
        target_transform: Transform | None = None,
        *,
        size: int | str | tuple[int, int] | None = 256,
        fit: str = "crop",
        background: str | tuple[int, int, int] | None = None,
        fast_decode: bool = False,
        max_pixels: int | None = None,
        layout: str = AUTO,
        class_order: str = STRING,
        classes_from: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(transform, target_transform)
        self.root = os.path.abspath(root)
        options = Options(
            size=size,
            fit=fit,
            background=background,
            fast_decode=fast_decode,
            max_pixels=max_pixels,
            layout=layout,
            class_order=class_order,
            classes_from=classes_from,
        )
        self._settings = options.preprocessing()
        self._listing = scan(self.root, options.layout, labelling=options.labelling())

    def __len__(self) -> int:
        return len(self._listing)

    @property
    def classes(self) -> tuple[str, ...]:
        return self._listing.classes

    @property
    def targets(self) -> NDArray[np.int64]:
        return self._listing.labels

    @property
    def paths(self) -> Names:
        return self._listing.names

    def _pixels(self, index: int) -> NDArray[np.uint8]:
        self._lap("start")
        sample = self._listing.sample(index)
        try:
            record = load_record(self.root, sample, self._settings, lap=self._lap)
        except ImageError as error:
            raise ImageError(f"{os.path.join(self.root, sample.name)}: {error}") from error
        pixels = record.pixels if record.pixels.flags.writeable else record.pixels.copy()
        self._lap("convert")
        return pixels

    def close(self) -> None:
        """Nothing is kept open; here so that datasets can be exchanged for each other."""

    def __enter__(self) -> ImageFolderDataset:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.root!r}: {len(self):,} pictures, {self._settings.describe()})"


_CLASSES: Mapping[str, type[StoreDataset]] = {"lmdb": LMDBDataset, "hdf5": HDF5Dataset}


def open_dataset(
    path: str | os.PathLike[str],
    transform: Transform | None = None,
    target_transform: Transform | None = None,
) -> StoreDataset:
    """The dataset over a store of any format, told by its content, not its name.

    Raises StoreError where `path` is not a whole store (for a folder of pictures there is `ImageFolderDataset`).
    """
    if os.path.isdir(path):
        raise NotAStoreError(
            f"{os.fspath(path)} is a folder: expected a store file; for the pictures in a folder use ImageFolderDataset"
        )
    found = Reader(path).info.format
    return _CLASSES.get(found, StoreDataset)(path, transform, target_transform)
