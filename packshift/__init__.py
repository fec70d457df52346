"""packshift: a folder of pictures becomes one fast file for PyTorch.

    from packshift import convert, open_dataset

    convert("photos/", "photos.lmdb")
    dataset = open_dataset("photos.lmdb")
    image, label = dataset[0]

Importing this package loads none of torch, lmdb, h5py and Pillow: each name below is imported at its first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from packshift._version import __version__

if TYPE_CHECKING:
    from packshift.benchmarking import bench
    from packshift.conversion import Report, convert
    from packshift.datasets import HDF5Dataset, ImageFolderDataset, LMDBDataset, open_dataset
    from packshift.errors import PackshiftError
    from packshift.forecasting import forecast, probe
    from packshift.loader import Loader
    from packshift.monitor import MemoryMonitor
    from packshift.tuning import tune

_HOMES = {
    "HDF5Dataset": "datasets",
    "ImageFolderDataset": "datasets",
    "Loader": "loader",
    "LMDBDataset": "datasets",
    "MemoryMonitor": "monitor",
    "PackshiftError": "errors",
    "Report": "conversion",
    "bench": "benchmarking",
    "convert": "conversion",
    "forecast": "forecasting",
    "open_dataset": "datasets",
    "probe": "forecasting",
    "tune": "tuning",
}

__all__ = [
    "HDF5Dataset",
    "ImageFolderDataset",
    "LMDBDataset",
    "Loader",
    "MemoryMonitor",
    "PackshiftError",
    "Report",
    "__version__",
    "bench",
    "convert",
    "forecast",
    "open_dataset",
    "probe",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'packshift' has no attribute {name!r}")
    value = getattr(import_module(f"packshift.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
