"""What figures of speed and memory have to be read with: CPU, limits, kernel, versions."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from packshift._version import __version__
from packshift.machine import usable_cpus
from packshift.memory import limits


def describe_machine() -> dict[str, Any]:
    """What figures have to be read with: CPU, limits, kernel, versions."""
    now = limits()
    return {
        "cpu": _cpu_name(),
        "cpus_allowed": usable_cpus(),
        "memory_mb": round(now.machine_memory / 1e6),
        "memory_limit_mb": round(now.memory / 1e6),
        "shm_mb": None if now.shm_size is None else round(now.shm_size / 1e6),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packshift": __version__,
        **{name: _version(name) for name in ("torch", "numpy", "pillow", "lmdb", "h5py")},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    found = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return found or platform.machine()
