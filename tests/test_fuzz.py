"""A few hundred of the mutations of fuzz_stores.py (`python tests/fuzz_stores.py` runs ten thousand); what those found."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fuzz_stores import Target, fuzz, make_targets, read_everything, with_header

from packshift.errors import DamagedStoreError
from packshift.stores._reader import Reader
from packshift.verification import verify_store


def test_no_damage_does_more_than_raise_a_line(tmp_path: Path) -> None:
    assert fuzz(400, 7, tmp_path) == []


def forged(tmp_path: Path) -> list[Target]:
    (tmp_path / "targets").mkdir()
    return make_targets(tmp_path / "targets")


def findings(path: Path) -> list[str]:
    return [said for said in read_everything(str(path))["said"].values() if said.startswith("FINDING")]


def test_a_missing_array_is_a_line(tmp_path: Path) -> None:
    for number, target in enumerate(forged(tmp_path)):
        arrays = json.loads(target.header)["arrays"]
        for name in arrays:
            header = json.loads(target.header)
            del header["arrays"][name]
            path = tmp_path / f"{number}-{name}.{'lmdb' if target.format == 'lmdb' else 'h5'}"
            path.write_bytes(with_header(target, json.dumps(header, sort_keys=True, separators=(",", ":")).encode()))
            assert findings(path) == [], (target.format, name)
            with pytest.raises(DamagedStoreError, match=f"its array '{name}' is missing or of the wrong shape"):
                Reader(path)


@pytest.mark.parametrize("offset", [-(2**62), -1, 2**62])
@pytest.mark.parametrize("record", [0, 3])
def test_a_record_that_lies_nowhere_is_a_problem(tmp_path: Path, record: int, offset: int) -> None:
    """The last one decides how far is read ahead."""
    for number, target in enumerate(forged(tmp_path)):
        header = json.loads(target.header)
        place = header["arrays"].get("offsets")
        if place is None:
            continue
        data = bytearray(target.data)
        offsets = np.frombuffer(data, "<i8", place["shape"][0], place["offset"])
        offsets[record] = offset
        place["crc32"] = zlib.crc32(offsets.tobytes())
        forged_target = replace(target, data=bytes(data))
        path = tmp_path / f"{number}.{'lmdb' if target.format == 'lmdb' else 'h5'}"
        text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
        path.write_bytes(with_header(forged_target, text))
        assert findings(path) == [], target.format
        problems = verify_store(path, jobs=1).problems
        assert any(problem.index == record for problem in problems), (target.format, problems)
