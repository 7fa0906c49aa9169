"""The command line. Exit codes: 0 done, 1 a party is missing or a claim is refuted, 2 bad input, 130 interrupted.

With `--format json` the result object is all that stdout gets; whatever is said in words goes to stderr. A command's
module is imported when that command is asked for, so that `dpmerge --help` answers at once whatever they import.
"""

import os
import sys
import warnings
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer
from click import Command, Context
from click.exceptions import Abort, ClickException
from typer.core import TyperGroup

from dpmerge.cli.terminal import BAD_INPUT, INTERRUPTED
from dpmerge.common.errors import DpmergeError
from dpmerge.common.files import NO_PLACE, NO_SPACE, storage_refusal

COMMANDS = {
    "merge": (
        "Merge releases of dpmerge or any PEFT LoRA adapters of one base model; nothing is written unless all fit."
    ),
    "plan": "Tell noise, cost and predicted signal of every training, from declared sizes and public texts alone.",
    "verify": "Check signature, hashes, and ε by two accountants; exit code 1 if anything fails.",
    "simulate": "Run the whole job on this machine: train every party privately, merge, evaluate, report.",
    "report": "Rebuild report.html from the stored results.",
    "assets": "Embedded models and public tasks, pinned by SHA-256.",
    "audit": "Measure what leaks, against what is claimed.",
    "config": "Write, check and describe federation files.",
    "ledger": "What a data set has spent: reservations, releases, receipts.",
    "spool": "What a server has accepted; withdrawing a release.",
}
"""Module of `commands/` → the line of `dpmerge --help`, which is the help that the module's `app` begins with."""


class LazyCommands(TyperGroup):
    """The commands of `COMMANDS`, known by name and line until one of them is asked for."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, line in COMMANDS.items():
            self.add_command(Command(name, help=line))

    def resolve_command(self, context: Context, arguments: list[str]) -> tuple[str | None, Command | None, list[str]]:
        """Find a command by the first argument, and import it."""
        name, command, rest = super().resolve_command(context, arguments)
        return name, command and load_command(str(command.name)), rest


def load_command(name: str) -> Command:
    """Import the module of a command and return what its `app` holds: one command, or a group of them."""
    command = typer.main.get_command(import_module(f"dpmerge.cli.commands.{name}").app)
    command.name = name
    return command


app = typer.Typer(
    cls=LazyCommands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Private LoRA fine-tuning at many organisations, one upload each, one merged multi-task model.",
    epilog="Start with: [bold]dpmerge config init[/] and [bold]dpmerge simulate federation.toml --out runs/first[/]",
)


def main() -> None:
    """Run the command line and exit with a code that tells the truth."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # what libraries say to their developers is noise to our users; -W shows it
    try:
        code = app(standalone_mode=False)
    except DpmergeError as refusal:
        print(refusal, file=sys.stderr)
        code = BAD_INPUT
    except ClickException as usage:
        usage.show()
        code = BAD_INPUT
    except OSError as problem:
        if problem.errno not in NO_SPACE | NO_PLACE:
            raise
        print(storage_refusal(problem), file=sys.stderr)
        code = BAD_INPUT
    except (Abort, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        code = INTERRUPTED
    if code == INTERRUPTED:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(INTERRUPTED)  # not sys.exit: a thread of Flower's may wait for ever for a worker that is gone
    sys.exit(code or 0)


@app.callback(invoke_without_command=True)
def _root(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if show_version:
        print(version("dpmerge"))
        raise typer.Exit
