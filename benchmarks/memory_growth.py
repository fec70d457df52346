"""Whether a worker's own memory grows from epoch to epoch, and what the shared memory in flight is.

    python benchmarks/memory_growth.py STORE [--epochs 20] [--batch-size 64] [--num-workers 2]

Prints, per epoch, the USS of each worker (memory that is its own: psutil `memory_full_info`) and the size of its slots,
as the slots themselves say and as the kernel counts it (`st_blocks` of the memfd).
"""

from __future__ import annotations

import argparse
import os

import psutil
from torch.utils.data import DataLoader

from packshift import open_dataset, slots


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("store")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--num-workers", type=int, default=2)
    options = parser.parse_args()
    loader = DataLoader(
        open_dataset(options.store),
        batch_size=options.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=options.num_workers,
        persistent_workers=True,
    )
    history = []
    for epoch in range(options.epochs):
        for images, _ in loader:
            nbytes = images.nbytes
        del images
        uss = [process.memory_full_info().uss / 1e6 for process in psutil.Process().children()]
        slot_counts = [len(peer.windows) for peer in slots._peers.values()]
        kernel = [os.fstat(peer.fd).st_blocks * 512 / 1e6 for peer in slots._peers.values()]
        history.append(uss)
        print(
            f"epoch {epoch + 1:2}: USS of workers {', '.join(f'{value:.1f}' for value in uss)} MB; slots "
            f"{', '.join(f'{count} x {nbytes / 1e6:.1f}' for count in slot_counts)} MB, kernel says "
            f"{', '.join(f'{value:.1f}' for value in kernel)} MB"
        )
    growth = [(last - second) / (len(history) - 2) for second, last in zip(history[1], history[-1], strict=True)]
    print(f"growth per epoch after the second: {', '.join(f'{value:+.3f}' for value in growth)} MB")


if __name__ == "__main__":
    main()
