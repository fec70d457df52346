"""CRC-32: the same numbers whichever library counts them, since a store made with one is read with the other."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib

import numpy as np
import pytest

from packshift.checksum import crc32

LENGTHS = [*range(70), 255, 256, 1000, 4095, 4096, 4097, 65_537, 1_000_003]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, np.array])
def test_zlibs_numbers(kind: type) -> None:
    noise = np.random.default_rng(0).integers(0, 256, max(LENGTHS) + 3, np.uint8)
    for length in LENGTHS:
        for first in range(4):
            data = noise[first : first + length]
            given = data if kind is np.array else kind(data.tobytes())
            assert crc32(given) == zlib.crc32(data)
            assert crc32(given, 0xDEADBEEF) == zlib.crc32(data, 0xDEADBEEF)


def test_parts_one_after_the_other() -> None:
    assert crc32(b"56789", crc32(b"1234")) == crc32(b"123456789") == 0xCBF43926  # the check value of CRC-32/ISO-HDLC


@pytest.mark.parametrize(
    ("program", "switch", "module"),
    [
        ("import isal; ", "1", "isal.isal_zlib"),
        ("", "0", "zlib"),
        ("import sys; sys.modules['isal'] = None; ", "1", "zlib"),
    ],
    ids=["installed", "turned off", "not installed"],
)
def test_which_library(program: str, switch: str, module: str) -> None:
    program += "from packshift.checksum import crc32; print(crc32.__module__)"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PACKSHIFT_TURBO": switch},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == f"{module}\n"
