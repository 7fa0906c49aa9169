"""`dpmerge ledger`: what a data set has spent, on which releases, and whether its record is whole."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpmerge.common.errors import DpmergeError, closest
from dpmerge.simulations.terminal import CLAIM_REFUTED, Format, FormatOption, console, print_json

if TYPE_CHECKING:
    from dpmerge.client.ledger import Ledger

LEDGER_FILE = "ledger.jsonl"

app = typer.Typer(no_args_is_help=True, help="What a data set has spent: reservations, releases, receipts.")

Name = Annotated[
    str, typer.Argument(metavar="LEDGER", help="A data set's id, a ledger file, or a party's folder of a run.")
]


@app.command("show", epilog="Example: dpmerge ledger show reviews")
def show(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[LEDGER]", help="As in verify; without it, the data sets that have a ledger."),
    ] = None,
    output: FormatOption = Format.text,
) -> None:
    """Show every charge and what became of it."""
    from rich.table import Table

    from dpmerge.simulations.table import escape

    if name is None:
        names = site_ledgers()
        if output is Format.json:
            print_json({"schema": 1, "ledgers": {name: str(path) for name, path in names.items()}})
        else:
            print("\n".join(f"{name}: {path}" for name, path in names.items()) or "no ledger yet")
        return
    ledger = find_ledger(name)
    rows = charge_rows(ledger)
    if output is Format.json:
        print_json({"schema": 1, "ledger": {"head": ledger.head(), "charges": rows}})
        return
    table = Table("data set", "reservation", "state", "ε", "δ", "unit", "release")
    for row in rows:
        epsilon, delta = ("–" if row[key] is None else f"{row[key]:.6g}" for key in ("epsilon", "delta"))
        release = (row["release"] or "–")[:16]
        table.add_row(
            *map(escape, (row["dataset"], row["reservation"][:16], row["state"])),
            epsilon,
            delta,
            *map(escape, (str(row["unit"] or "–"), release)),
        )
    console().print(table)
    print(f"head {ledger.head()}")


@app.command("verify", epilog="Example: dpmerge ledger verify reviews --against runs/demo/releases/shop")
def verify(
    name: Name,
    against: Annotated[
        list[Path] | None,
        typer.Option("--against", metavar="PATH", help="A signed release, or a receipt.json, that knows its head."),
    ] = None,
    output: FormatOption = Format.text,
) -> int:
    """Check the chain, and that nothing was cut or rewritten since a release or a receipt; exit code 1 if so."""
    from dpmerge.common.verify import Check, verdict
    from dpmerge.simulations.verification import ledger_checks
    from dpmerge.simulations.verify_app import show as show_checks

    try:
        lines = find_ledger(name).lines()
    except DpmergeError as refusal:
        if refusal.code != "DPM-504":
            raise
        checks = [Check("chain", "FAIL", refusal.problem)]
    else:
        checks = [Check("chain", "PASS", f"{len(lines)} lines, each on top of the one before")]
        for path in against or []:
            checks += ledger_checks(lines, path)
        if not against:
            checks.append(Check("ledger head", "WARN", "a cut at the end shows only --against a release or receipt"))
    show_checks(output, "ledger", {"name": name}, checks)
    return CLAIM_REFUTED if verdict(checks) == "FAIL" else 0


@app.command("compose", epilog="Example: dpmerge ledger compose reviews --delta 1e-5")
def compose(
    name: Name,
    delta: Annotated[float | None, typer.Option(help="δ of the total; the largest of the charges by default.")] = None,
    reservation: Annotated[
        list[str] | None,
        typer.Option("--reservation", metavar="ID", help="Only these charges, by the start of their ids."),
    ] = None,
    output: FormatOption = Format.text,
) -> None:
    """Compose the loss distributions of all charges, or of chosen ones, to one (ε, δ)."""
    import math

    from dpmerge.client.budget import charged_mechanism, total_epsilon

    chosen = _chosen(find_ledger(name), reservation or [])
    if len({entry["dataset"] for entry in chosen}) > 1:
        problem = f"{name} holds charges of several data sets"
        raise DpmergeError(
            "DPM-504", problem, "choose those of one with --reservation; different people do not compose"
        )
    deltas = [charged_mechanism(entry["charge"]).target_delta for entry in chosen]
    at = max(deltas, default=1e-5) if delta is None else delta
    epsilon = total_epsilon([entry["charge"] for entry in chosen], at)
    if output is Format.json:
        told = epsilon if math.isfinite(epsilon) else None
        print_json({"schema": 1, "composition": {"charges": len(chosen), "epsilon": told, "delta": at}})
        return
    total = f"ε = {math.ceil(epsilon * 1e4) / 1e4:g}" if math.isfinite(epsilon) else "no finite ε: one had no privacy"
    print(f"{len(chosen)} charge{'s' * (len(chosen) != 1)} together: {total} at δ = {at:g} (one PLD of all)")


def site_ledgers() -> dict[str, Path]:
    """Return the ledgers in this site's state folder, by data set."""
    from dpmerge.client.policy import LEDGERS, state_folder

    return {path.stem: path for path in sorted((state_folder() / LEDGERS).glob("*.jsonl"))}


def find_ledger(name: str) -> Ledger:
    """Return the ledger that a person means: a file, a party's folder, or a data set's id.

    Raises:
        DpmergeError: DPM-303 if there is none.
    """
    from dpmerge.client.ledger import Ledger

    for path in (Path(name), Path(name) / LEDGER_FILE):
        if path.is_file():
            return Ledger(path)
    known = site_ledgers()
    if name not in known:
        problem = f"{name} is no ledger file, no party's folder and no data set with a ledger"
        raise DpmergeError("DPM-303", problem, f"give one of them{closest(name, known)}")
    return Ledger(known[name])


def charge_rows(ledger: Ledger) -> list[dict[str, Any]]:
    """Return one row per reservation, oldest first, with the last thing that became of it."""
    rows: dict[str, dict[str, Any]] = {}
    for entry in ledger.entries():
        if entry["kind"] == "reserve":
            charge = entry["charge"]
            rows[entry["reservation"]] = {
                "dataset": entry["dataset"],
                "reservation": entry["reservation"],
                "state": "reserved",
                "epsilon": charge.get("epsilon"),
                "delta": charge.get("target_delta"),
                "unit": charge.get("privacy_unit"),
                "release": None,
            }
            continue
        row = rows[entry["reservation"]]
        row["state"] = "receipted" if entry["kind"] == "receipt" else entry["kind"]
        row["release"] = entry.get("release", row["release"])
    return list(rows.values())


def _chosen(ledger: Ledger, starts: list[str]) -> list[dict[str, Any]]:
    reserved = [entry for entry in ledger.entries() if entry["kind"] == "reserve"]
    for start in starts:
        if sum(entry["reservation"].startswith(start) for entry in reserved) != 1:
            problem = f"--reservation {start} is not the start of exactly one id"
            raise DpmergeError("DPM-104", problem, "see `dpmerge ledger show`")
    return [e for e in reserved if not starts or any(e["reservation"].startswith(start) for start in starts)]
