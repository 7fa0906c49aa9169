"""The command line: every command has help with an example, and is imported only when it is asked for."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # typer 0.20 reads names that click 8.5 deprecates
    from dpmerge.cli import main as cli

COMMANDS = [
    ["simulate"],
    ["merge"],
    ["plan"],
    ["report"],
    ["assets", "fetch"],
    ["assets", "list"],
    ["config", "init"],
    ["config", "validate"],
    ["config", "schema"],
    ["audit", "mechanism"],
    ["verify"],
    ["ledger", "show"],
    ["ledger", "verify"],
    ["ledger", "compose"],
    ["ledger", "create"],
    ["ledger", "bind"],
    ["spool", "show"],
    ["spool", "withdraw"],
]
HEAVY = {"torch", "flwr", "ray", "matplotlib", "numpy", "pydantic", "dpmerge.cli.commands"}


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example(dpmerge, command):
    code, out, _ = dpmerge(*command, "--help")
    assert code == 0
    assert f"Example: dpmerge {' '.join(command)}" in " ".join(out.split())


def test_every_command_is_listed_above():
    names = []
    for name in cli.COMMANDS:
        command = cli.load_command(name)
        names += [[name, part] for part in command.commands] if hasattr(command, "commands") else [[name]]
    assert sorted(names) == sorted(COMMANDS)


def test_every_module_is_a_command():
    folder = Path(cli.__file__).parent / "commands"
    assert {path.stem for path in folder.glob("*.py")} == {"__init__", *cli.COMMANDS}


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_list_says_of_a_command_what_its_own_help_says(name):
    command = cli.load_command(name)
    assert (command.name, command.help) == (name, cli.COMMANDS[name])
    assert [parameter.name for parameter in command.params if "completion" in parameter.name] == []


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["nonsense"], []], ids=str)
def test_what_names_no_command_imports_none(arguments):
    script = f"""if True:
        import sys
        from dpmerge.cli.main import main
        sys.argv = ["dpmerge", *{arguments}]
        try:
            main()
        finally:
            print(sorted({HEAVY} & sys.modules.keys()), file=sys.stderr)
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "[]"


@pytest.mark.parametrize("words", [["nonsense"], ["ledger", "nonsense"], ["--nonsense"], ["ledger", "--nonsense"]])
def test_an_unknown_word_is_bad_input(dpmerge, words):
    code, out, err = dpmerge(*words)
    assert (code, out) == (2, "")
    assert f"No such {'option' if words[-1].startswith('-') else 'command'}" in err
    assert words[-1] in err


def test_version(dpmerge):
    assert dpmerge("--version") == (0, "0.1.0\n", "")
