"""How fast stores are read: stock DataLoader, in process, and Loader, against a bare gather and the copied LMDB recipe.

    python benchmarks/read_speed.py [--side 224] [--records 7000] [--batch-size 64] [--rounds 5] [--only NAME ...] [--json F]

All sides read the same synthetic pictures, shuffled, from a warm page cache, and the consumer touches one byte of every
4 KiB page of each batch. They take turns, round by round; a rate is the median over the rounds, a ratio the median of
the ratios within a round. Start-up (processes, imports, a first epoch in which each process maps the pages of the store) is
outside the clock.

- gather: `np.take(..., out=, mode="clip")` from a map of a flat file into one reused buffer, one thread: the machine's limit.
- index_select, packshift.gathering: the same by torch (8 bytes at a time) and by what packshift's datasets use.
- recipe: what tutorials show: pickled samples in LMDB, opened in each worker, default collate, 2 workers.
- the rest: packshift's datasets in the stock DataLoader (by format, workers and start method), and `Loader`.

With --step-ms T the consumer multiplies matrices for T ms per batch, and the table gives the share of the time that the
loop waits for data instead.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import pickle
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from packshift import Loader, open_dataset
from packshift.gathering import Rows
from packshift.record import Record
from packshift.stores import get_format
from packshift.stores._partial import partial_file
from packshift.stores._writer import Description, Writer

RECIPE = "recipe, 2 workers"


class Recipe(Dataset):
    """The LMDB dataset that everybody copies, with the one repair that it needs to run at all: opened in the worker."""

    def __init__(self, path: str, count: int) -> None:
        self.path, self.count, self.environment = path, count, None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.environment is None:
            self.environment = lmdb.open(self.path, subdir=False, readonly=True, lock=False, readahead=False)
        with self.environment.begin() as transaction:
            image, label = pickle.loads(transaction.get(str(index).encode()))
        return torch.from_numpy(image), label


def picture(base: np.ndarray, index: int) -> np.ndarray:
    image = base[index % len(base)].copy()
    image.reshape(-1)[:8] = np.frombuffer(np.int64(index).tobytes(), np.uint8)
    return image


def make_files(folder: Path, side: int, count: int) -> None:
    base = np.random.default_rng(0).integers(0, 256, (64, side, side, 3), dtype=np.uint8)
    for format_name, suffix in (("lmdb", ".lmdb"), ("hdf5", ".h5")):
        with partial_file(folder / f"store{suffix}") as file:
            writer = Writer(file, get_format(format_name), (side, side, 3))
            for index in range(count):
                image = picture(base, index)
                writer.append(Record(f"class/{index}.jpg", 0, image, 0, 0, (side, side)))
            writer.finish(Description(("class",), {}, {"layout": "class-folders", "found": count}, {}))
            file.publish(overwrite=True)
    with (folder / "flat.bin").open("wb") as flat:
        for index in range(count):
            flat.write(picture(base, index))
    environment = lmdb.open(str(folder / "recipe.lmdb"), subdir=False, lock=False, map_size=1 << 40, sync=False)
    for start in range(0, count, 500):
        with environment.begin(write=True) as transaction:
            for index in range(start, min(start + 500, count)):
                sample = (picture(base, index).transpose(2, 0, 1).copy(), 0)
                transaction.put(str(index).encode(), pickle.dumps(sample, protocol=4))
    environment.close()


def touch(images: torch.Tensor) -> int:
    """Read one byte of every page, in the order of memory."""
    flat = (
        images.permute(0, 2, 3, 1).reshape(-1)
        if images.is_contiguous(memory_format=torch.channels_last)
        else images.view(-1)
    )
    return int(flat[::4096].sum())


def timed(batches: Iterator[torch.Tensor], seconds: float, warm_up: int) -> float:
    """Images/s after a warm-up of so many images, until the time ends."""
    while warm_up > 0:
        images = next(batches)
        touch(images)
        warm_up -= len(images)
    count, started = 0, time.perf_counter()
    for images in batches:
        touch(images)
        count += len(images)
        if time.perf_counter() - started > seconds:
            break
    elapsed = time.perf_counter() - started
    del images
    return count / elapsed


def waiting_share(batches: Iterator[torch.Tensor], seconds: float, warm_up: int, step_ms: float) -> float:
    """The share of the time in which a loop that computes for `step_ms` per batch waits for the next one."""
    matrix = torch.rand(192, 192)
    while warm_up > 0:
        warm_up -= len(next(batches))
    waited, started = 0.0, time.perf_counter()
    while (asked := time.perf_counter()) - started < seconds:
        images = next(batches)
        got = time.perf_counter()
        waited += got - asked
        touch(images)
        while time.perf_counter() - got < step_ms / 1000:
            matrix = torch.nn.functional.normalize(matrix @ matrix)
    return waited / (time.perf_counter() - started)


Gather = Callable[[np.ndarray, np.ndarray, np.ndarray], object]  # rows, positions, out


def numpys_gather(rows: np.ndarray, positions: np.ndarray, out: np.ndarray) -> None:
    np.take(rows, positions, axis=0, out=out, mode="clip")


def torchs_gather(rows: np.ndarray, positions: np.ndarray, out: np.ndarray) -> None:
    wide, into = torch.from_numpy(rows).view(torch.int64), torch.from_numpy(out).view(torch.int64)
    torch.index_select(wide, 0, torch.from_numpy(positions), out=into)


def packshifts_gather(rows: np.ndarray, positions: np.ndarray, out: np.ndarray) -> None:
    Rows(rows).gather(positions, out)


def gather(folder: Path, side: int, count: int, batch_size: int, function: Gather) -> Iterator[torch.Tensor]:
    """One thread, one buffer."""
    rows = np.memmap(folder / "flat.bin", np.uint8, "c", shape=(count, side * side * 3))
    out = np.empty((batch_size, side * side * 3), np.uint8)
    generator = np.random.default_rng(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        while True:
            order = generator.permutation(count)
            for start in range(0, count - batch_size + 1, batch_size):
                function(rows, order[start : start + batch_size], out)
                yield torch.from_numpy(out)
    finally:
        torch.set_num_threads(threads)


def epochs(loader: object) -> Iterator[torch.Tensor]:
    for _ in itertools.count():
        for batch in loader:
            yield batch[0]


def stock(dataset: Dataset, batch_size: int, workers: int, method: str | None = None) -> Iterator[torch.Tensor]:
    loader = DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        multiprocessing_context=method,
        persistent_workers=workers > 0,
    )
    return epochs(loader)


def make_cases(folder: Path, side: int, count: int, batch_size: int) -> dict[str, Callable[[], Iterator[torch.Tensor]]]:
    def dataset(suffix: str) -> Dataset:
        return open_dataset(folder / f"store{suffix}")

    cases: dict[str, Callable[[], Iterator[torch.Tensor]]] = {
        "gather": lambda: gather(folder, side, count, batch_size, numpys_gather),
        "index_select": lambda: gather(folder, side, count, batch_size, torchs_gather),
        "packshift.gathering": lambda: gather(folder, side, count, batch_size, packshifts_gather),
        RECIPE: lambda: stock(Recipe(str(folder / "recipe.lmdb"), count), batch_size, 2, "fork"),
    }
    for suffix in (".lmdb", ".h5"):
        name = suffix[1:]
        for method in ("fork", "spawn", "forkserver"):
            cases[f"{name}, 2 workers, {method}"] = lambda s=suffix, m=method: stock(dataset(s), batch_size, 2, m)
        cases[f"{name}, 0 workers"] = lambda s=suffix: stock(dataset(s), batch_size, 0)
        for threads in (1, 2):
            cases[f"{name}, Loader, threads={threads}"] = lambda s=suffix, t=threads: epochs(
                Loader(dataset(s), batch_size, shuffle=True, drop_last=True, threads=t)
            )
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--records", type=int, default=7000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--only", nargs="*", default=[], help="cases whose name contains one of these")
    parser.add_argument("--folder", type=Path, default=None, help="keep the files here and use them again")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "recipe.lmdb").exists():
            make_files(folder, options.side, options.records)
        for path in folder.iterdir():
            zlib.crc32(path.read_bytes())
        cases = make_cases(folder, options.side, options.records, options.batch_size)
        wanted = {
            name: case
            for name, case in cases.items()
            if not options.only or name == "gather" or any(word in name for word in options.only)
        }
        rounds: list[dict[str, float]] = []
        for _ in range(options.rounds):
            row = {}
            for name, case in wanted.items():
                batches = case()
                if options.step_ms:
                    row[name] = waiting_share(batches, options.seconds, options.records, options.step_ms)
                else:
                    row[name] = timed(batches, options.seconds, options.records)
                batches.close()
                del batches
                gc.collect()
            rounds.append(row)
    print(
        f"{options.records} records of {options.side} x {options.side}, batch {options.batch_size}, {options.rounds} rounds "
        f"of {options.seconds} s, {len(os.sched_getaffinity(0))} CPUs, torch {torch.__version__}"
    )
    if options.step_ms:
        print(f"{'':<28}{'waits':>10}{'lowest':>10}{'highest':>10}   step {options.step_ms} ms")
    else:
        print(f"{'':<28}{'images/s':>10}{'lowest':>10}{'highest':>10}{'of gather':>11}{'x recipe':>10}")
    for name in wanted:
        values = [row[name] for row in rounds]
        shown = "10.1%" if options.step_ms else "10,.0f"
        line = f"{name:<28}" + "".join(
            format(value, shown) for value in (statistics.median(values), min(values), max(values))
        )
        if not options.step_ms:
            line += f"{statistics.median(row[name] / row['gather'] for row in rounds):>11.0%}"
        if not options.step_ms and RECIPE in wanted:
            line += f"{statistics.median(row[name] / row[RECIPE] for row in rounds):>10.1f}"
        print(line)
    if options.json:
        measured = {name: value for name, value in vars(options).items() if name not in ("folder", "json")}
        options.json.write_text(json.dumps({"options": measured, "rounds": rounds}, indent=2) + "\n")


if __name__ == "__main__":
    main()
