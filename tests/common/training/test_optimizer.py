import pytest
import torch

from dpmerge.common.training.optimizer import (
    OPTIMIZERS,
    SECOND_MOMENT_FLOOR,
    DPAdam,
    corrected_second_moment,
    make_optimizer,
    scheduled,
)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_descends(name):
    theta = torch.ones(3)
    optimizer = make_optimizer(name, theta, 0.1, noise_std=0.0)
    for _ in range(50):
        theta.grad = 2 * theta.clone()
        optimizer.step()
    assert theta.norm() < 0.5


def test_unknown_optimizer_lists_the_known():
    with pytest.raises(ValueError, match="adamw"):
        make_optimizer("lion", torch.ones(1), 0.1, noise_std=0.0)


def test_schedule_without_warmup_is_constant():
    assert scheduled(0.4, 0, 0) == 0.4


def walk(optimizer, theta, gradients):
    for gradient in gradients:
        theta.grad = gradient.clone()
        optimizer.step()
    return theta


def test_dp_adam_without_noise_is_adam():
    gradients = torch.randn(30, 50, generator=torch.Generator().manual_seed(0))
    ours, adam = torch.zeros(50), torch.zeros(50)
    walk(make_optimizer("dp-adam", ours, 0.1, noise_std=0.0), ours, gradients)
    walk(make_optimizer("adam", adam, 0.1, noise_std=0.0), adam, gradients)
    torch.testing.assert_close(ours, adam, rtol=1e-5, atol=1e-6)


def test_dp_adam_takes_the_noise_out_of_the_second_moment():
    """What remains of v̂ estimates the squared signal: zero for pure noise, and g² where a constant g hides in it."""
    std, num_coordinates, num_steps = 0.05, 20_000, 40
    signal = torch.zeros(num_coordinates)
    signal[: num_coordinates // 2] = 0.1
    generator = torch.Generator().manual_seed(0)
    theta = torch.zeros(num_coordinates)
    optimizer = DPAdam([theta], 1.0, noise_std=std)
    gradients = signal + std * torch.randn(num_steps, num_coordinates, generator=generator)
    walk(optimizer, theta, gradients[:-1])
    before = theta.clone()
    walk(optimizer, theta, gradients[-1:])
    moment = optimizer.state[theta]["exp_avg_sq"] / (1 - 0.999**num_steps)
    strong, silent = (moment - std**2).split(num_coordinates // 2)
    assert silent.mean() == pytest.approx(0.0, abs=0.01 * std**2)
    assert strong.mean() == pytest.approx(0.1**2, rel=0.01)
    assert torch.equal(corrected_second_moment(moment, std)[: len(strong)], strong.clamp_min(0.1 * std**2))
    step = (before - theta)[: len(strong)].mean()
    assert step == pytest.approx(1.0, abs=0.03)  # Adam's is 0.1/√(0.1² + 0.05²) = 0.89


def test_dp_adam_never_divides_by_less_than_the_floor():
    """A first gradient far below the noise would otherwise be divided by the root of a negative number, or of zero."""
    theta = torch.zeros(2)
    walk(DPAdam([theta], 0.1, noise_std=1.0), theta, [torch.tensor([0.0, 0.01])])
    assert theta.tolist() == pytest.approx([0.0, -0.1 * 0.01 / SECOND_MOMENT_FLOOR**0.5])
    assert corrected_second_moment(torch.zeros(1), noise_std=2.0).item() == pytest.approx(4 * SECOND_MOMENT_FLOOR)


@pytest.mark.parametrize("noise_std", [-1.0, float("nan"), float("inf")])
def test_dp_adam_refuses_a_noise_that_cannot_be(noise_std):
    with pytest.raises(ValueError, match="noise_std"):
        DPAdam([torch.zeros(1)], 0.1, noise_std=noise_std)


def test_dp_adam_has_no_closure():
    with pytest.raises(ValueError, match="another query"):
        DPAdam([torch.zeros(1)], 0.1, noise_std=0.0).step(lambda: 0.0)
