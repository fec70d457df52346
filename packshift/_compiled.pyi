"""What is written in C; see _module.c for what Python sees of it."""

from collections.abc import Sequence
from typing import Any, TypeAlias, final

from numpy.typing import NDArray

Buffer: TypeAlias = NDArray[Any] | bytearray | bytes | memoryview
Side: TypeAlias = tuple[float, float, int, int, int, int, bool]
"""`struct side` of _resampling.h."""

INTERFACE: int
"""Changes with everything that is said here."""

@final
class Rows:
    """Rows of equal length, which stay in memory as they are."""

    def __init__(self, table: Buffer, /) -> None:
        """`table` is (N, bytes) uint8, each row in one piece, else ValueError."""

    def gathering(self, positions: Sequence[int] | Buffer, out: Buffer, /) -> Gathering:
        """The copying, not yet begun, of the rows at `positions` (B,), a list or int64, to `out`, of B * bytes in one piece.

        Raises IndexError where a position is not one of 0 to N - 1, TypeError where there are other things than int or int64
        (numpy's integers in a list among them), ValueError where `out` is of another length.
        """

@final
class Gathering:
    """One batch to be gathered; made by `Rows.gathering`."""

    @property
    def positions(self) -> bytes:
        """(B,) int64."""

    @property
    def begun(self) -> int:
        """How many rows somebody has begun to copy: there is nothing left to take part in where that is all of them."""

    def __len__(self) -> int: ...
    def run(self, threads: int, /) -> None:
        """Copy all of it, on so many threads, the caller's among them, which live as long as the call."""

    def pick(self, values: Buffer, /) -> bytearray:
        """(B,) int64: those of `values`, (N,) int64, at the positions. Raises ValueError for other values."""

@final
class Queue:
    """Threads that gather, in the order in which batches are handed over, and never need the interpreter for it.

    Whoever waits for a batch takes part in it. In a child that was forked meanwhile, which has no such threads, and after
    `close` it copies all of it. Raises MemoryError.
    """

    def __init__(self, threads: int, /) -> None: ...
    @property
    def is_inherited(self) -> bool:
        """Whether this is a child of the process whose threads these are."""

    @property
    def waiting(self) -> int:
        """How many batches were handed over that nobody has begun the last row of."""

    def hand_over(self, gathering: Gathering, /) -> None:
        """Have a batch copied; once, else ValueError. What a queue that is closed has begun of it is not copied again."""

    def finish(self, gathering: Gathering, /) -> None:
        """Come back when all rows of a batch that was handed over are there."""

    def close(self) -> None:
        """End the threads."""

def resample(picture: Buffer, height: Side, width: Side, sideways: bool, turned: bool, out: Buffer, /) -> None:
    """See resampling.py. Raises MemoryError, and ValueError where the buffers are of other lengths than the sides say."""

def major_faults() -> int:
    """How often this process has waited for the disk at an address so far (getrusage(2))."""
