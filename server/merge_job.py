"""One merge from gate to folder; `cli/commands/merge.py` is what people type, this is what happens then."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpmerge.common.data.records import read_texts
from dpmerge.common.encoder.base_model import Base, load_base
from dpmerge.common.errors import DpmergeError
from dpmerge.common.release.format import (
    HEAD,
    MERGE,
    MODULES,
    PICTURE,
    README,
    Release,
    check_new_folder,
    new_folder,
    to_files,
    write_files,
)
from dpmerge.server.evaluation.coefficient import (
    Validation,
    check_base,
    choose_coefficient,
    first_layer,
    grid,
    max_length,
    public_tasks,
)
from dpmerge.server.evaluation.evaluate import PublicTask
from dpmerge.server.evaluation.explain import Explanation, explain
from dpmerge.server.evaluation.picture import picture
from dpmerge.server.evaluation.predicted_gap import PredictedGap, predicted_gaps
from dpmerge.server.evaluation.public_statistics import public_statistics
from dpmerge.server.intake.spool import open_spool
from dpmerge.server.merging.adapters.deltas import Adapter
from dpmerge.server.merging.card import merge_card
from dpmerge.server.merging.gate.gate import Gate, inspect_adapters
from dpmerge.server.merging.materialize import add_change, open_base, save_model
from dpmerge.server.merging.merge import Merged, as_release, merge
from dpmerge.server.merging.methods.parameter import COEFFICIENT
from dpmerge.server.merging.registry import METHODS
from dpmerge.server.merging.spec.spec import MergeSpec


@dataclass(frozen=True, kw_only=True)
class Request:
    """One call of the command, its texts parsed.

    Attributes:
        inputs: Party name, or None for the adapter's own, and folder.
        out: Where the result goes, or None to write nothing.
        spec: What to do with them; `statistics` and, with a validation file, the coefficient are filled in.
        materialize: Write the full model in place of an adapter.
        explained: Say what is known about the merge.
        base: Where the base model is; empty for where the adapters say.
        validation: Party → labelled public file to measure on, and to choose the coefficient on.
        public: Party → public texts, for methods that need statistics.
    """

    inputs: Sequence[tuple[str | None, Path]]
    out: Path | None
    spec: MergeSpec
    materialize: bool
    explained: bool
    base: str
    validation: Mapping[str, Path]
    public: Mapping[str, Path]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a merge found and made.

    Attributes:
        gate: The adapters, all of which fit.
        merged: The merged change.
        explanation: Diagnostics, if they were asked for.
        validation: How the coefficient was chosen, if on public files.
    """

    gate: Gate
    merged: Merged
    explanation: Explanation | None
    validation: Validation | None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "gate": [entry.to_dict() for entry in self.gate.entries],
            "warnings": list(self.gate.warnings),
            "merge": self.merged.info,
            "explanation": self.explanation.to_dict() if self.explanation else None,
            "validation": self.validation.to_dict() if self.validation else None,
        }


def spooled(spool: Path, without: Sequence[str]) -> list[tuple[str | None, Path]]:
    """Return party and folder of every release of a spool that is to be merged, in order of the parties' names.

    Args:
        spool: The spool's folder.
        without: Parties to leave out, as if they had withdrawn.

    Raises:
        DpmergeError: DPM-403 if there is no spool; DPM-104 for a party that it does not hold; DPM-401 if bytes changed.
    """
    found = open_spool(spool)
    known = found.hashes()
    for party in without:
        if party not in known:
            raise DpmergeError("DPM-104", f"the spool holds no release of {party!r}", f"it holds {', '.join(known)}")
    return [(party, folder) for party, folder in found.folders().items() if party not in without]


def inspect(request: Request) -> Gate:
    """Read the adapters and list what keeps them from being merged.

    Raises:
        DpmergeError: DPM-301 if the output folder cannot be used; DPM-403 without adapters.
    """
    if request.out is not None:
        _check_out(request.out, [folder for _, folder in request.inputs])
    return inspect_adapters(request.inputs, strict=request.spec.strict, base=request.base)


def run(request: Request, gate: Gate) -> Outcome:
    """Merge adapters that fit, and write the result if it has a place to go.

    Args:
        request: What was asked for.
        gate: What `inspect` found, without refusals.

    Raises:
        DpmergeError: For a method, parameter, file or base model that cannot be used. Nothing is written then.
    """
    request = _with_statistics(request, gate)
    tasks = public_tasks(gate.adapters, request.validation)
    validation = _validate(request, gate, tasks)
    spec = request.spec
    if validation and _chooses(spec):
        spec = spec.with_coefficient(validation.coefficient)
    merged = merge(gate.adapters, spec)
    gaps = _gaps(request, gate, merged, tasks) if request.explained else {}
    explanation = explain(gate.adapters, merged, gaps) if request.explained else None
    outcome = Outcome(gate=gate, merged=merged, explanation=explanation, validation=validation)
    if request.out is not None:
        try:
            _write(request, request.out, outcome)
        except OSError as problem:
            raise _unwritable(request.out, problem) from None
    return outcome


def _check_out(out: Path, inputs: Sequence[Path]) -> None:
    """Refuse a place that is taken, that no folder can have, or that lies in a folder which is read."""
    try:
        check_new_folder(out)
    except OSError as problem:
        raise _unwritable(out, problem) from None
    place = Path(os.path.realpath(out))  # unlike `resolve`, it takes a loop of links for a name
    for folder in inputs:
        if place.is_relative_to(os.path.realpath(folder)):
            raise DpmergeError("DPM-301", f"{out} lies in {folder}, which is merged", "give another --out")


def _unwritable(out: Path, problem: OSError) -> DpmergeError:
    return DpmergeError("DPM-301", f"{out} cannot be written: {problem.strerror}", "give another --out")


def _with_statistics(request: Request, gate: Gate) -> Request:
    """Measure what the method has to know about every party's model, if it has, on the public texts that were named."""
    row = METHODS.get(request.spec.method)
    if row is None or (row.statistics is None and not request.public):
        return request  # `merge` refuses an unknown name
    if row.statistics is None:
        raise DpmergeError("DPM-103", f"--public is for methods that need statistics; {row.name} does not", "remove it")
    parties = {adapter.party for adapter in gate.adapters}
    if missing := sorted(parties - request.public.keys()):
        fix = f"give --public {missing[0]}=FILE"
        raise DpmergeError("DPM-103", f"{row.name} needs public texts for {', '.join(missing)}", fix)
    if strangers := sorted(request.public.keys() - parties):
        fix = f"name one of {', '.join(sorted(parties))}"
        raise DpmergeError("DPM-103", f"--public names {', '.join(strangers)}, who is not merged", fix)
    texts = {party: read_texts(path, text="text") for party, path in request.public.items()}
    base, length = _open(request, gate), max_length(gate.adapters)
    found = public_statistics(base, gate.adapters, texts, kind=row.statistics, max_length=length)
    return replace(request, spec=replace(request.spec, statistics=found))


def _chooses(spec: MergeSpec) -> bool:
    """Tell whether there is a coefficient to choose: the method takes one, and none was given."""
    row = METHODS.get(spec.method)
    return row is not None and COEFFICIENT in row.takes and spec.parameters.get(COEFFICIENT.name) is None


def _validate(request: Request, gate: Gate, tasks: Mapping[str, PublicTask]) -> Validation | None:
    """Measure the merge on the public files that were named, and choose the coefficient there if there is one."""
    if not tasks:
        return None
    spec, coefficients = request.spec, grid(len(gate.adapters))
    if not _chooses(spec):
        coefficients = (merge(gate.adapters, spec).info["coefficient"],)

    def merged_at(coefficient: float) -> Merged:
        return merge(gate.adapters, spec.with_coefficient(coefficient) if _chooses(spec) else spec)

    base, files = _open(request, gate), request.validation
    return choose_coefficient(base, _folders(gate), tasks, files, coefficients, merged_at)


def _gaps(request: Request, gate: Gate, merged: Merged, tasks: Mapping[str, PublicTask]) -> dict[str, PredictedGap]:
    """Predict how much each party loses, where a public file of its task was named."""
    if not tasks:
        return {}
    own = {adapter.party: folder for folder, adapter in _folders(gate).items()}
    base = _open(request, gate)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "merged"
        write_files(folder, to_files(as_release(merged, gate.adapters)))
        first, length = first_layer(base, gate.adapters), max_length(gate.adapters)
        return predicted_gaps(base, first, tasks, own, folder, max_length=length)


def _folders(gate: Gate) -> dict[Path, Adapter]:
    return {Path(entry.folder): adapter for entry, adapter in zip(gate.entries, gate.adapters, strict=True)}


def _open(request: Request, gate: Gate) -> Base:
    """Load the base model afresh, for whoever adds adapters to it, and hold it against the statements."""
    base = load_base(_base_name(request, gate))
    check_base(base, gate.adapters)
    return base


def _write(request: Request, out: Path, outcome: Outcome) -> None:
    """Write the adapter, or the full model, with its record and its card; complete or not at all."""
    gate, explanation, validation = outcome.gate, outcome.explanation, outcome.validation
    release = as_release(outcome.merged, gate.adapters)
    if validation:
        release = replace(release, merge=(release.merge or {}) | {"validation": validation.to_dict()})
    card = merge_card(release, gate.entries, materialized=request.materialize, pictured=explanation is not None)
    beside = {README: card.encode()} | ({PICTURE: picture(explanation)} if explanation else {})
    if request.materialize:
        _write_model(request, out, outcome, release, beside)
    else:
        write_files(out, to_files(release) | beside)


def _write_model(request: Request, out: Path, outcome: Outcome, release: Release, beside: Mapping[str, bytes]) -> None:
    name = _base_name(request, outcome.gate)
    if any(adapter.base_sha256 for adapter in outcome.gate.adapters):
        _open(request, outcome.gate)  # only to compare the hash
    model = open_base(name)
    add_change(model, outcome.merged)
    kept = {MERGE, MODULES} | ({HEAD} if release.heads else set())
    with new_folder(out) as folder:
        save_model(model, name, folder)
        for file, content in {**to_files(release), **beside}.items():
            if file in kept or file in beside:
                (folder / file).write_bytes(content)


def _base_name(request: Request, gate: Gate) -> str:
    stated = [adapter.config.get("base_model_name_or_path") for adapter in gate.adapters]
    name = request.base or next((name for name in stated if isinstance(name, str)), "")
    if not name:
        raise DpmergeError("DPM-204", "no adapter names its base model", "give --base an alias, a folder or a hub id")
    return name
