import pytest
import torch

from dpmerge.common.activations import ROWS_UNIT, Activations, num_rows
from dpmerge.common.attention import ALWAYS_MASKED
from dpmerge.common.model import load_base
from dpmerge.common.split_encoder import LENGTHS, SplitEncoder, padded_length

TEXTS = [
    "a fine film",
    "who wrote it ?",
    "dull",
    "one of the longest and most tiresome sequels in a long , long while , sadly",
]


@pytest.fixture
def base():
    return load_base("minilm-l3")


@pytest.mark.parametrize("first", [0, 1, 3])
def test_split_encoder_is_the_encoder(base, first):
    batch = base.tokenizer(TEXTS, padding=True, return_tensors="pt")
    split = SplitEncoder(base.encoder, base.layers, first)
    with torch.no_grad():
        whole = base.encoder(**batch).last_hidden_state
        halves = split.top(split.trunk(batch["input_ids"], batch["attention_mask"]), batch["attention_mask"])
    assert torch.equal(whole, halves)


def test_activations_are_the_same_however_records_are_drawn(base):
    split = SplitEncoder(base.encoder, base.layers, 1)
    texts = TEXTS * 40
    cached = Activations(base, split, texts, max_length=16)
    uncached = Activations(base, split, texts, max_length=16, cached=False)
    drawn = torch.randperm(len(texts))[:77]
    for capacity in (1, 5, 64):
        pairs = list(zip(cached.batches(drawn, capacity), uncached.batches(drawn, capacity), strict=True))
        for a, b in pairs:  # the trunk ran in one shape, but a record had another place: equal bits are not promised
            assert (a.hidden - b.hidden).norm() <= 1e-6 * a.hidden.norm()
            assert len(a.records) <= len(a.hidden) == len(a.mask) == num_rows(a.hidden.shape[1], capacity) <= capacity
        assert sorted(torch.cat([a.records for a, _ in pairs]).tolist()) == sorted(drawn.tolist())
    assert list(cached.batches(torch.empty(0, dtype=torch.long), 8)) == []


def test_a_batch_has_the_shape_of_its_length_whatever_is_drawn(base):
    split = SplitEncoder(base.encoder, base.layers, 1)
    data = Activations(base, split, TEXTS * 10, max_length=32)
    shapes = [{batch.hidden.shape for batch in data.batches(torch.arange(count), 64)} for count in (40, 7, 4)]
    assert shapes[0] == shapes[1] == shapes[2]
    for batch in data.batches(torch.arange(7), 64):
        assert torch.equal(batch.filled[: len(batch.records)], batch.records)
        assert (batch.filled[len(batch.records) :] == batch.records[0]).all()
        assert torch.equal(
            batch.hidden[len(batch.records) :], batch.hidden[:1].expand_as(batch.hidden)[len(batch.records) :]
        )


def test_shapes_are_whole_tiles():
    for capacity in (1, 11, 12, 64, 128, 1000):
        for length in LENGTHS:
            rows = num_rows(length, capacity)
            assert rows == 1 or (rows % ROWS_UNIT == 0 and rows * length % 48 == 0)
            assert rows <= capacity
    assert all(padded_length(n, 30) % 4 == 0 and n <= padded_length(n, 30) <= 32 for n in range(1, 31))


def test_full_and_padded_records_take_the_same_attention(base):
    """A batch without padding must not leave the mask out, or its records' bits would tell that they are all full."""
    assert base.encoder.config._attn_implementation == ALWAYS_MASKED
    seen = []
    handle = base.encoder.encoder.layer[0].register_forward_pre_hook(
        lambda _module, args, kwargs: seen.append([a for a in (*args, *kwargs.values()) if a is not None]),
        with_kwargs=True,
    )
    for mask in (torch.ones(2, 12, dtype=torch.long), torch.ones(2, 12, dtype=torch.long).tril(5)):
        SplitEncoder(base.encoder, base.layers, 1).trunk(torch.full((2, 12), 7), mask)
    handle.remove()
    full, padded = ([a.shape for a in call if isinstance(a, torch.Tensor)] for call in seen)
    assert full == padded
    assert len(full) == 2
