"""How near a conversion comes to decoding and resizing alone.

    python benchmarks/convert_speed.py PICTURES [--jobs 2] [--rounds 5] [--json FILE]

The limit is Pillow alone: open, load, upright, RGB, resize, crop, nothing kept, on as many processes (and, as a second
figure, threads) as the conversion has jobs. Limit and conversion take turns, round by round, so that both see the same
machine; the result is the median over rounds of the ratio within each round. All files are read once beforehand, so the
page cache is warm for every side. Writing goes to --out, a temporary folder by default. With --times 5 every picture is
converted five times (through links), so that the fixed costs of a run (starting threads, two waits for the disk) weigh
as little as they do on a set of thousands.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from PIL import Image, ImageOps

from packshift import convert
from packshift.machine import usable_cpus

SIZE = 256


def decode_alone(path: str) -> int:
    """Resize(256) and CenterCrop(256) with Pillow, without a needless copy."""
    with Image.open(path) as image:
        ImageOps.exif_transpose(image, in_place=True)
        image = image if image.mode == "RGB" else image.convert("RGB")
        image.load()
    width, height = image.size
    short, long = sorted((width, height))
    long = int(SIZE * long / short)
    image = image.resize((SIZE, long) if width <= height else (long, SIZE), Image.Resampling.BILINEAR)
    left, top = round((image.width - SIZE) / 2), round((image.height - SIZE) / 2)
    return image.crop((left, top, left + SIZE, top + SIZE)).getpixel((0, 0))[0]


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
            }
            for suffix in ("lmdb", "h5"):
                target = Path(folder) / f"round{number}.{suffix}"
                row[suffix] = rate(len(paths), lambda target=target: convert(pictures, target, jobs=options.jobs))
                target.unlink()
            row["limit"] = max(row["processes"], row["threads"])
            rounds.append(row)

    print(f"{len(paths)} pictures, {options.jobs} jobs, {options.rounds} rounds, images/s (median, lowest, highest):")
    for name in ("processes", "threads", "lmdb", "h5"):
        values = sorted(row[name] for row in rounds)
        label = f"decode alone, {name}" if name in ("processes", "threads") else f"convert to {name}"
        print(f"  {label:<26}{statistics.median(values):7.0f}{values[0]:7.0f}{values[-1]:7.0f}")
    result = {"pictures": len(paths), "jobs": options.jobs, "rounds": rounds, "limit_fraction": {}}
    for name in ("lmdb", "h5"):
        ratios = sorted(row[name] / row["limit"] for row in rounds)
        result["limit_fraction"][name] = statistics.median(ratios)
        spread = f"{ratios[0]:.1%} to {ratios[-1]:.1%}"
        print(f"  {name} reaches {statistics.median(ratios):.1%} of the faster limit ({spread})")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
