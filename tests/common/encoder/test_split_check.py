"""A split that computes anything else than its model is found on public texts, and given up."""

from contextlib import contextmanager

import pytest
import torch

from dpmerge.common.config.federation import LoraSettings
from dpmerge.common.encoder.base_model import attach_lora, load_base
from dpmerge.common.encoder.split_check import SPLIT_TOLERANCE, checked_split, public_batches, split_error
from dpmerge.common.encoder.split_encoder import SplitEncoder

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


@pytest.fixture
def base():
    return load_base("minilm-l3")


def add_embeddings(_encoder, args, output):
    """What some models do around their layers: it is lost where the layers below a split do not run."""
    output.last_hidden_state = output.last_hidden_state + 1e-3 * args[0]
    return output


def test_a_split_that_agrees_is_kept(base):
    batches = public_batches(base, 16)
    split, note = checked_split(base, base.encoder, 2, batches)
    assert split.first == 2
    assert note == ""


def test_a_split_that_loses_something_is_given_up_for_the_whole_model(base):
    base.encoder.encoder.register_forward_hook(add_embeddings)
    batches = public_batches(base, 16)
    assert SPLIT_TOLERANCE < split_error(SplitEncoder(base.encoder, base.layers, 2), batches) < 0.1
    split, note = checked_split(base, base.encoder, 2, batches)
    assert split.first == 0
    assert "cannot be split at layer 2" in note
    assert "the whole model runs" in note
    for ids, mask in batches:
        whole = base.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        assert torch.equal(split.trunk(ids, mask), ids)
        assert torch.equal(split.top(ids, mask), whole)


@pytest.mark.parametrize("broken", ["trunk", "top"])
def test_a_split_that_fails_is_given_up_for_the_whole_model(base, broken, monkeypatch):
    def fail(*_args):
        raise AttributeError("'NoneType' object has no attribute 'shape'")

    monkeypatch.setattr(SplitEncoder, broken, fail)
    split, note = checked_split(base, base.encoder, 1, public_batches(base, 16))
    assert split.first == 0
    assert "relative error inf" in note


def test_not_a_number_is_no_agreement(base):
    base.encoder.get_submodule(base.layers)[2].output.LayerNorm.weight.data[0] = float("nan")
    assert checked_split(base, base.encoder, 1, public_batches(base, 16)).split.first == 0


def test_an_adapter_below_the_split_is_seen(base):
    """The lower half is run once, for all adapters: it must be the same for each."""
    model = attach_lora(base, LoraSettings(layers="all", rank=2), seed=1)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    batches = public_batches(base, 16)

    @contextmanager
    def adapted():
        yield

    assert split_error(SplitEncoder(model, base.layers, 2), batches, [adapted]) == 0.0
    assert split_error(SplitEncoder(model, base.layers, 2), batches, [adapted, model.disable_adapter]) > 1e-3
    assert split_error(SplitEncoder(model, base.layers, 0), batches, [adapted, model.disable_adapter]) == 0.0


def test_public_batches_have_padding_and_the_longest_length(base):
    padded, shortest, longest = public_batches(base, 30)
    assert padded.mask.sum(1).unique().numel() == len(padded.ids)
    assert shortest.ids.shape[1] == 12
    assert longest.ids.shape[1] == 32
