"""What the tensors of an adapter's file are: pairs of LoRA factors, and what PEFT saves beside them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpmerge.common.errors import DpmergeError
from dpmerge.common.release.format import ADAPTER
from dpmerge.server.merging.adapters.dora import DoraChange, Plain, base_weights, known
from dpmerge.server.merging.adapters.lazy_tensors import StoredTensor
from dpmerge.server.merging.adapters.names import read_key, unwrapped
from dpmerge.server.merging.adapters.peft_config import Scalings, check_patterns, check_targets, scalings
from dpmerge.server.merging.adapters.settings import SAVE_AGAIN, check_settings, shown, stated

Source = Tensor | StoredTensor | DoraChange


@dataclass(frozen=True)
class Contents:
    """What the tensors of one adapter are.

    Attributes:
        pairs: Module → A, B and what B A is scaled by.
        embeddings: Modules whose change is one of an embedding.
        copies: Module → a copy of the base model's weight.
        saved: Tensor's name → tensor of a head that was trained whole.
    """

    pairs: dict[str, tuple[Source, Source, float]]
    embeddings: frozenset[str]
    copies: Mapping[str, Source]
    saved: Mapping[str, Source]


def read_contents(
    tensors: Mapping[str, Plain], config: Mapping[str, Any], party: str, base: Path | None = None
) -> Contents:
    """Pair up the LoRA tensors of an adapter, with each module's own scaling, and sort out what lies beside them.

    Args:
        tensors: fp32 tensors under PEFT's keys, or where they are stored.
        config: PEFT's configuration.
        party: Named in every refusal.
        base: The base model's folder, which DoRA needs.

    Raises:
        DpmergeError: DPM-402 for anything that is not LoRA on linear layers and embeddings, or whose shapes contradict
            the configuration.
    """
    check_patterns(config, party)
    check_settings(config, party)
    parts: dict[str, dict[str, Plain]] = {}
    read = {key: read_key(key, party) for key in sorted(tensors)}
    plain = unwrapped({name for name, _ in read.values()})
    for key, (wrapped, part) in read.items():
        name = plain[wrapped]
        if part in parts.setdefault(name, {}):
            problem = f"{party}: {ADAPTER}: two tensors are {part} of {name}, one of them {shown(key)}"
            raise DpmergeError("DPM-402", problem, SAVE_AGAIN)
        parts[name][part] = tensors[key]
    adapted = {name: found for name, found in parts.items() if found.keys() != {"saved"}}
    kept = {name: found["saved"] for name, found in parts.items() if "saved" in found}
    check_targets(config, adapted, party)
    looked_up = scalings(config, adapted, party)
    if stated(config, "use_dora"):
        pairs = _dora_pairs(adapted, looked_up, config, base)
    else:
        pairs = {name: _pair(name, found, looked_up) for name, found in adapted.items()}
    if not pairs:
        raise DpmergeError("DPM-402", f"{party}: {len(tensors)} tensors form 0 pairs of A and B", SAVE_AGAIN)
    embeddings = frozenset(name for name, found in adapted.items() if "embedding_A" in found)
    return Contents(pairs, embeddings, {name: f["base"] for name, f in adapted.items() if "base" in f}, kept)


def _dora_pairs(
    adapted: Mapping[str, Mapping[str, Plain]], looked_up: Scalings, config: Mapping[str, Any], base: Path | None
) -> dict[str, tuple[Source, Source, float]]:
    """Return DoRA's changes beside the identity, which makes factors of them."""
    party = looked_up.party
    if base is None:
        problem = f"{party}: use_dora = True: what DoRA changes is told by its factors and the base model's weights"
        raise DpmergeError("DPM-402", problem, "give --base the folder of the base model, or train without DoRA")
    weights, transposed = base_weights(base), stated(config, "fan_in_fan_out")
    pairs: dict[str, tuple[Source, Source, float]] = {}
    for name, found in adapted.items():
        lengths = found.get("magnitude_vector")
        if "embedding_A" in found or lengths is None:
            problem = f"{party}: {name} is {'an embedding' if 'embedding_A' in found else 'without lengths'} under DoRA"
            raise DpmergeError("DPM-402", problem, "train DoRA on linear layers only")
        plain = {part: source for part, source in found.items() if part != "magnitude_vector"}
        a, b, scaling = _pair(name, plain, looked_up)
        shape = (b.shape[0], a.shape[1])
        made = DoraChange(weights, name, party, (plain["A"], plain["B"], lengths), scaling, transposed, shape)
        change, identity = known(made), torch.eye(min(shape))
        pairs[name] = (change, identity, 1.0) if shape[0] <= shape[1] else (identity, change, 1.0)
    return pairs


def _pair(name: str, found: Mapping[str, Plain], looked_up: Scalings) -> tuple[Source, Source, float]:
    pair = {"embedding_A", "embedding_B"} if "embedding_A" in found else {"A", "B"}
    if found.keys() - {"base"} != pair:
        parts = ", ".join(f"lora_{part}" for part in sorted(found))
        problem = f"{looked_up.party}: of {name} there is {parts}, which is no pair of A and B"
        raise DpmergeError("DPM-402", problem, SAVE_AGAIN)
    a, b = (found[part] for part in sorted(pair))
    return a, b, looked_up.of(name, a.shape, b.shape)
