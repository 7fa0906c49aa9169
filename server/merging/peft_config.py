"""What PEFT's configuration says of an adapter: whether it is plain LoRA, and what each module's B A is scaled by."""

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dpmerge.common.errors import DpmergeError
from dpmerge.common.release import CONFIG
from dpmerge.server.merging.patterns import PatternRefused, check, matches

# Settings under which W + scaling · B A is not the adapter's weight, or not all of it.
UNSUPPORTED = (
    "use_dora",
    "lora_bias",
    "use_qalora",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "modules_to_save",
    "trainable_token_indices",
    "target_parameters",
    "layer_replication",
    "use_bdlora",
)
SAVE_AGAIN = "save the adapter again with PEFT"


def check_plain_lora(config: Mapping[str, Any], party: str) -> None:
    """Refuse an adapter that is more than LoRA on linear layers, or something else.

    Raises:
        DpmergeError: DPM-402, naming the party and the setting.
    """
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none":
        problem = f"{party}: peft_type = {config.get('peft_type')!r}, bias = {config.get('bias')!r}"
        raise DpmergeError("DPM-402", problem, "only LoRA without trained biases can be merged")
    for setting in UNSUPPORTED:
        if config.get(setting):
            problem = f"{party}: {setting} = {config[setting]!r} cannot be merged"
            raise DpmergeError("DPM-402", problem, "train the adapter as plain LoRA on linear layers")


def check_patterns(config: Mapping[str, Any], names: Collection[str], party: str) -> None:
    """Refuse rank and alpha patterns that are no object, no pattern, or made to be matched for ever.

    Args:
        config: PEFT's configuration.
        names: All modules of the adapter.
        party: Named in every refusal.

    Raises:
        DpmergeError: DPM-402.
    """
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(key) or {}
        if not isinstance(patterns, Mapping):
            raise DpmergeError("DPM-402", f"{party}: {key} = {patterns!r} is no object", SAVE_AGAIN)
        try:
            check(patterns, names)
        except PatternRefused as refusal:
            fix = "name modules, or the ends of their names, with at most . * + ? [ ] and ( | ) between"
            raise DpmergeError("DPM-402", f"{party}: {key} of {CONFIG}: {refusal}", fix) from None


def scaling(name: str, a: Sequence[int], b: Sequence[int], config: Mapping[str, Any], party: str) -> float:
    """Return alpha/rank of a module, or alpha/√rank with rsLoRA.

    Args:
        name: The module's dotted name, which rank and alpha patterns are matched against; see `check_patterns`.
        a: Shape of A.
        b: Shape of B.
        config: PEFT's configuration: r, lora_alpha, use_rslora, rank_pattern, alpha_pattern.
        party: Named in every refusal.

    Raises:
        DpmergeError: DPM-402 for shapes that contradict the configuration, or a value of the wrong type.
    """
    rank = _of_module(config, "r", "rank_pattern", name, party)
    alpha = _of_module(config, "lora_alpha", "alpha_pattern", name, party)
    root = config.get("use_rslora") or False
    if not isinstance(root, bool):
        raise DpmergeError("DPM-402", f"{party}: use_rslora = {root!r} is not true or false", SAVE_AGAIN)
    if len(a) != 2 or len(b) != 2 or a[0] != rank or b[1] != rank:
        problem = f"{party}: {name} has A {tuple(a)} and B {tuple(b)} where the configuration says rank {rank}"
        raise DpmergeError("DPM-402", problem, SAVE_AGAIN)
    return alpha / math.sqrt(rank) if root else alpha / rank


def _of_module(config: Mapping[str, Any], key: str, pattern_key: str, name: str, party: str) -> float:
    """Look a module up as PEFT does: the first pattern that matches wins, and `key` holds for all others."""
    value = config.get(key)
    for pattern, stated in (config.get(pattern_key) or {}).items():
        if matches(pattern, name):
            key, value = f"{pattern_key}.{pattern}", stated
            break
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise DpmergeError("DPM-402", f"{party}: {key} = {value!r} is no finite number", SAVE_AGAIN)
    return value
