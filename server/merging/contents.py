"""What the tensors of an adapter's file are: pairs of LoRA factors, and what PEFT saves beside them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dpmerge.common.errors import DpmergeError
from dpmerge.common.release import ADAPTER
from dpmerge.server.merging.names import read_key, unwrapped
from dpmerge.server.merging.peft_config import Scalings, check_patterns, check_targets, scalings
from dpmerge.server.merging.settings import SAVE_AGAIN, check_settings, shown
from dpmerge.server.merging.stored import StoredTensor

Source = Tensor | StoredTensor


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
    copies: dict[str, Source]
    saved: dict[str, Source]


def read_contents(tensors: Mapping[str, Source], config: Mapping[str, Any], party: str) -> Contents:
    """Pair up the LoRA tensors of an adapter, with each module's own scaling, and sort out what lies beside them.

    Args:
        tensors: fp32 tensors under PEFT's keys, or where they are stored.
        config: PEFT's configuration.
        party: Named in every refusal.

    Raises:
        DpmergeError: DPM-402 for anything that is not LoRA on linear layers and embeddings, or whose shapes contradict
            the configuration.
    """
    check_patterns(config, party)
    check_settings(config, party)
    parts: dict[str, dict[str, Source]] = {}
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
    pairs = {name: _pair(name, found, looked_up) for name, found in adapted.items()}
    if not pairs:
        raise DpmergeError("DPM-402", f"{party}: {len(tensors)} tensors form 0 pairs of A and B", SAVE_AGAIN)
    embeddings = frozenset(name for name, found in adapted.items() if "embedding_A" in found)
    return Contents(pairs, embeddings, {name: f["base"] for name, f in adapted.items() if "base" in f}, kept)


def _pair(name: str, found: Mapping[str, Source], looked_up: Scalings) -> tuple[Source, Source, float]:
    pair = {"embedding_A", "embedding_B"} if "embedding_A" in found else {"A", "B"}
    if found.keys() - {"base"} != pair:
        parts = ", ".join(f"lora_{part}" for part in sorted(found))
        problem = f"{looked_up.party}: of {name} there is {parts}, which is no pair of A and B"
        raise DpmergeError("DPM-402", problem, SAVE_AGAIN)
    a, b = (found[part] for part in sorted(pair))
    return a, b, looked_up.of(name, a.shape, b.shape)
