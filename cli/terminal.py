"""What the commands print and how they exit: stdout for the result, stderr for words about it."""

import sys
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console

from dpmerge.common.printable import json_text, lines

BAD_INPUT = 2
PARTY_FAILED = 1
CLAIM_REFUTED = 1
INTERRUPTED = 130
LOG_WIDTH = 110  # columns of the tables where there is no terminal to ask


class Format(StrEnum):
    """What stdout gets."""

    text = "text"
    json = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="json: one object on stdout and nothing else.")]


def console(*, stderr: bool = False) -> Console:
    """Return a console as wide as the terminal, or `LOG_WIDTH` where there is none."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else LOG_WIDTH)


def answer(output: Format, facts: dict[str, Any], words: str) -> None:
    """Print a command's result: the facts in an envelope of schema 1, or a sentence.

    Args:
        output: What stdout gets.
        facts: The result, for JSON.
        words: The result, for people.
    """
    if output is Format.json:
        print_json({"schema": 1} | facts)
    else:
        print(lines(words))


def print_json(tables: dict[str, Any]) -> None:
    """Print one JSON object.

    Raises:
        ValueError: If a number is NaN or infinite, which JSON does not have.
    """
    print(json_text(tables))
