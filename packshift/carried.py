"""A user's own dataset and training step on their way into a trial's process.

They are pickled into a file and unpickled there. A fresh process has not run the user's script, so it cannot find what
only that script defines: such things are refused here, with what to do, instead of failing in every trial.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from packshift.errors import UsageError

_ADVICE = "trials run in fresh processes: move it into a module (a .py file) of its own and import it from there"


@dataclass(frozen=True)
class Carried:
    """`step` is called with each batch as the DataLoader gives it, `collate_fn` makes batches of lists of items.

    `dataset` None is the one that the trial's path names.
    """

    dataset: Any
    step: Callable[[Any], Any] | None = None
    collate_fn: Callable[[Any], Any] | None = None


class _Pickler(pickle.Pickler):
    def reducer_override(self, thing: Any) -> Any:
        """Functions and classes are pickled by name; raises UsageError where that name is the script's."""
        if isinstance(thing, (FunctionType, type)) and thing.__module__ == "__main__":
            raise UsageError(f"{thing.__qualname__} is defined in the script that runs; {_ADVICE}")
        return NotImplemented


def pack(carried: Carried, path: str) -> None:
    """Write `carried` to the file `path`. Raises UsageError that names the part which cannot be pickled."""
    with open(path, "wb") as file:
        for name in ("dataset", "step", "collate_fn"):
            try:
                _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(getattr(carried, name))
            except UsageError as error:
                raise UsageError(f"{name}: {error}") from None
            except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
                reason = " ".join(str(error).split())
                raise UsageError(
                    f"{name}: cannot be pickled ({reason}); {_ADVICE}, with no lambdas, nested functions and open files"
                ) from error


def unpack(path: str) -> Carried:
    """What `pack` wrote; runs in the trial's process."""
    with open(path, "rb") as file:
        return Carried(*(pickle.load(file) for _ in range(3)))
