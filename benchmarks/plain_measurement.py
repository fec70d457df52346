"""One case of `packshift bench`, measured by a plain script that uses nothing of packshift but its datasets.

    python benchmarks/plain_measurement.py STORE_OR_FOLDER [--num-workers 2] [--batch-size 64] [--seconds 3]

A few lines of DataLoader and psutil, to compare the benchmark's figures with. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import time

import psutil
from torch.utils.data import DataLoader, RandomSampler

from packshift import ImageFolderDataset, open_dataset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data")
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    dataset = ImageFolderDataset(options.data) if os.path.isdir(options.data) else open_dataset(options.data)
    order = RandomSampler(dataset, num_samples=2000 * len(dataset))
    loader = iter(DataLoader(dataset, options.batch_size, sampler=order, num_workers=options.num_workers))
    for _ in range(3 * max(1, options.num_workers)):
        next(loader)
    images, started = 0, time.perf_counter()
    while time.perf_counter() - started < options.seconds:
        for _ in range(max(1, options.num_workers)):
            batch, _labels = next(loader)
            batch.as_strided((batch.numel(),), (1,))[::4096].sum()
            images += len(batch)
    speed = images / (time.perf_counter() - started)
    time.sleep(0.1)
    main_process = psutil.Process()
    workers = [child.memory_full_info() for child in main_process.children()]
    here = main_process.memory_full_info()
    result = {
        "images_per_s": speed,
        "main_rss_mb": here.rss / 1e6,
        "main_pss_mb": here.pss / 1e6,
        "main_uss_mb": here.uss / 1e6,
    }
    for name in ("rss", "pss", "uss") if workers else ():
        result[f"worker_{name}_mb"] = sum(getattr(worker, name) for worker in workers) / len(workers) / 1e6
    print(json.dumps(result), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
