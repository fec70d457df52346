"""The memory that loading will take, term by term, before it takes it.

What is foretold is the state in which the loader is ahead of the training: all queues full. How many batches exist then
follows from the loaders' code (torch 2.2 to 2.14, checked by measurement, benchmarks/forecast_error.py):

- DataLoader with W workers keeps W * prefetch_factor batches ordered or ready; one is in the hands of the loop, and for a
  moment the one before it: W * prefetch_factor + 2. packshift's datasets reuse slots of each worker, which grow until one
  of them is in the loop's hands: W * prefetch_factor + max(2, W);
- without workers, the batch in hand and the next one, and where items are made one by one, the list of them, too;
- packshift's Loader: threads * prefetch batches ahead, one in hand, one in the making.

What a process needs by itself differs from machine to machine: `packshift.probing` measures it; without a probe it is
assumed (constants below).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packshift.arguments import at_least_one
from packshift.carried import Carried, pack
from packshift.errors import UsageError
from packshift.forecast_results import Configuration, Forecast
from packshift.isolation import LOADERS, Trial
from packshift.probing import Line, Probe, measure_constants
from packshift.settings import parse_size

if TYPE_CHECKING:
    from torch.utils.data import Dataset

ASSUMED_MAIN = 155e6
"""Private memory of a process that has imported torch and packshift (torch 2.13, CPU, Linux x86-64), bytes."""

ASSUMED_FORKED_WORKER = {True: 12e6, False: 40e6}
"""What a forked worker adds: it reads ready batches (True), or makes each item in Python (False)."""

ASSUMED_FRESH_WORKER = 155e6
"""What a worker adds that imports torch by itself (spawn)."""

ASSUMED_PRELOADED_WORKER = 160e6
"""The same for forkserver, whose server has not imported torch."""

_PAGE, _PAGE_TABLE_ENTRY = 4096, 8
_PROCESS_PAGE_TABLES = 1e6


@dataclass(frozen=True)
class Data:
    """What of a dataset decides about memory: bytes of one item in a batch, whether it reads batches in one go, the bytes
    of the file that its processes map, and whether its workers reuse slots of shared memory."""

    item_bytes: int
    batched: bool
    mapped_bytes: int = 0
    slots: bool = True


def forecast(
    dataset: Dataset[Any] | str | os.PathLike[str] | Data,
    *,
    batch_size: int,
    num_workers: int = 0,
    prefetch_factor: int = 2,
    loader: str = "dataloader",
    start_method: str | None = None,
    pin_memory: bool = False,
    probe: Probe | None = None,
) -> Forecast:
    """Foretell the memory of a configuration.

    `dataset` is any map-style dataset (one item of it is read), the path of a store or of a folder of pictures, or a
    `Data`. With a `probe` of the same kind of configuration (see `packshift.probe`) the constants are those measured.
    Raises UsageError.
    """
    if loader not in LOADERS:
        raise UsageError(f"unknown loader {loader!r}: expected one of {', '.join(LOADERS)}")
    if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 0:
        raise UsageError(f"num_workers {num_workers!r}: expected a number from 0")
    configuration = Configuration(
        batch_size=at_least_one("batch_size", batch_size),
        num_workers=at_least_one("num_workers", num_workers) if loader == "threads" else num_workers,
        prefetch_factor=at_least_one("prefetch_factor", prefetch_factor),
        loader=loader,
        start_method=start_method,
        pin_memory=pin_memory,
    )
    data = data_of(dataset)
    if probe is not None and (probe.loader != loader or (probe.worker is None) == bool(_processes(configuration))):
        raise UsageError("probe: it measured another kind of configuration: probe this one")
    per_item = data.item_bytes if probe is None else probe.batch_bytes_per_item
    batch = per_item * batch_size
    main, worker, measured = _constants(configuration, data, probe)
    terms = {"main process": main.base}
    if _processes(configuration):
        terms |= _worker_terms(configuration, data, main, worker, batch)
    elif loader == "threads":
        ahead = configuration.num_workers * prefetch_factor + 2
        building = max(0.0, main.per_batch_byte - _PROBED_THREAD_BATCHES)
        terms["batches ahead and in hand"] = ahead * batch
        terms["batches being built"] = configuration.num_workers * building * batch
    else:
        terms["batches being built and in hand"] = main.per_batch_byte * batch
    if pin_memory:
        terms["pinned copies"] = (configuration.num_workers * prefetch_factor + 2) * batch
    terms["page tables"] = _page_tables(configuration, data, probe, terms)
    return Forecast(
        configuration=configuration,
        terms={name: round(value) for name, value in terms.items()},
        reclaimable=data.mapped_bytes,
        measured=measured,
        batch_bytes=round(batch),
    )


_PROBED_THREAD_BATCHES = 3
"""Batches ahead, in hand and in the making with one thread and a prefetch of 1, as a probe runs."""


def _processes(configuration: Configuration) -> int:
    return configuration.num_workers if configuration.loader == "dataloader" else 0


def shared_batches(configuration: Configuration, *, slots: bool = True) -> int:
    """How many batches are in shared memory when all queues are full; 0 without workers."""
    workers = _processes(configuration)
    if not workers:
        return 0
    return workers * configuration.prefetch_factor + (max(2, workers) if slots else 2)


def _worker_terms(configuration: Configuration, data: Data, main: Line, worker: Line, batch: float) -> dict[str, float]:
    workers = configuration.num_workers
    return {
        "batches in the main process": main.per_batch_byte * batch,
        "worker processes": workers * worker.base,
        "batches being built": workers * worker.per_batch_byte * batch,
        "batches in shared memory": shared_batches(configuration, slots=data.slots) * batch,
    }


def _constants(configuration: Configuration, data: Data, measured: Probe | None) -> tuple[Line, Line, tuple[str, ...]]:
    """(main process, one worker, names of the terms whose constants were measured)."""
    if measured is not None:
        worker = measured.worker or Line(0.0, 0.0)
        names = ("main process", "worker processes", "batches being built", "batches in the main process")
        in_process = ("main process", "batches being built", "batches being built and in hand")
        return measured.main, worker, names if measured.worker is not None else in_process
    if not _processes(configuration):
        held = 2.0 if data.batched else 3.0
        return (
            Line(ASSUMED_MAIN, _PROBED_THREAD_BATCHES + held - 2 if configuration.loader == "threads" else held),
            Line(0, 0),
            (),
        )
    added = {
        "spawn": ASSUMED_FRESH_WORKER,
        "forkserver": ASSUMED_PRELOADED_WORKER,
    }.get(configuration.start_method or default_start_method(), ASSUMED_FORKED_WORKER[data.batched])
    return Line(ASSUMED_MAIN, 0.0), Line(added, 0.0 if data.batched else 1.0), ()


def default_start_method() -> str:
    """How Python starts processes here where nothing else is asked for."""
    from multiprocessing import get_start_method

    return get_start_method(allow_none=False)


def _page_tables(configuration: Configuration, data: Data, measured: Probe | None, terms: dict[str, float]) -> float:
    """One entry of 8 bytes for every page of 4 KiB, in every process that maps it."""
    processes = 1 + _processes(configuration)
    readers = max(1, _processes(configuration))
    shared = terms.get("batches in shared memory", 0.0)
    entries = (readers * data.mapped_bytes + 2 * shared) / _PAGE
    each = _PROCESS_PAGE_TABLES if measured is None else measured.page_tables
    return processes * each + entries * _PAGE_TABLE_ENTRY


def probe(
    dataset: Dataset[Any] | str | os.PathLike[str],
    *,
    num_workers: int = 0,
    loader: str = "dataloader",
    start_method: str | None = None,
    pin_memory: bool = False,
    collate_fn: Callable[[Any], Any] | None = None,
    size: int | str | tuple[int, int] | None = 256,
) -> Probe:
    """Measure what a forecast needs to know about a dataset on this machine, with two short runs in fresh processes.

    `dataset` is the path of a store, of a folder of pictures (read with `size`), or any map-style dataset that can be
    pickled and whose class a fresh process can import. The result holds for all batch sizes and `prefetch_factor`s, and
    any number of workers if `num_workers` is above 0. Takes 5 to 10 seconds. Raises UsageError for what cannot be
    pickled and ProbeError where the runs fail.
    """
    path = os.fspath(dataset) if isinstance(dataset, (str, os.PathLike)) else ""
    parsed = parse_size(size)
    item_bytes = data_of(dataset, parsed).item_bytes
    kind = Trial(
        path=path,
        loader=loader,
        num_workers=num_workers if loader == "dataloader" else max(1, num_workers),
        start_method=start_method if num_workers and loader == "dataloader" else None,
        pin_memory=pin_memory,
        size=parsed if os.path.isdir(path) else None,
    )
    if path and collate_fn is None:
        return measure_constants(kind, item_bytes)
    with tempfile.TemporaryDirectory(prefix="packshift-probe-") as folder:
        carried = os.path.join(folder, "carried.pickle")
        pack(Carried(None if path else dataset, None, collate_fn), carried)
        return measure_constants(replace(kind, carried=carried), item_bytes)


def data_of(dataset: Dataset[Any] | str | os.PathLike[str] | Data, size: tuple[int, int] | None = (256, 256)) -> Data:
    """What of a dataset decides about memory. A folder of pictures is taken as read with `size`."""
    if isinstance(dataset, Data):
        return dataset
    if isinstance(dataset, (str, os.PathLike)):
        return _data_of_path(Path(dataset), size)
    from packshift.datasets import ImageFolderDataset, StoreDataset

    item_bytes = _bytes_in(dataset[0])
    if isinstance(dataset, StoreDataset) and dataset.transform is None:
        return Data(item_bytes, True, Path(dataset.path).stat().st_size)
    return Data(item_bytes, False, slots=isinstance(dataset, (StoreDataset, ImageFolderDataset)))


def _data_of_path(path: Path, size: tuple[int, int] | None) -> Data:
    if path.is_dir():
        if size is None:
            raise UsageError(f"{path}: choose a size: pictures of different sizes make no batches")
        return Data(size[0] * size[1] * 3 + 8, False)
    from packshift.stores._reader import Reader

    reader = Reader(path)
    if reader.info.shape is None:
        raise UsageError(f"{path}: its pictures are of different sizes, which make no batches")
    return Data(prod(reader.info.shape) + 8, True, reader.file_size)


def _bytes_in(item: Any) -> int:
    """Bytes of all tensors and arrays in an item; 8 for each number."""
    if isinstance(item, (bytes, str)):
        return len(item)
    if hasattr(item, "element_size") and hasattr(item, "numel"):
        return int(item.element_size() * item.numel())
    if hasattr(item, "nbytes"):
        return int(item.nbytes)
    if isinstance(item, dict):
        return sum(map(_bytes_in, item.values()))
    if isinstance(item, (list, tuple)):
        return sum(map(_bytes_in, item))
    return 8
