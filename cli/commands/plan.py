"""`dpmerge plan`: what each party's training will cost and can learn, before it, without a private record."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpmerge.cli.terminal import Format, FormatOption, console, print_json
from dpmerge.common.config.federation import load_federation, party_plan
from dpmerge.server.merging.spec.federation import checked

if TYPE_CHECKING:
    from rich.table import Table

    from dpmerge.common.privacy.sizing import Point
    from dpmerge.simulations.planning import Forecast

app = typer.Typer(add_completion=False)

KNOWN_FROM = {
    "noise_multiplier": "computed",
    "sampling_prob": "computed",
    "num_steps": "stated",
    "epsilon": "computed",
    "delta": "stated",
    "l2_clip_norm": "stated",
    "noise_std": "computed",
    "num_coordinates": "computed",
    "num_parameters": "computed",
    "signal_to_noise_bound": "computed",
    "upload_bytes": "computed",
    "memory_bytes": "estimated",
    "seconds_per_step": "measured",
    "seconds": "estimated",
}
"""How each number of a party is known; time is measured on class descriptions at full length."""

WORDS = {
    "noise_multiplier": "σ, noise multiplier",
    "sampling_prob": "q, chance of a record per step",
    "num_steps": "T, steps",
    "epsilon": "ε",
    "delta": "δ",
    "l2_clip_norm": "C, clip norm",
    "noise_std": "σC/B, noise per coordinate and step",
    "num_coordinates": "noised coordinates",
    "num_parameters": "trainable parameters",
    "signal_to_noise_bound": "signal-to-noise of a step, at most",
    "upload_bytes": "upload, bytes",
    "memory_bytes": "memory, bytes",
    "seconds_per_step": "seconds per step",
    "seconds": "seconds",
}


@app.command(epilog="Example: dpmerge plan examples/five-organisations.toml --party news")
def plan(
    federation: Annotated[
        Path, typer.Argument(metavar="FEDERATION.toml", help="The organisations and their settings.")
    ],
    party: Annotated[str | None, typer.Option("--party", metavar="NAME", help="Only this one.")] = None,
    full_grid: Annotated[
        bool, typer.Option("--full-grid", help="Vary ε, batch and steps together, not one at a time.")
    ] = False,
    output: FormatOption = Format.text,
) -> None:
    """Tell noise, cost and predicted signal of every training, from declared sizes and public texts alone."""
    stated = checked(load_federation(federation), str(federation))
    names = [item.name for item in stated.parties] if party is None else [party]
    plans = [party_plan(stated, name) for name in names]
    from dpmerge.simulations.planning import forecast

    forecasts = [forecast(item, full_grid=full_grid) for item in plans]
    if output is Format.json:
        print_json({"schema": 1, "known_from": KNOWN_FROM, "parties": list(map(facts, forecasts))})
        return
    terminal = console()
    for item in forecasts:
        for part in tables(item):
            terminal.print(part)
        for line in reasons(item):
            terminal.print(line, markup=False, highlight=False)


def facts(item: Forecast) -> dict[str, Any]:
    """Return a forecast as JSON values; infinite numbers are None."""
    numbers = {
        "noise_multiplier": item.mechanism.noise_multiplier,
        "sampling_prob": item.mechanism.sampling_prob,
        "num_steps": item.mechanism.num_steps,
        "epsilon": item.epsilon,
        "delta": item.mechanism.target_delta,
        "l2_clip_norm": item.mechanism.l2_clip_norm,
        "noise_std": item.mechanism.noise_std,
        "num_coordinates": item.mechanism.num_coordinates,
        "signal_to_noise_bound": item.signal_to_noise_bound,
        **asdict(item.cost),
    }
    size = None
    if item.size is not None and item.planned is not None:
        size = {
            "k": item.size.k,
            "l2_clip_norm": item.size.chosen.l2_clip_norm,
            "learning_rate": item.learning_rate,
            "planned": asdict(item.planned),
            "curve": [asdict(point) for point in item.size.curve],
        }
    return {
        "party": item.plan.party,
        "private": item.mechanism.private,
        **{key: None if value == math.inf else value for key, value in numbers.items()},
        "size": size,
        "what_if": [asdict(row) for row in item.scenarios],
        "reasons": list(reasons(item)),
    }


def tables(item: Forecast) -> Iterator[Table]:
    """Yield the tables of one party: its numbers, the predicted curve over k, and what if."""
    numbers = facts(item)
    rows = [[WORDS[key], _number(numbers[key]), known] for key, known in KNOWN_FROM.items()]
    yield _table(item.plan.party, ("", "", "known from"), rows)
    if item.size is not None and item.planned is not None:
        points = {point.k: _curve_row(point) for point in item.size.curve}
        rows = [*points.values(), ["plan: " + _curve_row(item.planned)[0], *_curve_row(item.planned)[1:]]]
        yield _table("predicted, by directions", ("k", "C", "σC/B", "signal-to-noise", "kept"), rows)
    if item.scenarios:
        rows = [list(map(_number, asdict(row).values())) for row in item.scenarios]
        names = ("ε", "B", "T", "σ", "σC/B", "signal-to-noise ≤", "signal-to-noise")
        yield _table("what if", names, rows)


def reasons(item: Forecast) -> Iterator[str]:
    """Yield the reasoning in sentences."""
    from dpmerge.common.privacy import sizing

    mechanism = item.mechanism
    if not mechanism.private:
        yield "No noise: nothing is private, and there is nothing to size."
        return
    yield (
        f"{mechanism.num_coordinates} coordinates are noised: a step's signal is at most "
        f"{item.signal_to_noise_bound:.2g} times its noise, if all gradients were as long as C and parallel."
    )
    if item.size is None or item.planned is None:
        yield "Nothing is known of the signal: name public texts with training.subspace to predict it."
        return
    chosen, planned = item.size.chosen, item.planned
    yield (
        f"Of k = {', '.join(str(point.k) for point in item.size.curve)} (two public texts a direction, or more) "
        f"k = {chosen.k} keeps most of what could be learned without noise: {chosen.kept:.2f} of its squared length; "
        f"the plan's k = {planned.k} with C = {planned.l2_clip_norm:g} keeps {planned.kept:.2f}."
    )
    yield (
        f"C = {chosen.l2_clip_norm:g}: {1 - sizing.PROPOSED_CLIP_QUANTILE:.0%} of the public gradients are longer in "
        f"these directions, so that hardly any is drowned by noise that is made for longer ones."
    )
    if item.learning_rate is not None:
        yield (
            f"Learning rate {item.learning_rate:g} for {item.plan.training.optimizer}: noise alone then carries each "
            f"coordinate about {sizing.NOISE_WALK:g} far in {mechanism.num_steps} steps."
        )
    yield (
        f"Assumed: {sizing.COHERENCE:.0%} of a gradient's energy is common to a task's examples. "
        "The curve's shape hangs on it, not on private data: see docs/sizing.md."
    )


def _curve_row(point: Point) -> list[str]:
    return [_number(getattr(point, key)) for key in ("k", "l2_clip_norm", "noise_std", "signal_to_noise", "kept")]


def _table(title: str, names: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in names:
        table.add_column(name, justify="left" if not name or name == "known from" else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
