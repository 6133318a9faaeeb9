"""The `gossamer` command: its verbs, and errors as one line with the fix."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.core import TyperGroup

import gossamer as gs
from gossamer.cli.bench import bench
from gossamer.cli.calibrate import calibrate
from gossamer.cli.compare import compare
from gossamer.cli.console import say
from gossamer.cli.doctor import doctor
from gossamer.cli.errors import EXPECTED, Interrupted, describe
from gossamer.cli.fidelity import fidelity
from gossamer.cli.generate import generate
from gossamer.cli.methods import methods
from gossamer.cli.report import report

BAD_INPUT = 2
INTERRUPTED = 130
_DEBUG = "--debug"


class OneLineErrors(TyperGroup):
    """A command group that answers bad input with `error: …` and exit code 2, Ctrl-C with 130."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: object,
    ) -> object:
        """Run a command and exit; see `click.Command.main`.

        `--debug` is taken out before the verbs see it, so that it may stand anywhere.
        """
        arguments = list(sys.argv[1:] if args is None else args)
        debug = _DEBUG in arguments
        arguments = [argument for argument in arguments if argument != _DEBUG]
        try:
            code = super().main(
                arguments, prog_name, complete_var, False, windows_expand_args, **extra
            )
            if code == INTERRUPTED:  # Ctrl-C, which typer turns into this code
                say("interrupted: nothing half-written is left")
        except Interrupted as error:
            say(f"interrupted: {error}")
            code = INTERRUPTED
        except EXPECTED as error:
            if debug:
                traceback.print_exc()
            say(f"error: {describe(error)}")
            code = BAD_INPUT
        if standalone_mode:
            sys.exit(code if isinstance(code, int) else 0)
        return code


app = typer.Typer(
    name="gossamer",
    cls=OneLineErrors,
    help="Sparse attention for video diffusion transformers, with the quality loss measured.",
    epilog="--debug, anywhere on the line, shows the traceback of an error.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help wraps better, and keeps brackets that are meant as such
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(gs.__version__)
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    *,
    version: Annotated[  # noqa: ARG001 - acted upon by its callback
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Show the help when no command is given."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


for _command in (doctor, methods, generate, compare, fidelity, bench, calibrate, report):
    app.command()(_command)


def main() -> None:
    """Run the `gossamer` command."""
    app()
