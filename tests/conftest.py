from __future__ import annotations

import multiprocessing
import shutil
import signal
import sys
from pathlib import Path

import pytest
from helpers import make_folder
from hypothesis import settings

from packshift import convert, pool
from packshift.stores import format_names, get_format

multiprocessing.set_forkserver_preload(["torch"])  # once a session, not once a worker: it takes seconds

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # run with & or nohup: the commands tested would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


# The same examples at every run; others with --hypothesis-profile=random.
settings.register_profile("same", derandomize=True)
settings.register_profile("random", derandomize=False)
settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        help="every combination of workers, start methods and loader options, and more damaged bytes, not a sample",
    )


@pytest.fixture(params=format_names())
def format_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def suffix(format_name: str) -> str:
    return get_format(format_name).suffixes[0]


def make_pictures(root: Path) -> Path:
    return make_folder(root / "my pictures", ["ant", "bee", "cow"], 4)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Three classes of four pictures, portrait and landscape."""
    return make_pictures(tmp_path)


@pytest.fixture(scope="session")
def stores_made_once(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A store of each format by its suffix, made of pictures as `pictures` has them. Not to be changed."""
    root = tmp_path_factory.mktemp("stores")
    pictures = make_pictures(root)
    stores = {suffix: root / f"store{suffix}" for suffix in (get_format(name).suffixes[0] for name in format_names())}
    for target in stores.values():
        convert(pictures, target, size=32)
    return stores


@pytest.fixture
def store(pictures: Path, stores_made_once: dict[str, Path], tmp_path: Path, suffix: str) -> Path:
    """What converting `pictures` gives: a copy, since starting decoding processes takes half a second."""
    return Path(shutil.copy(stores_made_once[suffix], tmp_path / f"my store{suffix}"))


@pytest.fixture
def forked_decoders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding processes are forked, as in the command. Here, where libraries have threads, they would be started afresh,
    which takes a fifth of a second each; test_pool.py, and what does not ask for this, has those."""
    if sys.platform == "linux":
        monkeypatch.setattr(pool, "_is_single_threaded", lambda: True)
