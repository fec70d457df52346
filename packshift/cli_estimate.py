"""The command `packshift estimate`."""

from __future__ import annotations

import os
from math import prod
from typing import Any

import click

from packshift.cli_shared import echo, json_option, print_json
from packshift.errors import UsageError

_DTYPE_BYTES = {"uint8": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int64": 8}


@click.command("estimate")
@click.argument("data", metavar="[STORE|FOLDER]", required=False, type=click.Path())
@click.option("--sample-shape", metavar="CxHxW", help="Shape of one sample instead of data, such as 3x1024x1024.")
@click.option(
    "--dtype", type=click.Choice(sorted(_DTYPE_BYTES)), default="uint8", show_default=True, help="Of --sample-shape."
)
@click.option("--batch-size", type=click.IntRange(min=1), default=64, show_default=True, help="Pictures in a batch.")
@click.option("--num-workers", type=click.IntRange(min=0), default=0, show_default=True, help="Processes, or threads.")
@click.option("--prefetch-factor", type=click.IntRange(min=1), default=2, show_default=True, help="Batches ahead each.")
@click.option(
    "--loader",
    type=click.Choice(["dataloader", "threads"]),
    default="dataloader",
    show_default=True,
    help="dataloader: torch's, with worker processes; threads: packshift.Loader.",
)
@click.option(
    "--start-method", type=click.Choice(["fork", "spawn", "forkserver"]), help="Of workers.  [default: Python's]"
)
@click.option("--pin-memory", is_flag=True, help="Count page-locked copies of the batches, as with a GPU.")
@click.option("--size", default="256", show_default=True, metavar="N|HxW", help="Of a folder's pictures.")
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Training processes on this machine (DDP).",
)
@click.option("--probe", is_flag=True, help="Measure what processes need with two short runs on the data.")
@json_option
def estimate_command(
    data: str | None,
    sample_shape: str | None,
    dtype: str,
    size: str,
    ranks: int,
    probe: bool,
    as_json: bool,
    **configuration: Any,
) -> None:
    """Foretell the memory of loading with these DataLoader settings, term by term, against this machine's limits.

    What is foretold is the memory of a training whose loader is ahead of it: all queues full. The model, its gradients
    and what the training itself keeps come on top.

    \b
    packshift estimate photos.lmdb --batch-size 64 --num-workers 4 --probe
    packshift estimate --sample-shape 3x1024x1024 --dtype float32 --batch-size 32 --num-workers 4
    """
    from packshift.estimate_report import estimate_json, estimate_text
    from packshift.forecasting import Data, data_of, forecast
    from packshift.forecasting import probe as probe_data
    from packshift.memory import limits
    from packshift.settings import parse_size

    if (data is None) == (sample_shape is None):
        raise click.UsageError("give a store, a folder of pictures, or --sample-shape: one of them")
    if sample_shape is not None:
        if probe:
            raise click.UsageError("--probe needs data to load: give a store or a folder of pictures")
        shape = _shape(sample_shape)
        item = Data(prod(shape) * _DTYPE_BYTES[dtype], batched=False)
    else:
        assert data is not None  # the check above; not a user's data
        if not os.path.exists(data):
            raise UsageError(f"{data} does not exist: expected a store or a folder of pictures")
        shape = None
        item = data_of(data, parse_size(size))
    measured = None
    if probe and data is not None:
        kind = {name: configuration[name] for name in ("num_workers", "loader", "start_method", "pin_memory")}
        measured = probe_data(data, size=size, **kind)
    found = forecast(item, probe=measured, **configuration)
    now = limits()
    if as_json:
        print_json(estimate_json(found, now, ranks))
    else:
        echo(estimate_text(found, now, ranks, item_bytes=item.item_bytes, shape=shape))


def _shape(text: str) -> tuple[int, ...]:
    parts = text.lower().split("x")
    if not 1 <= len(parts) <= 5 or not all(part.isascii() and part.isdigit() and 0 < len(part) < 8 for part in parts):
        raise UsageError(f"sample-shape {text[:40]!r}: expected sides such as 3x224x224")
    shape = tuple(int(part) for part in parts)
    if not all(shape):
        raise UsageError(f"sample-shape {text[:40]!r}: expected sides of at least 1")
    return shape
