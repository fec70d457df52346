"""Peak memory of a conversion, for few and for many pictures.

    python benchmarks/convert_memory.py PICTURES [--counts 1000,20000] [--jobs 2] [--size 64] [--json FILE]

Each count of pictures is made from links to those in PICTURES and converted by the command in a process of its own. Every
50 ms the memory of that process and of its decoding processes is read: PSS, in which memory that several share counts
once, and USS, what would be free if that process ended. What is printed are the highest sums seen. Page cache of the
files read and written is not in them: the kernel takes that back when it is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil


def link_pictures(pictures: list[Path], count: int, folder: Path) -> None:
    for number in range(count):
        place = folder / f"class {number // 1000:03}"
        place.mkdir(parents=True, exist_ok=True)
        source = pictures[number % len(pictures)]
        (place / f"{number:07}{source.suffix}").symlink_to(source.resolve())


def measure(words: list[str]) -> dict[str, float]:
    """Highest memory in MB while the command runs, and how many seconds it took."""
    started = time.perf_counter()
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak = {"main_uss_mb": 0.0, "each_decoder_uss_mb": 0.0, "all_pss_mb": 0.0}
    main = psutil.Process(process.pid)
    while process.poll() is None:
        try:
            memory = [each.memory_full_info() for each in (main, *main.children())]
        except psutil.NoSuchProcess:
            continue
        peak["main_uss_mb"] = max(peak["main_uss_mb"], memory[0].uss / 1e6)
        peak["each_decoder_uss_mb"] = max([peak["each_decoder_uss_mb"], *(each.uss / 1e6 for each in memory[1:])])
        peak["all_pss_mb"] = max(peak["all_pss_mb"], sum(each.pss for each in memory) / 1e6)
        time.sleep(0.05)
    if process.returncode not in (0, 3):
        raise SystemExit(f"{' '.join(words)} ended with {process.returncode}")
    return {**peak, "seconds": time.perf_counter() - started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pictures", type=Path)
    parser.add_argument("--counts", default="1000,20000")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--size", default="64")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    pictures = sorted(Path(place) / name for place, _, names in os.walk(options.pictures) for name in names)
    rows = []
    for count in map(int, options.counts.split(",")):
        for suffix in ("lmdb", "h5"):
            with tempfile.TemporaryDirectory() as folder:
                link_pictures(pictures, count, Path(folder) / "src")
                words = [sys.executable, "-m", "packshift", "convert", f"{folder}/src", f"{folder}/out.{suffix}"]
                row = measure([*words, "--jobs", str(options.jobs), "--size", options.size])
            rows.append({"pictures": count, "format": suffix, "jobs": options.jobs, "size": options.size, **row})
            print(
                f"{count:>8,} pictures, {suffix:<4}: main process {row['main_uss_mb']:.0f} MB, each decoder "
                f"{row['each_decoder_uss_mb']:.0f} MB, all together {row['all_pss_mb']:.0f} MB; {row['seconds']:.0f} s"
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
