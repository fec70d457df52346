"""Kill conversions at random moments with SIGKILL, run the same command again, and compare the store byte for byte.

    python tests/kill_conversions.py PICTURES [--kills 50] [--seed 0] [--jobs 2]

Both formats take turns. A conversion is killed again and again at random moments until it has ended before its turn came;
its store is then compared with that of an undisturbed run. Exit code 1 where any differs, or a process is left behind.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil


def command(pictures: Path, target: Path, jobs: int) -> list[str]:
    return [sys.executable, "-m", "packshift", "convert", str(pictures), str(target), "--jobs", str(jobs)]


def run_for(seconds: float, words: list[str]) -> tuple[bool, int, list[psutil.Process]]:
    """(whether it was killed, pictures carried on with, its decoding processes)"""
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    children: list[psutil.Process] = []
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        children = psutil.Process(process.pid).children()
        process.kill()
    _, log = process.communicate()
    if process.returncode not in (0, 3, -9):
        raise SystemExit(f"{' '.join(words)}\nended with {process.returncode}: {log}")
    carried_on = re.search(r"carrying on: ([\d,]+) of", log)
    return process.returncode == -9, int(carried_on[1].replace(",", "")) if carried_on else 0, children


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pictures", type=Path)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    kills = rounds = carried_on = wrong = left_behind = 0
    with tempfile.TemporaryDirectory() as folder:
        undisturbed: dict[str, tuple[bytes, float]] = {}
        for suffix in ("lmdb", "h5"):
            target = Path(folder) / f"undisturbed.{suffix}"
            started = time.monotonic()
            subprocess.run(command(options.pictures, target, options.jobs), check=False, capture_output=True)
            undisturbed[suffix] = target.read_bytes(), time.monotonic() - started
        while kills < options.kills:
            suffix = ("lmdb", "h5")[rounds % 2]
            target = Path(folder) / f"killed.{suffix}"
            whole, seconds = undisturbed[suffix]
            history = []
            while True:
                killed, taken_over, children = run_for(
                    rng.uniform(0.05, 1.1) * seconds, command(options.pictures, target, options.jobs)
                )
                history.append(taken_over)
                if not killed:
                    break
                kills += 1
                assert not target.exists() or target.read_bytes() == whole
                _, alive = psutil.wait_procs(children, timeout=10)
                left_behind += len(alive)
                if target.exists():
                    break
            carried_on += sum(taken > 0 for taken in history)
            same = target.read_bytes() == whole
            wrong += not same
            leftovers = sorted(os.listdir(folder))
            print(f"{suffix}: killed {len(history) - 1} times, began at {history}: {'same' if same else 'DIFFERENT'}")
            assert leftovers == sorted(["undisturbed.lmdb", "undisturbed.h5", target.name]), leftovers
            target.unlink()
            rounds += 1
    print(
        f"{kills} kills in {rounds} conversions, {carried_on} runs carried on; "
        f"{wrong} stores differ, {left_behind} processes left behind"
    )
    sys.exit(bool(wrong or left_behind))


if __name__ == "__main__":
    main()
