"""`dpmerge merge`: from adapter folders to one merged adapter or model, with a gate before and a record after.

Nothing is written unless everything fits, and then in one step: the output folder is complete or absent.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpmerge.cli.terminal import BAD_INPUT, INTERRUPTED, Format, FormatOption, answer, console
from dpmerge.common.config.sections import MergeSettings
from dpmerge.common.errors import DpmergeError
from dpmerge.common.printable import MAX_TEXT, shown

if TYPE_CHECKING:
    from dpmerge.server.merge_job import Outcome
    from dpmerge.server.merging.gate.gate import Gate

app = typer.Typer(add_completion=False)
TUNED = "Parameters of the method"
AROUND = "Around any method"
PUBLIC = "Public data"
INSTEAD = "In place of merging, or beside it"


def _option(help: str, panel: str | None = None, *names: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, metavar=metavar)


Adapters = Annotated[
    list[str] | None,
    typer.Argument(metavar="ADAPTER…", help="Release or PEFT adapter folders; NAME=FOLDER names one."),
]
Out = Annotated[Path | None, _option("Where the result goes; empty or new.", None, "--out", metavar="DIR")]
Method = Annotated[str, _option("A name of --list.")]
Weights = Annotated[list[str] | None, _option("One weight per party; all 1 if not given.", metavar="A=1,B=.5")]
Strict = Annotated[bool, _option("Refuse other modules or seeds of A.", None, "--strict/--no-strict")]
Seed = Annotated[int | None, _option("Of random masks.")]
Device = Annotated[str, _option("Where to compute: cpu, cuda, or auto for CUDA where there is one.")]
Coefficient = Annotated[float | None, _option("Factor on the sum.", TUNED)]
Density = Annotated[float | None, _option("Share of entries to keep.", TUNED)]
Semantics = Annotated[str | None, _option("Whose TIES: paper, peft or mergekit.", TUNED)]
Ridge = Annotated[float | None, _option("Relative ridge of wudi.", TUNED)]
CommonShare = Annotated[float | None, _option("Share of iso-cts's directions from the sum.", TUNED)]
Spread = Annotated[float | None, _option("How far della's probabilities vary.", TUNED)]
Outliers = Annotated[float | None, _option("Share of the largest entries that breadcrumbs drops.", TUNED)]
OffDiagonal = Annotated[float | None, _option("What regmean keeps outside the diagonals.", TUNED)]
Rank = Annotated[int | None, _option("Rank of the result; exact if not given.", TUNED)]
Core = Annotated[bool, _option("Work on coordinates in bases that the adapters share.", AROUND, "--core")]
Denoise = Annotated[bool, _option("Predict every party's signal from all parties' changes first.", AROUND, "--denoise")]
Robust = Annotated[str | None, _option("Bound one party's influence: clip or median.", AROUND)]
LayerScale = Annotated[
    list[str] | None,
    _option(
        "Factor on the merged change in modules of this name, or on one party's.", AROUND, metavar="[PARTY:]PATTERN=X"
    ),
]
Validate = Annotated[
    list[str] | None,
    _option(
        "Measure on this public file (columns text, label), and choose the coefficient there if none is given.",
        PUBLIC,
        metavar="PARTY=FILE",
    ),
]
Public = Annotated[
    list[str] | None, _option("Public texts of the party's task, for regmean and fisher.", PUBLIC, metavar="PARTY=FILE")
]
FromSpool = Annotated[
    Path | None, _option("Merge what a server has accepted, and not withdrawn.", None, "--from-spool", metavar="DIR")
]
Without = Annotated[list[str] | None, _option("Leave this party of the spool out.", metavar="PARTY")]
BaseModel = Annotated[
    str | None, _option("Where the base model is, if not where the adapters say: alias, folder or hub id.")
]
List = Annotated[bool, _option("Show every method.", INSTEAD, "--list")]
Explain = Annotated[bool, _option("Show noise, drift and overlap; without --out only that.", INSTEAD, "--explain")]
Materialize = Annotated[bool, _option("Write the full model in place of an adapter.", INSTEAD, "--materialize")]


@app.command(epilog="Example: dpmerge merge runs/demo/releases/shop other=path/to/adapter --no-strict --out merged")
def merge(
    adapters: Adapters = None,
    out: Out = None,
    from_spool: FromSpool = None,
    without: Without = None,
    method: Method = MergeSettings.method,
    weights: Weights = None,
    strict: Strict = True,
    seed: Seed = None,
    device: Device = "cpu",
    coefficient: Coefficient = None,
    density: Density = None,
    semantics: Semantics = None,
    ridge: Ridge = None,
    common_share: CommonShare = None,
    spread: Spread = None,
    outliers: Outliers = None,
    off_diagonal: OffDiagonal = None,
    rank: Rank = None,
    core: Core = False,
    denoise: Denoise = False,
    robust: Robust = None,
    layer_scale: LayerScale = None,
    validate: Validate = None,
    public: Public = None,
    base: BaseModel = None,
    listed: List = False,
    explained: Explain = False,
    materialize: Materialize = False,
    output: FormatOption = Format.text,
) -> int:
    """Merge releases of dpmerge or any PEFT LoRA adapters of one base model; nothing is written unless all fit."""
    if listed:
        return _list(output)
    if out is None and not explained:
        raise typer.BadParameter("say where the result goes, or --explain to write nothing", param_hint="--out")
    if without and from_spool is None:
        raise typer.BadParameter("is for the parties of --from-spool", param_hint="--without")
    from dpmerge.server.merge_job import Request, inspect, run, spooled

    options = {
        "weights": _numbers("--weights", ",".join(weights).split(",")) if weights else None,
        **_layer_scales(layer_scale or ()),
        "coefficient": coefficient,
        "density": density,
        "semantics": semantics,
        "ridge": ridge,
        "common_share": common_share,
        "spread": spread,
        "outliers": outliers,
        "off_diagonal": off_diagonal,
        "rank": rank,
        "core": core or None,
        "denoise": denoise or None,
        "robust": robust,
        "seed": seed,
    }
    request = Request(
        inputs=[*map(_input, adapters or ()), *(spooled(from_spool, without or ()) if from_spool else ())],
        out=out,
        options={"method": method, "strict": strict, "device": device}
        | {key: item for key, item in options.items() if item is not None},
        materialize=materialize,
        explained=explained,
        base=base or "",
        validation={party: Path(file) for party, file in _pairs("--validate", validate or ()).items()},
        public={party: Path(file) for party, file in _pairs("--public", public or ()).items()},
    )
    try:
        gate = inspect(request)
        for line in gate.warnings:
            print(f"warning: {line}", file=sys.stderr)
        if gate.refusals:
            return _refuse(gate, output)
        outcome = run(request, gate)
    except KeyboardInterrupt:  # of which typer would keep the exit code alone
        print("interrupted; nothing was written", file=sys.stderr)
        return INTERRUPTED
    _report(request.out, outcome, output)
    return 0


def _list(output: Format) -> int:
    from dpmerge.cli.merge_tables import method_rows, methods_table

    if output is Format.json:
        answer(output, {"methods": method_rows()}, "")
    else:
        console().print(methods_table())
    return 0


def _refuse(gate: Gate, output: Format) -> int:
    """Show what was read and every mismatch, on stderr: there is no result."""
    from dpmerge.cli.merge_tables import gate_table

    terminal = console(stderr=True)
    if gate.entries and output is Format.text:
        terminal.print(gate_table(gate.entries))
    for refusal in gate.refusals:
        terminal.print(str(refusal), style="red", markup=False, highlight=False, soft_wrap=True)
    return BAD_INPUT


def _report(out: Path | None, outcome: Outcome, output: Format) -> None:
    from dpmerge.cli.merge_tables import explanation_tables, gate_table, validation_tables
    from dpmerge.server.intake.loudness import loud_warnings

    if output is Format.json:
        answer(output, {"out": None if out is None else str(out)} | outcome.to_dict(), "")
        return
    tables = [gate_table(outcome.gate.entries)]
    tables += explanation_tables(outcome.explanation) if outcome.explanation else []
    tables += validation_tables(outcome.validation) if outcome.validation else []
    terminal = console()
    for table in tables:
        terminal.print(table)
    info = outcome.merged.info
    for absent in info["absent"]:
        print(shown(f"taken as 0: {absent}", MAX_TEXT))
    for warning in loud_warnings(dict(zip(info["parties"], info["norms"], strict=True))):
        print(shown(warning, MAX_TEXT), file=sys.stderr)
    norm = "not measured" if info["norm"] is None else f"{info['norm']:.4g}"
    print(
        f"{info['method']} of {len(info['parties'])}: rank {info['rank']}, coefficient {info['coefficient']:.4g}, "
        f"norm {norm}, {info['truncation_error']:.2g} of it left out by the rank"
    )
    if out is not None:
        print(out)


def _numbers(option: str, texts: Iterable[str]) -> dict[str, float]:
    """Read NAME=NUMBER texts.

    >>> _numbers("--weights", ["a=1", "b=.5"])
    {'a': 1.0, 'b': 0.5}
    """
    numbers = {}
    for name, value in _pairs(option, texts).items():
        try:
            numbers[name] = float(value)
        except ValueError:
            raise DpmergeError("DPM-103", f"{option} {name}={value} is no number", "write, say, shop=.5") from None
    return numbers


def _layer_scales(texts: Iterable[str]) -> dict[str, Any]:
    """Sort factors into those on the merged change and those on one party's: `PATTERN=X` and `PARTY:PATTERN=X`.

    No module's name has a colon in it that a pattern needs; a party's name may.

    >>> _layer_scales(["query=.5", "shop:value=2"])
    {'layer_scales': {'query': 0.5}, 'party_layer_scales': {'shop': {'value': 2.0}}}
    """
    scales: dict[str, float] = {}
    of_parties: dict[str, dict[str, float]] = {}
    for name, number in _numbers("--layer-scale", texts).items():
        party, mark, pattern = name.rpartition(":")
        if mark and pattern and not party.endswith("(?"):
            of_parties.setdefault(party, {})[pattern] = number
        else:
            scales[name] = number
    return {"layer_scales": scales or None, "party_layer_scales": of_parties or None}


def _input(text: str) -> tuple[str | None, Path]:
    """Read a folder, or NAME=FOLDER where no such folder exists."""
    name, mark, folder = text.partition("=")
    if not mark or _exists(Path(text)):
        return None, Path(text)
    if not name or not folder:
        raise DpmergeError("DPM-103", f"{text!r} is not of the form NAME=FOLDER", "write, say, shop=path/to/adapter")
    return name, Path(folder)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # no name that a file could have
        return False


def _pairs(option: str, texts: Iterable[str]) -> dict[str, str]:
    """Read NAME=VALUE texts, each name once."""
    pairs: dict[str, str] = {}
    for text in texts:
        name, _, value = (part.strip() for part in text.partition("="))
        if not name or not value:
            raise DpmergeError("DPM-103", f"{option} {text!r} is not of the form NAME=VALUE", "write, say, shop=1")
        if name in pairs:
            raise DpmergeError("DPM-103", f"{option} names {name} twice", "give each name once")
        pairs[name] = value
    return pairs
