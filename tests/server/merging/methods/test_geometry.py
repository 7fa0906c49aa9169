"""`geometry` and `denoise`: what is signal, what is noise, and the factors that follow from it."""

import pytest
import torch
from torch import Tensor

from dpmerge.common.errors import DpmergeError
from dpmerge.server.merging.adapters.deltas import Adapter, LowRankDelta
from dpmerge.server.merging.merge import merge
from dpmerge.server.merging.methods.geometry import CAUTION, solve_coefficients, split, wiener_weights
from dpmerge.server.merging.noise.noise import Noise
from dpmerge.server.merging.noise.shares import estimated
from dpmerge.server.merging.spec.spec import spec_of

NONE = Noise(0.0, 1000, "stated")


def adapters_of(deltas: dict[str, Tensor]) -> list[Adapter]:
    eye = torch.eye(next(iter(deltas.values())).shape[1])
    config = {"base_model_name_or_path": "tiny"}
    return [Adapter(party, {"m": LowRankDelta(eye, delta)}, config, party) for party, delta in deltas.items()]


@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        (torch.ones(4, 4), 1 / 4),  # identical: the average
        (torch.eye(4), (1 + CAUTION / 4) / (1 + CAUTION)),  # unrelated: nearly the sum
        (torch.tensor([[1.0, -1.0], [-1.0, 1.0]]), 1 / 2),  # opposed: nothing to gain by going further
        (torch.zeros(3, 3), 1 / 3),  # nobody moved
        (torch.ones(1, 1), 1.0),  # alone
    ],
)
def test_factors_in_limiting_cases(inner: Tensor, expected: float) -> None:
    size = len(inner)
    assert solve_coefficients(inner, [NONE] * size, [1 / size] * size) == pytest.approx([expected] * size)


def test_an_unrelated_party_gets_more_than_related_ones() -> None:
    inner = torch.tensor([[1.0, 0.9, 0.0], [0.9, 1.0, 0.0], [0.0, 0.0, 1.0]])
    first, second, alone = solve_coefficients(inner, [NONE] * 3, [1 / 3] * 3)
    assert first == pytest.approx(second)
    assert alone > 1.5 * first
    assert first * 1.9 == pytest.approx(1.0, abs=0.1)  # each of the related two acts nearly in full


def test_more_noise_draws_the_factors_towards_the_average() -> None:
    quiet, loud, drowned = (
        solve_coefficients(torch.eye(5), [Noise(share, 50_000, "stated")] * 5, [0.2] * 5)[0]
        for share in (0.0, 0.9, 0.98)
    )
    assert quiet > loud > drowned > 0.2


def test_chance_is_not_taken_for_a_relation() -> None:
    inner = torch.tensor([[1.0, 0.004], [0.004, 1.0]])
    assert split(inner, [Noise(0.97, 40_000, "stated")] * 2)[0][0, 1] == 0.0
    assert split(inner, [NONE] * 2)[0][0, 1] == pytest.approx(0.004)


def test_noise_hides_relations_that_the_signal_gram_shows() -> None:
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(200_000, generator=generator, dtype=torch.float64)
    changes = torch.stack(
        [s + 5.0 * torch.randn(200_000, generator=generator, dtype=torch.float64) for s in (shared, shared, -shared)]
    )
    inner = changes @ changes.T
    signal, energy = split(inner, [Noise(25 / 26, 200_000, "stated")] * 3)
    cosines = signal / signal.diagonal().sqrt()[:, None] / signal.diagonal().sqrt()
    assert abs(float(inner[0, 1] / inner[0, 0])) < 0.05
    torch.testing.assert_close(cosines, torch.tensor([[1, 1, -1], [1, 1, -1], [-1, -1, 1]]).double(), atol=0.1, rtol=0)
    torch.testing.assert_close(energy, torch.full((3,), 5e6).double(), rtol=0.02, atol=0)


def test_weight_zero_takes_no_part_and_uneven_weights_shift_the_average() -> None:
    x, y = torch.eye(3), torch.diag(torch.tensor([0.0, 1.0, -1.0]))
    adapters = adapters_of({"x": x, "y": y})
    alone = merge(adapters, spec_of("geometry", weights={"x": 1.0, "y": 0.0}))
    torch.testing.assert_close(alone.modules["m"].delta(), x)
    assert solve_coefficients(torch.ones(2, 2), [NONE] * 2, [0.25, 0.75]) == pytest.approx([0.25, 0.75])


def test_a_stated_coefficient_is_the_mean_factor() -> None:
    adapters = adapters_of({"x": torch.eye(3), "y": torch.diag(torch.tensor([0.0, 1.0, -1.0]))})
    free, stated = merge(adapters, spec_of("geometry")), merge(adapters, spec_of("geometry", coefficient=0.3))
    assert stated.info["coefficient"] == 0.3
    assert sum(stated.info["factors"]) / 2 == pytest.approx(0.3)
    scale = 0.3 / free.info["coefficient"]
    torch.testing.assert_close(stated.modules["m"].delta(), scale * free.modules["m"].delta())


def test_adapters_without_a_statement_have_their_noise_estimated_and_said_so() -> None:
    generator = torch.Generator().manual_seed(0)
    noisy = torch.randn(400, 8, generator=generator)
    spiked = torch.outer(torch.randn(400, generator=generator), torch.ones(8)) + 0.01 * noisy
    info = merge(adapters_of({"noisy": noisy, "spiked": spiked}), spec_of("geometry")).info
    assert [each["origin"] for each in info["noise"]] == ["estimated", "estimated"]
    assert info["noise"][0]["share"] > 0.9
    assert info["noise"][1]["share"] < 0.01
    assert estimated({}).share == 0.0


def test_denoise_is_nothing_without_noise_and_nothing_among_strangers() -> None:
    inner = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(wiener_weights(*split(inner, [NONE] * 2)), torch.eye(2).double())
    strangers = split(torch.eye(3), [Noise(0.9, 100, "stated")] * 3)
    torch.testing.assert_close(wiener_weights(*strangers), torch.eye(3).double())


def test_denoise_brings_related_parties_nearer_to_their_signals() -> None:
    generator = torch.Generator().manual_seed(1)
    signal = torch.randn(64, 64, generator=generator)
    deltas = {name: signal + 2 * torch.randn(64, 64, generator=generator) for name in "xyz"}
    inner = torch.stack([d.flatten() for d in deltas.values()]).double()
    rows = wiener_weights(*split(inner @ inner.T, [Noise(0.8, 4096, "stated")] * 3))
    for row, delta in zip(rows, deltas.values(), strict=True):
        better = sum(float(w) * d for w, d in zip(row, deltas.values(), strict=True))
        cosine = torch.cosine_similarity(better.flatten(), signal.flatten(), dim=0)  # type: ignore[union-attr]
        assert cosine > 1.3 * torch.cosine_similarity(delta.flatten(), signal.flatten(), dim=0)


def test_denoise_goes_around_other_methods_and_is_refused_by_geometry() -> None:
    generator = torch.Generator().manual_seed(2)
    signal = torch.randn(40, 6, generator=generator)
    adapters = adapters_of({name: signal + torch.randn(40, 6, generator=generator) for name in "xyz"})
    plain, denoised = (merge(adapters, spec_of("ties", denoise=flag)) for flag in (False, True))
    assert denoised.info["parameters"]["denoise"] is True
    assert not torch.equal(plain.modules["m"].delta(), denoised.modules["m"].delta())
    with pytest.raises(DpmergeError, match="uses the noise itself"):
        merge(adapters, spec_of("geometry", denoise=True))
