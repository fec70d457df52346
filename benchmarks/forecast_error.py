"""How far the forecast of memory is from what loading takes.

    python benchmarks/forecast_error.py STORE|FOLDER|MODULE:DATASET [--workers 0,1,2,4] [--batches 16,64,256]
        [--prefetch 1,2,4] [--start-methods fork,spawn] [--every 1] [--json FILE]

One probe for each start method (and one without workers) measures the constants. Then every configuration runs in a
process of its own, is given time to fill its queues, and all its processes are looked at every 20 ms: private memory,
shared memory (also what no process maps while it is on its way), swap and page tables. The highest sum is compared with
the forecast. `--every 3` takes each third configuration. MODULE:DATASET is a dataset object of an importable module.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import shutil
import statistics
import sys
import tempfile
from dataclasses import replace
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

from packshift.carried import Carried, pack
from packshift.forecasting import forecast, probe
from packshift.isolation import Trial, run_trial


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def opened(name: str) -> tuple[Any, Trial]:
    """What is measured, and what all its trials have in common."""
    if os.path.exists(name):
        return name, Trial(name, size=(256, 256) if os.path.isdir(name) else None)
    module, _, attribute = name.partition(":")
    dataset = getattr(import_module(module), attribute)
    carried = os.path.join(tempfile.mkdtemp(prefix="packshift-forecast-"), "carried.pickle")
    pack(Carried(dataset), carried)
    atexit.register(shutil.rmtree, os.path.dirname(carried))
    return dataset, Trial("", carried=carried)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data")
    parser.add_argument("--workers", type=numbers, default=[0, 1, 2, 4])
    parser.add_argument("--batches", type=numbers, default=[16, 64, 256])
    parser.add_argument("--prefetch", type=numbers, default=[1, 2, 4])
    parser.add_argument("--start-methods", default="fork,spawn")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    data, common = opened(options.data)
    configurations = [(0, batch, 2, None) for batch in options.batches if 0 in options.workers]
    configurations += [
        (workers, batch, prefetch, method)
        for method, workers, batch, prefetch in product(
            options.start_methods.split(","), filter(None, options.workers), options.batches, options.prefetch
        )
    ]
    probes = {}
    rows = []
    for workers, batch, prefetch, method in configurations[:: options.every]:
        kind = (workers > 0, method)
        if kind not in probes:
            probes[kind] = probe(data, num_workers=workers, start_method=method)
        foretold = forecast(
            data,
            batch_size=batch,
            num_workers=workers,
            prefetch_factor=prefetch,
            start_method=method,
            probe=probes[kind],
        ).total
        trial = replace(
            common,
            batch_size=batch,
            num_workers=workers,
            prefetch_factor=prefetch,
            start_method=method,
            seconds=0.3,
            batches=2 * max(1, workers),
            step_ms=5.0,
            fill=True,
        )
        ended = run_trial(trial, timeout=300, sample_every=0.02)
        if ended.peak_bytes is None or ended.result is None:
            print(f"{workers} workers, batch {batch}, prefetch {prefetch}, {method}: {ended.error}")
            continue
        error = foretold / ended.peak_bytes - 1
        rows.append(
            {
                "num_workers": workers,
                "batch_size": batch,
                "prefetch_factor": prefetch,
                "start_method": method,
                "forecast_mb": foretold / 1e6,
                "peak_mb": ended.peak_bytes / 1e6,
                "error": error,
            }
        )
        print(
            f"{workers} workers, batch {batch:>3}, prefetch {prefetch}, {method or '-':<5}: "
            f"forecast {foretold / 1e6:7.1f} MB, measured {ended.peak_bytes / 1e6:7.1f} MB, {error:+.1%}",
            flush=True,
        )
    errors = sorted(abs(row["error"]) for row in rows)
    lowest = min(row["error"] for row in rows)
    print(
        f"{len(rows)} configurations: median error {statistics.median(errors):.1%}, worst {errors[-1]:.1%}, "
        f"lowest {lowest:+.1%}"
    )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    sys.exit(0)


if __name__ == "__main__":
    main()
