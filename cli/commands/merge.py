"""`dpmerge merge`: from adapter folders to one merged adapter or model, with a gate before and a record after.

Nothing is written unless everything fits, and then in one step: the output folder is complete or absent.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpmerge.cli.grouped import grouped, parameter
from dpmerge.cli.merge_texts import files, layer_scales, named_folder, numbers
from dpmerge.cli.terminal import BAD_INPUT, INTERRUPTED, Format, FormatOption, answer, console
from dpmerge.common.config.sections import MergeSettings
from dpmerge.common.printable import MAX_TEXT, shown
from dpmerge.server.merging.methods.recipe import MergeMethod
from dpmerge.server.merging.registry import METHODS, parameters_of
from dpmerge.server.merging.spec.spec import spec_of

if TYPE_CHECKING:
    from dpmerge.server.merge_job import Outcome, Request
    from dpmerge.server.merging.gate.gate import Gate

app = typer.Typer(add_completion=False)
TUNED = "Parameters of the method"
AROUND = "Around any method"
PUBLIC = "Public data"
INSTEAD = "In place of merging, or beside it"


def _option(help: str, panel: str | None = None, *names: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, metavar=metavar)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What is merged, and where the result goes."""

    adapters: Annotated[
        list[str] | None,
        typer.Argument(metavar="ADAPTER…", help="Release or PEFT adapter folders; NAME=FOLDER names one."),
    ] = None
    out: Annotated[Path | None, _option("Where the result goes; empty or new.", None, "--out", metavar="DIR")] = None
    from_spool: Annotated[
        Path | None,
        _option("Merge what a server has accepted, and not withdrawn.", None, "--from-spool", metavar="DIR"),
    ] = None
    without: Annotated[list[str] | None, _option("Leave this party of the spool out.", metavar="PARTY")] = None
    base: Annotated[
        str | None, _option("Where the base model is, if not where the adapters say: alias, folder or hub id.")
    ] = None

    def folders(self) -> list[tuple[str | None, Path]]:
        """Return every adapter's party, or None for its own, and folder."""
        from dpmerge.server.merge_job import spooled

        named = list(map(named_folder, self.adapters or ()))
        return [*named, *spooled(self.from_spool, self.without or ())] if self.from_spool else named


@dataclass(frozen=True, kw_only=True)
class How:
    """The method, and what makes its result the same again."""

    method: Annotated[str, _option("A name of --list.")] = MergeSettings.method
    weights: Annotated[list[str] | None, _option("One weight per party; all 1 if not given.", metavar="A=1,B=.5")] = (
        None
    )
    strict: Annotated[bool, _option("Refuse other modules or seeds of A.", None, "--strict/--no-strict")] = True
    seed: Annotated[int | None, _option("Of random masks.")] = None
    device: Annotated[str, _option("Where to compute: cpu, cuda, or auto for CUDA where there is one.")] = "cpu"

    def options(self) -> dict[str, Any]:
        """Return keywords of `spec_of`."""
        weights = numbers("--weights", ",".join(self.weights).split(",")) if self.weights else None
        return {key: getattr(self, key) for key in ("method", "strict", "seed", "device")} | {"weights": weights}


@dataclass(frozen=True, kw_only=True)
class Around:
    """What is put around the method."""

    core: Annotated[bool, _option("Work on coordinates in bases that the adapters share.", AROUND, "--core")] = False
    denoise: Annotated[
        bool, _option("Predict every party's signal from all parties' changes first.", AROUND, "--denoise")
    ] = False
    robust: Annotated[str | None, _option("Bound one party's influence: clip or median.", AROUND)] = None
    layer_scale: Annotated[
        list[str] | None,
        _option(
            "Factor on the merged change in modules of this name, or on one party's.",
            AROUND,
            metavar="[PARTY:]PATTERN=X",
        ),
    ] = None

    def options(self) -> dict[str, Any]:
        """Return keywords of `spec_of`."""
        return {"core": self.core, "denoise": self.denoise, "robust": self.robust} | layer_scales(
            self.layer_scale or ()
        )


@dataclass(frozen=True, kw_only=True)
class PublicData:
    """Public files to measure on."""

    validate: Annotated[
        list[str] | None,
        _option(
            "Measure on this public file (columns text, label), and choose the coefficient there if none is given.",
            PUBLIC,
            metavar="PARTY=FILE",
        ),
    ] = None
    public: Annotated[
        list[str] | None,
        _option("Public texts of the party's task, for regmean and fisher.", PUBLIC, metavar="PARTY=FILE"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Result:
    """What comes out."""

    listed: Annotated[bool, _option("Show every method.", INSTEAD, "--list")] = False
    explained: Annotated[
        bool, _option("Show noise, drift and overlap; without --out only that.", INSTEAD, "--explain")
    ] = False
    materialize: Annotated[bool, _option("Write the full model in place of an adapter.", INSTEAD, "--materialize")] = (
        False
    )
    output: FormatOption = Format.text


def parameter_options(methods: Mapping[str, MergeMethod]) -> list[Parameter]:
    """Return an option for every parameter that the methods take."""
    return [
        parameter(name, Annotated[each.kind | None, _option(each.about, TUNED)], None)
        for name, each in parameters_of(methods).items()
    ]


@app.command(epilog="Example: dpmerge merge runs/demo/releases/shop other=path/to/adapter --no-strict --out merged")
@grouped(Inputs, How, parameter_options(METHODS), Around, PublicData, Result)
def merge(
    inputs: Inputs, how: How, parameters: dict[str, Any], around: Around, public: PublicData, result: Result
) -> int:
    """Merge releases of dpmerge or any PEFT LoRA adapters of one base model; nothing is written unless all fit."""
    if result.listed:
        return _list(result.output)
    if inputs.out is None and not result.explained:
        raise typer.BadParameter("say where the result goes, or --explain to write nothing", param_hint="--out")
    if inputs.without and inputs.from_spool is None:
        raise typer.BadParameter("is for the parties of --from-spool", param_hint="--without")
    from dpmerge.server.merge_job import Request  # PEFT and transformers, which a refused option need not wait for

    spec = spec_of(**how.options(), **around.options(), **parameters)
    request = Request(
        inputs=inputs.folders(),
        out=inputs.out,
        spec=spec,
        materialize=result.materialize,
        explained=result.explained,
        base=inputs.base or "",
        validation=files("--validate", public.validate),
        public=files("--public", public.public),
    )
    try:
        return _run(request, result.output)
    except KeyboardInterrupt:  # of which typer would keep the exit code alone
        print("interrupted; nothing was written", file=sys.stderr)
        return INTERRUPTED


def _run(request: Request, output: Format) -> int:
    from dpmerge.server.merge_job import inspect, run

    gate = inspect(request)
    for line in gate.warnings:
        print(f"warning: {line}", file=sys.stderr)
    if gate.refusals:
        return _refuse(gate, output)
    _report(request.out, run(request, gate), output)
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
