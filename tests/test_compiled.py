"""What is written in C is found, or done without."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path

import pytest

from packshift import compiled as compiled_module
from packshift.compiled import compiled


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    compiled.cache_clear()
    yield
    compiled.cache_clear()


def test_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_module, "import_module", lambda name: import_module("packshift._not_built"))
    assert compiled() is None


def test_built_for_another_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / f"built_elsewhere{EXTENSION_SUFFIXES[0]}").write_bytes(b"MZ")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(compiled_module, "import_module", lambda name: import_module("built_elsewhere"))
    assert compiled() is None


@pytest.mark.skipif(
    compiled() is None,
    reason="the C part was not built (no C compiler) or is off (PACKSHIFT_TURBO=0)",
)
def test_built_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_module, "_INTERFACE", 99)
    assert compiled() is None


@pytest.mark.parametrize("switch", ["0", "1"])
def test_the_switch(switch: str) -> None:
    program = "from packshift.compiled import compiled; print(compiled() is not None)"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PACKSHIFT_TURBO": switch},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.strip() == str(switch == "1" and find_spec("packshift._compiled") is not None)
