"""A few hundred of the mutations of fuzz_stores.py; `python tests/fuzz_stores.py` runs ten thousand."""

from __future__ import annotations

from pathlib import Path

from fuzz_stores import fuzz


def test_no_damage_does_more_than_raise_a_line(tmp_path: Path) -> None:
    assert fuzz(400, 7, tmp_path) == []
