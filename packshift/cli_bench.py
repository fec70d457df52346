"""The command `packshift bench`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from packshift.cli_shared import echo, print_json, quiet_option
from packshift.errors import TargetError
from packshift.stores import format_names

if TYPE_CHECKING:
    _Type = click.ParamType[Any]
else:
    _Type = click.ParamType  # generic since click 8.4 only


class _List(_Type):
    """Values separated by commas, each of type `kind`."""

    def __init__(self, kind: _Type, name: str) -> None:
        self.name = name
        self._kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        return tuple(self._kind.convert(part.strip(), param, ctx) for part in value.split(",") if part.strip())


@click.command("bench")
@click.argument("sources", metavar="SRC_OR_STORE...", nargs=-1, required=True, type=click.Path())
@click.option(
    "--formats",
    type=_List(click.Choice(["jpeg", *format_names()]), "LIST"),
    help="What to compare; jpeg: the pictures themselves.  [default: jpeg,hdf5,lmdb]",
)
@click.option(
    "--num-workers",
    type=_List(click.IntRange(min=0), "LIST"),
    help="Worker processes (or threads) to try.  [default: 0,1,2,4,... up to the CPUs this process may use]",
)
@click.option("--batch-size", type=click.IntRange(min=1), default=64, show_default=True, help="Pictures in a batch.")
@click.option(
    "--loader",
    type=click.Choice(["dataloader", "threads", "both"]),
    default="dataloader",
    show_default=True,
    help="dataloader: torch's, with worker processes; threads: packshift.Loader.",
)
@click.option(
    "--start-method", type=click.Choice(["fork", "spawn", "forkserver"]), help="Of workers.  [default: Python's]"
)
@click.option("--prefetch-factor", type=click.IntRange(min=1), help="Batches ahead per worker.  [default: 2]")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Runs of each case.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=2.0,
    show_default=True,
    help="Time measured for each case, over all its runs.",
)
@click.option("--epochs", type=click.IntRange(min=1), help="Passes over the pictures that each run takes at least.")
@click.option(
    "--images", type=click.IntRange(min=1), default=2000, show_default=True, help="Pictures to take from SRC, at most."
)
@click.option("--size", default="256", show_default=True, metavar="N|HxW", help="As in packshift convert.")
@click.option(
    "--step-ms", type=click.FloatRange(min=0), default=0.0, help="Let the consumer work so long on each batch."
)
@click.option(
    "--step-matmul",
    type=click.IntRange(min=0),
    default=0,
    help="Let it multiply so many matrices of 512 x 512 instead.",
)
@click.option("--cold", is_flag=True, help="Measure an epoch with nothing in the page cache.")
@click.option("--json", "json_file", type=click.Path(), metavar="FILE", help="Write everything as JSON; -: to stdout.")
@click.option("--csv", "csv_file", type=click.Path(), metavar="FILE", help="Write the rows as CSV.")
@click.option(
    "--html", "html_file", type=click.Path(), metavar="FILE", help="Write a page with plots (packshift[report])."
)
@quiet_option
def bench_command(
    sources: Sequence[str],
    json_file: str | None,
    csv_file: str | None,
    html_file: str | None,
    quiet: bool,
    **options: Any,
) -> None:
    """Measure loading speed and memory per format and number of workers, and say which to use.

    Takes a folder of pictures, of which a sample is converted for this, or stores. Every case runs in a process of its
    own, in turns with the others; the page cache is warm unless --cold is given. Ctrl-C prints what is finished.

    \b
    packshift bench photos/
    packshift bench photos.lmdb photos.h5 --num-workers 0,2,4 --batch-size 256 --html report.html
    """
    from packshift.bench_report import bench_csv, bench_text
    from packshift.benchmarking import bench

    if html_file is not None:
        from packshift.bench_html import bench_html, require_matplotlib

        require_matplotlib()  # before a minute of measuring, not after it
    with _bar(quiet=quiet) as progress:
        found = bench(*sources, progress=progress, **options)
    if json_file == "-":
        print_json(found.to_json())
    elif not quiet:
        echo(bench_text(found, colour=sys.stdout.isatty(), encoding=sys.stdout.encoding or "utf-8"))
    if json_file not in (None, "-"):
        _write(json_file, _json_text(found.to_json()))
    if csv_file is not None:
        _write(csv_file, bench_csv(found))
    if html_file is not None:
        _write(html_file, bench_html(found))


def _json_text(value: Any) -> str:
    import json

    return json.dumps(value, indent=2) + "\n"


def _write(name: str, text: str) -> None:
    try:
        Path(name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise TargetError(f"{name}: cannot be written: {error.strerror}") from error


@contextmanager
def _bar(*, quiet: bool) -> Iterator[Callable[[int, int, str], None] | None]:
    """A bar over the runs on stderr, with the time left and what runs now."""
    if quiet or sys.stderr is None:
        yield None
        return
    from tqdm import tqdm

    with tqdm(unit=" runs", disable=None, file=sys.stderr, dynamic_ncols=True, leave=False) as bar:

        def show(done: int, total: int, what: str) -> None:
            bar.total = total
            bar.set_postfix_str(what, refresh=False)
            bar.update(done - bar.n)
            bar.refresh()

        yield show
