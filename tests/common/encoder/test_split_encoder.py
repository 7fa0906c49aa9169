from dataclasses import replace

import pytest
import torch

from dpmerge.common.data.tabular.rows import max_characters
from dpmerge.common.encoder.activations import (
    ENCODE_BATCH,
    LEAST_TOKENS,
    MOST_TOKENS,
    TILE_TOKENS,
    Activations,
    Shapes,
    shapes_of,
)
from dpmerge.common.encoder.attention import ALWAYS_MASKED
from dpmerge.common.encoder.base_model import load_base
from dpmerge.common.encoder.split_encoder import (
    LENGTHS,
    SplitEncoder,
    check_reach,
    check_vocabulary,
    highest_token_id,
    padded_length,
    tokenize,
)
from dpmerge.common.errors import DpmergeError

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
        for a, b in pairs:  # the trunk ran in one shape, but a record had another place: equal bits are not promised
            assert (a.hidden - b.hidden).norm() <= 1e-6 * a.hidden.norm()
            rows = shapes_of(a.hidden.shape[1], capacity).rows_for(len(a.records))
            assert len(a.records) <= len(a.hidden) == len(a.mask) == rows <= capacity
        assert sorted(torch.cat([a.records for a, _ in pairs]).tolist()) == sorted(drawn.tolist())
    assert list(cached.batches(torch.empty(0, dtype=torch.long), 8)) == []


@pytest.mark.parametrize("max_length", [8, 64, 512])
def test_a_text_is_cut_to_public_length_and_its_tokens_are_those_of_the_whole(base, max_length):
    num_characters = 2 * max_characters(max_length)
    texts = [
        (f"{word} " * num_characters)[:num_characters]
        for word in ("w", "antidisestablishmentarianism", "漢字", "3.14", "x" * 60)
    ]
    whole = base.tokenizer(texts, truncation=True, max_length=max_length)["input_ids"]
    assert tokenize(base, texts, max_length) == whole
    asked = []
    stub = replace(base, tokenizer=lambda given, **_: asked.extend(given) or {"input_ids": [[1]] * len(given)})
    tokenize(stub, texts, max_length)
    assert {len(text) for text in asked} == {max_characters(max_length)}


class Panic(BaseException):
    pass


@pytest.mark.parametrize("error", [Panic, MemoryError, TypeError])
def test_a_text_on_which_the_tokenizer_stops_has_no_tokens_and_stops_no_other(base, error):
    def tokenizer(texts, **options):
        if "bad" in texts:
            raise error
        return base.tokenizer(texts, **options)

    found = tokenize(replace(base, tokenizer=tokenizer), ["a", "bad", "c"], 8)
    assert found == [tokenize(base, ["a"], 8)[0], [], tokenize(base, ["c"], 8)[0]]
    split = SplitEncoder(base.encoder, base.layers, 1)
    among = Activations(replace(base, tokenizer=Silent(base.tokenizer)), split, ["a", "bad", "c"], max_length=8)
    hidden = {
        int(r): h
        for batch in among.batches(torch.arange(3), 8)
        for r, h in zip(batch.records, batch.hidden, strict=True)
    }
    assert set(hidden) == {0, 1, 2}
    assert all(torch.isfinite(hidden[place]).all() for place in (0, 2))


class Silent:
    """A tokenizer that stops at one word."""

    def __init__(self, inner):
        self.inner, self.pad_token_id = inner, inner.pad_token_id

    def __call__(self, texts, **options):
        if "bad" in texts:
            raise ValueError
        return self.inner(texts, **options)


def test_a_tokenizer_with_more_ids_than_the_embedding_has_rows_is_refused(base):
    check_vocabulary(base)
    assert highest_token_id(base) == base.encoder.config.vocab_size - 1
    base.tokenizer.add_tokens(["<a token of its own>"])
    with pytest.raises(DpmergeError, match=r"DPM-204.*gives ids up to 30522, and its embedding has 30522 rows"):
        check_vocabulary(base)


def test_a_length_that_the_model_cannot_run_is_found_on_made_up_texts(base):
    seen = []
    check_reach(base, lambda ids, mask: seen.append((ids, mask)), 18)
    assert {ids.shape[1] for ids, _ in seen} == {12, 20}
    assert any((ids[:, :18] == highest_token_id(base)).all() and mask.sum() == 18 for ids, mask in seen)
    split = SplitEncoder(base.encoder, base.layers, 1)
    check_reach(base, split.trunk, 512)
    with pytest.raises(DpmergeError, match=r"DPM-204: base model minilm-l3 stops \(\w+Error\) at 516 tokens"):
        check_reach(base, split.trunk, 513)


@pytest.mark.parametrize("is_fixed", [False, True])
def test_a_batch_has_a_shape_of_its_length_whatever_is_drawn(base, is_fixed):
    split = SplitEncoder(base.encoder, base.layers, 1)
    data = Activations(base, split, TEXTS * 10, max_length=32, is_fixed=is_fixed)
    for count in (40, 7, 4):
        for batch in data.batches(torch.arange(count), 64):
            num_rows, length = batch.mask.shape
            shapes = shapes_of(length, 64, is_fixed=is_fixed)
            assert num_rows % shapes.unit == 0
            assert shapes.least <= num_rows <= shapes.most
            assert not is_fixed or num_rows == shapes.most
            assert num_rows - len(batch.records) < max(shapes.unit, shapes.least)
    for batch in data.batches(torch.arange(7), 64):
        assert torch.equal(batch.filled[: len(batch.records)], batch.records)
        assert (batch.filled[len(batch.records) :] == batch.records[0]).all()
        assert torch.equal(
            batch.hidden[len(batch.records) :], batch.hidden[:1].expand_as(batch.hidden)[len(batch.records) :]
        )


def test_shapes_are_whole_tiles():
    for capacity in (1, 11, 12, 64, 128, 1000):
        for length in (*LENGTHS, 20, 28, 516):
            shapes = shapes_of(length, capacity)
            if shapes.most == 1:
                assert shapes == Shapes(1, 1, 1)
                continue
            for count in range(1, shapes.most + 1):
                rows = shapes.rows_for(count)
                assert count <= rows <= min(capacity, MOST_TOKENS // length)
                assert rows * length % TILE_TOKENS == 0
                assert rows * length >= LEAST_TOKENS
    assert all(shapes_of(length, 128).most > 1 for length in LENGTHS[:8])
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


@pytest.mark.parametrize("cached", [True, False])
def test_the_trunk_sees_as_many_rows_whatever_is_drawn(base, monkeypatch, cached):
    rows, own = [], SplitEncoder.trunk
    monkeypatch.setattr(SplitEncoder, "trunk", lambda self, ids, mask: (rows.append(len(ids)), own(self, ids, mask))[1])
    data = Activations(base, SplitEncoder(base.encoder, base.layers, 1), TEXTS, max_length=32, cached=cached)
    list(data.batches(torch.arange(3), 64))
    assert set(rows) == {ENCODE_BATCH}
