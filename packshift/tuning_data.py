"""What the trials of `packshift tune` read: a store, a folder of pictures, or a dataset of the user."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from packshift.carried import Carried, pack
from packshift.errors import UsageError
from packshift.isolation import Trial
from packshift.settings import parse_size
from packshift.sources import scan
from packshift.stores._reader import Reader
from packshift.tuning_code import Opening, opening_of


@dataclass(frozen=True)
class Data:
    """What trials read: `trial` is all that they have in common, `opening` the code that opens the dataset, None for
    one of the user.

    `item_bytes` is the size of an item in a batch where it is known beforehand. `in_dev_shm`: workers send batches
    through /dev/shm; packshift's own datasets have shared memory without a name where the system has that.
    """

    trial: Trial
    count: int
    item_bytes: int | None
    threads: bool
    in_dev_shm: bool
    opening: Opening | None
    files: Iterable[str] = ()
    collate_fn: bool = False


def data_of(
    dataset: Any, carried: Carried, size: int | str | tuple[int, int] | None, fit: str, stack: ExitStack
) -> Data:
    """What `dataset` is, ready for trials; what is written for them goes with `stack`."""
    data = _of_path(dataset, size, fit) if isinstance(dataset, (str, os.PathLike)) else _of_user(dataset)
    if not data.count:
        raise UsageError(f"{dataset}: there is nothing in it to be loaded")
    collates = carried.collate_fn is not None
    if data.opening is None or carried.step is not None or collates:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="packshift-tune-"))
        path = os.path.join(folder, "carried.pickle")
        pack(replace(carried, dataset=None) if data.opening else carried, path)
        data = replace(data, trial=replace(data.trial, carried=path))
    if collates:
        data = replace(data, item_bytes=None, threads=False, in_dev_shm=True, collate_fn=True)
    return data


def _of_path(path: str | os.PathLike[str], size: int | str | tuple[int, int] | None, fit: str) -> Data:
    """A store, or a folder of pictures; torch is left to the trials."""
    common = Trial(path=os.path.abspath(path), fit=fit, fill=True)
    sends_through_memfd = hasattr(os, "memfd_create")
    if os.path.isdir(path):
        parsed = parse_size(size)
        if parsed is None:
            raise UsageError("size none: pictures of different sizes make no batches; choose a size")
        listing = scan(path)
        return Data(
            trial=replace(common, size=parsed),
            count=len(listing),
            item_bytes=parsed[0] * parsed[1] * 3,
            threads=False,
            in_dev_shm=not sends_through_memfd,
            opening=opening_of(os.fspath(path), parsed, fit),
            files=(os.path.join(listing.root, name) for name in listing.names),
        )
    reader = Reader(path)
    shape = reader.info.shape
    if shape is None:
        raise UsageError(f"{os.fspath(path)}: its pictures are of different sizes, which make no batches")
    return Data(
        trial=common,
        count=len(reader),
        item_bytes=shape[0] * shape[1] * 3,
        threads=True,
        in_dev_shm=not sends_through_memfd,
        opening=opening_of(os.fspath(path), None, fit),
        files=[str(reader.path)],
    )


def _of_user(dataset: Any) -> Data:
    if not callable(getattr(dataset, "__len__", None)) or not callable(getattr(dataset, "__getitem__", None)):
        raise UsageError(
            f"{type(dataset).__name__}: expected a store, a folder, or a dataset with __len__ and __getitem__"
        )
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(dataset).__mro__}
    return Data(
        trial=Trial(path="", fill=True),
        count=len(dataset),
        item_bytes=None,
        threads="packshift.datasets.StoreDataset" in kinds,  # by name, since importing it would load torch
        in_dev_shm=True,
        opening=None,
    )
