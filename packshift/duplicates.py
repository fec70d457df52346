"""Source files that occur more than once in a store, found by what the store keeps about each anyway."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from packshift.stores._reader import Reader

_EXAMPLES = 3


@dataclass(frozen=True)
class Duplicates:
    """Pictures whose file equals that of an earlier one: how many, and how many of them under another label.

    Files count as equal when length, CRC-32, and the CRC-32 of the resulting pixels are. `examples` are pairs of paths,
    the ones with different labels first.
    """

    count: int
    other_label: int
    examples: tuple[tuple[str, str], ...]


def find_duplicates(store: Reader) -> Duplicates:
    """Compare all records of a store. Takes about 50 bytes of memory a record while it runs."""
    columns = (store.array("source_sizes"), store.array("source_crc32"), store.array("checksums"))
    order = np.lexsort((np.arange(len(store)), *columns))  # within equal ones, the earlier record first
    same_as_before = np.ones(len(order) - 1, bool)
    for column in columns:
        ordered = column[order]
        same_as_before &= ordered[1:] == ordered[:-1]
    begins = np.flatnonzero(~np.concatenate(([False], same_as_before)))
    first = order[begins[np.searchsorted(begins, np.arange(len(order)), side="right") - 1]]
    later = np.flatnonzero(np.concatenate(([False], same_as_before)))
    pairs = np.stack([first[later], order[later]], axis=1)
    labels = store.labels
    conflicting = labels[pairs[:, 0]] != labels[pairs[:, 1]]
    shown = pairs[np.lexsort((pairs[:, 1], ~conflicting))][:_EXAMPLES]
    examples = tuple((store.paths[int(one)], store.paths[int(other)]) for one, other in shown)
    return Duplicates(len(pairs), int(conflicting.sum()), examples)
