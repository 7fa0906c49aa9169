import pytest
import torch

from dpmerge.common.activations import Activations
from dpmerge.common.model import load_base
from dpmerge.common.split_encoder import SplitEncoder

TEXTS = [
    "a fine film",
    "who wrote it ?",
    "dull",
    "one of the longest and most tiresome sequels in a long , long while , sadly",
]


@pytest.fixture
def base():
    return load_base("minilm-l3")


@pytest.mark.parametrize("first", [0, 1, 2])
def test_split_encoder_is_the_encoder(base, first):
    batch = base.tokenizer(TEXTS, padding=True, return_tensors="pt")
    split = SplitEncoder(base.encoder, base.layers, first)
    with torch.no_grad():
        whole = base.encoder(**batch).last_hidden_state
        halves = split.top(split.trunk(batch["input_ids"], batch["attention_mask"]), batch["attention_mask"])
    assert torch.equal(whole, halves)


def test_no_layer_above_the_last_can_be_split_at(base):
    with pytest.raises(ValueError, match="first=3 to be the index of one of 3 layers"):
        SplitEncoder(base.encoder, base.layers, 3)


def test_layers_keep_their_forwards_whatever_happens(base):
    batch = base.tokenizer(TEXTS, padding=True, return_tensors="pt")
    ids, mask = batch["input_ids"], batch["attention_mask"]
    layers = list(base.encoder.get_submodule(base.layers))
    layers[0].forward = kept = layers[0].forward  # as one that per-example gradients have put there
    split = SplitEncoder(base.encoder, base.layers, 1)
    hidden = split.trunk(ids, mask)
    split.top(hidden, mask)
    with pytest.raises(RuntimeError):
        split.top(hidden[:, :, :5], mask)
    assert layers[0].forward is kept
    assert all("forward" not in layer.__dict__ for layer in layers[1:])
    assert list(base.encoder.get_submodule(base.layers)) == layers


def test_the_upper_half_can_be_asked_first(base):
    batch = base.tokenizer(TEXTS, padding=True, return_tensors="pt")
    ids, mask = batch["input_ids"], batch["attention_mask"]
    hidden = SplitEncoder(base.encoder, base.layers, 2).trunk(ids, mask)
    assert torch.equal(
        SplitEncoder(base.encoder, base.layers, 2).top(hidden, mask),
        SplitEncoder(base.encoder, base.layers, 0).whole(ids, mask),
    )


def test_activations_are_the_same_however_records_are_drawn(base):
    split = SplitEncoder(base.encoder, base.layers, 1)
    texts = TEXTS * 40
    cached = Activations(base, split, texts, max_length=16)
    uncached = Activations(base, split, texts, max_length=16, cached=False)
    drawn = torch.randperm(len(texts))[:77]
    for capacity in (1, 5, 64):
        pairs = list(zip(cached.batches(drawn, capacity), uncached.batches(drawn, capacity), strict=True))
        assert all(torch.equal(a.hidden, b.hidden) for a, b in pairs)
        assert all(len(a.records) <= capacity for a, _ in pairs)
        assert sorted(torch.cat([a.records for a, _ in pairs]).tolist()) == sorted(drawn.tolist())
    assert list(cached.batches(torch.empty(0, dtype=torch.long), 8)) == []
