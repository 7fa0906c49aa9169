"""The transcript check: replay one training's privatised gradients on neighbouring records and compare everything else.

A training may depend on its records through the mechanism's answers only. So the answers of one training are given to a
second one, whose records differ in one: every point at which the mechanism is asked, the state after every step and the
release must then be equal to the last bit; and of the rows that a query sums, at most one may differ.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial
from unittest import mock

import torch
from torch import Tensor

from dpmerge.client.party import party, trained_space
from dpmerge.client.privacy.privatiser import Privatiser
from dpmerge.client.training import train
from dpmerge.common.config.federation import load_federation, party_plan

from ..training.loop import observe as loop_observe

FEDERATION = """
[base]
model = "minilm-l3"
max_length = 32
[lora]
layers = "last:1"
rank = 2
[training]
num_steps = 4
expected_batch_size = 1
alignment = 0.05
head = "{head}"
{training}
[privacy]
noise = "fast"
noise_seed = 5
delta = 1e-3
{privacy}
[[party]]
name = "shop"
data = "reviews.csv"
labels = {{ "1" = "a bad product", "5" = "a great product" }}
population = 2
epsilon = {epsilon}
{party}
"""
"""B = 1 makes every physical batch one record, whose row then has the same bits in any company."""

DEFAULTS = {"head": "linear", "epsilon": "1.0"}
SUBSPACE = 'subspace = {{ k = 4, public = "public.txt", {} }}'
FORMS = {
    "none": {"training": 'sharpness = "none"'},
    "sat": {"training": 'sharpness = "sat"'},
    "sat-momentum": {"training": 'sharpness = "sat-momentum"'},
    "sam": {"training": 'sharpness = "sam"'},
    "sam-separate": {"training": 'sharpness = "sam"\nascent_sampling = "separate"'},
    "sat-dp-adam": {"training": 'sharpness = "sat"\noptimizer = "dp-adam"'},
    "sat-users": {
        "training": 'sharpness = "sat"',
        "privacy": 'unit = "user"',
        "party": 'user = "author"',
    },
    "sat-subspace": {
        "training": 'sharpness = "sat"\n' + SUBSPACE.format('allocation = "public", clip = "public"'),
        "head": "label-text",
    },
    "sat-subspace-quantile": {
        "training": 'sharpness = "sat"\n' + SUBSPACE.format('clip = "quantile"'),
        "privacy": "l2_clip_norm = 1e-3",
        "epsilon": "10.0",  # so that the histogram says something
        "head": "label-text",
    },
    "sam-subspace-refreshed": {
        "training": 'sharpness = "sam"\n' + SUBSPACE.format('allocation = "history", refresh_every_steps = 2'),
        "head": "label-text",
    },
}

COMMON = (
    "5,ann,works well",
    "1,ann,broke",
    "5,bob,love it",
    "1,bob,no good at all",
    "5,cy,very happy with this",
    "1,dee,returned",
    "5,eve,fine",
)
LAST = (
    "1,zoe,the longest of these reviews by far: no other record has its padded length or is encoded together with it",
    "5,zoe,a second one by the same author and about as long as the first so that it keeps the same company",
)
NEIGHBOURS = {
    "removed": COMMON,
    "replaced": (*COMMON, "5,yan,this one took its place and is much longer than those that the two data sets share"),
}
"""What differs comes last, so that the others keep their positions, and is longer, so no batch mixes the two."""


PUBLIC = ("good day", "no thanks", "what a waste", "see you", "so so", LAST[0].split(",")[2])
"""Texts for directions; the last one is also a record of one data set, which must not show either."""


@dataclass
class Transcript:
    """What was seen of one training. Vectors that are only compared are kept as bytes.

    Attributes:
        samples: Positions of each Poisson sample.
        answers: Privatised gradients [P], in the order in which they were asked for.
        points: θ, perturbed or not, at the moment of each answer.
        rows: The per-record gradients behind each answer, in no order.
        states: θ, ascent direction, optimizer state and, in a subspace, coordinates, scales and directions, before
            the first step and after each.
        release: The files of the release.
    """

    samples: list[Tensor] = field(default_factory=list)
    answers: list[Tensor] = field(default_factory=list)
    points: list[bytes] = field(default_factory=list)
    rows: list[Counter[bytes]] = field(default_factory=list)
    states: list[list[bytes]] = field(default_factory=list)
    release: dict[str, bytes] = field(default_factory=dict)


def record(folder, form: str) -> Transcript:
    """Train on the records, undisturbed."""
    return observe(*_party(folder / "records", form, (*COMMON, *LAST[: 2 if "user" in form else 1])))


def replay(folder, form: str, neighbour: str, first: Transcript) -> Transcript:
    """Train on a neighbouring data set, with the samples and answers of `first`."""
    return observe(*_party(folder / neighbour, form, NEIGHBOURS[neighbour]), answered_by=first)


def _party(folder, form, records):
    folder.mkdir()
    (folder / "reviews.csv").write_text("\n".join(["label,author,text", *records]))
    (folder / "public.txt").write_text("\n".join(PUBLIC))
    (folder / "federation.toml").write_text(FEDERATION.format_map(defaultdict(str, DEFAULTS | FORMS[form])))
    plan = party_plan(load_federation(folder / "federation.toml"), "shop")
    return plan, loop_observe.fresh_base(plan.base.model), folder / "party"


def observe(plan, base, folder, *, answered_by: Transcript | None = None) -> Transcript:
    """Run the whole party and write down its transcript.

    Args:
        plan: Its records; relative to those of `answered_by`, the last one may be missing or another.
        base: A base model of its own, which is changed.
        folder: The party's folder.
        answered_by: A transcript whose samples and answers take the place of this training's own.
    """
    seen, real_train = Transcript(), train.train

    def watched(model, data, gradients, lora, mechanism, settings, sampler, noise, *, after_step, **options):
        given = None if answered_by is None else iter(answered_by.answers)
        watched_sampler = _Sampler(sampler, data.num_units, seen, answered_by)

        def note_state(step, capture):
            seen.states.append(_state_bytes(capture(), options["coordinates"]))
            after_step(step, capture)

        watched_privatiser = partial(_Privatiser, seen=seen, theta=gradients.theta, given=given)
        with loop_observe.everywhere(Privatiser, watched_privatiser):
            return real_train(
                *(model, data, gradients, lora, mechanism, settings, watched_sampler, noise),
                after_step=note_state,
                **options,
            )

    def made_anew(_identity, make):  # a basis found in a cache would be equal whatever it was made of
        return make()

    with loop_observe.everywhere(real_train, watched), mock.patch.object(trained_space, "cached_basis", made_anew):
        seen.release = party.run_party(plan, base, folder)
    return seen


class _Privatiser(Privatiser):
    """The real privatiser under observation; if answers are given, they replace its own."""

    def __init__(self, *args, seen, theta, given, **options):
        super().__init__(*args, **options)
        self._seen, self._theta, self._given = seen, theta, given
        self._rows: Counter[bytes] = Counter()

    def accumulate(self, grads):
        self._rows.update(_bytes(row) for row in grads)
        super().accumulate(grads)

    def finish(self):
        own = super().finish()
        answer = own if self._given is None else next(self._given).clone()
        self._seen.points.append(_bytes(self._theta))
        self._seen.rows.append(self._rows)
        self._seen.answers.append(answer.clone())
        self._rows = Counter()
        return answer


class _Sampler:
    """Notes each sample; where a transcript is given, takes its samples, without units that are not there."""

    def __init__(self, sampler, num_units, seen, given):
        self._sampler, self._num_units, self._seen = sampler, num_units, seen
        self._given = None if given is None else iter(given.samples)
        self.state = sampler.state

    def sample(self):
        own = self._sampler.sample()
        sample = own if self._given is None else next(self._given)
        self._seen.samples.append(sample)
        return sample[sample < self._num_units]


def released_through_the_mechanism_only(first: Transcript, second: Transcript) -> None:
    """Assert that nothing but the answers told the second training what the first one's records were."""
    if first.rows == second.rows:
        raise ValueError("Expected the record that differs to be sampled at least once: choose another noise_seed.")
    for query, (one, two) in enumerate(zip(first.rows, second.rows, strict=True)):
        assert max((one - two).total(), (two - one).total()) <= 1, f"query {query} sums several rows that differ"
    assert first.points == second.points, "asked at another point"
    assert first.states == second.states, "another state"
    assert first.release == second.release, "another release"


def _state_bytes(state, coordinates) -> list[bytes]:
    optimizer = state.optimizer["state"].get(0, {})
    vectors = [state.theta, state.direction, *(optimizer[key] for key in sorted(optimizer))]
    if state.subspace is not None:
        vectors += [state.subspace.coordinates, coordinates.scales, coordinates.basis.rows]
    return [b"" if vector is None else _bytes(vector) for vector in vectors]


def _bytes(vector: Tensor | int) -> bytes:
    return torch.as_tensor(vector).numpy().tobytes()
