"""Write the golden stores of the current format version. Run once per version; the files are never changed again.

python tests/golden/make_golden.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from helpers import make_records, write_store

from packshift.record import Record, Skipped
from packshift.stores import formats
from packshift.stores._header import VERSION

SKIPPED = [Skipped("class0/broken \udcff.jpg", "empty file (0 bytes)")]


def golden_records(own_sizes: bool) -> list[Record]:
    return make_records([(3, 5), (1, 1), (7, 2)] if own_sizes else [(4, 6)] * 5, seed=1)


def golden_name(version: int, own_sizes: bool, suffix: str) -> str:
    return f"version{version}{'-own-sizes' if own_sizes else ''}{suffix}"


def main() -> None:
    for known in formats():
        for own_sizes in (False, True):
            target = Path(__file__).with_name(golden_name(VERSION, own_sizes, known.suffixes[0]))
            write_store(target, known.name, golden_records(own_sizes), own_sizes=own_sizes, skipped=SKIPPED)


if __name__ == "__main__":
    main()
