"""Importing packshift, and asking for help, is quick: nothing heavy is loaded before it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import packshift

HEAVY = ("torch", "lmdb", "h5py", "PIL", "numpy")


@pytest.mark.parametrize(
    "code",
    [
        "import packshift",
        "from packshift.cli import main; main(['--help'])",
        "from packshift.cli import main; main(['convert', '--help'])",
        "from packshift.cli import main; main(['watch', '--help'])",
        "from packshift import MemoryMonitor",
    ],
)
def test_nothing_heavy_is_imported(code: str) -> None:
    report = f"print('loaded', [m for m in {HEAVY} if m in sys.modules])"
    code = f"import atexit, sys; atexit.register(lambda: {report}); {code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded []"


def test_the_command_starts_without_what_only_some_commands_need() -> None:
    code = "import sys, packshift.cli; print([m for m in ('psutil', 'torch', 'numpy', 'pynvml') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_converting_loads_no_torch() -> None:
    code = "import sys, packshift; packshift.convert; print([m for m in ('torch', 'lmdb', 'h5py') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_reading_a_store_loads_neither_library() -> None:
    code = (
        "import sys; from packshift import open_dataset; d = open_dataset(sys.argv[1]); d[0];"
        "print([m for m in ('lmdb', 'h5py', 'PIL') if m in sys.modules])"
    )
    for suffix in (".lmdb", ".h5"):
        path = f"tests/golden/version1{suffix}"
        done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "[]"


def test_every_public_name_exists_and_is_listed() -> None:
    assert set(packshift.__all__) == {*packshift._HOMES, "__version__"}
    for name in packshift.__all__:
        assert getattr(packshift, name) is not None
        assert name in dir(packshift)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        packshift.nothing  # noqa: B018


def test_a_name_stays_itself_after_its_module_was_imported() -> None:
    code = "import packshift.conversion, packshift.datasets; from packshift import convert; print(callable(convert))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
