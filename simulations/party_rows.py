"""One row of the results per party: what it released and what was measured, or why it is in no merge."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from dpmerge.client.app import FAILED, FAILURE
from dpmerge.client.party.party import read_training
from dpmerge.common.config.federation import PartyPlan
from dpmerge.common.errors import CODES, DpmergeError
from dpmerge.common.public.terms import task_name
from dpmerge.common.statement.statement import mechanism_from_statement, sentence
from dpmerge.server.app import Collection
from dpmerge.server.evaluation.evaluate import TaskScores
from dpmerge.server.intake.reception import Reception
from dpmerge.server.merging.adapters.deltas import Adapter
from dpmerge.server.merging.merge import Merged
from dpmerge.server.merging.noise.from_statement import noise_share
from dpmerge.simulations.flower import PARTIES
from dpmerge.simulations.reporting.results import Accuracies, PartyResult, Status

NEXT = {"keep": "go on with --resume, which waits for it", "refuse": "this federation takes no more releases"}
WITHDRAWN = "its release was withdrawn and is in no merge"


def party_rows(
    plans: Iterable[PartyPlan],
    adapters: Sequence[Adapter],
    collection: Collection,
    reception: Reception,
    scores: Mapping[str, TaskScores],
    merged: Merged | None,
    left_out: Mapping[str, DpmergeError],
    folders: Path,
) -> tuple[PartyResult, ...]:
    """Return every party's line, in the order of the plans.

    Args:
        plans: All parties'.
        adapters: What the spool holds and is not withdrawn.
        collection: What became of the run's replies.
        reception: The federation's.
        scores: By party, of those with public test records.
        merged: None if nothing was merged.
        left_out: By party, why an accepted release is in no merge after all.
        folders: Where the parties' own folders are: in a simulation all of it is the user's.
    """
    released = {adapter.party: adapter for adapter in adapters}
    withdrawn = reception.spool.withdrawn()
    rows = []
    for plan in plans:
        if plan.party in released:
            rows.append(_released(plan, released[plan.party], scores.get(plan.party), merged))
        elif plan.party in left_out:
            rows.append(_absent(plan, "failed", f"{left_out[plan.party]}; the others were merged without it"))
        elif plan.party in withdrawn:
            rows.append(_absent(plan, "withdrawn", WITHDRAWN))
        else:
            status, reason = _why_absent(plan.party, collection, reception)
            rows.append(_absent(plan, status, reason + _own_words(folders / plan.party, reason)))
    return tuple(rows)


def _why_absent(party: str, collection: Collection, reception: Reception) -> tuple[Status, str]:
    if party in collection.refused:
        code, reason = collection.refused[party]
        return "failed", f"{code}: {reason}"
    if collection.late:
        lateness = f"no release by the deadline, {reception.deadline:%Y-%m-%d %H:%M} UTC"
        return "late", "; ".join([lateness, *collection.nameless, NEXT[reception.late]])
    return "failed", "; ".join(["DPM-599: no reply came", *collection.nameless])


def _own_words(folder: Path, reason: str) -> str:
    """Return the code that the party itself noted where the reply has the common one, and where its words are.

    Its words may quote the data, and results are shown to others.
    """
    path = folder / FAILURE
    if not reason.startswith(FAILED) or not path.exists():
        return ""
    code = path.read_text(encoding="utf-8").partition(":")[0]
    words = f"{code}, {CODES[code]}; " if code in CODES else ""
    return f" (there: {words}in full in {PARTIES}/{folder.name}/{FAILURE})"


def _absent(plan: PartyPlan, status: Status, reason: str) -> PartyResult:
    return PartyResult(
        party=plan.party,
        task=task_name(plan.party, plan.source),
        status=status,
        reason=reason,
        private=plan.privacy.private,
    )


def _released(plan: PartyPlan, adapter: Adapter, scores: TaskScores | None, merged: Merged | None) -> PartyResult:
    mechanism = mechanism_from_statement(adapter.statement)
    accuracy = accuracy_se = Accuracies()
    by_adapter: dict[str, float] = {}
    if scores is not None:
        measured = (scores.base, scores.by_adapter[plan.party], scores.merged)
        accuracy = Accuracies(**dict(zip(("base", "own", "merged"), (m.value for m in measured), strict=True)))
        accuracy_se = Accuracies(
            **dict(zip(("base", "own", "merged"), (m.standard_error for m in measured), strict=True))
        )
        by_adapter = {party: m.value for party, m in scores.by_adapter.items()}
    records, report = read_training(plan)  # the simulation's own knowledge; no release carries it
    return PartyResult(
        party=plan.party,
        task=task_name(plan.party, plan.source),
        private=mechanism.private,
        epsilon=adapter.statement["epsilon"],
        delta=mechanism.target_delta,
        noise_multiplier=mechanism.noise_multiplier if mechanism.private else None,
        num_train=len(records),
        num_dropped=report.num_dropped if report else 0,
        dropped=report.reasons() if report else (),
        num_test=scores.base.num_test if scores else None,
        accuracy=accuracy,
        accuracy_se=accuracy_se,
        accuracy_by_adapter=by_adapter,
        drift=merged.info["norms"][merged.info["parties"].index(plan.party)] if merged else None,
        noise_share=noise_share(mechanism, plan.training, adapter.modules),
        sentence=sentence(adapter.statement),
    )
