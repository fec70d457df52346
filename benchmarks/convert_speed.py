"""How near a conversion comes to decoding and resizing alone.

    python benchmarks/convert_speed.py PICTURES [--jobs 2] [--rounds 5] [--times 5] [--fast-decode] [--json FILE]

The limit is Pillow alone: open, load, upright, RGB, resize, crop, nothing kept, on as many processes (and, as a second
figure, threads) as the conversion has jobs; a third figure is Pillow alone with the pixels given out as an array, which
is the least that any use of them needs. Limit and conversion take turns, round by round, so that both see the same
machine; the result is the median over rounds of the ratio within each round. All files are read once beforehand, so the
page cache is warm for every side.

A conversion is the command in a fresh process, and its time the one that it reports, from the arguments to the store
published and on disk; starting Python is not in it, as starting the limit's processes is not in the limit. Writing goes
to --out, a temporary folder by default. With --times 5 every picture is converted five times (through links), so that the
fixed costs of a run (two waits for the disk) weigh as little as they do on a set of thousands.

Each format is measured as plain packshift, with the extra packshift[turbo] where it is installed (which plain packshift does
not find), and with all that is faster than Pillow and zlib switched off, as where there was no C compiler.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from packshift.machine import usable_cpus

SIZE = 256
EXTRAS = ("isal", "simplejpeg")
KINDS = ["", " with turbo", " with Pillow's scaling"]
if not all(find_spec(extra) for extra in EXTRAS):
    KINDS.remove(" with turbo")
CONVERSIONS = [(f"{suffix}{kind}", suffix, kind) for kind in KINDS for suffix in ("lmdb", "h5")]
LABELS = {
    "processes": "decode alone, processes",
    "threads": "decode alone, threads",
    "array": "decode to an array, processes",
    **{name: f"convert to {name}" for name, *_ in CONVERSIONS},
}


def decode_alone(path: str) -> int:
    """Resize(256) and CenterCrop(256) with Pillow, without a needless copy."""
    return _decoded(path).getpixel((0, 0))[0]


def _decoded(path: str) -> Image.Image:
    with Image.open(path) as image:
        ImageOps.exif_transpose(image, in_place=True)
        image = image if image.mode == "RGB" else image.convert("RGB")
        image.load()
    width, height = image.size
    short, long = sorted((width, height))
    long = int(SIZE * long / short)
    image = image.resize((SIZE, long) if width <= height else (long, SIZE), Image.Resampling.BILINEAR)
    left, top = round((image.width - SIZE) / 2), round((image.height - SIZE) / 2)
    return image.crop((left, top, left + SIZE, top + SIZE))


def decode_to_array(path: str) -> int:
    """The same, and the pixels as an array of uint8 (256, 256, 3)."""
    return int(np.asarray(_decoded(path))[0, 0, 0])


def convert_rate(count: int, pictures: Path, target: Path, jobs: int, kind: str, *, fast_decode: bool) -> float:
    program = "from packshift.cli import main; main()"
    if not kind:
        program = f"import sys; sys.modules.update(dict.fromkeys({EXTRAS!r})); {program}"  # None: cannot be imported
    words = [sys.executable, "-c", program, "convert", pictures, target, "--jobs", str(jobs), "--json", "-q"]
    done = subprocess.run(
        words + ["--fast-decode"] * fast_decode,
        env={**os.environ, "PACKSHIFT_TURBO": "0" if kind == " with Pillow's scaling" else "1"},
        stdout=subprocess.PIPE,
        check=True,
    )
    target.unlink()
    return count / json.loads(done.stdout)["seconds"]


def rate(count: int, work) -> float:
    started = time.perf_counter()
    work()
    return count / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pictures", type=Path)
    parser.add_argument("--jobs", type=int, default=usable_cpus())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--fast-decode", action="store_true")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()

    rounds = []
    with (
        tempfile.TemporaryDirectory(dir=options.out) as folder,
        ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as processes,
        ThreadPoolExecutor(options.jobs) as threads,
    ):
        pictures = options.pictures
        if options.times > 1:
            pictures = Path(folder) / "pictures"
            for number in range(options.times):
                (pictures / f"{number}").mkdir(parents=True)
                (pictures / f"{number}" / "all").symlink_to(options.pictures.resolve())
        paths = [os.path.join(place, name) for place, _, names in os.walk(pictures, followlinks=True) for name in names]
        list(processes.map(decode_alone, paths, chunksize=4))  # start the processes and warm everything
        for number in range(options.rounds):
            row = {
                "processes": rate(len(paths), lambda: list(processes.map(decode_alone, paths, chunksize=4))),
                "threads": rate(len(paths), lambda: list(threads.map(decode_alone, paths))),
                "array": rate(len(paths), lambda: list(processes.map(decode_to_array, paths, chunksize=4))),
            }
            for name, suffix, kind in CONVERSIONS:
                row[name] = convert_rate(
                    len(paths),
                    pictures,
                    Path(folder) / f"round{number}.{suffix}",
                    options.jobs,
                    kind,
                    fast_decode=options.fast_decode,
                )
            row["limit"] = max(row["processes"], row["threads"])
            rounds.append(row)

    print(f"{len(paths)} pictures, {options.jobs} jobs, {options.rounds} rounds, images/s (median, lowest, highest):")
    for name, label in LABELS.items():
        values = sorted(row[name] for row in rounds)
        print(f"  {label:<38}{statistics.median(values):7.0f}{values[0]:7.0f}{values[-1]:7.0f}")
    result = {
        "pictures": len(paths),
        "jobs": options.jobs,
        "rounds": rounds,
        "limit_fraction": {},
        "array_fraction": {},
    }
    for name, *_ in CONVERSIONS:
        for kind, against in (("limit_fraction", "limit"), ("array_fraction", "array")):
            ratios = sorted(row[name] / row[against] for row in rounds)
            result[kind][name] = statistics.median(ratios)
            words = "the faster limit" if against == "limit" else "decoding to arrays"
            spread = f"{ratios[0]:.1%} to {ratios[-1]:.1%}"
            print(f"  {name} reaches {statistics.median(ratios):.1%} of {words} ({spread})")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
