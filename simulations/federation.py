"""The whole job on one machine: parties on Ray through Flower, then intake, merge, evaluation and results.

The functions are those of a deployment; only the way in which parties are started is the simulation's.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from dpmerge.client.party.outbox import RELEASE
from dpmerge.common.config.federation import Federation, FileSource, IntakeSettings, PartyPlan, party_plan
from dpmerge.common.data.records import Records
from dpmerge.common.data.tabular.places import check_place
from dpmerge.common.encoder.base_model import Base, adapted_layers, load_base
from dpmerge.common.encoder.heads import label_text_head
from dpmerge.common.encoder.split_encoder import check_length, check_vocabulary
from dpmerge.common.errors import DpmergeError
from dpmerge.common.files import replace_file
from dpmerge.common.public.terms import label_descriptions, terms_hash
from dpmerge.common.release.format import replace_folder, to_files
from dpmerge.common.release.wire import Terms
from dpmerge.server.app import Collection
from dpmerge.server.evaluation.evaluate import PublicTask, TaskScores, evaluate, public_test_records
from dpmerge.server.intake.receipts import Receipts
from dpmerge.server.intake.reception import Reception
from dpmerge.server.intake.release_spec import release_spec_of
from dpmerge.server.intake.spool import Spool
from dpmerge.server.merging.adapters.deltas import Adapter, adapter_from_files
from dpmerge.server.merging.merge import Merged, as_release, merge
from dpmerge.server.merging.spec.federation import checked, spec_of_settings
from dpmerge.simulations.flower import PARTIES, collect
from dpmerge.simulations.keys import SimulatedFederation, create_federation
from dpmerge.simulations.output_folder import RUN_FILE, Mode, check_output, locked, prepare_output
from dpmerge.simulations.party_rows import party_rows
from dpmerge.simulations.progress import Progress
from dpmerge.simulations.reporting.report import write_report
from dpmerge.simulations.reporting.results import Results, write_results

PACKAGES = (
    "dpmerge",
    "torch",
    "transformers",
    "peft",
    "flwr",
    "ray",
    "opacus",
    "dp-accounting",
    "numpy",
    "safetensors",
)


def run(federation: Federation, out: Path, *, mode: Mode, num_cpus: int | None, progress: Progress) -> Results:
    """Train every party, merge what was released if that is enough, evaluate, write results and report into `out`.

    Args:
        federation: The checked configuration.
        out: The run's folder.
        mode: "new" wants it absent or empty, "overwrite" replaces an earlier run, "resume" keeps the releases of
            finished parties and goes on with interrupted ones.
        num_cpus: Cores to use; None for all.
        progress: Where long work is shown.

    Raises:
        DpmergeError: Before anything is written, if an asset, model, target, task or data file cannot be used, another
            process is at work in the folder, or "resume" meets another configuration.
    """
    with ExitStack() as held:
        return _run(_prepare(checked(federation), out, mode, held), num_cpus, progress)


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What a run is about, once everything that can be refused before it starts has been looked at.

    Attributes:
        federation: The checked configuration.
        plans: One per party.
        base: The frozen encoder.
        public: Party → public test records, if it has any.
        reception: Where releases are checked, spooled and receipted.
        simulated: The federation's id and keys.
        out: The run's folder.
        seconds: Stage → time that it took; filled as the run goes on.
    """

    federation: Federation
    plans: Sequence[PartyPlan]
    base: Base
    public: Mapping[str, Records | None]
    reception: Reception
    simulated: SimulatedFederation
    out: Path
    seconds: dict[str, float]


def _prepare(federation: Federation, out: Path, mode: Mode, held: ExitStack) -> _Job:
    seconds: dict[str, float] = {}
    plans = [party_plan(federation, party.name) for party in federation.parties]
    with _timed(seconds, "prepare"):
        base = load_base(plans[0].base.model)
        check_length(base, plans[0].base.max_length)
        check_vocabulary(base)
        public = {plan.party: _public_records(plan) for plan in plans}
        release_spec = release_spec_of(base, plans)
        check_output(out, mode)
        held.enter_context(locked(out))
        _open_run(out, federation, mode)
        simulated = create_federation(out, [plan.party for plan in plans])
    reception = Reception(
        federation=simulated.id,
        release_spec=release_spec,
        keys=simulated.keys,
        key=simulated.server_key,
        spool=Spool(out / "spool"),
        receipts=Receipts(out / "receipts"),
        deadline=_deadline(simulated, federation.intake),
        late=federation.intake.late,
        loud=federation.intake.loud,
    )
    return _Job(
        federation=federation,
        plans=plans,
        base=base,
        public=public,
        reception=reception,
        simulated=simulated,
        out=out,
        seconds=seconds,
    )


def _run(job: _Job, num_cpus: int | None, progress: Progress) -> Results:
    federation, plans, reception, out = job.federation, job.plans, job.reception, job.out
    collection = _train(job, num_cpus, progress)
    files, left_out = reception.releases()  # of all that was ever accepted here, whatever came of this run's replies
    adapters = [adapter_from_files(kept, party) for party, kept in files.items()]
    merged = None
    scores: dict[str, TaskScores] = {}
    shortfall = _shortfall(len(adapters), federation)
    if not shortfall:
        for party, kept in files.items():
            replace_folder(out / "releases" / party, kept)
        with _timed(job.seconds, "merge"):
            merged = _merge(federation, adapters, out, progress)
        with _timed(job.seconds, "evaluate"), _threads(num_cpus):
            scores = _evaluate(job.base, plans, job.public, adapters, out, progress)
    results = Results(
        config=federation.to_dict(),
        versions={name: version(name) for name in PACKAGES},
        merge=merged.info if merged else {},
        seconds=job.seconds,
        parties=party_rows(plans, adapters, collection, reception, scores, merged, left_out, out / PARTIES),
        not_merged=shortfall,
    )
    write_results(out, results)
    write_report(out)
    return results


def _train(job: _Job, num_cpus: int | None, progress: Progress) -> Collection:
    """Let the parties train that are to, and return what the server accepted and refused."""
    terms = Terms(terms_hash(job.plans[0], job.base.sha256), job.simulated.id)
    starting, collection = _starting(job.plans, job.reception, job.out), Collection()
    if starting:
        with _timed(job.seconds, "train"):
            collection = collect(
                starting, terms, job.reception, job.simulated, job.out, num_cpus=num_cpus, progress=progress
            )
    collection.late |= len(starting) < len(job.plans)
    return collection


def _merge(federation: Federation, adapters: Sequence[Adapter], out: Path, progress: Progress) -> Merged:
    settings = federation.merge
    progress.stage("merge", f"merging: {settings.method}", None)
    merged = merge(adapters, spec_of_settings(settings, seed=federation.run.seed))
    replace_folder(out / "merged", to_files(as_release(merged, adapters)))
    progress.done("merge")
    return merged


def _evaluate(
    base: Base,
    plans: Sequence[PartyPlan],
    public: Mapping[str, Records | None],
    adapters: Sequence[Adapter],
    out: Path,
    progress: Progress,
) -> dict[str, TaskScores]:
    """Measure every adapter on every task that has public test records."""
    tasks = {}
    heads = {adapter.party: adapter.heads[adapter.party] for adapter in adapters}
    for plan in plans:
        records = public[plan.party]
        if records is not None and plan.party in heads:
            base_head = label_text_head(base, label_descriptions(plan.source))
            tasks[plan.party] = PublicTask(records, heads[plan.party], base_head)
    progress.stage("evaluate", "evaluating", len(tasks))
    scores = evaluate(
        base,
        adapted_layers(base, plans[0].lora.layers)[0],
        tasks,
        {adapter.party: out / "releases" / adapter.party for adapter in adapters},
        out / "merged",
        max_length=plans[0].base.max_length,
        on_task=lambda num_done: progress.update("evaluate", num_done),
    )
    progress.done("evaluate")
    return scores


def _deadline(simulated: SimulatedFederation, settings: IntakeSettings) -> datetime | None:
    minutes = settings.deadline_minutes
    return simulated.created + timedelta(minutes=minutes) if minutes else None


def _starting(plans: Sequence[PartyPlan], reception: Reception, out: Path) -> list[PartyPlan]:
    """Return whom to start: once a federation takes nothing more, only who has a release, and perhaps no receipt.

    Others would spend their budget on a release that is refused.
    """
    if reception.late == "keep" or not reception.is_over(datetime.now(UTC)):
        return list(plans)
    return [plan for plan in plans if (out / PARTIES / plan.party / RELEASE).exists()]


def _shortfall(num_releases: int, federation: Federation) -> str:
    """Return why nothing is merged, or nothing if there are enough releases."""
    wanted = federation.intake.min_parties
    if num_releases >= wanted:
        return ""
    return f"{num_releases} of {len(federation.parties)} releases are here, and intake.min_parties is {wanted}"


@contextmanager
def _threads(num_cpus: int | None) -> Iterator[None]:
    """Give torch all the cores of the run: the parties have finished."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_cpus or os.cpu_count() or 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    seconds[stage] = round(time.monotonic() - start, 3)


def _public_records(plan: PartyPlan) -> Records | None:
    """Return the party's public test records, having checked that its private file is there and of a known kind."""
    if isinstance(plan.source, FileSource):
        try:
            check_place(plan.source.path)
        except DpmergeError as error:
            raise DpmergeError(error.code, f"data of party {plan.party!r}: {error.problem}", error.fix) from None
    return public_test_records(plan.source)


def _open_run(out: Path, federation: Federation, mode: Mode) -> None:
    """Make the folder ready; a resumed run must have been started with the same configuration.

    Raises:
        DpmergeError: DPM-301 for a folder in the way; DPM-302 with the keys that differ.
    """
    now = json.dumps(federation.to_dict(), sort_keys=True, indent=2)
    check_output(out, mode)
    if mode == "resume":
        before = _started_with(out)
        differing = sorted(_differences(before, json.loads(now)))
        if differing:
            raise DpmergeError(
                "DPM-302",
                f"the configuration differs from the one that {out} was started with in {', '.join(differing)}",
                "put the old values back, or start a new run in another folder",
            )
    prepare_output(out, mode)
    replace_file(out / RUN_FILE, now)


def _started_with(out: Path) -> Any:
    """Return the configuration that a run was started with; nothing if it stopped before that was on disk."""
    try:
        return json.loads((out / RUN_FILE).read_text())
    except (FileNotFoundError, ValueError, RecursionError):
        return {}


def _differences(before: Any, now: Any, path: str = "") -> Iterator[str]:
    """Yield the dotted keys whose values differ.

    >>> list(_differences({"a": {"b": 1}}, {"a": {"b": 2}, "c": [3]}))
    ['a.b', 'c']
    """
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in {**before, **now}:
            yield from _differences(before.get(key), now.get(key), f"{path}.{key}" if path else str(key))
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for index, (old, new) in enumerate(zip(before, now, strict=True)):
            yield from _differences(old, new, f"{path}[{index}]")
    elif before != now:
        yield path
