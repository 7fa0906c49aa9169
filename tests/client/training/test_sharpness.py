import torch

from dpmerge.client.training.sharpness import AscentMemory, perturbation, perturbed


def test_perturbation_has_the_stated_radius_and_direction():
    direction = torch.randn(1000)
    e = perturbation(direction, 0.3)
    assert torch.isclose(e.norm(), torch.tensor(0.3))
    assert torch.nn.functional.cosine_similarity(e, direction, dim=0) > 0.999999


def test_no_direction_zero_direction_and_zero_radius_leave_theta_alone():
    assert perturbation(None, 0.5) is None
    assert perturbation(torch.zeros(3), 0.5) is None
    assert perturbation(torch.ones(3), 0.0) is None


def test_theta_comes_back_bit_for_bit_where_subtracting_would_not():
    theta = torch.tensor([1e-8, 1.0, 3.3333])
    before = theta.clone()
    e = torch.tensor([1.0, 1e-9, 0.1])
    with perturbed(theta, e):
        assert torch.equal(theta, before + e)
    assert torch.equal(theta, before)
    assert not torch.equal((before + e) - e, before)  # what the published code does


def test_theta_comes_back_when_the_step_fails():
    theta = torch.zeros(2)
    try:
        with perturbed(theta, torch.ones(2)):
            raise RuntimeError
    except RuntimeError:
        pass
    assert torch.equal(theta, torch.zeros(2))


def test_memory_keeps_what_each_form_ascends_along():
    gradient, before, after = torch.tensor([1.0, 2.0]), torch.tensor([5.0, 5.0]), torch.tensor([4.0, 7.0])
    remembered = {}
    for form in ("none", "sat", "sat-momentum", "sam"):
        memory = AscentMemory(form)
        memory.remember(gradient, before, after)
        remembered[form] = memory.direction
    assert remembered["none"] is None
    assert remembered["sam"] is None
    assert torch.equal(remembered["sat"], gradient)
    assert torch.equal(remembered["sat-momentum"], before - after)
    gradient.zero_()
    assert remembered["sat"].norm() > 0  # a copy: the privatiser may reuse its buffer
