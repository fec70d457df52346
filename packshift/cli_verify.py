"""The command `packshift verify`."""

from __future__ import annotations

import click

from packshift.cli_shared import FAILED, echo, json_option, print_json, progress_bars, quiet_option
from packshift.text import printable


@click.command("verify")
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
def verify_command(
    store: str, source: str | None, sample: int | None, jobs: int | None, as_json: bool, quiet: bool
) -> int:
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
        with progress_bars(quiet=quiet) as progress:
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
