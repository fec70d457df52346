"""What the commands have in common: printing, and the options that mean the same in all of them."""

from __future__ import annotations

import json
import sys
from typing import Any

import click


def echo(text: str, *, err: bool = False) -> None:
    """Print whatever the terminal's encoding can show, the rest escaped, instead of failing on it."""
    stream = sys.stderr if err else sys.stdout
    if stream is None or not text:
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    click.echo(text.encode(encoding, "backslashreplace").decode(encoding), file=stream)


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
quiet_option = click.option(
    "-q", "--quiet", is_flag=True, help="No progress and no summary; warnings and errors are still told."
)
