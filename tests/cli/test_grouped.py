"""Options in groups: typer sees one flat signature, the command gets an object for each group."""

import inspect
from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from dpmerge.cli.grouped import grouped, parameter


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where."""

    folder: Annotated[str, typer.Argument()]
    deep: Annotated[bool, typer.Option("--deep")] = False


@pytest.fixture
def seen():
    return []


@pytest.fixture
def app(seen):
    app = typer.Typer(add_completion=False)
    numbers = [parameter(name, Annotated[float | None, typer.Option(help=f"The {name}.")], None) for name in "xy"]

    @app.command()
    @grouped(Place, numbers)
    def look(place: Place, given: dict[str, float], loud: bool = False) -> None:
        """Look there."""
        seen.append((place, given, loud))

    return app


def test_a_command_gets_its_groups_and_what_else_it_takes(app, seen):
    assert CliRunner().invoke(app, ["here", "--deep", "--y", "2"]).exit_code == 0
    assert CliRunner().invoke(app, ["there", "--loud"]).exit_code == 0
    assert seen == [
        (Place(folder="here", deep=True), {"x": None, "y": 2.0}, False),
        (Place(folder="there"), {"x": None, "y": None}, True),
    ]


def test_the_help_and_the_signature_are_those_of_all_groups(app):
    words = CliRunner().invoke(app, ["--help"]).output
    assert "Look there." in words
    assert "The x." in words
    (command,) = app.registered_commands
    assert list(inspect.signature(command.callback).parameters) == ["folder", "deep", "x", "y", "loud"]


def test_an_argument_without_a_default_is_required(app, seen):
    assert CliRunner().invoke(app, []).exit_code == 2
    assert seen == []
