"""Adapters of every kind that PEFT writes, merged and compared with what PEFT itself computes, in float64.

`adapter_figures(count, seed)` draws cases over `LoraConfig`, hostile names of modules and keys included. Each is two
adapters of one tiny model: PEFT makes and saves them, dpmerge reads, merges and writes, and PEFT opens the result. The
merged change must be the one that follows from PEFT's own `merge_and_unload`, or the refusal must name the party. A
case that dpmerge must take counts as wrong when it is refused.
"""

import json
import math
import random
import re
import tempfile
import warnings
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from dpmerge.common.errors import DpmergeError
from dpmerge.common.release.format import write_release
from dpmerge.server.merging.gate.gate import inspect_adapters
from dpmerge.server.merging.merge import as_release, merge
from dpmerge.server.merging.spec.spec import spec_of

TOLERANCE = 1e-6
UNMADE = (ValueError, TypeError, RuntimeError, KeyError, NotImplementedError, AttributeError, ImportError)
"""What PEFT raises for what it cannot make or open."""
WEIGHTS = (0.75, 0.5)  # of the two parties
METHODS = ("average", "concat", "task-arithmetic")
ADAPTED = re.compile(r"\.(lora_(A|B|embedding_[AB]|magnitude_vector)|modules_to_save|trainable_tokens_delta)\b")
CHANGING = ("pissa", "olora", "corda", "loftq", "lora_ga")  # starts that change the base model
FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

COMMON = ("layers.0.q_proj", "layers.0.k_proj", "layers.1.q_proj", "layers.1.k_proj", "layers.10.q_proj")
HOSTILE = (
    ("proj_out", "blocks.0.proj_out", "blocks.1.proj_out"),
    ("lm_head", "sub.lm_head", "layers.0.out"),
    ("a-b.w+x", "a-b.q(1)", "x$y.q_proj"),
    ("module.q_proj", "encoder.module.q_proj"),
    ("layers.0.lora_like", "layers.1.lora_like"),
    ("layersX0Xq_proj", "layers.0.q_proj"),
    ("base.q_proj", "model.q_proj", "default_net.q_proj"),
    ("w[0].q_proj", "w^1.q_proj", "w|2.q_proj"),
)


class Experts(nn.Module):
    """Two experts' weights in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight_of_all = nn.Parameter(torch.zeros(2, 5, 6))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One drawn case.

    Attributes:
        name: What is special about it.
        names: Modules of the model, dotted.
        kinds: Module → what makes it, where it is no linear layer.
        configs: Arguments of `LoraConfig`, of either party.
        dtype: As stored.
        rename: What happens to the keys of the file.
        edit: What is written over in the configuration.
        method: Of the merge.
        at_hand: Whether the base model's weights are.
        plain: Whether it must be merged, and not refused.
    """

    name: str
    names: tuple[str, ...]
    configs: tuple[dict[str, Any], dict[str, Any]]
    kinds: Mapping[str, Callable[[], nn.Module]] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    rename: Callable[[str], str] = str
    edit: Mapping[str, Any] = field(default_factory=dict)
    method: str = "average"
    at_hand: bool = False
    plain: bool = True


@dataclass(frozen=True)
class Result:
    """What became of a case: its error, or the refusal, and whether that is wrong."""

    case: Case
    error: float | None
    said: str
    wrong: bool


def model_of(case: Case) -> nn.Module:
    """Build the case's model, all of its weights zero, so that what is merged into it is the change."""
    root = nn.Module()
    for name in sorted(case.names):
        parent, parts = root, name.split(".")
        for part in parts[:-1]:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent._modules[part]  # type: ignore[assignment]  # never None
        parent.add_module(parts[-1], case.kinds.get(name, lambda: nn.Linear(6, 5))())
    for parameter in root.parameters():
        parameter.data.uniform_(-0.5, 0.5, generator=torch.Generator().manual_seed(1))
    root.eval()
    return root


def saved_base(case: Case, folder: Path) -> Path:
    """Save the case's model as a base model is."""
    folder.mkdir()
    save_file(model_of(case).state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def zeroed(model: nn.Module) -> nn.Module:
    """Set all weights but the adapter's to zero, in float64."""
    for name, parameter in model.double().named_parameters():
        if not ADAPTED.search(name):
            parameter.data.zero_()
    return model


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter of a plain model as float64."""
    return {name: parameter.detach().double() for name, parameter in model.named_parameters()}


def peft_adapter(case: Case, which: int, folder: Path) -> dict[str, Tensor]:
    """Make and save one adapter; return the change that PEFT merges for it, per parameter, float64."""
    torch.manual_seed(10 + which)
    before = weights_of(model_of(case))
    model = get_peft_model(model_of(case), LoraConfig(**case.configs[which])).double()
    generator = torch.Generator().manual_seed(100 + which)
    for name, parameter in model.named_parameters():
        if ADAPTED.search(name):
            drawn = torch.randn(parameter.shape, generator=generator) * 0.3
            parameter.data = (drawn.abs() if "magnitude" in name else drawn).to(case.dtype).double()
    model.save_pretrained(folder)
    tensors = {key: value.to(case.dtype).contiguous() for key, value in load_file(folder / FILE).items()}
    save_file(tensors, folder / FILE)
    if _needs_base(case):  # PEFT changed the base model, or reads it
        after = weights_of(model.merge_and_unload())
        change = {name: value - before.get(name, 0.0) for name, value in after.items()}
    else:
        change = opened(case, folder)
    save_file({case.rename(key): value for key, value in tensors.items()}, folder / FILE)
    config = json.loads((folder / CONFIG).read_text()) | {"base_model_name_or_path": "tiny"} | case.edit
    (folder / CONFIG).write_text(json.dumps(config))
    return change


def _needs_base(case: Case) -> bool:
    config = case.configs[0]
    return bool(config.get("use_dora")) or str(config.get("init_lora_weights")).startswith(CHANGING)


def opened(case: Case, folder: Path) -> dict[str, Tensor]:
    """Return what PEFT merges from a written folder, per parameter, float64."""
    model = PeftModel.from_pretrained(model_of(case), str(folder))
    return weights_of(zeroed(model).merge_and_unload())


def try_case(case: Case, scratch: Path) -> Result | None:
    """Try one case; None if PEFT itself cannot make it.

    Args:
        case: As drawn.
        scratch: An empty folder.
    """
    parties = ("shop", "library")
    try:
        own = [peft_adapter(case, which, scratch / party) for which, party in enumerate(parties)]
    except UNMADE:
        return None
    try:
        base = str(saved_base(case, scratch / "base")) if case.at_hand else ""
        gate = inspect_adapters([(None, scratch / party) for party in parties], strict=False, base=base)
        if gate.refusals:
            said = str(gate.refusals[0])
            return Result(case, None, said, case.plain or not said.startswith(("DPM-402: shop", "DPM-401: shop")))
        weights = dict(zip(parties, WEIGHTS, strict=True))
        options: dict[str, Any] = {"coefficient": 0.8} if case.method == "task-arithmetic" else {}
        merged = merge(gate.adapters, spec_of(case.method, weights=weights, strict=False, **options))
        write_release(scratch / "merged", as_release(merged, gate.adapters))
    except DpmergeError as refusal:
        return Result(case, None, str(refusal), True)
    factor = {"average": 1 / sum(WEIGHTS), "concat": 1.0, "task-arithmetic": 0.8}[case.method]
    expected = {
        name: factor * sum(weight * change[name] for weight, change in zip(WEIGHTS, own, strict=True))
        for name in own[0]
        if "classifier" not in name
    }
    try:
        error = distance(opened(case, scratch / "merged"), expected)
    except UNMADE as problem:
        return Result(case, math.inf, f"PEFT cannot open what is written: {problem}", True)
    return Result(case, error, "", not error <= TOLERANCE)


def distance(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest relative distance of a parameter's change, infinite where one has none."""
    worst = 0.0
    for name, target in expected.items():
        norm, here = float(torch.linalg.vector_norm(target)), found.get(name)
        if here is None or here.shape != target.shape:
            return math.inf
        gap = float(torch.linalg.vector_norm(here - target))
        worst = max(worst, gap / norm if norm else (math.inf if gap else 0.0))
    return worst


@contextmanager
def _quietly() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def adapter_results(count: int, seed: int = 0) -> list[Result]:
    """Draw cases until `count` of them could be made, and try each."""
    draw, results, tried = random.Random(seed), list[Result](), 0
    with _quietly(), tempfile.TemporaryDirectory() as folder:
        while len(results) < count:
            tried += 1
            scratch = Path(folder) / str(tried)
            scratch.mkdir()
            found = try_case(SPECIAL[tried - 1](draw) if tried <= len(SPECIAL) else drawn_case(draw), scratch)
            if found:
                results.append(found)
    return results


def adapter_figures(count: int = 240, seed: int = 0) -> dict[str, float]:
    """Return `adapter_cases`, `adapter_cases_refused`, `adapter_error_max` and `adapter_cases_wrong`."""
    results = adapter_results(count, seed)
    errors = [result.error for result in results if result.error is not None]
    return {
        "adapter_cases": len(results),
        "adapter_cases_refused": len(results) - len(errors),
        "adapter_error_max": max(errors, default=0.0),
        "adapter_cases_wrong": sum(result.wrong for result in results),
    }


def _ranks(draw: random.Random, names: tuple[str, ...]) -> dict[str, Any]:
    """Draw rank, alpha and their patterns."""
    config: dict[str, Any] = {"r": draw.randint(1, 4), "lora_alpha": draw.choice((1, 3, 4, 8, 16, 2.5))}
    config["use_rslora"] = draw.random() < 0.3
    for key, values in (("rank_pattern", (1, 2, 3, 5)), ("alpha_pattern", (1, 2, 7, 9))):
        if draw.random() < 0.5:
            chosen = draw.sample(names, min(len(names), draw.randint(1, 3)))
            config[key] = {_pattern(draw, name): draw.choice(values) for name in chosen}
    return config


def _pattern(draw: random.Random, name: str) -> str:
    last = re.escape(name.rpartition(".")[2])
    return draw.choice((last, re.escape(name), f"^{re.escape(name)}", re.sub(r"\\.\d+", r".\\d+", name), last + "$"))


def _targets(draw: random.Random, names: tuple[str, ...]) -> dict[str, Any]:
    lasts = sorted({name.rpartition(".")[2] for name in names})
    return draw.choice(
        (
            {"target_modules": lasts},
            {"target_modules": list(names)},
            {"target_modules": f"({'|'.join(map(re.escape, names))})"},
            {"target_modules": lasts, "exclude_modules": [names[0]]},
            {"target_modules": lasts, "layers_to_transform": [0, 1]},
            {"target_modules": lasts, "layers_to_transform": 1, "layers_pattern": "layers"},
        )
    )


def drawn_case(draw: random.Random) -> Case:
    """Draw a case of plain LoRA: any ranks, alphas, patterns, targets, precision, and names."""
    names = draw.choice((COMMON, *HOSTILE))
    shared = _targets(draw, names)
    if any("[" in name or "|" in name or "^" in name for name in names):
        shared = {"target_modules": list(names)}
    configs = tuple(shared | _ranks(draw, names) for _ in range(2))
    start = draw.choice((True, True, True, False, "gaussian"))
    configs = tuple(config | {"init_lora_weights": start, "lora_dropout": draw.choice((0, 0.1))} for config in configs)
    rename = draw.choice((str, str, *RENAMES.values()))
    return Case(
        name=f"plain {names[0]}",
        names=names,
        configs=configs,  # type: ignore[arg-type]  # two
        dtype=draw.choice(DTYPES),
        rename=rename,
        method=draw.choice(METHODS),
    )


PREFIX = "base_model.model."
RENAMES: dict[str, Callable[[str], str]] = {
    "compiled": lambda key: key.replace(PREFIX, f"{PREFIX}_orig_mod."),
    "distributed": lambda key: f"module.{key}",
    "doubled": lambda key: PREFIX + key,
    "fsdp": lambda key: key.replace(PREFIX, f"_fsdp_wrapped_module.{PREFIX}_fsdp_wrapped_module."),
    "checkpoint": lambda key: key.replace(".lora_", "._checkpoint_wrapped_module.lora_"),
    "adapter name": lambda key: key.replace(".weight", ".default.weight"),
}

RANK = {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "k_proj"]}


def _special(name: str, *, plain: bool = False, more: Mapping[str, Any] | None = None, **config: Any) -> Any:
    def make(draw: random.Random) -> Case:
        configs = tuple(RANK | {"r": draw.choice((2, 4))} | config for _ in range(2))
        names = (more or {}).get("names", COMMON)
        arguments = {key: value for key, value in (more or {}).items() if key != "names"}
        return Case(name=name, names=names, configs=configs, plain=plain, **arguments)  # type: ignore[arg-type]

    return make


EMBEDDED = {"names": (*COMMON, "embed"), "kinds": {"embed": lambda: nn.Embedding(7, 5)}}
CONVOLVED = {"names": (*COMMON, "conv"), "kinds": {"conv": lambda: nn.Conv2d(3, 4, 3)}}
FUSED = {"names": (*COMMON, "experts"), "kinds": {"experts": Experts}}
HEADED = {"names": (*COMMON, "classifier"), "kinds": {}}
TRANSPOSED = {"kinds": {name: lambda: Conv1D(5, 6) for name in COMMON}}

SPECIAL = [
    *(
        _special(f"start {start}", init_lora_weights=start)
        for start in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga")
    ),
    _special("start loftq", init_lora_weights="loftq", loftq_config={"loftq_bits": 4}),
    *(_special(f"start {start}", plain=True, init_lora_weights=start) for start in ("eva", "orthogonal", "mica")),
    _special("DoRA without the base", use_dora=True),
    _special("DoRA", plain=True, more={"at_hand": True}, use_dora=True),
    _special("DoRA concatenated", plain=True, more={"at_hand": True, "method": "concat"}, use_dora=True),
    _special(
        "DoRA rslora bf16", plain=True, more={"at_hand": True, "dtype": torch.bfloat16}, use_dora=True, use_rslora=True
    ),
    _special("DoRA Conv1D", plain=True, more=TRANSPOSED | {"at_hand": True}, use_dora=True, fan_in_fan_out=True),
    _special("all biases", bias="all"),
    _special("LoRA biases", bias="lora_only"),
    _special("bias of B", lora_bias=True),
    _special("tokens", more=EMBEDDED, trainable_token_indices={"embed": [1, 2]}),
    _special("embedding", plain=True, more=EMBEDDED, target_modules=["q_proj", "embed"]),
    _special("embedding rslora", plain=True, more=EMBEDDED, target_modules=["embed"], use_rslora=True),
    _special("convolution", more=CONVOLVED, target_modules=["q_proj", "conv"]),
    _special("fused experts", more=FUSED, target_modules=["q_proj"], target_parameters=["experts.weight_of_all"]),
    _special("a head", plain=True, more=HEADED, modules_to_save=["classifier"]),
    _special("a saved layer", modules_to_save=["k_proj"], target_modules=["q_proj"]),
    _special("Conv1D", plain=True, more=TRANSPOSED, fan_in_fan_out=True),
    _special("alpha 0", plain=True, lora_alpha=0),
    _special("unknown key", more={"edit": {"cls": 0}}),
    _special("rank as float", more={"edit": {"r": 2.0}}),
    _special("rank as true", more={"edit": {"r": True}}),
    _special("alpha as text", more={"edit": {"lora_alpha": "6"}}),
    _special("alpha not finite", more={"edit": {"lora_alpha": 10**400}}),
    _special("rsLoRA as number", more={"edit": {"use_rslora": 1}}),
    _special("start as list", more={"edit": {"init_lora_weights": ["pissa"]}}),
    _special("start as object", more={"edit": {"init_lora_weights": {"name": "olora"}}}),
    _special("hostile pattern", more={"edit": {"rank_pattern": {"(a+)+b": 2}}}),
    _special("pattern of text", more={"edit": {"alpha_pattern": {"q_proj": "4"}}}),
    _special("aLoRA", more={"edit": {"alora_invocation_tokens": [1]}}),
    _special("Arrow", more={"edit": {"arrow_config": {"top_k": 1}}}),
    _special("KaSA", more={"edit": {"kasa_config": {"beta": 1e-4}}}),
    _special("MonteCLoRA", more={"edit": {"monteclora_config": {}}}),
    _special("BD-LoRA", more={"edit": {"use_bdlora": {"nblocks": 2}}}),
    _special("QALoRA", more={"edit": {"use_qalora": True}}),
    _special("replicated", more={"edit": {"layer_replication": [[0, 1]]}}),
    _special("tied", more={"edit": {"ensure_weight_tying": True}}),
    _special("Megatron", more={"edit": {"megatron_config": {"a": 1}}}),
    _special("foreign wrapper", more={"rename": lambda key: key.replace(PREFIX, f"{PREFIX}_forward_module.")}),
    _special("two keys of one module", more={"edit": {"target_modules": ["k_proj"]}}),
    *(_special(f"keys {name}", plain=True, more={"rename": rename}) for name, rename in RENAMES.items()),
]
