"""The command `packshift watch`."""

from __future__ import annotations

import sys

import click


@click.command("watch")
@click.argument("pid", metavar="PID", type=click.IntRange(min=1))
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="From one look to the next.",
)
@click.option("--log", metavar="F.csv", type=click.Path(), help="Append each look as a row to this CSV file.")
@click.option("--once", is_flag=True, help="One look, and done.")
@click.option("--json", "as_json", is_flag=True, help="Print each look as one JSON document on a line of its own.")
def watch_command(pid: int, interval: float, log: str | None, once: bool, as_json: bool) -> None:
    """Watch a training's processes while they run: memory, trends, and warnings with their reasons.

    PID is the training's main process; its workers and all else that it starts are found. Ends with a summary when the
    process ends, or at Ctrl-C, which leaves the process alone.

    \b
    packshift watch 12345
    packshift watch 12345 --interval 10 --log memory.csv
    packshift watch "$(pgrep -o -f train.py)" --once --json

    Exit code 0 means that the process was watched to its end or until Ctrl-C, whatever was seen; 1 that there is no such
    process, that it is another user's, or that the log cannot be written.
    """
    from packshift.watch_view import run_watch

    run_watch(pid, interval=interval, log=log, once=once, as_json=as_json, out=sys.stdout)
