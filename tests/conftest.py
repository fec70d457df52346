from __future__ import annotations

from pathlib import Path

import pytest
from helpers import make_folder

from packshift import convert
from packshift.stores import format_names, get_format


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        help="every combination of workers, start methods and loader options, not a sample",
    )


@pytest.fixture(params=format_names())
def format_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def suffix(format_name: str) -> str:
    return get_format(format_name).suffixes[0]


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Three classes of four pictures, portrait and landscape."""
    return make_folder(tmp_path / "my pictures", ["ant", "bee", "cow"], 4)


@pytest.fixture
def store(pictures: Path, tmp_path: Path, suffix: str) -> Path:
    target = tmp_path / f"my store{suffix}"
    convert(pictures, target, size=32)
    return target
