"""The command `packshift info`."""

from __future__ import annotations

import click

from packshift.cli_shared import echo, json_option, print_json


@click.command("info")
@click.argument("store", type=click.Path())
@click.option("--skipped", "all_skipped", is_flag=True, help="List every skipped file.")
@click.option("-v", "--verbose", is_flag=True, help="Also how the store is read on this machine, and why.")
@json_option
def info_command(store: str, all_skipped: bool, verbose: bool, as_json: bool) -> None:
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
