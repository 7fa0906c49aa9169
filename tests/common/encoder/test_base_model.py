import pytest
import torch

from dpmerge.common.config.federation import LoraSettings
from dpmerge.common.encoder.activations import Activations
from dpmerge.common.encoder.base_model import (
    adapted_layers,
    attach_lora,
    load_base,
    lora_shapes,
    shared_a,
    target_modules,
)
from dpmerge.common.encoder.heads import label_text_head, logits, zero_linear_head
from dpmerge.common.encoder.split_encoder import SplitEncoder, pool
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


def test_base_hash_sees_a_single_weight_and_not_how_the_tokenizer_was_called(base):
    base.tokenizer(TEXTS, padding=True, truncation=True, max_length=7)
    assert load_base("minilm-l3").sha256 == base.sha256
    from dpmerge.common.encoder.base_model import _base_hash

    next(base.encoder.parameters()).data.view(-1)[0] += 1e-3
    assert _base_hash(base.encoder, base.tokenizer) != base.sha256


def test_unusable_base_is_one_clear_line(tmp_path):
    with pytest.raises(DpmergeError, match=r"DPM-204: base.model = .*minilm-l6") as caught:
        load_base(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_misspelt_alias_is_refused_at_once():
    with pytest.raises(DpmergeError, match=r"DPM-104: base.model = 'minilm-l7' .*\(closest: minilm-l"):
        load_base("minilm-l7")


def test_a_rank_above_the_width_is_refused(base):
    assert lora_shapes(base, LoraSettings(rank=384))
    with pytest.raises(DpmergeError, match=r"DPM-103: lora.rank = 385 .* 384"):
        lora_shapes(base, LoraSettings(rank=385))


def test_layers_and_targets_resolve_to_used_linears(base):
    assert adapted_layers(base, "last:2") == (1, 2)
    assert adapted_layers(base, "all") == (0, 1, 2)
    assert adapted_layers(base, (2, 0)) == (0, 2)
    names = target_modules(base, LoraSettings(layers="last:1"))
    assert len(names) == 6
    assert all(name.startswith("encoder.layer.2.") for name in names)
    assert target_modules(base, LoraSettings(layers=(1,), targets=("query",))) == (
        "encoder.layer.1.attention.self.query",
    )
    assert lora_shapes(base, LoraSettings(layers=(1,), targets=("intermediate.dense",))) == {
        "encoder.layer.1.intermediate.dense": (1536, 384)
    }


@pytest.mark.parametrize(
    "lora", [LoraSettings(layers="last:9"), LoraSettings(layers=(3,)), LoraSettings(targets=("qeury",))]
)
def test_layers_and_targets_that_do_not_exist_are_refused_with_those_that_do(base, lora):
    with pytest.raises(DpmergeError, match="DPM-103"):
        target_modules(base, lora)


def test_shared_a_depends_on_seed_and_module_only(base):
    first = attach_lora(base, LoraSettings(layers="last:2"), seed=7).state_dict()
    torch.manual_seed(99)
    second = attach_lora(load_base("minilm-l3"), LoraSettings(layers="last:1"), seed=7).state_dict()
    key = "base_model.model.encoder.layer.2.attention.self.query.lora_A.default.weight"
    assert torch.equal(first[key], second[key])
    assert not torch.equal(shared_a(7, "x", (2, 3)), shared_a(8, "x", (2, 3)))
    assert not torch.equal(shared_a(7, "x", (2, 3)), shared_a(7, "y", (2, 3)))
    assert shared_a(7, "x", (64, 100)).abs().max() <= 0.1


def test_training_starts_at_the_base_and_only_b_is_trained(base):
    batch = base.tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        before = base.encoder(**batch).last_hidden_state
        model = attach_lora(base, LoraSettings(), seed=7)
        assert torch.equal(model(**batch).last_hidden_state, before)
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trainable
    assert all(".lora_B." in name for name in trainable)
    assert model.peft_config["default"].base_model_name_or_path == "minilm-l3"


def test_label_text_head_prefers_its_own_descriptions(base):
    descriptions = {"pos": "a positive movie review", "neg": "a negative movie review"}
    head = label_text_head(base, descriptions)
    split = SplitEncoder(base.encoder, base.layers, 2)
    data = Activations(base, split, list(descriptions.values()), max_length=16)
    scores = torch.zeros(2, 2)
    for batch in data.batches(torch.arange(2), 2):
        scores[batch.records] = logits(pool(split.top(batch.hidden, batch.mask), batch.mask), head).detach()[
            : len(batch.records)
        ]
    assert torch.allclose(scores.diag(), torch.tensor(20.0), atol=1e-3)
    assert scores.argmax(1).tolist() == [0, 1]
    assert head.labels == ("pos", "neg")


def test_zero_linear_head_says_nothing(base):
    head = zero_linear_head(base, ("a", "b", "c"))
    assert logits(torch.randn(4, base.width), head).count_nonzero() == 0
