"""What privacy costs a training step: time, memory and exactness, side by side in one process.

    python benchmarks/step_time.py [--quick] [--format json]

Every variant takes the same step on its own copy of the same model and batch: forward, backward, whatever it needs to
be private, Adam. The denominator is the *fused non-private step*: the same autograd functions as the private path,
returning summed gradients, which is faster than stock PEFT. Variants take turns, each time is the minimum over the
turns, and the ratio that is reported is the worst over the cases of the run.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import opacus
import torch
import transformers
from opacus.grad_sample import GradSampleModule
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModel, BertConfig, BertModel, LlamaConfig, LlamaModel

from dpmerge.client.gradients.per_example import PerExampleGradients
from dpmerge.client.privacy.noise import FastNoise
from dpmerge.client.privacy.privatiser import Privatiser
from dpmerge.client.training.sharpness import perturbation, perturbed
from dpmerge.common.data.assets import model_folder
from dpmerge.common.errors import DpmergeError
from dpmerge.common.privacy.mechanism import Mechanism

NUM_CLASSES, CLIP, SIGMA, RADIUS, RATE = 4, 0.5, 1.0, 0.1, 1e-4
TURNS = 9
Step = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One model, batch and thread count."""

    model: str  # a key of MODELS
    num_examples: int
    num_tokens: int
    num_threads: int


QUICK = (Case("bert-last-2-cached", 16, 32, 1), Case("llama-7-targets", 16, 64, 1))
FULL = (
    *(Case("bert-last-2-cached", n, tokens, threads) for threads in (1, 2) for tokens in (32, 128) for n in (16, 64)),
    *(Case("bert-all", n, tokens, threads) for threads in (1, 2) for tokens in (32, 128) for n in (16, 64)),
    *(Case("llama-7-targets", n, tokens, threads) for threads in (1, 2) for tokens in (64, 128) for n in (16, 64)),
)


class Classifier(nn.Module):
    """A transformer fed with hidden states, with a linear head on its mean-pooled tokens."""

    def __init__(self, encoder: nn.Module, width: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states [n, tokens, width] → class scores [n, classes]."""
        scores: Tensor = self.head(self.encoder(inputs_embeds=hidden).last_hidden_state.mean(1))
        return scores


def bert(num_layers: int) -> nn.Module:
    """MiniLM's top layers; a cached trunk leaves exactly these to be run."""
    try:
        model: nn.Module = AutoModel.from_pretrained(str(model_folder("minilm-l6")), dtype=torch.float32)
    except DpmergeError:
        config = BertConfig(hidden_size=384, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=12)
        model = BertModel(config)
    model.pooler = None
    model.encoder.layer = model.encoder.layer[-num_layers:]
    targets = r".*(query|key|value|dense)"
    return lora(model, targets, train_a=False)


def llama() -> nn.Module:
    """A small Llama with random weights: no assets needed, all seven linears of each block adapted, A trained too."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=6,
        use_cache=False,
    )
    return lora(LlamaModel(config), r".*(q|k|v|o|gate|up|down)_proj", train_a=True)


def lora(base: nn.Module, targets: str, *, train_a: bool) -> nn.Module:
    model = Classifier(get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=targets)), 384)
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.requires_grad_(train_a)
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    return model.train()  # Opacus's hooks work in training mode only


MODELS: dict[str, Callable[[], nn.Module]] = {
    "bert-last-2-cached": lambda: bert(2),
    "bert-all": lambda: bert(6),
    "llama-7-targets": llama,
}


class SummedLora(torch.autograd.Function):
    """The private path's LoRA function with summed gradients: the fused non-private floor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, base: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
        """Map x [n, …, d_in] and base [n, …, d_out] to [n, …, d_out]."""
        h = F.linear(x, a) * scaling
        ctx.save_for_backward(x if ctx.needs_input_grad[2] else None, h, a, b)
        ctx.scaling = scaling
        return torch.addmm(base.flatten(0, -2), h.flatten(0, -2), b.t()).view(base.shape)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Return the summed gradients."""
        x, h, a, b = ctx.saved_tensors
        grad_b = (h.flatten(0, -2).t() @ g.flatten(0, -2)).t()
        grad_a = grad_x = None
        if x is not None or ctx.needs_input_grad[0]:
            grad_h = (g @ b) * ctx.scaling
            grad_a = None if x is None else grad_h.flatten(0, -2).t() @ x.flatten(0, -2)
            grad_x = grad_h @ a if ctx.needs_input_grad[0] else None
        return grad_x, g if ctx.needs_input_grad[1] else None, grad_a, grad_b, None


def fuse_summed(model: nn.Module) -> None:
    for layer in model.modules():
        if isinstance(layer, LoraLinear):

            def forward(x: Tensor, layer: Any = layer) -> Tensor:
                a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
                return SummedLora.apply(x, layer.base_layer(x), a, b, layer.scaling["default"])

            layer.forward = forward


def losses(model: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(hidden), labels, reduction="none")


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def plain(model: nn.Module, hidden: Tensor, labels: Tensor) -> Step:
    optimizer = torch.optim.Adam(trainable(model), lr=RATE)

    def step() -> None:
        optimizer.zero_grad()
        losses(model, hidden, labels).mean().backward()
        optimizer.step()

    return step


def floor(model: nn.Module, hidden: Tensor, labels: Tensor) -> Step:
    fuse_summed(model)
    return plain(model, hidden, labels)


def ours(sharpness: str) -> Callable[[nn.Module, Tensor, Tensor], Step]:
    def make(model: nn.Module, hidden: Tensor, labels: Tensor) -> Step:
        gradients = PerExampleGradients(model)
        theta, batch = gradients.theta, len(hidden)
        optimizer = torch.optim.Adam([theta], lr=RATE)
        mechanism = Mechanism(
            noise_multiplier=SIGMA,
            ascent_noise_multiplier=SIGMA if sharpness == "sam" else None,
            l2_clip_norm=CLIP,
            population=100 * batch,
            expected_batch_size=batch,
            num_steps=1,
            target_delta=1e-5,
            num_coordinates=theta.numel(),
            sharpness=sharpness,
            noise="fast",
        )
        noise = FastNoise(0)
        descent = Privatiser(mechanism, theta.numel(), noise)
        ascent = Privatiser(mechanism, theta.numel(), noise, query="ascent") if sharpness == "sam" else None
        direction: Tensor | None = None

        def private_gradient(privatiser: Privatiser) -> Tensor:
            privatiser.accumulate(gradients.compute(lambda: losses(model, hidden, labels)))
            return privatiser.finish()

        def step() -> None:
            nonlocal direction
            if ascent is not None:
                direction = private_gradient(ascent)
            with perturbed(theta, perturbation(direction, RADIUS)):
                gradient = private_gradient(descent)
            if sharpness == "sat":
                direction = gradient
            theta.grad = gradient
            optimizer.step()

        return step

    return make


def opacus_hooks(model: nn.Module, hidden: Tensor, labels: Tensor) -> Step:
    wrapped = GradSampleModule(model)
    optimizer = DPOptimizer(
        torch.optim.Adam(trainable(model), lr=RATE),
        noise_multiplier=SIGMA,
        max_grad_norm=CLIP,
        expected_batch_size=len(hidden),
    )

    def step() -> None:
        optimizer.zero_grad()
        losses(wrapped, hidden, labels).mean().backward()
        optimizer.step()

    return step


def opacus_ghost(model: nn.Module, hidden: Tensor, labels: Tensor) -> Step:
    wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=CLIP)
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.Adam(trainable(model), lr=RATE),
        noise_multiplier=SIGMA,
        max_grad_norm=CLIP,
        expected_batch_size=len(hidden),
    )

    def step() -> None:
        optimizer.zero_grad()
        DPTensorFastGradientClipping(wrapped, optimizer, losses(wrapped, hidden, labels)).backward()
        optimizer.step()

    return step


VARIANTS: dict[str, Callable[[nn.Module, Tensor, Tensor], Step]] = {
    "nonprivate": floor,
    "peft": plain,
    "dp": ours("none"),
    "sat": ours("sat"),
    "sam": ours("sam"),
    "opacus_hooks": opacus_hooks,
    "opacus_ghost": opacus_ghost,
}


def batch_of(case: Case, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(case.num_examples, case.num_tokens, 384, generator=generator, dtype=dtype)
    return hidden, torch.arange(case.num_examples) % NUM_CLASSES


def seconds(case: Case, model: nn.Module, *, turns: int) -> dict[str, float]:
    """Return each variant's fastest step, variants taking turns.

    One thread is timed in processor seconds, which a busy machine disturbs least; more threads in wall-clock seconds.
    """
    torch.set_num_threads(case.num_threads)
    clock = time.process_time if case.num_threads == 1 else time.perf_counter
    steps = {name: make(copy.deepcopy(model), *batch_of(case)) for name, make in VARIANTS.items()}
    fastest = dict.fromkeys(steps, float("inf"))
    for turn in range(turns + 1):
        for name, step in steps.items():
            start = clock()
            step()
            if turn > 0:  # the first warms up
                fastest[name] = min(fastest[name], clock() - start)
    return fastest


def peak_bytes(case: Case, model: nn.Module, variant: str) -> int:
    """Return the largest sum of tensor bytes alive: the model, what a variant sets up, and two steps of it."""
    own = copy.deepcopy(model)
    hidden, labels = batch_of(case)
    held = sum(p.numel() * p.element_size() for p in own.parameters())
    with torch.profiler.profile(profile_memory=True) as profile:
        step = VARIANTS[variant](own, hidden, labels)
        step()
        step()
    alive = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return held + peak


def gradient_error(case: Case, model: nn.Module, dtype: torch.dtype) -> float:
    """Return the rows' worst relative L2 error against one record at a time, over three splits of five records."""
    model = copy.deepcopy(model).to(dtype).eval()
    hidden, labels = (t[:5] for t in batch_of(case, dtype))
    expected = torch.stack(
        [
            torch.cat(
                [g.flatten() for g in torch.autograd.grad(losses(model, x[None], y[None]).sum(), trainable(model))]
            )
            for x, y in zip(hidden, labels, strict=True)
        ]
    )
    worst = 0.0
    with PerExampleGradients(model) as gradients:
        for size in (5, 2, 1):
            parts = zip(hidden.split(size), labels.split(size), strict=True)
            rows = torch.cat([gradients.compute(lambda x=x, y=y: losses(model, x, y)).clone() for x, y in parts])
            errors = torch.linalg.vector_norm(rows - expected, dim=1) / torch.linalg.vector_norm(expected, dim=1)
            worst = max(worst, errors.max().item())
    return worst


def run(cases: tuple[Case, ...], *, turns: int) -> dict[str, Any]:
    torch.manual_seed(0)
    models = {name: MODELS[name]() for name in dict.fromkeys(case.model for case in cases)}
    rows = []
    for case in cases:
        times = seconds(case, models[case.model], turns=turns)
        row: dict[str, Any] = asdict(case) | {"seconds": {name: round(t, 4) for name, t in times.items()}}
        row |= {f"{name}_over_nonprivate": round(t / times["nonprivate"], 4) for name, t in times.items()}
        memory = {name: peak_bytes(case, models[case.model], name) for name in ("nonprivate", "dp", "opacus_hooks")}
        row["peak_memory_ratio"] = round(memory["dp"] / memory["nonprivate"], 4)
        row["opacus_hooks_peak_memory_ratio"] = round(memory["opacus_hooks"] / memory["nonprivate"], 4)
        print(json.dumps(row), file=sys.stderr, flush=True)
        rows.append(row)
    columns = [f"{name}_over_nonprivate" for name in VARIANTS if name != "nonprivate"]
    columns += ["peak_memory_ratio", "opacus_hooks_peak_memory_ratio"]
    figures: dict[str, Any] = {column: max(row[column] for row in rows) for column in columns}
    for key, dtype in (("gradient_error_fp32", torch.float32), ("gradient_error_fp64", torch.float64)):
        firsts = {case.model: case for case in reversed(cases)}
        figures[key] = max(gradient_error(case, models[name], dtype) for name, case in firsts.items())
    return {"benchmark": "step_time", "figures": figures, "cases": rows, "environment": environment(turns)}


def environment(turns: int) -> dict[str, Any]:
    try:
        weights = model_folder("minilm-l6").name
    except DpmergeError:
        weights = "random, minilm-l6's shape"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "opacus": opacus.__version__,
        "processor": platform.machine(),
        "blas": "mkl" if torch.backends.mkl.is_available() else "other",
        "bert_weights": weights,
        "llama_weights": "random, 2 layers, width 384, A trained",
        "lora": "rank 8 on all linears and a linear head; A frozen in bert",
        "noise": "fast",
        "trunk": "cached in bert-last-2-cached, none in the others",
        "turns": turns,
        "clock": "processor seconds with one thread, wall clock with more",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two small cases, within a minute on two cores")
    parser.add_argument("--format", choices=["text", "json"], default="text")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # of transformers and Opacus, about their own deprecated names
    result = run(QUICK if arguments.quick else FULL, turns=TURNS)
    if arguments.format == "json":
        print(json.dumps(result))
    else:
        for key, value in result["figures"].items():
            print(f"{key:34s} {value:.4g}")


if __name__ == "__main__":
    main()
