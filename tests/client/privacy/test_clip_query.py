"""The clip query: what a unit adds, which noise it gets, which norm it names; and planted defects are caught."""

from collections import Counter
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import ClassVar
from unittest import mock

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn

from dpmerge.client.gradients.per_example import PerExampleGradients
from dpmerge.client.privacy import clip_query
from dpmerge.client.privacy.clip_query import one_hot, with_private_clip_norm
from dpmerge.client.privacy.noise import FastNoise, SecureNoise
from dpmerge.client.privacy.privatiser import Privatiser
from dpmerge.client.privacy.sampling import PoissonSampler
from dpmerge.client.subspace.basis import random_basis
from dpmerge.client.subspace.coordinates import Subspace
from dpmerge.client.training import train
from dpmerge.common.config.federation import SubspaceSettings, TrainingSettings
from dpmerge.common.encoder.activations import Batch
from dpmerge.common.privacy.clip_grid import MAX_BINS, ClipGrid
from dpmerge.common.privacy.mechanism import COMPANY_MARGIN, GRID_STEPS_PER_SIGMA, Mechanism

ALPHA = 1e-3


class Silence:
    """A noise source of the right mode that draws zeros: what comes out is the clipped sum."""

    def __init__(self, mode):
        self.mode = mode
        self.steps_per_sigma = GRID_STEPS_PER_SIGMA if mode == "secure" else 1

    def sample(self, num_values):
        return torch.zeros(num_values, dtype=torch.int64 if self.mode == "secure" else torch.float32)


K = 12
MECHANISM = Mechanism(
    noise_multiplier=0.8,
    l2_clip_norm=0.3,
    population=60,
    expected_batch_size=15,
    num_steps=4,
    target_delta=1e-5,
    num_coordinates=K,
    num_clip_queries=1,
)
FAST = replace(MECHANISM, noise="fast")


class Watched(Privatiser):
    """The real privatiser, which notes what it is given and what it answers."""

    seen: ClassVar[Counter] = Counter()
    answers: ClassVar[list] = []  # of all that a check makes

    def accumulate(self, grads):
        Watched.seen.update(row.numpy().tobytes() for row in grads)
        super().accumulate(grads)

    def finish(self):
        answer = super().finish()
        Watched.answers.append((Watched.seen, answer.clone()))
        Watched.seen = Counter()
        return answer


@contextmanager
def watching():
    Watched.seen, Watched.answers = Counter(), []
    with mock.patch.object(clip_query, "Privatiser", Watched), mock.patch.object(train, "Privatiser", Watched):
        yield Watched.answers


def ask(mechanism, noise, rows):
    """Return the noisy counts and the clip norm."""
    with watching() as answers:
        found = with_private_clip_norm(mechanism, noise, rows)
    ((_, answer),) = answers
    return answer.double() * mechanism.expected_batch_size / mechanism.l2_clip_norm, found.l2_clip_norm


def rows_of_norms(norms, k=K):
    rows = torch.randn(len(norms), k, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (rows * (torch.tensor(norms, dtype=torch.float64) / rows.norm(dim=1))[:, None]).float()


def a_unit_counts_once_in_the_bin_of_its_norm(height):
    mechanism = replace(MECHANISM, l2_clip_norm=height)
    edges = ClipGrid.around(height, K).edges
    assert len(edges) == K
    norms = [0.9 * edge for edge in edges for _ in range(3)] + [7 * edges[-1], 0.0]
    rows = rows_of_norms(norms)
    rows = torch.cat([rows, torch.full((2, K), float("nan")), torch.full((1, K), float("inf"))])
    counts, found = ask(mechanism, Silence("secure"), [rows[:5], rows[5:]])
    expected = [4] + [3] * (K - 2) + [4]
    np.testing.assert_allclose(counts.numpy() / (1 - COMPANY_MARGIN), expected, rtol=1e-5, atol=1e-5)
    assert found == edges[K // 2 - 1]


@pytest.mark.parametrize("height", [0.3, 5.0])
def test_a_unit_counts_once_in_the_bin_of_its_norm(height):
    a_unit_counts_once_in_the_bin_of_its_norm(height)


def test_a_hot_entry_of_one_is_caught():
    """Clipping hides it for clip norms below 1; above, units count for less than they are."""
    with mock.patch.object(clip_query, "one_hot", lambda rows, edges, _height: one_hot(rows, edges, 1.0)):
        a_unit_counts_once_in_the_bin_of_its_norm(0.3)
        with pytest.raises(AssertionError):
            a_unit_counts_once_in_the_bin_of_its_norm(5.0)


@given(
    rows=hnp.arrays(np.float32, st.tuples(st.integers(1, 4), st.just(3)), elements=st.floats(width=32)),
    height=st.floats(1e-6, 1e6),
)
@settings(deadline=None)
def test_a_unit_adds_the_clip_norm_to_one_bin_or_nothing(rows, height):
    edges = ClipGrid(height, 9).edges
    hot = one_hot(torch.from_numpy(rows), edges, height)
    norms = np.linalg.norm(rows.astype(np.float64), axis=1)
    assert ((hot != 0).sum(1).numpy() == np.isfinite(norms)).all()
    assert hot.max() <= np.float32(height)
    for row, norm in zip(hot, norms, strict=True):
        if np.isfinite(norm):
            place = int(row.argmax())
            assert place == 8 or norm <= edges[place]
            assert place == 0 or norm > edges[place - 1]


@given(
    rows=hnp.arrays(np.float32, st.tuples(st.integers(1, 5), st.just(K)), elements=st.floats(width=32)),
    height=st.floats(1e-3, 1e3),
)
@settings(deadline=None, max_examples=50)
def test_one_unit_more_changes_the_sum_by_at_most_the_clip_norm(rows, height):
    mechanism = replace(MECHANISM, l2_clip_norm=height)
    with_all, without = (
        ask(mechanism, Silence("secure"), [torch.from_numpy(some.copy())])[0] for some in (rows, rows[:-1])
    )
    assert (with_all - without).norm() <= 1 + 1e-6  # in units, of which C₀ is one


@pytest.mark.parametrize(("factor", "passes"), [(1.0, True), (0.9, False), (1.1, False)])
def test_the_histogram_has_the_noise_of_a_step(factor, passes):
    noise, mechanism = SecureNoise(), replace(MECHANISM, noise_multiplier=factor * 0.8)
    counts = torch.cat([ask(mechanism, noise, [])[0] for _ in range(1200)])  # samples of nobody, noised as any other
    assert (stats.kstest(counts / 0.8, "norm", method="asymp").pvalue > ALPHA) == passes


def test_the_median_is_found_to_a_bin_under_noise():
    rng = np.random.default_rng(0)
    mechanism = replace(FAST, noise_multiplier=1.5, population=2800, expected_batch_size=128, num_coordinates=64)
    wide, noise = replace(mechanism, l2_clip_norm=1.0), FastNoise(0)
    edges = ClipGrid.around(1.0, 64).edges
    assert len(edges) == MAX_BINS
    for median in (0.02, 1.0, 40.0):
        exact = next(edge for edge in edges if edge >= median)
        found = [
            ask(wide, noise, [rows_of_norms(median * np.exp(0.5 * rng.standard_normal(128)), 64)])[1] for _ in range(40)
        ]
        near = [abs(np.log2(one / exact)) <= 0.51 for one in found]
        assert np.mean(near) > 0.9, median


def test_where_there_is_only_noise_the_middle_is_named():
    drowned = replace(FAST, noise_multiplier=500.0)
    found = [ask(drowned, FastNoise(seed), [rows_of_norms([0.01] * 15)])[1] for seed in range(50)]
    assert np.mean([norm == 0.3 for norm in found]) > 0.9
    assert ask(FAST, FastNoise(1), [])[1] == 0.3


def test_an_uncounted_query_is_not_asked():
    with pytest.raises(ValueError, match="num_clip_queries=1"):
        with_private_clip_norm(replace(FAST, num_clip_queries=0), FastNoise(), [])


NUM_UNITS = 40


class Records:
    """Stands for the records' activations: hidden states [n, 1, 5]."""

    def __init__(self):
        self.hidden = torch.randn(NUM_UNITS, 1, 5, generator=torch.Generator().manual_seed(3))

    def __len__(self):
        return NUM_UNITS

    def batches(self, records, capacity):
        for some in torch.split(records, capacity) if len(records) else ():
            yield Batch(some, self.hidden[some], torch.ones(len(some), 1))


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(5, 3)

    def forward(self, hidden, mask):
        return self.linear(hidden[:, 0])


class NotingSampler(PoissonSampler):
    def __init__(self, *args):
        super().__init__(*args)
        self.samples = []

    def sample(self):
        self.samples.append(super().sample())
        return self.samples[-1]


def run(mechanism=FAST, *, state=None, optimizer="dp-adam"):
    """Train a tiny model; return θ, what ran, the samples, and the captured states by step."""
    model, states = Tiny(), {}
    noise = FastNoise(7) if state is None else FastNoise.from_state(state.noise)
    sampler = NotingSampler(mechanism.sampling_prob, NUM_UNITS, 7)
    if state is not None:
        sampler._keystream = PoissonSampler.from_state(0.5, 1, state.sampler)._keystream
    with PerExampleGradients(model, max_examples=16) as gradients:
        coordinates = Subspace(
            gradients, SubspaceSettings(k=K, public="none", clip="quantile"), lambda _: random_basis(18, K, "0")
        )

        def after_step(step, capture):
            states[step] = deepcopy(capture())  # as on disk: the optimizer goes on with its own tensors

        ran = train.train(
            *(model, train.PrivateData(Records(), torch.arange(NUM_UNITS) % 3), gradients, ()),
            *(mechanism, TrainingSettings(optimizer=optimizer, sharpness=mechanism.sharpness), sampler, noise),
            coordinates=coordinates,
            resume_from=state,
            after_step=after_step,
        )
        return gradients.theta.clone(), ran, sampler.samples, states


def one_poisson_sample_a_query(mechanism, answers, samples):
    """Every answer is about exactly the units of a sample of its own."""
    assert len(samples) == mechanism.num_steps + 1
    assert [seen.total() for seen, _ in answers] == [len(sample) for sample in samples]
    assert len({tuple(sample.tolist()) for sample in samples}) == len(samples)


def every_answer_is_charged(mechanism, answers, samples):
    """As many Gaussian answers are given as are accounted for, each of at most so many noise values."""
    assert len(answers) == sum(count for _, count in mechanism.queries)
    assert sum(len(answer) for _, answer in answers) <= mechanism.num_noise_values


TRAINING_CHECKS = (one_poisson_sample_a_query, every_answer_is_charged)


def all_units_are_asked():
    asked = train.with_private_clip_norm
    every = torch.arange(NUM_UNITS)
    model, records = Tiny(), Records()

    def planted(mechanism, noise, rows):
        list(rows)
        outputs = model(records.hidden[every], None).detach()
        return asked(mechanism, noise, [torch.cat([outputs, torch.zeros(NUM_UNITS, K - 3)], dim=1)])

    return mock.patch.object(train, "with_private_clip_norm", planted)


def the_query_is_not_counted():
    counted = Mechanism.queries.fget
    return mock.patch.object(Mechanism, "queries", property(lambda own: counted(replace(own, num_clip_queries=0))))


@pytest.mark.parametrize("check", TRAINING_CHECKS)
def test_a_training_asks_once_more_than_it_steps(check):
    with watching() as answers:
        _, ran, samples, _ = run()
    check(ran, answers, samples)
    assert ran.l2_clip_norm in ClipGrid.around(0.3, K).edges
    assert ran.l2_clip_norm != 0.3


@pytest.mark.parametrize(
    ("mutant", "check"),
    [(all_units_are_asked, one_poisson_sample_a_query), (the_query_is_not_counted, every_answer_is_charged)],
)
def test_a_planted_defect_is_caught(mutant, check):
    with watching() as answers, mutant():
        _, ran, samples, _ = run()
        with pytest.raises(AssertionError):
            check(ran, answers, samples)


@pytest.mark.parametrize("killed_at", [0, 1, 3])
@pytest.mark.parametrize("optimizer", ["dp-adam", "sgd"])
def test_a_killed_training_goes_on_with_its_clip_norm_and_does_not_ask_again(killed_at, optimizer):
    theta, ran, _, states = run(optimizer=optimizer)
    assert states[0].l2_clip_norm == 0.3  # nothing was asked when it was taken: whoever goes on from it asks
    noise_std = states[1].optimizer["param_groups"][0].get("noise_std")
    assert noise_std == (ran.noise_std if optimizer == "dp-adam" else None)
    with watching() as answers:
        resumed, again, _, _ = run(state=states[killed_at], optimizer=optimizer)
    assert len(answers) == 4 - killed_at + (killed_at == 0)
    assert torch.equal(resumed, theta)
    assert again == ran


def test_sharpness_that_asks_twice_has_one_clip_query_more():
    sam = {"sharpness": "sam", "ascent_noise_multiplier": 0.8, "ascent_sampling": "separate"}
    with watching() as answers:
        _, ran, samples, _ = run(replace(FAST, **sam))
    assert len(samples) == 9
    every_answer_is_charged(ran, answers, samples)
