"""The command `packshift convert`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from packshift.cli_shared import SOME_SKIPPED, echo, json_option, print_json, quiet_option
from packshift.sources import AUTO, layout_names
from packshift.sources._labelling import ORDERS, STRING
from packshift.stores import format_names
from packshift.text import printable


@click.command("convert")
@click.argument("source", metavar="SRC", type=click.Path())
@click.argument("target", metavar="OUT", type=click.Path())
@click.option(
    "--size",
    default="256",
    show_default=True,
    metavar="N|HxW|none",
    help="Side of the square, or height x width, in pixels; none: every picture keeps its own size.",
)
@click.option(
    "--fit",
    type=click.Choice(["crop", "pad", "stretch"]),
    default="crop",
    show_default=True,
    help="crop: cover the size and cut the middle out; pad: fit inside, black around; stretch: ignore proportions.",
)
@click.option(
    "--background",
    metavar="COLOUR",
    help="Lay transparent pictures over this colour: white, #ff8000.  [default: drop the transparency]",
)
@click.option("--fast-decode", is_flag=True, help="Decode large JPEGs smaller: faster, pixels differ a little.")
@click.option(
    "--max-pixels",
    type=click.IntRange(min=1),
    metavar="N",
    help="Skip pictures of more pixels; a larger number lets huge ones through.  [default: 178956970, Pillow's limit]",
)
@click.option(
    "--jobs", type=click.IntRange(min=1), help="Pictures decoded at a time.  [default: the CPUs this process may use]"
)
@click.option(
    "--on-error",
    type=click.Choice(["skip", "stop"]),
    default="skip",
    show_default=True,
    help="What to do about a picture that cannot be read.",
)
@click.option(
    "--max-errors", metavar="N|P%", help="Give up when more pictures than this cannot be read.  [default: no limit]"
)
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists, once the new store is whole.")
@click.option("--restart", is_flag=True, help="Throw away what an earlier run that ended early has finished.")
@click.option("--dry-run", is_flag=True, help="Only say what would be written, and how long it would take.")
@click.option("--force", is_flag=True, help="Start even if the disk looks too small.")
@click.option("--format", "format_", type=click.Choice(format_names()), help="Format of OUT.  [default: by its suffix]")
@click.option(
    "--layout",
    type=click.Choice([AUTO, *layout_names()]),
    default=AUTO,
    show_default=True,
    help="How SRC is arranged: SRC/CLASS/**/picture, or pictures without classes.",
)
@click.option(
    "--class-order",
    type=click.Choice(ORDERS),
    default=STRING,
    show_default=True,
    help="Order of the class folders' names, from which labels count: string: as torchvision; natural: 2 before 10.",
)
@click.option(
    "--classes-from",
    metavar="FILE",
    type=click.Path(),
    help="Labels of another data set: a store, or a text file with one class name per line.",
)
@json_option
@quiet_option
def convert_command(
    source: str, target: str, format_: str | None, dry_run: bool, as_json: bool, quiet: bool, **options: Any
) -> int:
    """Convert the pictures in SRC to one store file OUT (.lmdb, .h5 or .hdf5).

    SRC holds one folder per class (labels count from 0 in the order of the sorted names), or pictures alone (label -1).
    Pixels are stored as uint8 RGB, upright. OUT appears when it is whole, or not at all. A run that ended early, by
    Ctrl-C, a full disk or a power failure, is carried on by the same command.

    \b
    packshift convert photos/ photos.lmdb
    packshift convert photos/ photos.h5 --size 224 --jobs 8

    Exit code 3 means that OUT is there but some pictures were skipped; each is named on stderr and by packshift info.
    """
    # One thread until the decoding processes are forked: the library behind numpy would start some, which nothing here
    # needs.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from packshift.conversion import run_plan
    from packshift.options import Options
    from packshift.planning import check_room, look_ahead, make_plan
    from packshift.report import outlook_json, outlook_text, plan_text, report_json, report_text, warning_text

    started = time.perf_counter()
    with _scanning_bar(quiet=quiet) as scanning:
        plan = make_plan(source, target, Options(format=format_, **options), scanning=scanning)
    echo(warning_text(plan) if quiet else plan_text(plan), err=True)
    outlook = look_ahead(plan, decode=dry_run or None)
    if dry_run:
        print_json(outlook_json(outlook)) if as_json else echo(outlook_text(outlook))
        return 0
    if not quiet:
        echo(outlook_text(outlook), err=True)
    check_room(plan, outlook)
    before = _identity(plan.target)
    try:
        with _progress_bar(len(plan.listing), quiet=quiet) as progress:
            report = run_plan(
                plan, progress=progress, log=lambda line: None if quiet else echo(line, err=True), started=started
            )
    except KeyboardInterrupt as error:
        if _identity(plan.target) == before:
            raise click.ClickException(
                f"interrupted: {str(error) or 'nothing was published; the same command carries on'}"
            ) from None
        echo(f"packshift: interrupted, but {printable(str(plan.target))} is whole and was published", err=True)
        return 0
    code = SOME_SKIPPED if report.skipped else 0
    try:
        for skipped in report.skipped:
            echo(f"skipped {printable(skipped.path)}: {skipped.reason}", err=True)
        if as_json:
            print_json(report_json(report))
        elif not quiet:
            echo(report_text(report))
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:  # the store is there, whatever became of the terminal; the exit code says so
        _give_up_output(f"the store was published; its summary cannot be printed: {error.strerror}")
    return code


def _identity(path: Path) -> tuple[int, int] | None:
    """Which file has this name now; None: none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _give_up_output(reason: str) -> None:
    """Keep Python from failing a second time when it flushes stdout at exit."""
    with suppress(OSError):
        click.echo(f"packshift: {reason}", err=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _progress_bar(total: int, *, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr with rate and time left; none where stderr is not a terminal."""
    if quiet or sys.stderr is None:
        yield None
        return
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # no thread of its own
    with tqdm(total=total, unit=" images", disable=None, file=sys.stderr, dynamic_ncols=True) as bar:

        def show(done: int, _: int) -> None:
            if not bar.n and done > 1:
                bar.initial = done  # finished by an earlier run: not part of the rate
            bar.update(done - bar.n)

        yield show


@contextmanager
def _scanning_bar(*, quiet: bool) -> Iterator[Callable[[int], None] | None]:
    """A count of files on stderr, where that is a terminal and the scan takes longer than a second."""
    if quiet or sys.stderr is None:
        yield None
        return
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # no thread of its own
    with tqdm(desc="scanning", unit=" files", disable=None, file=sys.stderr, leave=False, delay=1.0) as bar:
        yield lambda found: bar.update(found - bar.n) and None
