"""What README.md and docs/ show is run: the commands, the training loop, the readers without packshift."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import REPOSITORY, SAMPLE_PHOTOS, resize_and_crop

from packshift import convert
from packshift.stores._reader import Reader

README = (REPOSITORY / "README.md").read_text()
FORMAT = (REPOSITORY / "docs" / "FORMAT.md").read_text()
TRAINING = (REPOSITORY / "docs" / "training.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the sample pictures at the place where the README has them."""
    shutil.copytree(SAMPLE_PHOTOS, tmp_path / "sample_data" / "photos")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample pictures as sample.lmdb, in a folder that belongs to the whole module."""
    target = tmp_path_factory.mktemp("documents") / "sample.lmdb"
    convert(SAMPLE_PHOTOS, target)
    return target


@pytest.fixture
def sample_store(folder: Path, converted: Path) -> Path:
    """The store in the folder where the README has it."""
    return Path(shutil.copy(converted, folder))


END = "== end of a block"

RUN_BLOCKS = f"""
import runpy, sys, traceback

for path in sys.argv[1:]:
    try:
        runpy.run_path(path, run_name="__main__")
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        print({END!r}, file=stream, flush=True)
"""


@pytest.fixture(scope="module")
def said(converted: Path) -> dict[str, tuple[str, str]]:
    """What each Python block printed, stdout and stderr. All run in one process, since importing torch takes seconds."""
    paths = {}
    for document, text in {"readme": README, "training": TRAINING}.items():
        for number, code in enumerate(blocks(text, "python")):
            paths[f"{document}{number}"] = path = converted.parent / f"{document}{number}.py"
            path.write_text(code)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN_BLOCKS, *paths.values()],
        cwd=converted.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    outs, errors = (text.split(f"{END}\n") for text in (done.stdout, done.stderr))
    assert outs[-1] + errors[-1] == ""
    return dict(zip(paths, zip(outs[:-1], errors[:-1], strict=True), strict=True))


def shell(command: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        command, shell=True, capture_output=True, text=True, env={**os.environ, "PATH": path}, timeout=300
    )


def test_the_main_job_of_the_first_command(folder: Path) -> None:
    """The command without its installation, which .ci/run does."""
    install, command = (part.strip() for part in blocks(README, "sh")[0].rsplit("&&", 1))
    assert install == "python3 -m venv .venv && .venv/bin/pip install ."
    done = shell(command.replace(".venv/bin/", ""))
    assert done.returncode == 0, done.stderr
    assert "24 of 24 pictures written to sample.lmdb" in done.stdout


def test_the_console_session_prints_what_it_shows(folder: Path) -> None:
    session = blocks(README, "console")[0]
    for command in re.findall(r"^\$ (.*)$", session, re.MULTILINE):
        done = shell(command)
        assert done.returncode == 0, done.stderr
        if command.startswith("packshift convert"):
            shown = [line for line in session.splitlines() if not line.startswith("$")]
            assert comparable(done.stderr + done.stdout) == comparable("\n".join(shown))


def comparable(text: str) -> list[str]:
    """Without what differs from machine to machine: seconds and rate, jobs, free space."""
    return [
        re.sub(r"[\d.,]+ s, [\d,]+ images/s|\d+ jobs|[\d.,]+ .B are free", "...", line)
        for line in text.strip().splitlines()
    ]


def test_the_commands_that_check_and_export_run(folder: Path, sample_store: Path) -> None:
    checking, exporting = (block.strip() for block in blocks(README, "sh")[2:4])
    done = shell(checking)
    assert done.returncode == 0, done.stderr
    assert "no difference; 24 pictures decoded" in done.stdout
    done = shell(exporting)
    assert done.returncode == 0, done.stderr
    assert len(list((folder / "photos-again").rglob("*.png"))) == 24


def sh_block(command: str) -> str:
    """The one block of README that begins with a command."""
    (found,) = [block.strip() for block in blocks(README, "sh") if block.startswith(command)]
    return found


@pytest.mark.parametrize(
    ("command", "fewer", "words"),
    [
        ("packshift bench", "--num-workers 0", "recommended"),
        ("packshift estimate", "", "batches in shared memory"),
        (
            "packshift tune",
            "--max-workers 0 --target-batch-size 1 --step-ms 300",
            'dataset = open_dataset("sample.lmdb")',
        ),
    ],
)
def test_the_measuring_commands_run(sample_store: Path, command: str, fewer: str, words: str) -> None:
    """With `fewer` cases than they try by themselves, each of which takes seconds. A long step needs no worker."""
    done = shell(f"{sh_block(command)} {fewer}")
    assert done.returncode == 0, done.stderr
    assert words in done.stdout


def test_the_training_loop_runs(said: dict[str, tuple[str, str]]) -> None:
    out, errors = said["readme0"]
    assert errors == ""
    assert re.fullmatch(r"epoch 0: loss [\d.]+\nepoch 1: loss [\d.]+\n", out)


def test_the_loader_example_runs(said: dict[str, tuple[str, str]]) -> None:
    assert said["readme1"] == ("", "")


def test_the_monitor_example_runs(said: dict[str, tuple[str, str]]) -> None:
    out, errors = said["readme2"]
    assert out.startswith("peak ")
    assert [line.split(":")[1] for line in errors.splitlines()] == [" 100 steps", " 200 steps"]


@pytest.mark.skipif(sys.platform != "linux", reason="the command finds processes with pgrep, as Linux has it")
def test_the_watching_command_runs(folder: Path) -> None:
    (folder / "train.py").write_text("import time; time.sleep(60)")
    training = subprocess.Popen([sys.executable, str(folder / "train.py")])
    try:
        command = sh_block("packshift watch").replace("train.py", f"{folder}/train.py")
        done = shell(f"{command} --once")
        assert done.returncode == 0, done.stderr
        assert f" {training.pid} " in done.stdout
    finally:
        training.kill()
        training.wait()


@pytest.mark.parametrize(("number", "suffix"), [(0, ".lmdb"), (1, ".h5")])
def test_readers_without_packshift(folder: Path, converted: Path, number: int, suffix: str) -> None:
    if suffix == ".lmdb":
        shutil.copy(converted, folder / "photos.lmdb")
    else:
        convert(SAMPLE_PHOTOS, folder / "photos.h5")
    reader, paths = blocks(FORMAT, "python")[number], blocks(FORMAT, "python")[2]
    assert "packshift" not in reader.replace("photos", "")
    assert len([line for line in reader.splitlines() if line and not line.startswith("import")]) <= 5
    names: dict = {}
    exec(reader, names)
    if suffix == ".h5":
        exec(paths, names)
        assert names["path"] == "flower/flower_2.jpg"
        names["store"].close()
    assert names["label"] == 1
    assert np.array_equal(names["image"], resize_and_crop(SAMPLE_PHOTOS / "flower" / "flower_2.jpg", 256))


def test_the_format_document_lists_every_array_and_header_key(folder: Path) -> None:
    convert(SAMPLE_PHOTOS, folder / "photos.h5", size=None)
    reader = Reader(folder / "photos.h5")
    for name in reader.info.arrays:
        assert f"`{name}`" in FORMAT, name
    for key in (
        "magic",
        "version",
        "count",
        "classes",
        "payload",
        "arrays",
        "preprocessing",
        "source",
        "notes",
        "tools",
    ):
        assert f"`{key}`" in FORMAT, key


def test_links_between_documents_lead_somewhere() -> None:
    for document in [
        REPOSITORY / "README.md",
        *(REPOSITORY / "docs").glob("*.md"),
        *(REPOSITORY / "benchmarks").glob("*.md"),
    ]:
        for link in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / link).exists(), f"{document.name}: {link}"


def test_sample_photos_are_what_the_script_draws() -> None:
    sys.path.insert(0, str(REPOSITORY / "sample_data"))
    try:
        import make_photos
    finally:
        sys.path.remove(str(REPOSITORY / "sample_data"))
    files = sorted(SAMPLE_PHOTOS.rglob("*.jpg"))
    assert len(files) == len(make_photos.DRAW) * len(make_photos.SIZES) == 24
    assert sum(path.stat().st_size for path in files) < 500_000
    drawn = np.asarray(make_photos.make_photo("boat", 0)).astype(int)
    stored = np.asarray(__import__("PIL.Image").Image.open(SAMPLE_PHOTOS / "boat" / "boat_1.jpg")).astype(int)
    assert np.abs(drawn - stored).mean() < 5


@pytest.mark.parametrize("number", range(len(blocks(TRAINING, "python"))))
def test_the_training_guide_runs(said: dict[str, tuple[str, str]], number: int) -> None:
    _, errors = said[f"training{number}"]
    assert errors == ""
