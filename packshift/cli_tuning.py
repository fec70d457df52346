"""The command `packshift tune`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import click

from packshift.cli_shared import echo, json_option, print_json, quiet_option
from packshift.errors import UsageError


@click.command("tune")
@click.argument("source", metavar="STORE|FOLDER", type=click.Path())
@click.option(
    "--memory-limit", metavar="BYTES", help="8GB, 512MB, 2GiB.  [default: what this machine and job leave available]"
)
@click.option(
    "--target-batch-size", type=click.IntRange(min=1), default=64, show_default=True, help="Pictures to a step."
)
@click.option(
    "--step-ms",
    type=click.FloatRange(min=0),
    default=0.0,
    help="How long training works on a target batch; smaller ones take as much less.",
)
@click.option(
    "--max-workers", type=click.IntRange(min=0), help="Most worker processes.  [default: the CPUs this process may use]"
)
@click.option(
    "--prefetch-factor", type=click.IntRange(min=1), help="Batches ahead per worker.  [default: tries 1 to 4]"
)
@click.option(
    "--start-method", type=click.Choice(["fork", "spawn", "forkserver"]), help="Of workers.  [default: Python's]"
)
@click.option("--pin-memory", is_flag=True, help="Copy batches to page-locked memory, where there is a GPU.")
@click.option("--size", default="256", show_default=True, metavar="N|HxW", help="For FOLDER, as in packshift convert.")
@json_option
@quiet_option
def tune_command(source: str, as_json: bool, quiet: bool, **options: Any) -> None:
    """Choose num_workers, batch size and prefetch_factor by short trials that stay below a limit of memory.

    Every trial runs in a process of its own and is ended when it goes over the limit. Prints what was tried, the
    cheapest setting that is as fast as any, and code to paste. Ctrl-C prints what is finished.

    \b
    packshift tune photos.lmdb --memory-limit 8GB
    packshift tune photos/ --size 224 --memory-limit 2GB --step-ms 120

    Exit code 1 means that nothing fits.
    """
    from packshift.forecasting import data_of, forecast
    from packshift.settings import parse_size
    from packshift.tuning import tune
    from packshift.tuning_text import tuning_text

    if not os.path.exists(source):
        raise UsageError(f"{source} does not exist: expected a store or a folder of pictures")
    data = data_of(source, parse_size(options["size"]))
    with _bar(quiet=quiet) as progress:
        found = tune(
            source,
            foretell=lambda configuration: forecast(data, **asdict(configuration)).total,
            progress=progress,
            **options,
        )
    if as_json:
        print_json(found.to_json())
    elif not quiet:
        echo(tuning_text(found))
    if found.choice is None:
        raise click.ClickException(found.notes[-1])


@contextmanager
def _bar(*, quiet: bool) -> Iterator[Callable[[int, str], None] | None]:
    """On stderr, where that is a terminal, what is tried now; how many trials will be needed, nobody knows."""
    if quiet or sys.stderr is None:
        yield None
        return
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # no thread of its own
    with tqdm(desc="tuning", unit=" trials", disable=None, file=sys.stderr, dynamic_ncols=True, leave=False) as bar:

        def show(done: int, what: str) -> None:
            bar.set_postfix_str(what, refresh=False)
            bar.update(done - bar.n)
            bar.refresh()

        yield show
