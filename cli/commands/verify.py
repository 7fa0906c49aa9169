"""`dpmerge verify`: a table of verdicts on a release, a merged model or a receipt, offline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpmerge.cli.terminal import CLAIM_REFUTED, Format, FormatOption, console, print_json
from dpmerge.common.errors import DpmergeError

if TYPE_CHECKING:
    from dpmerge.common.statement.verify import Check

app = typer.Typer(add_completion=False)
COLOURS = {"PASS": "green", "WARN": "yellow", "FAIL": "bold red"}
CLOSING = "Nobody can check from here whether the stated noise was really added."

PathArgument = Annotated[Path, typer.Argument(metavar="PATH", help="A release, a merged model or a receipt.json.")]
Key = Annotated[list[str] | None, typer.Option("--key", help="Believe this public key, ed25519:….")]
Allow = Annotated[Path | None, typer.Option("--allow", metavar="FILE", help="The federation's key list.")]
ReceiptOption = Annotated[Path | None, typer.Option("--receipt", metavar="FILE", help="The release's receipt.")]
LedgerOption = Annotated[Path | None, typer.Option("--ledger", metavar="FILE", help="The ledger that paid for it.")]


@app.command(epilog="Example: dpmerge verify runs/demo/releases/library --allow keys.toml")
def verify(
    path: PathArgument,
    key: Key = None,
    allow: Allow = None,
    receipt: ReceiptOption = None,
    ledger: LedgerOption = None,
    output: FormatOption = Format.text,
) -> int:
    """Check signature, hashes, and ε by two accountants; exit code 1 if anything fails."""
    from dpmerge.client.verification import verify_path
    from dpmerge.common.statement.verify import verdict

    if key and allow:
        raise DpmergeError("DPM-103", "--key and --allow are both given", "give the key list, or single keys")
    kind, checks = verify_path(path, keys=key or [], key_list=allow, receipt=receipt, ledger=ledger)
    show(output, "verify", {"path": str(path), "kind": kind}, checks)
    return CLAIM_REFUTED if verdict(checks) == "FAIL" else 0


def show(output: Format, name: str, facts: dict[str, Any], checks: Sequence[Check]) -> None:
    """Print verdicts as a table, or as one object under `name`."""
    from rich.table import Table
    from rich.text import Text

    from dpmerge.common.statement.verify import verdict

    if output is Format.json:
        rows = [{"check": check.name, "status": check.status, "detail": check.detail} for check in checks]
        print_json({"schema": 1, name: facts | {"verdict": verdict(checks), "checks": rows}})
        return
    table = Table("check", "verdict", "detail")
    for check in checks:
        table.add_row(check.name, Text(check.status, style=COLOURS[check.status]), Text(check.detail))
    console().print(table)
    console().print(verdict(checks), style=COLOURS[verdict(checks)])
    if name == "verify":
        print(CLOSING)
