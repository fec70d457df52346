"""What a `MemoryMonitor` costs a training with eight workers, as a share of the time.

    python benchmarks/monitor_cost.py [--seconds 30] [--main-mb 300] [--workers 8]

The workers do nothing and the main process holds so much memory, since what a look costs grows with what is mapped. Prints
the processor time of the monitor's thread at one sample a second, as the monitor itself reports it.
"""

from __future__ import annotations

import argparse
import os
import signal
import time

from packshift import MemoryMonitor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--main-mb", type=int, default=300)
    parser.add_argument("--workers", type=int, default=8)
    options = parser.parse_args()
    held = bytearray(os.urandom(1000) * (options.main_mb * 1000))
    pids = []
    for _ in range(options.workers):
        pid = os.fork()
        if pid == 0:
            signal.pause()
        pids.append(pid)
    with MemoryMonitor(log=lambda line: None) as monitor:
        time.sleep(options.seconds)
    report = monitor.report()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    print(
        f"{len(held) / 1e6:.0f} MB, {options.workers} workers, {report.samples} samples: {report.cost:.2%} of the time"
    )


if __name__ == "__main__":
    main()
