"""The command `packshift export`."""

from __future__ import annotations

import click

from packshift.cli_shared import SOME_SKIPPED, echo, json_option, print_json, progress_bars, quiet_option
from packshift.text import printable


@click.command("export")
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
        with progress_bars(quiet=quiet) as progress:
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
