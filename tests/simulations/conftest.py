"""The command line as people call it, in this process."""

import sys

import pytest


@pytest.fixture
def dpmerge(monkeypatch, capsys):
    """Run `dpmerge` with arguments → (exit code, stdout, stderr)."""
    from dpmerge.cli import main as cli  # in a test, so that the filters of warnings hold

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["dpmerge", *map(str, arguments)])
        monkeypatch.setattr(cli.os, "_exit", sys.exit)  # else an interruption would end the tests themselves
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code, *capsys.readouterr()

    return call
