"""`dpmerge spool`: what a server has accepted, and taking a party's release out of every later merge."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpmerge.cli.terminal import Format, FormatOption, answer, console, print_json

if TYPE_CHECKING:
    from dpmerge.server.intake.spool import Spool

app = typer.Typer(add_completion=False, no_args_is_help=True, help="What a server has accepted; withdrawing a release.")

Folder = Annotated[Path, typer.Argument(metavar="SPOOL", help="The folder `spool` of a run or a server.")]


@app.command("show", epilog="Example: dpmerge spool show runs/demo/spool")
def show(folder: Folder, output: FormatOption = Format.text) -> None:
    """Show every accepted release: whose, its hash and its ε, and whether it was withdrawn."""
    from rich.table import Table

    from dpmerge.cli.tables import escape
    from dpmerge.server.intake.spool import open_spool

    rows = release_rows(open_spool(folder))
    if output is Format.json:
        print_json({"schema": 1, "spool": rows})
        return
    table = Table("party", "release", "ε", "δ", "in merges")
    for row in rows:
        epsilon = "not private" if row["epsilon"] is None else f"{row['epsilon']:.6g}"
        table.add_row(
            escape(row["party"]),
            row["sha256"][:16],
            epsilon,
            f"{row['delta']:.6g}",
            "no" if row["withdrawn"] else "yes",
        )
    console().print(table)


@app.command("withdraw", epilog="Example: dpmerge spool withdraw runs/demo/spool shop")
def withdraw(
    folder: Folder,
    party: Annotated[str, typer.Argument(metavar="PARTY", help="Whose release.")],
    output: FormatOption = Format.text,
) -> None:
    """Keep a party's release out of every later merge, for good; models merged before stay what they are."""
    from dpmerge.server.intake.spool import open_spool

    spool = open_spool(folder)
    spool.withdraw(party)
    left = sorted(spool.hashes().keys() - spool.withdrawn())
    again = shlex.join(["dpmerge", "merge", "--from-spool", str(folder), "--out", "DIR"])
    facts = {"withdrawn": party, "left": left, "merge_again": again if left else None}
    words = [
        f"{party} is in no later merge; models merged before stay what they are, its release stays in the spool, and "
        "what it spent stays spent",
        f"merge the other {len(left)} again, by the earlier merge.json's method and seed: {again}"
        if left
        else "nothing is left to merge",
    ]
    answer(output, facts, "\n".join(words))


def release_rows(spool: Spool) -> list[dict[str, Any]]:
    """Return one row per accepted release, by party; ε is None without privacy.

    Raises:
        ReleaseRefused: corrupted, when the bytes of one are no longer those that were accepted.
    """
    from dpmerge.common.release.format import STATEMENT
    from dpmerge.common.untrusted.parsing import parse_json

    rows, withdrawn = [], spool.withdrawn()
    for party, digest in spool.hashes().items():
        statement = parse_json(spool.release(party)[STATEMENT], f"{party}: {STATEMENT}")
        rows.append(
            {
                "party": party,
                "sha256": digest,
                "epsilon": statement["epsilon"],
                "delta": statement["target_delta"],
                "withdrawn": party in withdrawn,
            }
        )
    return rows
