import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save

from dpmerge.client.party.checkpoint import erase, load_checkpoint, save_checkpoint
from dpmerge.client.training.train import TrainingState
from dpmerge.common.errors import DpmergeError
from dpmerge.common.training.optimizer import OPTIMIZERS, make_optimizer


def _state(optimizer_name: str, theta: torch.Tensor) -> TrainingState:
    optimizer = make_optimizer(optimizer_name, theta, 0.1, noise_std=0.3)
    theta.grad = torch.randn_like(theta)
    optimizer.step()
    return TrainingState(
        3,
        theta.clone(),
        optimizer.state_dict(),
        torch.randn_like(theta),
        b"\x01sampler",
        b"\x02noise",
        None,
        0.3 * 2**0.5,
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_goes_on_as_if_never_interrupted(tmp_path, name):
    torch.manual_seed(1)
    theta = torch.randn(6)
    state = _state(name, theta)
    optimizer = make_optimizer(name, theta, 0.1, noise_std=0.3)
    optimizer.load_state_dict(state.optimizer)
    save_checkpoint(tmp_path / "c.safetensors", state, "binding")

    loaded = load_checkpoint(tmp_path / "c.safetensors", "binding")
    resumed = loaded.theta.clone()
    other = make_optimizer(name, resumed, 0.1, noise_std=0.3)
    other.load_state_dict(loaded.optimizer)
    gradient = torch.randn(6)
    for vector, stepper in ((theta, optimizer), (resumed, other)):
        vector.grad = gradient.clone()
        stepper.step()
    assert torch.equal(theta, resumed)
    assert (loaded.step, loaded.sampler, loaded.noise) == (3, b"\x01sampler", b"\x02noise")
    assert loaded.l2_clip_norm == state.l2_clip_norm
    assert torch.equal(loaded.direction, state.direction)


def test_checkpoint_is_bound_owner_only_and_erased(tmp_path):
    path = tmp_path / "c.safetensors"
    save_checkpoint(path, _state("adam", torch.randn(4)), "binding")
    assert path.stat().st_mode & 0o077 == 0
    assert [p.name for p in tmp_path.iterdir()] == ["c.safetensors"]
    with pytest.raises(DpmergeError, match="DPM-302"):
        load_checkpoint(path, "other data")
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(DpmergeError, match="DPM-302"):
        load_checkpoint(path, "binding")
    path.with_name(f"{path.name}.tmp").write_bytes(b"half a state")  # left by a killed process
    erase(path)
    erase(path)
    assert list(tmp_path.iterdir()) == []


def test_a_replaced_checkpoint_is_zeroed_on_the_disk(tmp_path):
    """Noise to come follows from a state: the bytes of an old one must not wait for whoever undeletes them."""
    path = tmp_path / "c.safetensors"
    save_checkpoint(path, _state("adam", torch.randn(4)), "binding")
    with path.open("rb") as old:
        assert b"noise" in old.read()
        save_checkpoint(path, _state("adam", torch.randn(4)), "binding")
        old.seek(0)
        assert set(old.read()) == {0}
    assert load_checkpoint(path, "binding").step == 3


@pytest.mark.parametrize("key", ["binding", "step", "groups", "scalars", "sampler", "noise"])
def test_a_checkpoint_that_lacks_a_key_is_one_that_cannot_be_read(tmp_path, key):
    path = tmp_path / "c.safetensors"
    save_checkpoint(path, _state("adam", torch.randn(4)), "binding")
    with safe_open(path, framework="pt") as file:
        tensors, text = {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["dpmerge"])
    path.write_bytes(save(tensors, {"dpmerge": json.dumps({k: v for k, v in text.items() if k != key})}))
    with pytest.raises(DpmergeError, match=r"DPM-302: the checkpoint c.safetensors cannot be read"):
        load_checkpoint(path, "binding")
    path.write_bytes(save({"direction": torch.ones(4)}, {"dpmerge": json.dumps(text)}))  # without θ
    with pytest.raises(DpmergeError, match="DPM-302"):
        load_checkpoint(path, "binding")
