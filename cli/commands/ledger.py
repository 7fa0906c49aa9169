"""`dpmerge ledger`: what a data set has spent, on which releases, and whether its record is whole."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpmerge.cli.terminal import CLAIM_REFUTED, Format, FormatOption, answer, console, print_json
from dpmerge.common.errors import DpmergeError, closest

if TYPE_CHECKING:
    from dpmerge.client.budget.ledger import Ledger
    from dpmerge.client.budget.policy import DataSet, Policy

LEDGER_FILE = "ledger.jsonl"

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="What a data set has spent: reservations, releases, receipts."
)

Name = Annotated[
    str,
    typer.Argument(
        metavar="LEDGER", help="A ledger file, a party's folder of a run, or, with --policy, a data set's id."
    ),
]
PolicyOption = Annotated[
    Path | None,
    typer.Option("--policy", metavar="POLICY.toml", help="The site's policy, which says where ledgers are."),
]
PolicyFile = Annotated[Path, typer.Argument(metavar="POLICY.toml", help="The site's policy.")]


@app.command("create", epilog="Example: dpmerge ledger create policy.toml reviews")
def create(
    policy: PolicyFile,
    dataset: Annotated[
        str | None, typer.Argument(metavar="[DATASET]", help="Its id; without it, every data set that has no ledger.")
    ] = None,
    output: FormatOption = Format.text,
) -> None:
    """Begin a data set's ledger with nothing spent: for one never trained on; a lost ledger is brought back instead."""
    from dpmerge.client.budget.policy import create_ledger
    from dpmerge.client.budget.policy_file import load_policy

    site = load_policy(policy)
    if dataset is None:
        chosen = [one for one in site.datasets if not site.ledger_of(one).exists()]
    else:
        chosen = [_dataset(site, dataset)]
    created = {one.id: str(create_ledger(site, one).path) for one in chosen}
    words = "\n".join(f"{name}: {path}, with nothing spent" for name, path in created.items())
    answer(output, {"ledgers": created}, words or "every data set of the policy has a ledger")


@app.command("bind", epilog="Example: dpmerge ledger bind policy.toml reviews")
def bind(
    policy: PolicyFile,
    dataset: Annotated[str, typer.Argument(metavar="DATASET", help="Its id, by which its ledger's file is named.")],
    output: FormatOption = Format.text,
) -> None:
    """Say that a ledger is that of a data set which was renamed or moved; all that it ever charged goes on to count."""
    from dpmerge.client.budget.policy_file import load_policy

    site = load_policy(policy)
    one = _dataset(site, dataset)
    ledger = site.ledger_of(one)
    before = ledger.bound()
    ledger.bind(one.bound)
    was = "nothing" if before is None else f"{before.dataset} at {before.place}"
    result = {"dataset": one.id, "place": one.bound.place, "path": str(ledger.path)}
    answer(output, {"ledger": result}, f"{ledger.path} is bound to {one.id} at {one.bound.place}; before: {was}")


@app.command("show", epilog="Example: dpmerge ledger show reviews")
def show(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[LEDGER]", help="As in verify; without it, the policy's data sets that have a ledger."),
    ] = None,
    policy: PolicyOption = None,
    output: FormatOption = Format.text,
) -> None:
    """Show every charge and what became of it."""
    from rich.table import Table

    from dpmerge.cli.tables import escape

    if name is None:
        if policy is None:
            raise DpmergeError("DPM-303", "neither LEDGER nor --policy is given", "give one of them")
        names = site_ledgers(policy)
        if output is Format.json:
            print_json({"schema": 1, "ledgers": {name: str(path) for name, path in names.items()}})
        else:
            print("\n".join(f"{name}: {path}" for name, path in names.items()) or "no ledger yet")
        return
    ledger = find_ledger(name, policy)
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
    policy: PolicyOption = None,
    output: FormatOption = Format.text,
) -> int:
    """Check the chain, and that nothing was cut or rewritten since a release or a receipt; exit code 1 if so."""
    from dpmerge.cli.commands.verify import show as show_checks
    from dpmerge.client.verification import ledger_checks
    from dpmerge.common.statement.verify import Check, verdict

    try:
        lines = find_ledger(name, policy).lines()
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
    policy: PolicyOption = None,
    output: FormatOption = Format.text,
) -> None:
    """Compose the loss distributions of all charges, or of chosen ones, to one (ε, δ)."""
    import math

    from dpmerge.client.budget.composition import charged_mechanism, total_epsilon

    ledger = find_ledger(name, policy)
    chosen = _chosen(ledger, reservation or [])
    if ledger.bound() is None and len({entry["dataset"] for entry in chosen}) > 1:
        problem = f"{name} holds charges of several data sets"
        raise DpmergeError(
            "DPM-504", problem, "choose those of one with --reservation; different people do not compose"
        )
    deltas = [charged_mechanism(entry["charge"]).target_delta for entry in chosen]
    at = max(deltas, default=1e-5) if delta is None else delta
    if not 0 < at < 1:
        raise DpmergeError("DPM-103", f"--delta {at:g} is no probability between 0 and 1", "give one, such as 1e-5")
    epsilon = total_epsilon([entry["charge"] for entry in chosen], at)
    if output is Format.json:
        finite_epsilon = epsilon if math.isfinite(epsilon) else None
        print_json({"schema": 1, "composition": {"charges": len(chosen), "epsilon": finite_epsilon, "delta": at}})
        return
    total = f"ε = {math.ceil(epsilon * 1e4) / 1e4:g}" if math.isfinite(epsilon) else "no finite ε: one had no privacy"
    print(f"{len(chosen)} charge{'s' * (len(chosen) != 1)} together: {total} at δ = {at:g} (one PLD of all)")


def site_ledgers(policy: Path) -> dict[str, Path]:
    """Return the ledgers of a site that are there, by data set."""
    from dpmerge.client.budget.policy_file import load_policy

    site = load_policy(policy)
    ledgers = {dataset.id: site.ledger_of(dataset) for dataset in site.datasets}
    return {name: ledger.path for name, ledger in ledgers.items() if ledger.exists()}


def find_ledger(name: str, policy: Path | None) -> Ledger:
    """Return the ledger that a person means: with a policy a data set's, else a file or a party's folder.

    Raises:
        DpmergeError: DPM-303 if there is none.
    """
    from dpmerge.client.budget.ledger import Ledger

    if policy is None:
        for path in (Path(name), Path(name) / LEDGER_FILE):
            if path.is_file():
                return Ledger(path)
        fix = "give one of them, or a data set's id with --policy POLICY.toml"
        raise DpmergeError("DPM-303", f"{name} is no ledger file and no party's folder", fix)
    known = site_ledgers(policy)
    if name not in known:
        raise DpmergeError("DPM-303", f"{name} is no data set with a ledger", f"give one of them{closest(name, known)}")
    return Ledger(known[name])


def _dataset(site: Policy, name: str) -> DataSet:
    names = [dataset.id for dataset in site.datasets]
    if name not in names:
        fix = f"use one of {', '.join(names)}{closest(name, names)}"
        raise DpmergeError("DPM-104", f"{name} is no data set of the policy", fix)
    return site.datasets[names.index(name)]


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
        if entry["kind"] in ("reserve", "bound"):
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
