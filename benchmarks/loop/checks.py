"""What must hold of a training, stated as properties: none of them knows which defect it looks for.

Every check yields findings with a p-value: the probability, if the loop is sound, of anything as strange as what was
seen; 0 or 1 where there is nothing to chance. A finding is an alarm below ALPHA over the number of findings that chance
has a part in (Bonferroni): of all checks on a sound loop together, at most one run in 10,000 raises any alarm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from scipy import stats
from scipy.signal import fftconvolve
from torch import Tensor

from dpmerge.client.party.model import PartyModel, party_model
from dpmerge.common.privacy.clip_grid import ClipGrid
from dpmerge.common.statement.subspace_part import SUBSPACE_CLIP_QUANTILE

from .observe import LEARNING_RATE, RHO, Noise, Observed, Rows, fresh_base
from .queries import Loop, Query

ALPHA = 1e-4


@dataclass(frozen=True)
class Finding:
    """One statement that was tested, and the probability of what was seen if it holds."""

    what: str
    p_value: float
    is_exact: bool = False


def exactly(what: str, holds: bool) -> Finding:
    """Return the finding of a statement that chance has no part in."""
    return Finding(what, float(holds), is_exact=True)


Check = Callable[[Loop], Iterator[Finding]]


def noise_is_gaussian(loop: Loop) -> Iterator[Finding]:
    """What is added to a clipped sum is N(0, σ²C²): variance, shape, and its parts along what it could depend on."""
    for query_kind in ("descent", "ascent"):
        seen = [query.standard for query in loop.of(query_kind) if query.standard is not None]
        if not seen:
            continue
        values = torch.cat(seen).numpy()
        yield Finding(f"{query_kind}: normal", float(stats.kstest(values, "norm", method="asymp").pvalue))
        if query_kind == "descent":
            yield Finding("descent: variance", _chi2(float(np.square(values).sum()), len(values)))
    drawn = torch.cat(
        [event.values for event in loop.seen.events if isinstance(event, Noise)] or [torch.zeros(1)]
    ).numpy()
    yield Finding("as drawn: normal", float(stats.kstest(drawn, "norm", method="asymp").pvalue))
    yield Finding("as drawn: variance", _chi2(float(np.square(drawn).sum()), len(drawn)))
    excesses = [
        query.excess_of_length for query in loop.of("ascent") if query.direction is not None and len(query.records)
    ]
    if excesses:
        yield Finding("ascent: variance", _normal(sum(excesses) / math.sqrt(len(excesses))))
        yield Finding("ascent: spread", _chi2(float(np.square(excesses).sum()), len(excesses)))


def noise_knows_no_direction(loop: Loop) -> Iterator[Finding]:
    """Along the clipped sum, and along what clipping took, there is noise as anywhere: neither too much nor a rest."""
    for name in ("clipped", "excess"):
        directions = [(query, getattr(query, name)) for query in loop.of("descent")]
        parts = [float(query.standard @ one / one.norm()) for query, one in directions if one.norm() > 0]
        if parts:
            yield Finding(f"{name}: mean", _normal(sum(parts) / math.sqrt(len(parts))))
            yield Finding(f"{name}: variance", _chi2(float(np.square(parts).sum()), len(parts)))


def answers_are_clipped_sums_with_noise(loop: Loop) -> Iterator[Finding]:
    """Each answer is the clipped sum with the noise that was drawn for it, and nothing else."""
    for query in loop.queries:
        what = f"{query.kind} of step {query.step}"
        if query.noise is None:
            yield exactly(f"{what}: one draw of noise", False)
        elif query.kind == "clip":
            yield exactly(what, math.isclose(_named_clip_norm(query, loop), loop.clip_norm, rel_tol=1e-5))
        else:
            due = query.clipped + query.scale * query.noise
            rounding = 2e-3 * query.clip * len(query.records) + 1e-5 * float(due.norm())
            if query.answer is not None:
                yield exactly(what, bool((query.answer - due).norm() <= rounding))
            elif query.direction is not None:
                turned = query.direction * (due.norm() / query.direction.norm())
                yield exactly(what, bool((turned - due).norm() <= rounding))


def _named_clip_norm(query: Query, loop: Loop) -> float:
    """Return the clip norm that a clip query's noisy histogram names: one record, one bin, height C₀."""
    grid = ClipGrid.around(query.clip, loop.seen.charged.num_coordinates)
    counts = query.sigma * query.noise.numpy()  # type: ignore[union-attr]
    for rows in query.rows:
        bins = np.searchsorted(grid.edges, rows.norm(dim=1).numpy(), side="left").clip(max=len(grid.edges) - 1)
        np.add.at(counts, bins, 1.0)
    return grid.quantile(counts.tolist(), noise_std=query.sigma, share=SUBSPACE_CLIP_QUANTILE)


def samples_are_poisson(loop: Loop) -> Iterator[Finding]:
    """Every record has its own fresh coin of probability q in every sample: sizes, empty ones, records, repetitions."""
    q, num_records = loop.seen.charged.sampling_prob, loop.seen.form.num_records
    coins = _coins(loop.samples, num_records)
    num_samples, sizes = len(coins), coins.sum(1)
    yield Finding("number of draws", _binomial(int(sizes.sum()), coins.size, q))
    yield Finding("empty samples", _binomial(int((sizes == 0).sum()), num_samples, (1 - q) ** num_records))
    yield Finding("spread of sizes", _spread(sizes, num_records, q))
    yield Finding("spread over records", _spread(coins.sum(0), num_samples, q))
    again = coins[: num_samples // 2 * 2 : 2] & coins[1::2]  # disjoint pairs: given the first, the second is binomial
    yield Finding("drawn again", _binomial(int(again.sum()), int(coins[: num_samples // 2 * 2 : 2].sum()), q))
    for query in loop.queries:
        if len(query.records) != len(query.records.unique()):
            yield exactly(f"{query.kind} of step {query.step}: no record twice", False)
    if loop.seen.charged.ascent_sampling == "paired":
        for ascent, descent in zip(loop.of("ascent"), loop.of("descent"), strict=False):
            same = torch.equal(ascent.records.sort().values, descent.records.sort().values)
            yield exactly(f"step {ascent.step}: the charge is for one sample", same)


def streams_are_independent(loop: Loop) -> Iterator[Finding]:
    """No answer's noise tells of another's, of its neighbour's in the vector, or of who was sampled."""
    asked = [query for query in loop.queries if query.standard is not None]
    noises = torch.stack([query.standard for query in asked])  # type: ignore[misc]
    yield Finding("queries", _largest(noises @ noises.T / math.sqrt(noises.shape[1]), loop))
    along = float((noises[:, 1:] * noises[:, :-1]).sum() / math.sqrt(noises[:, 1:].numel()))
    yield Finding("neighbours", _normal(along))
    q, num_records = loop.seen.charged.sampling_prob, loop.seen.form.num_records
    coins = (_coins(asked, num_records) - q)[:, : noises.shape[1]]
    sizes = stats.norm.ppf(stats.chi2.cdf(noises[:, : coins.shape[1]].numpy() ** 2, 1).clip(1e-15, 1 - 1e-15))
    for name, lag in (("this query's sample", 0), ("the sample before", 1)):
        chosen, told = coins[: len(coins) - lag], sizes[lag:]  # given the coins, each sum of normal scores is normal
        yield Finding(f"{name}, all", _normal(float((chosen * told).sum() / np.sqrt(np.square(chosen).sum()))))
        yield Finding(f"{name}, first", _normal(float(chosen[0] @ told[0] / np.linalg.norm(chosen[0]))))


def what_was_charged_was_drawn(loop: Loop) -> Iterator[Finding]:
    """The ledger knew first, of as many queries and values of noise as there were."""
    charged = loop.seen.charged
    per_step = 2 if charged.ascent_noise_multiplier is not None else 1
    yield exactly("charged before anything was drawn", loop.seen.num_before_charge == 0)
    yield exactly("number of steps", len(loop.steps) == charged.num_steps)
    yield exactly("number of queries", loop.num_draws == charged.num_steps * per_step + charged.num_clip_queries)
    yield exactly("values of noise", loop.num_values <= charged.num_noise_values)
    yield exactly("width", all(len(step.vector) == charged.num_coordinates for step in loop.steps))


def keys_are_the_operating_systems(loop: Loop) -> Iterator[Finding]:
    """Every stream starts with 32 bytes of the operating system that nothing else was given, and repeats no key."""
    seen = loop.seen
    yield exactly("drawn for each stream", sorted(seen.fresh_keys) == sorted(seen.drawn_keys))
    yield exactly("sampler and noise", len(seen.fresh_keys) >= 2)
    keys = seen.fresh_keys + seen.later_keys
    yield exactly("no key twice", len(set(keys)) == len(keys))
    yield exactly("length", all(len(key) == 32 for key in keys))


def weights_move_by_answers_alone(loop: Loop) -> Iterator[Finding]:
    """θ is where the answers took it, before each query and in the release; rows are taken there or one radius off."""
    if loop.seen.scales is not None:
        return
    rounding = 1e-5 * LEARNING_RATE * float(loop.steps[-1].gradient.norm())
    stepped = [step.vector - LEARNING_RATE * step.gradient for step in loop.steps]
    strays = [float((a - step.vector).norm()) for a, step in zip(stepped, loop.steps[1:], strict=False)]
    yield exactly("steps", all(stray <= rounding for stray in strays))
    released = loop.seen.released_theta
    yield exactly("release", float((stepped[-1].sort().values - released).norm()) <= rounding)
    for query in loop.queries:
        theta = loop.steps[query.step].vector
        before = loop.steps[query.step - 1].gradient if query.step else None
        for point in query.points:
            yield exactly(f"{query.kind} of step {query.step}: where", _is_due(query, point - theta, before, loop))


def _is_due(query: Query, moved: Tensor, before: Tensor | None, loop: Loop) -> bool:
    if query.kind == "ascent" or (loop.seen.charged.sharpness == "sat" and before is None):
        return bool(moved.norm() == 0)
    if loop.seen.charged.sharpness == "sam":  # which way is the ascent's answer, and looked at as such
        return math.isclose(float(moved.norm()), RHO, rel_tol=1e-4)
    due = before * (RHO / before.norm())  # type: ignore[operator,union-attr]
    return bool((moved - due).norm() <= 1e-4 * RHO)


def rows_are_the_records_own(loop: Loop) -> Iterator[Finding]:
    """A row is the gradient of its own record's loss by its own label, at the query's θ: plain autograd says so."""
    events = [event for event in loop.seen.events if isinstance(event, Rows)]
    for event in (*events[:1], *events[-1:]):
        for record, row in list(zip(event.records.tolist(), event.gradients, strict=True))[:2]:
            due = _own_gradient(loop.seen, event.theta, record)
            yield exactly(f"record {record}", bool((row - due).norm() <= 1e-3 * due.norm()))


_models: dict[object, PartyModel] = {}


def _own_gradient(seen: Observed, theta: Tensor, record: int) -> Tensor:
    if seen.form not in _models:
        _models[seen.form] = party_model(fresh_base(seen.plan.base.model), seen.plan)
    model = _models[seen.form]
    parameters = [parameter for parameter in model.classifier.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for parameter, values in zip(parameters, theta.split([p.numel() for p in parameters]), strict=True):
            parameter.copy_(values.view_as(parameter))
    inputs = model.base.tokenizer(
        seen.texts[record], truncation=True, max_length=seen.plan.base.max_length, return_tensors="pt"
    )
    hidden = model.encoder(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).last_hidden_state
    features = torch.nn.functional.normalize(hidden.mean(1), dim=1) * model.head.feature_scale
    loss = torch.nn.functional.cross_entropy(model.classifier.head(features), torch.tensor([seen.labels[record]]))
    return torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, parameters)])


CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        noise_is_gaussian,
        noise_knows_no_direction,
        answers_are_clipped_sums_with_noise,
        samples_are_poisson,
        streams_are_independent,
        what_was_charged_was_drawn,
        keys_are_the_operating_systems,
        weights_move_by_answers_alone,
        rows_are_the_records_own,
    )
}


def runs_are_independent(loops: Mapping[str, Loop]) -> Iterator[Finding]:
    """No two trainings share noise or a key."""
    wide = {name: loop for name, loop in loops.items() if len(loop.steps[0].vector) > 1000}
    for (one, first), (two, second) in combinations(wide.items(), 2):
        noises = [next(q.standard for q in loop.queries if q.standard is not None) for loop in (first, second)]
        width = min(map(len, noises))
        product = float(noises[0][:width] @ noises[1][:width] / math.sqrt(width))
        yield Finding(f"{one}, {two}", _normal(product))
    keys = [key for loop in loops.values() for key in loop.seen.fresh_keys + loop.seen.later_keys]
    yield exactly("no key twice", len(set(keys)) == len(keys))


def findings_of(loops: Mapping[str, Loop]) -> dict[str, list[Finding]]:
    """Run every check on every training; return its findings by the check's name."""
    found = {
        name: [
            Finding(f"{form}: {one.what}", one.p_value, one.is_exact)
            for form, loop in loops.items()
            for one in check(loop)
        ]
        for name, check in CHECKS.items()
    }
    return found | {"runs_are_independent": list(runs_are_independent(loops))}


def alarms(found: Mapping[str, list[Finding]]) -> dict[str, list[Finding]]:
    """Return the findings that are alarms, by check; checks without one are left out."""
    num_chances = sum(not one.is_exact for some in found.values() for one in some)
    level = ALPHA / max(1, num_chances)
    raised = {name: [one for one in some if not one.p_value >= level] for name, some in found.items()}
    return {name: some for name, some in raised.items() if some}


def _coins(queries: list[Query], num_records: int) -> np.ndarray:
    coins = np.zeros((len(queries), num_records), dtype=np.int64)
    for row, query in zip(coins, queries, strict=True):
        row[query.records.numpy()] = 1
    return coins


def _normal(z: float) -> float:
    return float(2 * stats.norm.sf(abs(z)))


def _chi2(value: float, freedom: int) -> float:
    return float(min(1.0, 2 * min(stats.chi2.cdf(value, freedom), stats.chi2.sf(value, freedom))))


def _binomial(successes: int, trials: int, prob: float) -> float:
    return float(stats.binomtest(successes, trials, prob).pvalue) if trials else 1.0


def _largest(products: Tensor, loop: Loop) -> float:
    """Return the p-value of the largest of standard normal products above the diagonal."""
    above = products[*torch.triu_indices(len(products), len(products), 1)]
    return min(1.0, _normal(float(above.abs().max())) * len(above)) if len(above) else 1.0


def _spread(counts: np.ndarray, trials: int, prob: float) -> float:
    """Return the p-value of Σ(x − np)² of binomial counts, too small or too large, from its exact distribution."""
    squares = np.round(2 * (np.arange(trials + 1) - trials * prob)).astype(np.int64) ** 2
    one = np.bincount(squares, weights=stats.binom.pmf(np.arange(trials + 1), trials, prob))
    total, power, number = np.ones(1), one, len(counts)
    while number:
        total = fftconvolve(total, power).clip(min=0) if number & 1 else total
        power, number = fftconvolve(power, power).clip(min=0) if number > 1 else power, number >> 1
    seen = int((np.round(2 * (counts - trials * prob)).astype(np.int64) ** 2).sum())
    return min(1.0, 2 * float(min(total[: seen + 1].sum(), total[seen:].sum())))
