"""A merged change as PEFT opens it: tensors and a configuration that is made new from what was understood."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from dpmerge.common.release.format import PEFT_PREFIX, adapter_key
from dpmerge.server.merging.adapters.deltas import Adapter, LowRankDelta
from dpmerge.server.merging.adapters.names import escaped
from dpmerge.server.merging.adapters.settings import stated

KEPT_TASKS = frozenset({"CAUSAL_LM", "SEQ_2_SEQ_LM", "FEATURE_EXTRACTION"})
"""Tasks whose models PEFT opens without a head in the adapter; under any other it looks for one."""


def tensors_of(modules: Mapping[str, LowRankDelta], adapters: Sequence[Adapter]) -> dict[str, Tensor]:
    """Return merged factors under PEFT's keys, those of embeddings under their own.

    Args:
        modules: Module → merged factors, scaling 1.
        adapters: What was merged; they tell which modules are embeddings.
    """
    embeddings = frozenset[str]().union(*(adapter.embeddings for adapter in adapters))
    tensors = {}
    for name, factors in modules.items():
        if name in embeddings:
            tensors[f"{PEFT_PREFIX}{name}.lora_embedding_A"] = factors.a
            tensors[f"{PEFT_PREFIX}{name}.lora_embedding_B"] = factors.b
        else:
            tensors[adapter_key(name, "lora_A")] = factors.a
            tensors[adapter_key(name, "lora_B")] = factors.b
    return tensors


def saved_modules(adapters: Sequence[Adapter]) -> dict[str, Tensor]:
    """Return every party's head that was trained whole, as "<party>/<tensor's name>" → fp32 tensor."""
    return {
        f"{party}/{name}": (source if isinstance(source, Tensor) else source.read()).float()
        for adapter in adapters
        for party, tensors in adapter.saved.items()
        for name, source in tensors.items()
    }


def peft_config(modules: Mapping[str, LowRankDelta], adapters: Sequence[Adapter]) -> dict[str, Any]:
    """Describe merged factors to PEFT: modules by their full names, each with its own rank, and a scaling of 1.

    Nothing is copied: what all inputs agree on is stated again, and every other setting is left to PEFT's default.

    Args:
        modules: LowRankDelta with scaling 1.
        adapters: What was merged; the base model has the first one's name.
    """
    ranks = {name: factors.rank for name, factors in modules.items()}
    (common, _), *_ = sorted(Counter(ranks.values()).items(), key=lambda item: (-item[1], -item[0]))
    others = rank_pattern(ranks, common)
    task = _agreed(stated(adapter.config, "task_type") for adapter in adapters)
    config = {
        "peft_type": "LORA",
        "task_type": task if task in KEPT_TASKS else None,
        "base_model_name_or_path": adapters[0].base,
        "inference_mode": True,
        "r": common,
        "lora_alpha": common,
        "rank_pattern": others,
        "alpha_pattern": dict(others),
        "use_rslora": False,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": _agreed(stated(adapter.config, "fan_in_fan_out") for adapter in adapters) is True,
        "init_lora_weights": True,
        "target_modules": targets(modules),
        "modules_to_save": None,
    }
    revision = _agreed(stated(adapter.config, "revision") for adapter in adapters)
    return config | ({"revision": revision} if revision else {})


def rank_pattern(ranks: Mapping[str, int], common: int) -> dict[str, int]:
    r"""Return patterns for the modules whose rank is not the common one, in any order of which PEFT finds each rank.

    Modules whose last name always goes with one rank share a pattern; others are named in full from the start, so that
    `proj_out` is not taken for the end of `blocks.0.proj_out`.

    Args:
        ranks: Module → rank.
        common: The rank that `r` states.

    >>> rank_pattern({"proj_out": 2, "blocks.0.proj_out": 4, "0.q": 3, "1.q": 3}, 4)
    {'^proj_out': 2, 'q': 3}
    """
    alike: dict[str, set[int]] = defaultdict(set)
    for name, rank in ranks.items():
        alike[name.rpartition(".")[2]].add(rank)
    found = {}
    for name, rank in ranks.items():
        last = name.rpartition(".")[2]
        if rank != common:
            found[escaped(last) if len(alike[last]) == 1 else f"^{escaped(name)}"] = rank
    return found


def targets(names: Collection[str]) -> list[str] | str:
    r"""Return what PEFT finds exactly these modules by: their full names, or a pattern where one is the end of another.

    PEFT takes a name in a list for the end of longer names too; `proj_out` would bring in every `blocks.N.proj_out`.

    >>> targets(["b.q", "a.q"]), targets(["proj_out", "blocks.0.proj_out"])
    (['a.q', 'b.q'], '(?:blocks\\.0\\.proj_out|proj_out)')
    """
    known = set(names)
    ends = {name[place + 1 :] for name in names for place, sign in enumerate(name) if sign == "."}
    if known & ends:
        return f"(?:{'|'.join(escaped(name) for name in sorted(names))})"
    return sorted(names)


def _agreed(values: Iterable[Any]) -> Any:
    """Return what all have, or None."""
    first, *rest = values
    return first if all(value == first for value in rest) else None
