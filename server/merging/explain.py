"""What is known about a merge beside its result: noise, drift, overlap, and what it keeps of every party."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dpmerge.common.config_rules import build
from dpmerge.common.config_sections import TrainingSettings
from dpmerge.common.errors import DpmergeError
from dpmerge.common.statement import mechanism_from_statement
from dpmerge.server.merging.deltas import Adapter
from dpmerge.server.merging.lowrank import gram
from dpmerge.server.merging.merge import Merged
from dpmerge.server.noise_share import noise_share
from dpmerge.server.predicted_gap import PredictedGap


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Diagnostics of a merge; lists run over `parties`.

    Attributes:
        parties: In the order of the merge.
        noise_share: Estimated share in [0, 1] of ‖B‖² that is noise, from the statement; None where that is unknown.
        drift: ‖τ_t‖, the Frobenius norm of the party's whole weight change.
        overlap: Matrix of cosines between the parties' changes; None where `merge` left it out.
        kept: ⟨τ, τ_t⟩ / ‖τ_t‖² with the merged τ: how much of the party's change the merged one holds along it. 0 is
            the base model, 1 the party's own, more than 1 is possible; None for a party that did not move.
        gaps: Party → predicted growth of its loss; empty without public data to predict it from.
    """

    parties: tuple[str, ...]
    noise_share: tuple[float | None, ...]
    drift: tuple[float, ...]
    overlap: tuple[tuple[float, ...], ...] | None
    kept: tuple[float | None, ...]
    gaps: Mapping[str, PredictedGap]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        gaps = {party: asdict(gap) | {"predicted": gap.predicted} for party, gap in self.gaps.items()}
        return asdict(self) | {"gaps": gaps}


def explain(adapters: Sequence[Adapter], merged: Merged, gaps: Mapping[str, PredictedGap] | None = None) -> Explanation:
    """Return the diagnostics of a merge of these adapters, with the gaps that public data predict."""
    by_party = {adapter.party: adapter for adapter in adapters}
    parties = tuple(merged.info["parties"])
    drift, overlap = merged.info["norms"], merged.info["overlap"]
    along = [_inner(by_party[party], merged) for party in parties]
    return Explanation(
        parties=parties,
        noise_share=tuple(stated_noise_share(by_party[party]) for party in parties),
        drift=tuple(drift),
        overlap=None if overlap is None else tuple(map(tuple, overlap)),
        kept=tuple(inner / norm**2 if norm else None for inner, norm in zip(along, drift, strict=True)),
        gaps=gaps or {},
    )


def stated_noise_share(adapter: Adapter) -> float | None:
    """Return the estimated share of the adapter that is noise; None without a statement that says enough."""
    public = adapter.statement.get("training")
    settings = public.get("training") if isinstance(public, Mapping) else None
    if settings is None:
        return None
    try:
        training = build(TrainingSettings, settings, "training")
        return noise_share(mechanism_from_statement(adapter.statement), training, adapter.modules)
    except DpmergeError:  # a statement of another version: what it does not say is unknown, and no reason not to merge
        return None


def _inner(adapter: Adapter, merged: Merged) -> float:
    """Return ⟨τ, τ_t⟩ over all modules, from thin factors."""
    return sum(float(gram([own, merged.modules[name]])[0, 1]) for name, own in adapter.modules.items())
