"""Fused per-example gradients against one record at a time by plain autograd."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import (
    BertConfig,
    BertModel,
    Dinov2Config,
    Dinov2Model,
    LlamaConfig,
    LlamaModel,
    ViTConfig,
    ViTModel,
)

from dpmerge.client.gradients.per_example import PerExampleGradients
from dpmerge.common.errors import DpmergeError

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
LENGTHS = (7, 3, 5, 7, 1, 4)
NUM_EXAMPLES, NUM_CLASSES, WIDTH = len(LENGTHS), 3, 16


def bert() -> nn.Module:
    config = BertConfig(
        vocab_size=40, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    return BertModel(config, add_pooling_layer=False)


def llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return LlamaModel(config)


def vit(config: type, model: type) -> nn.Module:
    made: nn.Module = model(
        config(
            image_size=8,
            patch_size=4,
            hidden_size=WIDTH,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
        )
    )
    return made


TARGETS = {
    "bert": ["query", "key", "value", "attention.output.dense", "intermediate.dense", "output.dense"],
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "vit": ["q_proj", "v_proj"],
    "dinov2": ["q_proj", "v_proj", "fc1", "fc2"],
}


def patterns(kind: str) -> dict[str, Any]:
    """rsLoRA with another rank on the queries and another alpha on the values."""
    query, value = ("query", "value") if kind == "bert" else ("q_proj", "v_proj")
    return {"use_rslora": True, "rank_pattern": {query: 1}, "alpha_pattern": {value: 3}}


class Classifier(nn.Module):
    """A PEFT model with a linear head on its mean-pooled tokens."""

    def __init__(self, kind: str, *, train_a: bool = True, **lora: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        base = {
            "bert": bert,
            "llama": llama,
            "vit": lambda: vit(ViTConfig, ViTModel),
            "dinov2": lambda: vit(Dinov2Config, Dinov2Model),
        }
        self.kind = kind
        self.encoder = get_peft_model(
            base[kind](), LoraConfig(**{"r": 3, "lora_alpha": 5, "target_modules": TARGETS[kind]} | lora)
        )
        self.head = nn.Linear(WIDTH, NUM_CLASSES)
        for name, parameter in self.encoder.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)  # PEFT's zeros would make every gradient of A zero
            if "lora_A" in name:
                parameter.requires_grad_(train_a)
        self.eval()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if self.kind in ("bert", "llama"):
            hidden = self.encoder(input_ids=x, attention_mask=mask).last_hidden_state
        else:
            hidden = self.encoder(pixel_values=x).last_hidden_state
            mask = mask.new_ones(hidden.shape[:2])
        weight = (mask / mask.sum(1, keepdim=True)).to(hidden.dtype).unsqueeze(-1)
        scores: Tensor = self.head((hidden * weight).sum(1))
        return scores


def records(kind: str, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Unpadded records x [1, …] with their masks."""
    generator = torch.Generator().manual_seed(1)
    if kind in ("bert", "llama"):
        return [
            (torch.randint(1, 40, (1, length), generator=generator), torch.ones(1, length, dtype=torch.int64))
            for length in LENGTHS
        ]
    return [(torch.randn(1, 3, 8, 8, generator=generator, dtype=dtype), torch.ones(1, 1)) for _ in LENGTHS]


def padded(batch: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    longest = max(mask.shape[1] for _, mask in batch)

    def pad(t: Tensor) -> Tensor:
        return F.pad(t, (0, longest - t.shape[1])) if t.dim() == 2 else t

    return torch.cat([pad(x) for x, _ in batch]), torch.cat([pad(mask) for _, mask in batch])


LABELS = torch.arange(NUM_EXAMPLES) % NUM_CLASSES


def losses(model: nn.Module, batch: list[tuple[Tensor, Tensor]], labels: Tensor) -> Tensor:
    return F.cross_entropy(model(*padded(batch)), labels, reduction="none")


def oracle(model: nn.Module, loss: Callable[[int], Tensor], num_examples: int = NUM_EXAMPLES) -> Tensor:
    """One record at a time, ordinary autograd, the model's own forwards."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for n in range(num_examples):
        gradients = torch.autograd.grad(loss(n).sum(), trainable, allow_unused=True)
        rows.append(
            torch.cat(
                [
                    torch.zeros_like(p).flatten() if g is None else g.flatten()
                    for p, g in zip(trainable, gradients, strict=True)
                ]
            )
        )
    return torch.stack(rows)


def relative_error(rows: Tensor, expected: Tensor) -> float:
    return float((rows - expected).detach().norm() / expected.detach().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("train_a", [False, True])
@pytest.mark.parametrize("with_patterns", [False, True])
@pytest.mark.parametrize("kind", ["bert", "llama", "vit", "dinov2"])
def test_rows_equal_the_oracle_for_every_split(
    kind: str, with_patterns: bool, train_a: bool, dtype: torch.dtype
) -> None:
    model = Classifier(kind, train_a=train_a, **(patterns(kind) if with_patterns else {})).to(dtype)
    batch = records(kind, dtype)
    expected = oracle(model, lambda n: losses(model, batch[n : n + 1], LABELS[n : n + 1]))
    with PerExampleGradients(model) as gradients:
        assert gradients.theta.dtype == dtype
        for split in ([6], [1] * 6, [4, 2], [2, 1, 3]):
            rows, start = [], 0
            for size in split:
                part = slice(start, start + size)
                rows.append(gradients.compute(lambda part=part: losses(model, batch[part], LABELS[part])).clone())
                start += size
            assert relative_error(torch.cat(rows), expected) <= TOLERANCE[dtype]


@pytest.fixture(scope="module")
def small() -> Classifier:
    return Classifier("bert")


@settings(max_examples=15, deadline=None)
@given(order=st.permutations(range(NUM_EXAMPLES)), cut=st.integers(1, NUM_EXAMPLES - 1))
def test_rows_follow_their_examples(small: Classifier, order: list[int], cut: int) -> None:
    batch = records("bert", torch.float32)
    with PerExampleGradients(small) as gradients:
        straight = gradients.compute(lambda: losses(small, batch, LABELS)).clone()
        shuffled = torch.cat(
            [
                gradients.compute(lambda part=part: losses(small, [batch[i] for i in part], LABELS[part])).clone()
                for part in (order[:cut], order[cut:])
            ]
        )
    assert relative_error(shuffled, straight[order]) <= 1e-6


def test_sum_of_rows_is_the_ordinary_gradient(small: Classifier) -> None:
    batch = records("bert", torch.float32)
    trainable = [p for p in small.parameters() if p.requires_grad]
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(losses(small, batch, LABELS).sum(), trainable)])
    with PerExampleGradients(small) as gradients:
        rows = gradients.compute(lambda: losses(small, batch, LABELS))
    assert relative_error(rows.sum(0), expected) <= 1e-6


def test_moving_theta_moves_the_model() -> None:
    model = Classifier("bert")
    batch = records("bert", torch.float32)
    with PerExampleGradients(model) as gradients:
        before = losses(model, batch, LABELS).sum()
        step = 1e-2 * gradients.compute(lambda: losses(model, batch, LABELS)).sum(0)
        gradients.theta.sub_(step)
        assert losses(model, batch, LABELS).sum() < before
        for slot in gradients.layout:
            part = gradients.theta[slot.start : slot.stop].view(slot.shape)
            assert torch.equal(model.get_parameter(slot.name), part)
        assert gradients.layout[-1].stop == gradients.theta.numel()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_counts_once(use_reentrant: bool) -> None:
    model = Classifier("llama")
    batch = records("llama", torch.float32)
    expected = oracle(model, lambda n: losses(model, batch[n : n + 1], LABELS[n : n + 1]))
    model.encoder.enable_input_require_grads()
    model.encoder.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    model.train()
    with PerExampleGradients(model) as gradients:
        rows = gradients.compute(lambda: losses(model, batch, LABELS))
    assert relative_error(rows, expected) <= 1e-6


def test_a_checkpointed_layer_really_runs_again() -> None:
    calls = 0

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return torch.tanh(self.inner(x))

    model, x = Counting(), torch.randn(3, 4)
    expected = oracle(model, lambda n: model(x[n : n + 1]).sum(1), 3)
    calls = 0
    with PerExampleGradients(model) as gradients:
        rows = gradients.compute(lambda: checkpoint(model, x, use_reentrant=False).sum(1))
    assert calls == 2
    assert relative_error(rows, expected) <= 1e-6


class Twice(nn.Module):
    """One linear used twice, another tied to its weight, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 2)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor, *, again: bool = True) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.second(torch.tanh(self.first(hidden))).sum(-1) if again else hidden.sum(-1)


def test_shared_weights_add_up_and_unused_ones_are_zero() -> None:
    model, x = Twice().double(), torch.randn(5, 4, dtype=torch.float64)
    expected = oracle(model, lambda n: model(x[n : n + 1]), 5)
    with PerExampleGradients(model) as gradients:
        gradients.compute(lambda: model.unused(x).sum(-1))  # the next call must not see these
        assert relative_error(gradients.compute(lambda: model(x)), expected) <= 1e-12
        once = gradients.compute(lambda: model(x, again=False))
        assert relative_error(once, expected) > 0.1


@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_activations_give_fp32_rows(autocast: bool) -> None:
    model = Classifier("bert")
    batch = records("bert", torch.float32)
    expected = oracle(model, lambda n: losses(model, batch[n : n + 1], LABELS[n : n + 1]))
    if not autocast:
        frozen = [p for p in model.parameters() if not p.requires_grad]
        for parameter in frozen:
            parameter.data = parameter.data.bfloat16()
    with (
        PerExampleGradients(model) as gradients,
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        rows = gradients.compute(lambda: losses(model, batch, LABELS).float())
    assert rows.dtype == torch.float32
    assert relative_error(rows, expected) <= 0.05


def test_low_precision_parameters_are_promoted() -> None:
    model, x = nn.Linear(4, 2).bfloat16(), torch.randn(3, 4).bfloat16()
    with PerExampleGradients(model) as gradients:
        assert model(x).dtype == torch.bfloat16
        rows = gradients.compute(lambda: model(x).float().sum(1))
    assert gradients.theta.dtype == rows.dtype == torch.float32
    assert torch.equal(rows[:, :8].view(3, 2, 4)[:, 0], x.float())


def test_a_non_finite_example_spoils_its_own_row_only() -> None:
    model, x = nn.Linear(4, 2), torch.randn(3, 4)
    with PerExampleGradients(model) as gradients:
        clean = gradients.compute(lambda: model(x).square().sum(1)).clone()
        spoilt = x.clone()
        spoilt[1, 2] = torch.inf
        rows = gradients.compute(lambda: model(spoilt).square().sum(1)).clone()
        assert not rows[1].isfinite().all()
        assert torch.equal(rows[[0, 2]], clean[[0, 2]])
        assert torch.equal(gradients.compute(lambda: model(x).square().sum(1)), clean)


def test_close_gives_the_forwards_back() -> None:
    model = Classifier("bert")
    batch = records("bert", torch.float32)
    own = model(*padded(batch))
    with PerExampleGradients(model) as gradients:
        assert relative_error(model(*padded(batch)), own) <= 1e-6
        with model.encoder.disable_adapter():
            without = model(*padded(batch))
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert torch.equal(model(*padded(batch)), own)
    with model.encoder.disable_adapter():
        assert relative_error(model(*padded(batch)), without) <= 1e-6
    with pytest.raises(ValueError, match="close"):
        gradients.compute(lambda: losses(model, batch, LABELS))


def test_capacity_follows_the_budget() -> None:
    model = nn.Linear(4, 2)  # 10 coordinates, 40 bytes a row, 80 while it is gathered
    assert PerExampleGradients(model, memory_budget_bytes=800).capacity == 10
    assert PerExampleGradients(model, memory_budget_bytes=800, max_examples=3).capacity == 3
    with pytest.raises(DpmergeError, match=r"DPM-502.*80 bytes"):
        PerExampleGradients(model, memory_budget_bytes=79)
    with pytest.raises(ValueError, match="max_examples=0"):
        PerExampleGradients(model, max_examples=0)


def test_losses_are_one_per_example() -> None:
    model, x = nn.Linear(4, 2), torch.randn(3, 4)
    gradients = PerExampleGradients(model, max_examples=3)
    for bad in (
        lambda: model(x).sum(),
        lambda: model(x),
        lambda: model(torch.randn(4, 4)).sum(1),
        lambda: model(x[:0]).sum(1),
    ):
        with pytest.raises(ValueError, match="one loss per example"):
            gradients.compute(bad)
    with pytest.raises(ValueError, match="no gradient"):
        gradients.compute(lambda: torch.ones(3))
    with pytest.raises(DpmergeError, match="weight sees a tensor whose first dimension"):
        gradients.compute(lambda: model(x).sum(1)[:2])
    assert gradients.compute(lambda: model(x).sum(1)).shape == (3, 10)  # a refused call leaves nothing behind


def test_a_refused_pass_leaves_nothing_behind() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 2)
    x = torch.randn(6, 4)
    with PerExampleGradients(nn.ModuleList([first, second])) as gradients:
        clean = gradients.compute(lambda: second(x[:3]).sum(1))
        with pytest.raises(
            DpmergeError, match=r"0\.weight sees a tensor whose first dimension"
        ):  # after second's part is done
            gradients.compute(lambda: second(first(x).view(3, 2, 4)).sum((1, 2)))
        assert torch.equal(gradients.compute(lambda: second(x[:3]).sum(1)), clean)


def test_rows_belong_to_the_caller() -> None:
    linear, x = nn.Linear(4, 2), torch.randn(3, 4)
    with PerExampleGradients(linear) as gradients:
        rows = gradients.compute(lambda: linear(x).sum(1))
        kept = rows.clone()
        assert not torch.equal(gradients.compute(lambda: linear(-x).sum(1)), rows)
        assert torch.equal(rows, kept)
        held = weakref.ref(gradients.compute(lambda: linear(x).sum(1)))
        assert held() is None  # kept rows would add to the next step's peak memory


def test_check_independent_finds_coupled_examples() -> None:
    model, x = nn.Linear(4, 2), torch.randn(NUM_COMPANY, 4, generator=torch.Generator().manual_seed(1))
    gradients = PerExampleGradients(model)
    gradients.check_independent(lambda part: model(x[part]).square().sum(1), NUM_COMPANY, num_bystanders=128)
    for coupled in COUPLINGS.values():
        with pytest.raises(DpmergeError, match=r"DPM-502.*changes with the other examples"):
            gradients.check_independent(lambda part, c=coupled: c(model, x[part]), NUM_COMPANY, num_bystanders=128)


NUM_COMPANY = 24
COUPLINGS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "the batch's size": lambda model, x: model(x).square().sum(1) / len(x),
    "the batch's mean": lambda model, x: model(x - x.mean(0)).square().sum(1),
    "1 % of the batch's mean": lambda model, x: model(x - 0.01 * x.mean(0)).square().sum(1),
    "1e-4 of the batch's mean": lambda model, x: model(x - 1e-4 * x.mean(0)).square().sum(1),
    "a batch norm": lambda model, x: model(F.batch_norm(x, None, None, training=True)).square().sum(1),
    "the batch's largest value": lambda model, x: model(x / (1 + 0.01 * x.abs().max())).square().sum(1),
    "in-batch negatives": lambda model, x: (model(x) @ model(x).detach().T).logsumexp(1),
    "a neighbour, as in packed sequences": lambda model, x: model(x + 0.01 * x.roll(1, 0)).square().sum(1),
}


@pytest.mark.parametrize(
    "break_storage", [lambda m: m.double(), lambda m: copy.deepcopy(m.head), lambda m: nn.Linear(WIDTH, NUM_CLASSES)]
)
def test_check_storage_finds_parted_parameters(break_storage: Callable[[nn.Module], nn.Module]) -> None:
    model = Classifier("bert")
    gradients = PerExampleGradients(model)
    optimizer = torch.optim.SGD([gradients.theta])
    gradients.check_storage(optimizer.param_groups[0]["params"])
    with pytest.raises(DpmergeError, match=r"DPM-503.*optimizer"):
        gradients.check_storage([gradients.theta.clone()])
    broken = break_storage(model)
    if isinstance(broken, nn.Linear):
        model.head = broken
    with pytest.raises(DpmergeError, match=r"DPM-503.*(lora_A|head)"):
        gradients.check_storage([gradients.theta])


@pytest.mark.parametrize(
    ("lora", "problem"),
    [
        ({"use_dora": True}, "query.*DoRA"),
        ({"lora_bias": True}, "query.*lora_bias"),
        ({"target_modules": ["word_embeddings"]}, "word_embeddings.*not a LoRA linear"),
    ],
)
def test_other_kinds_of_lora_are_refused(lora: dict[str, Any], problem: str) -> None:
    with pytest.raises(DpmergeError, match=f"DPM-502.*{problem}"):
        PerExampleGradients(Classifier("bert", **lora))


def test_dropout_in_a_lora_path_is_refused_in_training_mode_only() -> None:
    model = Classifier("bert", lora_dropout=0.1)
    batch = records("bert", torch.float32)
    with PerExampleGradients(model) as gradients:
        gradients.compute(lambda: losses(model, batch, LABELS))
        model.train()
        with pytest.raises(DpmergeError, match=r"DPM-502.*query has lora_dropout = 0\.1"):
            gradients.compute(lambda: losses(model, batch, LABELS))


def test_batch_statistics_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False))
    with pytest.raises(DpmergeError, match=r"DPM-502.*1 normalises with batch statistics"):
        PerExampleGradients(model)
    model.eval()
    x = torch.randn(3, 4)
    with PerExampleGradients(model) as gradients:
        gradients.check_independent(lambda part: model(x[part]).square().sum(1), 3, num_bystanders=3)


def test_a_weight_used_outside_its_forward_is_refused() -> None:
    linear, x = nn.Linear(4, 2), torch.randn(3, 4)
    gradients = PerExampleGradients(linear)
    with pytest.raises(DpmergeError, match=r"DPM-502: weight is used outside"):
        gradients.compute(lambda: linear(x).sum(1) + F.linear(x, linear.weight).sum(1))


def test_a_weight_tied_to_another_kind_of_module_is_refused() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 4), "out": nn.Linear(4, 5, bias=False)})
    model["out"].weight = model["embedding"].weight
    with pytest.raises(DpmergeError, match=r"DPM-502.*embedding.weight.*tied"):
        PerExampleGradients(model)


def test_a_gradient_from_elsewhere_is_forgotten() -> None:
    linear, x = nn.Linear(4, 2), torch.randn(3, 4)
    with PerExampleGradients(linear) as gradients:
        expected = gradients.compute(lambda: linear(x).sum(1))
        linear.weight.grad = torch.ones(2, 4)
        assert torch.equal(gradients.compute(lambda: linear(x).sum(1)), expected)
    assert linear.weight.grad is None


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(DpmergeError, match=r"DPM-503.*no trainable"):
        PerExampleGradients(nn.Linear(4, 2).requires_grad_(False))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_rows_equal_the_oracle_on_cuda(kind: str) -> None:
    model = Classifier(kind).double().cuda()
    batch = [(x.cuda(), mask.cuda()) for x, mask in records(kind, torch.float64)]
    labels = LABELS.cuda()
    expected = oracle(model, lambda n: losses(model, batch[n : n + 1], labels[n : n + 1]))
    with PerExampleGradients(model) as gradients:
        assert relative_error(gradients.compute(lambda: losses(model, batch, labels)), expected) <= 1e-12
