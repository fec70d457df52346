"""Use and memory of NVIDIA GPUs, where their library answers: `pip install 'packshift[gpu]'` brings nvidia-ml-py."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """One GPU. `use` is the share of the last moments (a sixth of a second to a second) in which it computed; memory is in
    bytes. `own` says whether a process that is watched computes on it; None: the driver does not tell, as in containers.
    """

    index: int
    use: float | None
    memory_used: int | None
    memory_total: int | None
    own: bool | None


class Gpus:
    """The GPUs of this machine; none where nvidia-ml-py is not installed or finds no driver."""

    def __init__(self) -> None:
        self._library: Any = None
        self._handles: list[Any] = []
        try:
            library = import_module("pynvml")
        except ImportError:
            return
        try:
            library.nvmlInit()
            self._handles = [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]
        except library.NVMLError:
            return
        self._library = library

    def look(self, pids: Collection[int]) -> tuple[Gpu, ...]:
        """Those on which one of the processes computes, or all where the driver does not tell who does."""
        found = [self._look(index, handle, pids) for index, handle in enumerate(self._handles)]
        return tuple([gpu for gpu in found if gpu.own] or [gpu for gpu in found if gpu.own is None])

    def _look(self, index: int, handle: Any, pids: Collection[int]) -> Gpu:
        use = self._ask(self._library.nvmlDeviceGetUtilizationRates, handle)
        memory = self._ask(self._library.nvmlDeviceGetMemoryInfo, handle)
        computing = self._ask(self._library.nvmlDeviceGetComputeRunningProcesses, handle)
        return Gpu(
            index=index,
            use=None if use is None else use.gpu / 100,
            memory_used=None if memory is None else memory.used,
            memory_total=None if memory is None else memory.total,
            own=any(each.pid in pids for each in computing) if computing else None,
        )

    def _ask(self, function: Callable[[Any], Any], handle: Any) -> Any:
        """What a GPU says; None for what it does not tell (a part of a divided GPU tells no use)."""
        try:
            return function(handle)
        except self._library.NVMLError:
            return None
