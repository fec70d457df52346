"""What `packshift estimate` and `packshift tune` find out, as values. Bytes throughout; MB in JSON are 1,000,000 bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

MB = 1_000_000


@dataclass(frozen=True)
class Configuration:
    """A way to load: the arguments of `torch.utils.data.DataLoader`, or of `packshift.Loader`.

    `loader` is "dataloader" (`num_workers` processes) or "threads" (`packshift.Loader`, `num_workers` threads).
    """

    batch_size: int
    num_workers: int = 0
    prefetch_factor: int = 2
    loader: str = "dataloader"
    start_method: str | None = None
    pin_memory: bool = False


@dataclass(frozen=True)
class Forecast:
    """The memory that a configuration takes, term by term.

    `terms` maps names to bytes; their sum is `total`, what the kernel cannot take back. `reclaimable` is page cache that
    comes on top and goes when memory is needed. `measured` names the terms whose constants a probe measured on this
    machine; those of the others are assumed, as docs/training.md says.
    """

    configuration: Configuration
    terms: Mapping[str, int]
    reclaimable: int
    measured: tuple[str, ...]
    batch_bytes: int

    @property
    def total(self) -> int:
        return sum(self.terms.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "configuration": asdict(self.configuration),
            "total_mb": self.total / MB,
            "terms": {name: value / MB for name, value in self.terms.items()},
            "reclaimable_mb": self.reclaimable / MB,
            "measured": list(self.measured),
            "batch_mb": self.batch_bytes / MB,
        }


@dataclass(frozen=True)
class TuningTrial:
    """One configuration that was tried. `error` says why there is no measurement; `forecast_bytes` what was foretold."""

    configuration: Configuration
    error: str | None
    over_limit: bool
    forecast_bytes: int | None
    peak_bytes: int | None
    busy: float | None
    iterations_per_s: float | None
    images_per_s: float | None


@dataclass(frozen=True)
class Choice:
    """What to use: the cheapest configuration within noise of the fastest that stays under the limit.

    `accumulation_steps` batches make up one step of the optimizer where the target batch does not fit. `code` is what
    to paste into the training script.
    """

    configuration: Configuration
    accumulation_steps: int
    peak_bytes: int
    images_per_s: float
    busy: float | None
    reason: str
    code: str


@dataclass(frozen=True)
class Tuning:
    """All that one run of tune found; `memory_limit` is in bytes, `headroom` the share of it that is kept free."""

    memory_limit: int
    limit_source: str
    headroom: float
    target_batch_size: int
    trials: tuple[TuningTrial, ...]
    choice: Choice | None
    notes: tuple[str, ...]
    machine: Mapping[str, Any]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """`trials`, one object each, and `choice`, as README describes them."""
        return {
            "memory_limit_mb": self.memory_limit / MB,
            "limit_source": self.limit_source,
            "headroom": self.headroom,
            "target_batch_size": self.target_batch_size,
            "trials": [_trial_json(trial) for trial in self.trials],
            "choice": None if self.choice is None else _choice_json(self.choice),
            "notes": list(self.notes),
            "machine": dict(self.machine),
            "seconds": self.seconds,
        }


def _in_mb(value: int | None) -> float | None:
    return None if value is None else value / MB


def _trial_json(trial: TuningTrial) -> dict[str, Any]:
    return {
        **asdict(trial.configuration),
        "error": trial.error,
        "over_limit": trial.over_limit,
        "forecast_mb": _in_mb(trial.forecast_bytes),
        "peak_mb": _in_mb(trial.peak_bytes),
        "busy": trial.busy,
        "iterations_per_s": trial.iterations_per_s,
        "images_per_s": trial.images_per_s,
    }


def _choice_json(choice: Choice) -> dict[str, Any]:
    return {
        **asdict(choice.configuration),
        "accumulation_steps": choice.accumulation_steps,
        "peak_mb": _in_mb(choice.peak_bytes),
        "images_per_s": choice.images_per_s,
        "busy": choice.busy,
        "reason": choice.reason,
        "code": choice.code,
    }
