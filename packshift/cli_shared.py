"""What the commands have in common: exit codes, printing, progress, and the options that mean the same in all of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

FAILED = 1
WRONG_USAGE = 2
SOME_SKIPPED = 3


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


@contextmanager
def progress_bars(*, quiet: bool) -> Iterator[Callable[[str, int, int], None] | None]:
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
