"""The noise, against high-precision arithmetic and against tests that see a scale error of 2 %."""

import doctest

import mpmath
import numpy as np
import pytest
import torch
from scipy import special, stats

from dpmerge.client.privacy import noise
from dpmerge.client.privacy.noise import (
    CELLS_PER_SIGMA,
    NUM_CELLS,
    FastNoise,
    SecureNoise,
    cell_thresholds,
    is_kept_exactly,
)
from dpmerge.common.errors import DpmergeError

ALPHA = 1e-3
SIGMA = 2**20
STEPS, COORDINATES = 20, 50_000


class Scripted:
    """A keystream that says what the test wants, in order."""

    def __init__(self, *words):
        self._words = list(words)

    def words(self, count):
        taken, self._words = self._words[:count], self._words[count:]
        return np.array(taken, dtype=np.uint64)

    def ratchet(self):
        pass

    @property
    def is_used_up(self):
        return not self._words


@pytest.fixture(scope="module", params=[SecureNoise, FastNoise], ids=lambda source: source.mode)
def draws(request):
    """A million values in standard deviations, [steps, coordinates], from a fixed key."""
    if request.param is SecureNoise:
        source = SecureNoise.from_state(bytes(range(32)))
    else:
        source = FastNoise(seed=5)
    steps = [source.sample(COORDINATES) for _ in range(STEPS)]
    return torch.stack(steps).double().numpy() / source.steps_per_sigma


def test_docstring_examples():
    assert doctest.testmod(noise).failed == 0


def test_the_scale_is_right_to_two_percent(draws):
    values = draws.ravel()
    assert stats.kstest(values, special.ndtr, method="asymp").pvalue > ALPHA
    for wrong in (0.98, 1.02):
        assert stats.kstest(values / wrong, special.ndtr, method="asymp").pvalue < ALPHA


def test_coordinates_and_steps_are_independent(draws):
    def z_score(left, right):
        return abs(np.mean(left * right)) * np.sqrt(left.size)

    limit = stats.norm.isf(ALPHA / 2)
    assert z_score(draws[:, 1:], draws[:, :-1]) < limit
    assert z_score(draws[1:], draws[:-1]) < limit
    assert z_score(draws[:, 1:] ** 2 - 1, draws[:, :-1] ** 2 - 1) < 2 * limit  # the variance of each square is 2
    assert len(np.unique(draws[:, 0])) == STEPS


def test_tail_holds_what_it_should(draws):
    for bound in (3.0, 4.0):
        expected = 2 * stats.norm.sf(bound)
        assert stats.binomtest(int((np.abs(draws) > bound).sum()), draws.size, expected).pvalue > ALPHA
    assert np.abs(draws).max() < 7


def test_chi_square_against_the_rounded_gaussian():
    values = SecureNoise.from_state(bytes(32)).sample(1_000_000).numpy()
    edges = np.unique(np.concatenate([stats.norm.ppf(np.linspace(0, 1, 2001)[1:-1]) * SIGMA]).astype(np.int64))
    observed = np.bincount(np.searchsorted(edges, values, side="left"), minlength=len(edges) + 1)
    # a value ≤ edge came from a continuous one below edge + 1/2
    expected = np.diff(np.concatenate([[0], special.ndtr((edges + 0.5) / SIGMA), [1]])) * len(values)
    assert stats.chisquare(observed, expected).pvalue > ALPHA


def test_chi_square_inside_cells():
    values = np.abs(SecureNoise.from_state(bytes(31) + b"1").sample(1_000_000).numpy())
    observed = np.bincount(values % 1024 // 8, minlength=128)
    assert stats.chisquare(observed).pvalue > ALPHA  # the fall across one cell averages out to under 0.05 %


def test_two_sources_share_one_distribution():
    with mpmath.workprec(120):  # an independent high-precision sampler: inverse CDF of uniforms
        uniforms = np.random.default_rng(0).random(4000)
        slow = [float(mpmath.sqrt(2) * mpmath.erfinv(2 * mpmath.mpf(u) - 1)) for u in uniforms]
    ours = SecureNoise.from_state(bytes(31) + b"2").sample(200_000).numpy() / SIGMA
    assert stats.ks_2samp(slow, ours).pvalue > ALPHA


@pytest.mark.parametrize("k", [1, 2, 500, 1024, 4096, 8000, NUM_CELLS - 1])
def test_table_is_exact_to_the_last_bit(k):
    with mpmath.workprec(400):
        inside = 1 - 2 * mpmath.ncdf(-mpmath.mpf(k) / CELLS_PER_SIGMA)
        assert cell_thresholds()[k - 1] == int(mpmath.floor(inside * 2**128))


def test_the_tail_beyond_the_table_is_negligible():
    assert len(cell_thresholds()) == NUM_CELLS - 1
    with mpmath.workprec(200):
        assert 2 * mpmath.ncdf(-NUM_CELLS / CELLS_PER_SIGMA) < mpmath.mpf(2) ** -125


@pytest.mark.parametrize("k", [1, 1024, 12 * 1024])  # from 9σ on, neighbours share their high word
def test_a_tie_is_resolved_by_the_second_word(k):
    threshold = cell_thresholds()[k - 1]
    high, low = threshold >> 64, threshold % 2**64
    for second, cell in [(low - 1, k - 1), (low, k)]:
        stream = Scripted(high, second)
        assert noise._cells(stream, 1).tolist() == [cell]
        assert stream.is_used_up


def test_only_ties_take_a_second_word():
    thresholds = [cell_thresholds()[k] >> 64 for k in (10, 20)]
    stream = Scripted(thresholds[0] - 1, thresholds[1], thresholds[0] + 1, 2**64 - 1)
    # between the first and the last lies one tie: the fourth word completes the second
    assert noise._cells(stream, 3).tolist() == [10, 21, 11]
    assert stream.is_used_up


def test_float_rejections_are_far_inside_the_band_that_is_decided_exactly():
    rng = np.random.default_rng(1)
    cells = np.concatenate([rng.integers(0, NUM_CELLS, 300), [0, NUM_CELLS - 1, NUM_CELLS - 1]])
    places = np.concatenate([rng.integers(0, 2**63, 300, dtype=np.uint64), np.array([0, 0, 2**63 - 1], np.uint64)])
    found = noise._rejection_probs(cells, places)
    with mpmath.workprec(200):
        for cell, place, probability in zip(cells.tolist(), places.tolist(), found.tolist(), strict=True):
            u = mpmath.mpf(place) / 2**63
            left, right = mpmath.mpf(cell) / 1024, (cell + u) / 1024
            exact = 1 - mpmath.npdf(right) / mpmath.npdf(left)
            assert abs(probability - exact) < 2.0**-55


def test_a_close_call_is_decided_exactly():
    cell, place = 3000, 2**62 + 12345
    with mpmath.workprec(256):
        u = mpmath.mpf(place) / 2**63
        exact = int(mpmath.ceil(-mpmath.expm1(-(cell * u + u * u / 2) / 2**20) * 2**128))  # the least coin that keeps
    assert is_kept_exactly(cell, place, exact)
    assert not is_kept_exactly(cell, place, exact - 1)
    high, low = exact >> 64, exact % 2**64
    kept = Scripted(place << 1, high, low)
    assert noise._places(kept, np.array([cell])).tolist() == [place << 1]
    redrawn = Scripted(place << 1, high, low - 1, 77, 2**64 - 1)
    assert noise._places(redrawn, np.array([cell])).tolist() == [77]
    assert kept.is_used_up
    assert redrawn.is_used_up


def test_rejection_draws_place_and_coin_again_and_keeps_the_cell():
    steep = NUM_CELLS - 1
    stream = Scripted(2**64 - 2, 4, 0, 2**64 - 1, 6, 2**64 - 1)  # the first of two is rejected: a coin of 0
    assert noise._places(stream, np.array([steep, 0])).tolist() == [6, 4]
    assert stream.is_used_up


@pytest.mark.parametrize(
    ("cell", "place", "sign", "value"),
    [
        (0, 0, 0, 0),
        (0, 2**52 - 1, 0, 0),  # half a grid step less a hair
        (0, 2**52, 0, 1),
        (2, 3 * 2**53, 0, 2051),
        (2, 3 * 2**53, 1, -2051),
        (5, 2**63 - 1, 1, -6144),  # rounds up into the next cell
    ],
)
def test_the_integer_is_the_nearest(monkeypatch, cell, place, sign, value):
    monkeypatch.setattr(noise, "_cells", lambda stream, count: np.array([cell]))
    monkeypatch.setattr(noise, "_places", lambda stream, cells: np.array([place << 1 | sign], np.uint64))
    assert SecureNoise().sample(1).tolist() == [value]


def test_secure_noise_takes_no_seed():
    with pytest.raises(DpmergeError, match="noise_seed"):
        SecureNoise(seed=1)
    assert not torch.equal(SecureNoise().sample(8), SecureNoise().sample(8))


def test_secure_noise_uses_no_library_generator(monkeypatch):
    monkeypatch.setattr(torch, "randn", None)
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 - the global generator is what must not matter
    first = SecureNoise().sample(8)
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 - as above
    assert not torch.equal(first, SecureNoise().sample(8))


def test_fast_noise_is_seeded_from_the_operating_system_unless_told():
    assert not torch.equal(FastNoise().sample(8), FastNoise().sample(8))
    assert torch.equal(FastNoise(seed=4).sample(8), FastNoise(seed=4).sample(8))
    elsewhere = torch.Generator().manual_seed(4)  # a public seed used for anything else gives other numbers
    assert not torch.equal(FastNoise(seed=4).sample(8), torch.randn(8, generator=elsewhere))


@pytest.mark.parametrize("source", [SecureNoise, FastNoise])
def test_resume_continues_and_never_repeats(source):
    running = source()
    first = running.sample(100)
    resumed = source.from_state(running.state())
    second = running.sample(100)
    assert torch.equal(resumed.sample(100), second)
    assert not torch.equal(first, second)


def test_a_later_state_tells_nothing_of_earlier_noise():
    source = SecureNoise()
    start = source.state()
    source.sample(10)
    later = source.state()
    assert later != start
    source.erase()
    with pytest.raises(RuntimeError, match="erased"):
        source.sample(1)


def test_erasing_fast_noise_forgets_its_seed():
    source = FastNoise(seed=1)
    source.erase()
    assert not torch.equal(source.sample(8), FastNoise(seed=1).sample(8))
