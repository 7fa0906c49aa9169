"""The general path: what is neither LoRA nor a linear layer, against the same oracle, and against the fused path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PrefixTuningConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from dpmerge.client.gradients.per_example import PerExampleGradients
from dpmerge.common.errors import DpmergeError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning"),  # PEFT's prefix tuning
]

N, T = 5, 6
IDS = torch.randint(0, 30, (N, T), generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(N) % 3


def bert() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = BertForSequenceClassification(
        BertConfig(
            vocab_size=30,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=T,
            num_labels=3,
        )
    )
    return model.eval().double()


def llama() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=30,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )
    return model.eval().double()


def classification(model: nn.Module, part: slice) -> Tensor:
    ids = IDS[part]
    # By default BERT embeds the positions once for the whole batch, and no example has a gradient of its own there.
    positions = torch.arange(T).expand_as(ids)
    return F.cross_entropy(model(input_ids=ids, position_ids=positions).logits, LABELS[part], reduction="none")


def next_token(model: nn.Module, part: slice) -> Tensor:
    logits = model(input_ids=IDS[part], attention_mask=torch.ones_like(IDS[part]), use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].mT, IDS[part][:, 1:], reduction="none").mean(1)


def frozen_but(model: nn.Module, wanted: str) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(wanted in name)
    return model


def stirred(model: nn.Module) -> nn.Module:
    """Move adapters off their neutral start, where some gradients vanish."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval().double()


def prefix_tuned() -> nn.Module:
    return stirred(get_peft_model(llama(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)))


def ia3() -> nn.Module:
    config = IA3Config(
        target_modules=["key", "value", "intermediate.dense"], feedforward_modules=["intermediate.dense"]
    )
    return stirred(get_peft_model(bert(), config))


def lora_and_norms() -> nn.Module:
    model = stirred(get_peft_model(bert(), LoraConfig(r=2, target_modules=["query", "value"])))
    for name, parameter in model.named_parameters():
        if "LayerNorm" in name:
            parameter.requires_grad_(True)
    return model


def oracle(model: nn.Module, losses: Callable[[nn.Module, slice], Tensor]) -> Tensor:
    trainable = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for n in range(N):
        gradients = torch.autograd.grad(losses(model, slice(n, n + 1)).sum(), trainable, allow_unused=True)
        pairs = zip(trainable, gradients, strict=True)
        rows.append(torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten() for p, g in pairs]))
    return torch.stack(rows)


def relative_error(rows: Tensor, expected: Tensor) -> float:
    return float((rows - expected).norm() / expected.norm())


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, slice], Tensor]]] = {
    "layer norms": (lambda: frozen_but(bert(), "LayerNorm"), classification),
    "LoRA with layer norms": (lora_and_norms, classification),
    "IA3": (ia3, classification),
    "prefix tuning": (prefix_tuned, next_token),
    "full fine-tuning": (bert, classification),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("training", [False, True])
def test_rows_equal_the_oracle(name: str, training: bool) -> None:
    make, losses = MODELS[name]
    model = make()
    expected = oracle(model, losses)
    if training:
        model.train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if hasattr(module, "dropout_prob"):
                module.dropout_prob = 0.0
    with PerExampleGradients(model) as gradients:
        for split in ([N], [1] * N, [2, 3]):
            rows, start = [], 0
            for size in split:
                part = slice(start, start + size)
                rows.append(gradients.compute(lambda part=part: losses(model, part)).clone())
                start += size
            assert relative_error(torch.cat(rows), expected) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_paths_agree(dtype: torch.dtype) -> None:
    model = stirred(
        get_peft_model(bert(), LoraConfig(r=2, target_modules=["query", "dense"], modules_to_save=["classifier"]))
    )
    model = model.to(dtype)
    with PerExampleGradients(model) as gradients:
        fused = gradients.compute(lambda: classification(model, slice(N))).clone()
    with PerExampleGradients(model, fused=False) as gradients:
        hooked = gradients.compute(lambda: classification(model, slice(N)))
    assert relative_error(hooked, fused) <= (1e-6 if dtype == torch.float32 else 1e-12)


def test_theta_moves_what_is_hooked() -> None:
    model = frozen_but(bert(), "LayerNorm")
    with PerExampleGradients(model) as gradients:
        before = classification(model, slice(N)).sum()
        gradients.theta.sub_(gradients.compute(lambda: classification(model, slice(N))).sum(0), alpha=1e-2)
        assert classification(model, slice(N)).sum() < before
        gradients.check_storage([gradients.theta])


def test_close_leaves_no_trace() -> None:
    model = frozen_but(bert(), "LayerNorm")
    before = {key for module in model.modules() for key in vars(module)}
    with PerExampleGradients(model) as gradients:
        gradients.compute(lambda: classification(model, slice(N)))
    assert {key for module in model.modules() for key in vars(module)} == before
    assert not any(module._backward_hooks or module._forward_hooks for module in model.modules())
    assert not any(hasattr(p, "grad_sample") or p.grad is not None for p in model.parameters())


def test_a_pass_that_stopped_half_way_leaves_nothing_behind() -> None:
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2))
    x = torch.randn(3, 4)
    with PerExampleGradients(model) as gradients:
        clean = gradients.compute(lambda: model(x).square().sum(1)).clone()
        with pytest.raises(ValueError, match="one loss per example"):
            gradients.compute(lambda: model(x).square().sum())
        assert torch.equal(gradients.compute(lambda: model(x).square().sum(1)), clean)


class Scale(nn.Module):
    """A trainable module that Opacus has no formula for."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.inner: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(x * self.weight))


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x / self.scalar


def test_a_scalar_parameter() -> None:
    model, x = Temperature(), torch.randn(3, 4)
    with PerExampleGradients(model) as gradients:
        rows = gradients.compute(lambda: model(x).sum(1))
    assert torch.allclose(rows[:, 0], -x.sum(1) / 4)


def with_buffer() -> nn.Module:
    model = Scale()
    model.register_buffer("offset", torch.zeros(1))
    return model


def nested(inner: nn.Module) -> nn.Module:
    model = Scale()
    model.inner = inner
    return model


@pytest.mark.parametrize(
    ("model", "losses", "problem"),
    [
        (Scale(), lambda m, x: checkpoint(lambda x: m(x).exp(), x, use_reentrant=False).sum(1), "checkpointing"),
        (Scale(), lambda m, x: m(x).sum(1) + (x * m.weight).sum(1), "outside its module's forward as well"),
        (Scale(), lambda m, x: (x * m.weight).sum(1), "outside its module's forward"),
        (Scale(), lambda m, x: m(x=x).sum(1), "first positional"),
        (Scale(), lambda m, x: m(torch.cat([x, x])).sum(1)[:3], "first dimension is not"),
        (
            nn.Embedding(4, 2),
            lambda m, x: (x[:, :2] * m(torch.arange(1))).sum(1),
            "first dimension is not",
        ),
        (with_buffer(), None, "has buffers"),
        (nn.BatchNorm1d(4).eval(), None, "has buffers"),
        (nested(nn.Linear(4, 4)), None, "trained by another path"),
        (nested(Scale()), None, "as a whole and in a part"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_hooks_get_wrong_is_refused(model: nn.Module, losses: Any, problem: str) -> None:
    if losses is None:
        with pytest.raises(DpmergeError, match=f"DPM-502.*{problem}"):
            PerExampleGradients(model)
        return
    x = torch.randn(3, 4)
    with PerExampleGradients(model) as gradients, pytest.raises(DpmergeError, match=f"DPM-502.*{problem}"):
        gradients.compute(lambda: losses(model, x))


def test_a_non_finite_example_stops_nothing() -> None:
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2))
    x = torch.randn(3, 4)
    x[1, 0] = torch.nan
    with PerExampleGradients(model) as gradients:
        rows = gradients.compute(lambda: model(x).square().sum(1))
    assert rows[[0, 2]].isfinite().all()
    assert not rows[1].isfinite().all()
