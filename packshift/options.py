"""What a conversion is asked to do, checked before anything is read: the one list of the arguments of `convert`.

A new option is a field here; `convert` and the command line name it once each, and a test compares the three.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from packshift.arguments import at_least_one
from packshift.class_lists import read_classes
from packshift.errors import UsageError
from packshift.machine import usable_cpus
from packshift.settings import Preprocessing, parse_background, parse_max_pixels, parse_size
from packshift.sources import AUTO
from packshift.sources._labelling import STRING, Labelling

ON_ERROR = ("skip", "stop")


@dataclass(frozen=True)
class Options:
    """The arguments of `convert` that are neither paths nor callbacks, as they were given; their meaning is told there.

    Raises UsageError for one that cannot be right, whatever the source holds.
    """

    size: int | str | tuple[int, int] | None = 256
    fit: str = "crop"
    background: str | tuple[int, int, int] | None = None
    fast_decode: bool = False
    max_pixels: int | None = None
    layout: str = AUTO
    class_order: str = STRING
    classes_from: str | os.PathLike[str] | None = None
    format: str | None = None
    jobs: int | None = None
    on_error: str = "skip"
    max_errors: int | str | None = None
    overwrite: bool = False
    restart: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        if self.on_error not in ON_ERROR:
            raise UsageError(f"unknown on_error {self.on_error!r}: expected one of {', '.join(ON_ERROR)}")
        if self.classes_from is not None and self.class_order != STRING:
            raise UsageError(
                "class_order (--class-order) and classes_from (--classes-from): a list has its own order; give one of them"
            )
        Labelling(self.class_order)  # this and the next three raise where something is wrong
        self.processes()
        self.preprocessing()
        self.error_limit(1)

    def preprocessing(self) -> Preprocessing:
        return Preprocessing(
            parse_size(self.size),
            self.fit,
            self.fast_decode,
            parse_background(self.background),
            parse_max_pixels(self.max_pixels),
        )

    def labelling(self) -> Labelling:
        """How class folders get their labels. Reads `classes_from`: raises SourceError or StoreError."""
        if self.classes_from is None:
            return Labelling(self.class_order)
        return Labelling(names=read_classes(self.classes_from), origin=os.fsdecode(self.classes_from))

    def processes(self) -> int:
        """How many processes decode."""
        return usable_cpus() if self.jobs is None else at_least_one("jobs", self.jobs)

    def error_limit(self, pictures: int) -> int | None:
        """How many of the pictures may be skipped: a number, or "5%" of them, rounded down; None: any number."""
        if self.max_errors is None:
            return None
        text = str(self.max_errors).strip()
        number = text.removesuffix("%").strip()
        is_percentage = text.endswith("%")
        try:
            value = float(number) if is_percentage else int(number)
        except ValueError:
            value = -1
        if isinstance(self.max_errors, bool) or not 0 <= value < float("inf") or (is_percentage and value > 100):
            raise UsageError(
                f"max_errors {str(self.max_errors)[:40]!r}: expected a number of files such as 10, or a share such as 5%"
            )
        return int(pictures * value / 100) if is_percentage else int(value)
