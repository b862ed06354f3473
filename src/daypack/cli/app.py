"""The commands under their names."""

from typing import Annotated

import typer

import daypack
from daypack.cli import compare as compare_command
from daypack.cli import inspect as inspect_commands
from daypack.cli import plan as plan_command
from daypack.cli import state as state_commands
from daypack.cli import train as train_command

app = typer.Typer(
    help="Train with compressed optimizer state, and see what it costs and saves.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"daypack {daypack.__version__}")
        raise typer.Exit


app.command()(plan_command.plan)


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train with compressed optimizer state, and see what it costs and saves."""


app.command()(compare_command.compare)
app.command()(train_command.train)
for command, usage in {**inspect_commands.INSPECT_COMMANDS, **state_commands.STATE_COMMANDS}.items():
    app.command(options_metavar=usage)(command)
