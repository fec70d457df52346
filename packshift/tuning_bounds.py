"""What cannot fit needs no trial: known from a forecast, the size of a batch, /dev/shm and the limit of open files."""

from __future__ import annotations

from collections.abc import Callable

from packshift.forecast_results import Configuration
from packshift.memory import Limits
from packshift.text import human_bytes
from packshift.tuning_data import Data
from packshift.tuning_search import DATALOADER, Space, describe

FORECAST_ERROR = 0.15
"""How far a forecast may be off, as a share of what is measured."""

_FILES_PER_WORKER = 16
_FILES_ELSEWHERE = 128

Foretell = Callable[[Configuration], int]
"""The bytes that a configuration is expected to take."""


class Bounds:
    """What cannot fit is not tried. `refused` keeps one reason of each kind, for the notes."""

    def __init__(self, space: Space, now: Limits, foretell: Foretell | None, data: Data) -> None:
        self._space = space
        self._now = now
        self._foretell = foretell
        self._in_dev_shm = data.in_dev_shm
        self.item_bytes = data.item_bytes
        self.refused: dict[str, str] = {}

    def foretold(self, configuration: Configuration) -> int | None:
        return None if self._foretell is None else self._foretell(configuration)

    def admits(self, configuration: Configuration) -> bool:
        """Whether there is room for a configuration, as far as that can be known without a trial."""
        workers = configuration.num_workers if configuration.loader == DATALOADER else 0
        if not configuration.num_workers and configuration.batch_size == min(self._space.batch_sizes):
            return True  # the smallest of all is tried whatever was foretold: a measurement says that nothing fits
        ahead = configuration.num_workers * configuration.prefetch_factor
        batch = configuration.batch_size * (self.item_bytes or 0)
        memory = max(int((self.foretold(configuration) or 0) / (1 + FORECAST_ERROR)), (ahead + 1) * batch)
        if memory > self._space.budget:
            return self._refuse("memory", configuration, f"needs {human_bytes(memory)} at least")
        free = self._now.shm_free
        if self._in_dev_shm and workers and free is not None and ahead * batch > free:
            needs = f"needs {human_bytes(ahead * batch)} of /dev/shm, of which {human_bytes(free)} are free"
            return self._refuse("shm", configuration, f"{needs} (docker run --shm-size)")
        files = workers * (_FILES_PER_WORKER + 2 * configuration.prefetch_factor) + _FILES_ELSEWHERE
        most = self._now.open_files
        if workers and most is not None and files > most:
            return self._refuse(
                "files", configuration, f"needs about {files:,} open files, {most:,} are allowed (ulimit -n)"
            )
        return True

    def _refuse(self, kind: str, configuration: Configuration, reason: str) -> bool:
        self.refused.setdefault(kind, f"not tried: {describe(configuration)} {reason}")
        return False
