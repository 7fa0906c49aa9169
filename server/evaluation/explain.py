"""What is known about a merge beside its result: noise, drift, overlap, and what it keeps of every party."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dpmerge.server.evaluation.predicted_gap import PredictedGap
from dpmerge.server.merging.adapters.deltas import Adapter
from dpmerge.server.merging.low_rank.algebra import gram
from dpmerge.server.merging.merge import Merged
from dpmerge.server.merging.noise.shares import noise_of


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Diagnostics of a merge; lists run over `parties`.

    Attributes:
        parties: In the order of the merge.
        noise_share: Share in [0, 1] of ‖τ_t‖² that is noise; see `noise_of`.
        noise_origin: "stated": predicted from the statement; "estimated": from the spectrum, at most that much.
        drift: ‖τ_t‖, the Frobenius norm of the party's whole weight change.
        overlap: Matrix of cosines between the parties' changes; None where `merge` left it out.
        kept: ⟨τ, τ_t⟩ / ‖τ_t‖² with the merged τ: how much of the party's change the merged one holds along it. 0 is
            the base model, 1 the party's own, more than 1 is possible; None for a party that did not move.
        gaps: Party → predicted growth of its loss; empty without public data to predict it from.
    """

    parties: tuple[str, ...]
    noise_share: tuple[float, ...]
    noise_origin: tuple[str, ...]
    drift: tuple[float, ...]
    overlap: tuple[tuple[float, ...], ...] | None
    kept: tuple[float | None, ...]
    gaps: Mapping[str, PredictedGap]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        gaps = {party: asdict(gap) | {"predicted": gap.predicted} for party, gap in self.gaps.items()}
        return asdict(self) | {"gaps": gaps}


def explain(adapters: Sequence[Adapter], merged: Merged, gaps: Mapping[str, PredictedGap] | None = None) -> Explanation:
    """Return the diagnostics of a merge of these adapters, with the gaps that public data predict.

    Args:
        adapters: What was merged.
        merged: What came out.
        gaps: Party → predicted gap, where a public file of its task was named.
    """
    by_party = {adapter.party: adapter for adapter in adapters}
    parties = tuple(merged.info["parties"])
    drift, overlap = merged.info["norms"], merged.info["overlap"]
    known = merged.info["noise"] or [asdict(noise_of(by_party[party])) for party in parties]  # replayed once is enough
    along = [_inner(by_party[party], merged) for party in parties]
    return Explanation(
        parties=parties,
        noise_share=tuple(item["share"] for item in known),
        noise_origin=tuple(item["origin"] for item in known),
        drift=tuple(drift),
        overlap=None if overlap is None else tuple(map(tuple, overlap)),
        kept=tuple(inner / norm**2 if norm else None for inner, norm in zip(along, drift, strict=True)),
        gaps=gaps or {},
    )


def _inner(adapter: Adapter, merged: Merged) -> float:
    """Return ⟨τ, τ_t⟩ over all modules, from thin factors."""
    return sum(float(gram([own, merged.modules[name]])[0, 1]) for name, own in adapter.modules.items())
