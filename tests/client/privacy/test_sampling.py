import doctest

import numpy as np
import pytest
import torch
from scipy import stats

from dpmerge.client.privacy import sampling
from dpmerge.client.privacy.noise import SecureNoise
from dpmerge.client.privacy.sampling import PoissonSampler


class Scripted:
    """A keystream that says what the test wants."""

    def __init__(self, words):
        self._words = np.array(words, dtype=np.uint64)

    def words(self, count):
        return self._words[:count]

    def ratchet(self):
        pass


def test_docstring_examples():
    assert doctest.testmod(sampling).failed == 0


def test_sizes_are_binomial_and_records_independent():
    q, num_records, draws = 0.1, 200, 4000
    sampler = PoissonSampler(q, num_records, seed=1)
    chosen = torch.zeros(draws, num_records)
    for row in chosen:
        row[sampler.sample()] = 1
    assert stats.binomtest(int(chosen.sum()), draws * num_records, q).pvalue > 1e-3
    sizes = chosen.sum(1)
    variance = float(sizes.var())  # fixed-size or shuffled batches have none
    assert variance == pytest.approx(num_records * q * (1 - q), rel=0.1)
    correlations = np.corrcoef(chosen.T) - np.eye(num_records)
    assert np.abs(correlations).max() < 6 / np.sqrt(draws)
    repeats = (chosen[1:] * chosen[:-1]).mean()  # the same record twice in a row: q², without memory
    assert float(repeats) == pytest.approx(q * q, rel=0.05)


def test_a_record_is_chosen_by_words_below_the_exact_threshold():
    threshold = 3 * 2**62  # q = 3/4
    sampler = PoissonSampler(0.75, 4)
    sampler._keystream = Scripted([threshold - 1, threshold, 0, 2**64 - 1])
    assert sampler.sample().tolist() == [0, 2]


def test_certain_and_impossible_samples():
    assert PoissonSampler(1.0, 1000).sample().tolist() == list(range(1000))
    assert PoissonSampler(0.5, 0).sample().shape == (0,)
    empty = PoissonSampler(1e-12, 10).sample()
    assert (empty.shape, empty.dtype) == ((0,), torch.int64)
    assert PoissonSampler(1e-30, 10).sample().tolist() == []  # below 2⁻⁶⁴


def test_resume_continues_with_the_same_samples():
    sampler = PoissonSampler(0.5, 50, seed=3)
    first = sampler.sample()
    resumed = PoissonSampler.from_state(0.5, 50, sampler.state())
    second = sampler.sample()
    assert torch.equal(resumed.sample(), second)
    assert not torch.equal(first, second)


def test_keys_are_its_own():
    assert not torch.equal(PoissonSampler(0.5, 200).sample(), PoissonSampler(0.5, 200).sample())
    assert PoissonSampler(0.5, 1).state() != SecureNoise().state()
    assert PoissonSampler(0.5, 1, seed=1).state() != PoissonSampler(0.5, 1, seed=2).state()


def test_erased_samplers_refuse():
    sampler = PoissonSampler(0.5, 5)
    sampler.erase()
    with pytest.raises(RuntimeError, match="erased"):
        sampler.sample()


@pytest.mark.parametrize(("q", "n"), [(0.0, 1), (1.1, 1), (float("nan"), 1), (0.5, -1)])
def test_bad_arguments(q, n):
    with pytest.raises(ValueError, match="Expected"):
        PoissonSampler(q, n)
