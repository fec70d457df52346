"""The command line: each command in a file of its own gathers the options, calls one function, prints.

Results go to stdout, progress and log to stderr. Every error is one line. Exit codes: 0 all done; 1 failed, nothing
published; 2 wrong usage; 3 published, but some files were skipped.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from packshift._version import __version__
from packshift.cli_bench import bench_command
from packshift.cli_convert import convert_command
from packshift.cli_estimate import estimate_command
from packshift.cli_export import export_command
from packshift.cli_info import info_command
from packshift.cli_shared import FAILED, WRONG_USAGE
from packshift.cli_tuning import tune_command
from packshift.cli_verify import verify_command
from packshift.cli_watch import watch_command
from packshift.errors import PackshiftError, UsageError
from packshift.text import printable


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


for _command in (
    convert_command,
    info_command,
    verify_command,
    export_command,
    watch_command,
    bench_command,
    estimate_command,
    tune_command,
):
    main.add_command(_command)
