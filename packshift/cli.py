"""The command line: gather the options, call one function, print.

Results go to stdout, progress and log to stderr. Every error is one line. Exit codes: 0 all done; 1 failed, nothing
published; 2 wrong usage; 3 published, but some files were skipped.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from packshift._version import __version__
from packshift.cli_bench import bench_command
from packshift.cli_estimate import estimate_command
from packshift.cli_shared import echo, json_option, print_json, quiet_option
from packshift.cli_tuning import tune_command
from packshift.errors import PackshiftError, UsageError
from packshift.sources import AUTO, layout_names
from packshift.stores import format_names
from packshift.text import printable

FAILED = 1
WRONG_USAGE = 2
SOME_SKIPPED = 3


class _Commands(click.Group):
    """Prints each error as one line and turns it into the exit code of the contract."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            result = super().main(*args, **{**kwargs, "standalone_mode": False})
        except click.UsageError as error:
            command = error.ctx.command_path if error.ctx else "packshift"
            _fail(f"{error.format_message()} (see {command} --help)", WRONG_USAGE)
        except click.ClickException as error:
            _fail(error.format_message(), FAILED)
        except UsageError as error:
            _fail(str(error), WRONG_USAGE)
        except PackshiftError as error:
            _fail(str(error), FAILED)
        except (click.Abort, KeyboardInterrupt):
            _fail("interrupted", FAILED)
        except MemoryError:
            _fail(
                "out of memory: use fewer --jobs, or a machine with more; the same command carries on where a run stopped",
                FAILED,
            )
        except BrokenPipeError:
            # The reader of our output has gone (packshift info ... | head); keep Python from complaining at exit.
            sys.stderr.close()
            sys.exit(FAILED)
        except Exception as error:  # a fault of packshift: the process ends here, in one line unless asked for more
            if "PACKSHIFT_DEBUG" in os.environ:
                raise
            _fail(f"unexpected {type(error).__name__}: {error} (PACKSHIFT_DEBUG=1 shows where)", FAILED)
        sys.exit(result if isinstance(result, int) else 0)


def _fail(message: str, code: int) -> None:
    click.echo(f"packshift: {printable(message)}", err=True)
    sys.exit(code)


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="packshift")
@click.pass_context
def main(context: click.Context) -> None:
    """Turn a folder of pictures into one fast file for PyTorch.

    \b
    packshift convert photos/ photos.lmdb
    packshift info photos.lmdb
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@main.command()
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
@json_option
@quiet_option
def convert(
    source: str,
    target: str,
    size: str,
    fit: str,
    background: str | None,
    fast_decode: bool,
    jobs: int | None,
    on_error: str,
    max_errors: str | None,
    overwrite: bool,
    restart: bool,
    dry_run: bool,
    force: bool,
    format_: str | None,
    layout: str,
    as_json: bool,
    quiet: bool,
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
    from packshift.planning import check_room, look_ahead, make_plan
    from packshift.report import outlook_json, outlook_text, plan_text, report_json, report_text, warning_text

    started = time.perf_counter()
    with _scanning_bar(quiet=quiet) as scanning:
        plan = make_plan(
            source,
            target,
            size=size,
            fit=fit,
            background=background,
            fast_decode=fast_decode,
            layout=layout,
            format=format_,
            jobs=jobs,
            on_error=on_error,
            max_errors=max_errors,
            overwrite=overwrite,
            restart=restart,
            force=force,
            scanning=scanning,
        )
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


@main.command()
@click.argument("store", type=click.Path())
@click.option("--skipped", "all_skipped", is_flag=True, help="List every skipped file.")
@click.option("-v", "--verbose", is_flag=True, help="Also how the store is read on this machine, and why.")
@json_option
def info(store: str, all_skipped: bool, verbose: bool, as_json: bool) -> None:
    """Show what is in STORE: format, count, shape, classes, preprocessing, size, versions, skipped files.

    \b
    packshift info photos.lmdb
    packshift info photos.lmdb --json
    """
    from packshift.report import info_json, info_text, reading_text
    from packshift.stores._reader import Reader

    reader = Reader(store)
    if as_json:
        print_json(info_json(reader))
    else:
        echo(info_text(reader, all_skipped=all_skipped))
        if verbose:
            echo(reading_text(reader))


@main.command()
@click.argument("store", type=click.Path())
@click.option(
    "--source",
    metavar="SRC",
    type=click.Path(),
    help="Also decode the pictures of this folder again and compare: same files, same pixels?",
)
@click.option(
    "--sample", type=click.IntRange(min=1), help="With --source, decode only this many pictures, evenly spread."
)
@click.option(
    "--jobs", type=click.IntRange(min=1), help="Threads that check.  [default: the CPUs this process may use]"
)
@json_option
@quiet_option
def verify(store: str, source: str | None, sample: int | None, jobs: int | None, as_json: bool, quiet: bool) -> int:
    """Check every byte of STORE: is each record what was written, and the file whole and in order?

    Each problem is one line on stderr and names its record and source path. Nothing is repaired.

    \b
    packshift verify photos.lmdb
    packshift verify photos.lmdb --source photos/ --sample 1000

    Exit code 0 means that all is as it should be, 1 that something is not.
    """
    from packshift.report import verification_json, verification_text
    from packshift.verification import verify_store

    if sample is not None and source is None:
        raise click.UsageError("--sample says how many pictures of --source to decode; give both")
    try:
        with _progress_bars(quiet=quiet) as progress:
            found = verify_store(store, source, sample=sample, jobs=jobs, progress=progress)
    except KeyboardInterrupt:
        raise click.ClickException("interrupted before everything was checked") from None
    if as_json:
        print_json(verification_json(found))
    else:
        for problem in found.problems:
            echo(f"packshift: {printable(found.path)}: {problem}", err=True)
        more = found.faults + found.differences - len(found.problems)
        if more:
            echo(f"packshift: {printable(found.path)}: and {more:,} more problems", err=True)
        for note in found.notes:
            echo(f"note: {note}", err=True)
        if not quiet:
            echo(verification_text(found))
    return 0 if found.passed else FAILED


@main.command("export")
@click.argument("store", type=click.Path())
@click.argument("folder", metavar="DIR", type=click.Path())
@click.option(
    "--image-format",
    type=click.Choice(["png", "jpeg"]),
    default="png",
    show_default=True,
    help="png: lossless, gives the same records again; jpeg: smaller, changes pixels.",
)
@click.option("--quality", type=click.IntRange(1, 100), default=90, show_default=True, help="Of JPEG pictures.")
@click.option(
    "--jobs", type=click.IntRange(min=1), help="Pictures encoded at a time.  [default: the CPUs this process may use]"
)
@json_option
@quiet_option
def export_command(
    store: str, folder: str, image_format: str, quality: int, jobs: int | None, as_json: bool, quiet: bool
) -> int:
    """Write the records of STORE as pictures into DIR, a new or empty folder, in class folders, under their old names.

    Converting DIR again with the same --size gives the same records in the same order (from png, to the bit).

    \b
    packshift export photos.lmdb photos-again/
    packshift export photos.lmdb photos-again/ --image-format jpeg --quality 95

    Exit code 3 means that some records are damaged and were left out; each is named on stderr.
    """
    from packshift.export import export_store
    from packshift.report import export_json, export_text

    try:
        with _progress_bars(quiet=quiet) as progress:
            report = export_store(
                store, folder, image_format=image_format, quality=quality, jobs=jobs, progress=progress
            )
    except KeyboardInterrupt:
        raise click.ClickException(f"interrupted: what was written so far is left in {folder}") from None
    for skipped in report.skipped:
        echo(f"skipped {printable(skipped.path)}: {skipped.reason}", err=True)
    for note in report.notes:
        echo(f"note: {note}", err=True)
    if as_json:
        print_json(export_json(report))
    elif not quiet:
        echo(export_text(report))
    return SOME_SKIPPED if report.skipped else 0


@contextmanager
def _progress_bars(*, quiet: bool) -> Iterator[Callable[[str, int, int], None] | None]:
    """A bar on stderr per stage of a command ("bytes", "pictures"); none where stderr is not a terminal."""
    if quiet or sys.stderr is None:
        yield None
        return
    from tqdm import tqdm

    bars: dict[str, tqdm] = {}

    def progress(stage: str, done: int, total: int) -> None:
        if stage not in bars:
            unit = {"unit": "B", "unit_scale": True} if stage == "bytes" else {"unit": f" {stage}"}
            bars[stage] = tqdm(total=total, disable=None, file=sys.stderr, dynamic_ncols=True, **unit)
        bars[stage].update(done - bars[stage].n)

    try:
        yield progress
    finally:
        for bar in bars.values():
            bar.close()


@main.command()
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
def watch(pid: int, interval: float, log: str | None, once: bool, as_json: bool) -> None:
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


main.add_command(bench_command)
main.add_command(estimate_command)
main.add_command(tune_command)
