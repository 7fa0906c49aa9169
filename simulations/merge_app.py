"""`dpmerge merge`: from adapter folders to one merged adapter or model, with a gate before and a record after.

Nothing is written unless everything fits, and then in one step: the output folder is complete or absent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpmerge.common.config_sections import MergeSettings
from dpmerge.common.errors import DpmergeError
from dpmerge.simulations.terminal import BAD_INPUT, Format, FormatOption, answer, console

if TYPE_CHECKING:
    from dpmerge.server.coefficient import Validation
    from dpmerge.server.merging.explain import Explanation
    from dpmerge.server.merging.gate import Gate
    from dpmerge.server.merging.merge import Merged

EXAMPLE = "Example: dpmerge merge runs/demo/releases/shop other=path/to/adapter --no-strict --out merged"
TUNED = "Parameters of the method"
INSTEAD = "In place of merging, or beside it"


@dataclass(frozen=True, kw_only=True)
class Request:
    """One call of the command, its texts parsed.

    Attributes:
        inputs: Party name, or None for the adapter's own, and folder.
        out: Where the result goes, or None to write nothing.
        options: Keyword arguments of `merge`, only those that were given.
        materialize: Write the full model in place of an adapter.
        explained: Say what is known about the merge.
        base: Where the base model is; empty for where the adapters say.
        validation: Party → public file to choose the coefficient on.
    """

    inputs: Sequence[tuple[str | None, Path]]
    out: Path | None
    options: dict[str, Any]
    materialize: bool
    explained: bool
    base: str
    validation: dict[str, Path]


def merge(
    adapters: Annotated[
        list[str] | None,
        typer.Argument(metavar="ADAPTER…", help="Release or PEFT adapter folders; NAME=FOLDER names one."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where the result goes; empty or new.")
    ] = None,
    method: Annotated[str, typer.Option(help="A name of --list.")] = MergeSettings.method,
    weights: Annotated[
        str | None, typer.Option(metavar="A=1,B=.5", help="One weight per party; all 1 if not given.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict/--no-strict", help="Refuse other modules or seeds of A.")] = True,
    seed: Annotated[int | None, typer.Option(help="Of random masks.")] = None,
    coefficient: Annotated[float | None, typer.Option(help="Factor on the sum.", rich_help_panel=TUNED)] = None,
    density: Annotated[float | None, typer.Option(help="Share of entries to keep.", rich_help_panel=TUNED)] = None,
    semantics: Annotated[
        str | None, typer.Option(help="Whose TIES: paper, peft, mergekit.", rich_help_panel=TUNED)
    ] = None,
    ridge: Annotated[float | None, typer.Option(help="Relative ridge of wudi.", rich_help_panel=TUNED)] = None,
    common_share: Annotated[float | None, typer.Option(help="Common share of iso-cts.", rich_help_panel=TUNED)] = None,
    rank: Annotated[
        int | None, typer.Option(help="Rank of the result; exact if not given.", rich_help_panel=TUNED)
    ] = None,
    core: Annotated[
        bool, typer.Option("--core", help="Work on coordinates in shared bases.", rich_help_panel=TUNED)
    ] = False,
    validate: Annotated[
        list[str] | None,
        typer.Option(metavar="PARTY=FILE", help="Choose the coefficient on this public file (columns text, label)."),
    ] = None,
    base: Annotated[
        str, typer.Option(help="The base model, for --materialize and --validate, if not where the adapters say.")
    ] = "",
    listed: Annotated[bool, typer.Option("--list", help="Show every method.", rich_help_panel=INSTEAD)] = False,
    explained: Annotated[
        bool,
        typer.Option(
            "--explain", help="Show noise, drift and overlap; without --out only that.", rich_help_panel=INSTEAD
        ),
    ] = False,
    materialize: Annotated[
        bool,
        typer.Option("--materialize", help="Write the full model in place of an adapter.", rich_help_panel=INSTEAD),
    ] = False,
    output: FormatOption = Format.text,
) -> int:
    """Merge releases of dpmerge or any PEFT LoRA adapters of one base model; nothing is written unless all fit."""
    if listed:
        return _list(output)
    options = {"weights": _weights(weights), "coefficient": coefficient, "density": density, "semantics": semantics}
    options |= {"ridge": ridge, "common_share": common_share, "rank": rank, "core": core or None, "seed": seed}
    request = Request(
        inputs=[_input(text) for text in adapters or ()],
        out=out,
        options={key: value for key, value in options.items() if value is not None}
        | {"method": method, "strict": strict},
        materialize=materialize,
        explained=explained,
        base=base,
        validation={party: Path(file) for party, file in _pairs("--validate", validate or ()).items()},
    )
    return _run(request, output)


def _list(output: Format) -> int:
    from dpmerge.simulations.merge_tables import method_rows, methods_table

    if output is Format.json:
        answer(output, {"methods": method_rows()}, "")
    else:
        console().print(methods_table())
    return 0


def _run(request: Request, output: Format) -> int:
    """Gate, merge, write, report; the exit code."""
    from dpmerge.common.release import check_new_folder
    from dpmerge.server.merging.explain import explain
    from dpmerge.server.merging.gate import inspect
    from dpmerge.server.merging.merge import merge as merge_adapters

    if request.out is None and not request.explained:
        raise typer.BadParameter("say where the result goes, or --explain to write nothing", param_hint="--out")
    if request.out is not None:
        check_new_folder(request.out)
    gate = inspect(request.inputs, strict=request.options["strict"])
    if gate.refusals:
        return _refuse(gate, output)
    validation = _validate(request, gate)
    chosen = {"coefficient": validation.coefficient} if validation else {}
    merged = merge_adapters(gate.adapters, **request.options | chosen)
    explanation = explain(gate.adapters, merged) if request.explained else None
    if request.out is not None:
        _write(request, request.out, gate, merged, explanation, validation)
    _report(request, output, gate, merged, explanation, validation)
    return 0


def _refuse(gate: Gate, output: Format) -> int:
    """Show what was read and every mismatch, on stderr: there is no result."""
    from dpmerge.simulations.merge_tables import gate_table

    terminal = console(stderr=True)
    if gate.entries and output is Format.text:
        terminal.print(gate_table(gate.entries))
    for refusal in gate.refusals:
        terminal.print(str(refusal), style="red", markup=False, highlight=False, soft_wrap=True)
    return BAD_INPUT


def _validate(request: Request, gate: Gate) -> Validation | None:
    """Choose the coefficient on the public files that were named; None if none was."""
    if not request.validation:
        return None
    if "coefficient" in request.options:
        raise DpmergeError("DPM-103", "--coefficient and --validate contradict each other", "give one of them")
    from dpmerge.common.model import load_base
    from dpmerge.server.coefficient import check_base, choose_coefficient
    from dpmerge.server.merging.merge import merge as merge_adapters

    base = load_base(_base_name(request, gate))
    check_base(base, gate.adapters)
    folders = {Path(entry.folder): adapter for entry, adapter in zip(gate.entries, gate.adapters, strict=True)}
    return choose_coefficient(
        base,
        folders,
        request.validation,
        lambda coefficient: merge_adapters(gate.adapters, **request.options, coefficient=coefficient),
    )


def _write(
    request: Request,
    out: Path,
    gate: Gate,
    merged: Merged,
    explanation: Explanation | None,
    validation: Validation | None,
) -> None:
    """Write the adapter, or the full model, with its record and its card; complete or not at all."""
    from dpmerge.common.release import HEAD, MERGE, PICTURE, README, to_files, write_files
    from dpmerge.server.merging.card import merge_card
    from dpmerge.server.merging.merge import as_release
    from dpmerge.simulations.merge_tables import picture

    release = as_release(merged, gate.adapters)
    if validation:
        release = replace(release, merge=(release.merge or {}) | {"validation": validation.to_dict()})
    card = merge_card(release, gate.entries, materialized=request.materialize, pictured=explanation is not None)
    files = to_files(release) | {README: card.encode()}
    if explanation:
        files[PICTURE] = picture(explanation)
    try:
        if request.materialize:
            kept = {MERGE, README, PICTURE} | ({HEAD} if release.heads else set())
            _write_model(request, out, gate, merged, {name: files[name] for name in files.keys() & kept})
        else:
            write_files(out, files)
    except OSError as problem:
        raise DpmergeError("DPM-301", f"{out} cannot be written: {problem.strerror}", "give another --out") from None


def _write_model(request: Request, out: Path, gate: Gate, merged: Merged, files: dict[str, bytes]) -> None:
    from dpmerge.common.model import load_base
    from dpmerge.common.release import new_folder
    from dpmerge.server.coefficient import check_base
    from dpmerge.server.merging.materialize import add_change, open_base, save_model

    base = _base_name(request, gate)
    if any(adapter.base_sha256 for adapter in gate.adapters):
        check_base(load_base(base), gate.adapters)
    model = open_base(base)
    add_change(model, merged)
    with new_folder(out) as folder:
        save_model(model, base, folder)
        for name, content in files.items():
            (folder / name).write_bytes(content)


def _base_name(request: Request, gate: Gate) -> str:
    stated = [adapter.config.get("base_model_name_or_path") for adapter in gate.adapters]
    name = request.base or next((name for name in stated if isinstance(name, str)), "")
    if not name:
        raise DpmergeError("DPM-204", "no adapter names its base model", "give --base an alias, a folder or a hub id")
    return name


def _report(
    request: Request,
    output: Format,
    gate: Gate,
    merged: Merged,
    explanation: Explanation | None,
    validation: Validation | None,
) -> None:
    from dpmerge.simulations.merge_tables import explanation_tables, gate_table, validation_tables

    out, info = request.out, merged.info
    if output is Format.json:
        facts = {
            "out": None if out is None else str(out),
            "materialized": request.materialize and out is not None,
            "gate": [entry.to_dict() for entry in gate.entries],
            "merge": info,
            "explanation": explanation.to_dict() if explanation else None,
            "validation": validation.to_dict() if validation else None,
        }
        answer(output, facts, "")
        return
    tables = [gate_table(gate.entries), *(explanation_tables(explanation) if explanation else [])]
    tables += validation_tables(validation) if validation else []
    terminal = console()
    for table in tables:
        terminal.print(table)
    for absent in info["absent"]:
        print(f"taken as 0: {absent}")
    print(
        f"{info['method']} of {len(info['parties'])}: rank {info['rank']}, coefficient {info['coefficient']:.4g}, "
        f"norm {info['norm']:.4g}, {info['truncation_error']:.2g} of it left out by the rank"
    )
    if out is not None:
        print(out)


def _weights(text: str | None) -> dict[str, float] | None:
    """Read "a=1,b=.5".

    >>> _weights("a=1,b=.5"), _weights(None)
    ({'a': 1.0, 'b': 0.5}, None)
    """
    if text is None:
        return None
    weights = {}
    for party, value in _pairs("--weights", text.split(",")).items():
        try:
            weights[party] = float(value)
        except ValueError:
            problem = f"--weights {party}={value} is no number"
            raise DpmergeError("DPM-103", problem, "write, say, shop=1,library=.5") from None
    return weights


def _input(text: str) -> tuple[str | None, Path]:
    """Read a folder, or NAME=FOLDER where no such folder exists."""
    name, mark, folder = text.partition("=")
    if Path(text).exists() or not mark:
        return None, Path(text)
    return name, Path(folder)


def _pairs(option: str, texts: Iterable[str]) -> dict[str, str]:
    """Read NAME=VALUE texts, each name once."""
    pairs: dict[str, str] = {}
    for text in texts:
        name, _, value = (part.strip() for part in text.partition("="))
        if not name or not value:
            raise DpmergeError("DPM-103", f"{option} {text!r} is not of the form NAME=VALUE", "write, say, shop=1")
        if name in pairs:
            raise DpmergeError("DPM-103", f"{option} names {name} twice", "name each party once")
        pairs[name] = value
    return pairs
