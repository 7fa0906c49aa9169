import pytest
import torch

from dpmerge.common.config.federation import TrainingSettings
from dpmerge.common.training.alignment import LoraView, delta_l2_sp, factor_l2_sp, l2_sp


def _modules(train_a: bool) -> tuple[torch.Tensor, tuple[LoraView, ...]]:
    """Two LoRA modules and one stray coordinate (a head) in θ."""
    torch.manual_seed(0)
    views, stop = [], 1
    for width_out, width_in, rank, scaling in ((5, 7, 2, 2.0), (4, 3, 3, 0.5)):
        b = slice(stop, stop + width_out * rank)
        stop = b.stop
        a = slice(stop, stop + rank * width_in) if train_a else None
        stop = a.stop if a else stop
        views.append(LoraView(torch.randn(rank, width_in, dtype=torch.float64), b, (width_out, rank), scaling, a))
    return torch.randn(stop, dtype=torch.float64), tuple(views)


@pytest.mark.parametrize("train_a", [False, True])
def test_delta_l2_sp_is_the_gradient_of_the_squared_norm_of_the_delta(train_a):
    theta, modules = _modules(train_a)
    theta.requires_grad_()
    penalty = torch.zeros((), dtype=torch.float64)
    for m in modules:
        b = theta[m.b_slice].view(m.b_shape)
        a = m.lora_a if m.a_slice is None else theta[m.a_slice].view(m.lora_a.shape)
        penalty = penalty + (m.scaling * b @ a).square().sum()
    (expected,) = torch.autograd.grad(0.3 * penalty, theta)
    assert torch.allclose(delta_l2_sp(theta.detach(), modules, 0.3), expected, rtol=1e-12, atol=0)
    assert expected[0] == 0.0  # the head is not l2_sped


@pytest.mark.parametrize("train_a", [False, True])
def test_factor_l2_sp_leads_back_to_the_start(train_a):
    theta, modules = _modules(train_a)
    start = torch.randn_like(theta)
    moved = theta - factor_l2_sp(theta, start, modules, 0.5)  # 2 · 0.5 · (θ − θ₀) is the whole way
    assert torch.allclose(moved[1:], start[1:])
    assert moved[0] == theta[0]


def test_l2_sp_follows_its_schedule():
    theta, modules = _modules(train_a=False)
    settings = TrainingSettings(alignment=0.4, alignment_on="delta", alignment_warmup_steps=4)
    assert torch.allclose(l2_sp(theta, theta, modules, settings, 0), delta_l2_sp(theta, modules, 0.1))
    assert torch.allclose(l2_sp(theta, theta, modules, settings, 9), delta_l2_sp(theta, modules, 0.4))
    assert l2_sp(theta, theta, modules, TrainingSettings(alignment=0.0), 0).count_nonzero() == 0
