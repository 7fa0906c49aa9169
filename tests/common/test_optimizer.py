import pytest
import torch

from dpmerge.common.optimizer import OPTIMIZERS, make_optimizer, scheduled


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_descends(name):
    theta = torch.ones(3)
    optimizer = make_optimizer(name, theta, 0.1)
    for _ in range(50):
        theta.grad = 2 * theta.clone()
        optimizer.step()
    assert theta.norm() < 0.5


def test_unknown_optimizer_lists_the_known():
    with pytest.raises(ValueError, match="adamw"):
        make_optimizer("lion", torch.ones(1), 0.1)


def test_schedule_without_warmup_is_constant():
    assert scheduled(0.4, 0, 0) == 0.4
