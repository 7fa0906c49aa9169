"""Every setting of `adapter_config.json` in one table: understood, irrelevant for a stated reason, or refused.

The table is an allow-list of keys *and* values, of exact JSON kinds: `2.0` is no rank, and neither is `true`. A key
that it does not hold is refused, whatever its value; a test compares it with the installed PEFT. Intake and merges
share it.
"""

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dpmerge.common.errors import DpmergeError
from dpmerge.common.release.format import CONFIG

HEAD_MODULES = frozenset({"classifier", "score", "qa_outputs", "pre_classifier"})
"""Names of modules on top of a model, which PEFT trains whole and saves under `modules_to_save`."""

PLAIN_STARTS = ("gaussian", "eva", "orthogonal", "mica")
CONVERTIBLE_STARTS = ("pissa", "olora", "corda", "lora_ga")
"""Starts that take B A out of the base model's weights; PEFT can turn an adapter of theirs into plain LoRA."""
TASKS = ("SEQ_CLS", "SEQ_2_SEQ_LM", "CAUSAL_LM", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION")

MAX_SHOWN = 80  # characters of a value that somebody else wrote
SAVE_AGAIN = "save the adapter again with PEFT"
TRAIN_PLAIN = "train the adapter as plain LoRA on linear layers"
CONVERT = (
    "save it once more where it was trained, with PEFT's save_pretrained(OUT, "
    "path_initial_model_for_weight_conversion=FOLDER), where FOLDER holds the adapter as it was before training; "
    "that writes plain LoRA"
)

Use = Literal["understood", "irrelevant", "off"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What one key may hold.

    Attributes:
        use: "understood": a merge reads it. "irrelevant": no allowed value changes what B A is. "off": only values are
            allowed under which it does nothing.
        default: What PEFT takes where the key is absent.
        allowed: Whether a value has the right kind and range.
        words: What is allowed.
        why: Why it does not matter, or what it would do.
        fix: What to do about another value.
    """

    use: Use
    default: Any
    allowed: Callable[[Any], bool]
    words: str
    why: str
    fix: str = SAVE_AGAIN


def is_number(value: object) -> bool:
    """Tell whether a JSON value is a finite number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_rank(value: object) -> bool:
    """Tell whether a JSON value is an integer of at least 1, written as one."""
    return type(value) is int and value >= 1


def _flag(value: object) -> bool:
    return type(value) is bool


def _text(value: object) -> bool:
    return value is None or type(value) is str


def _object(value: object) -> bool:
    return value is None or type(value) is dict


def _texts(value: object) -> bool:
    return _text(value) or (type(value) is list and all(type(item) is str for item in value))


def _layers(value: object) -> bool:
    items = value if type(value) is list else [value]
    return value is None or all(type(item) is int and item >= 0 for item in items)


def _one_of(*values: object) -> Callable[[Any], bool]:
    return lambda value: any(type(value) is type(item) and value == item for item in values)


def _heads_only(value: object) -> bool:
    return value is None or (type(value) is list and all(type(item) is str and item in HEAD_MODULES for item in value))


def _pattern(of: Callable[[object], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or (type(value) is dict and all(map(of, value.values())))


def _understood(default: Any, allowed: Callable[[Any], bool], words: str, fix: str = SAVE_AGAIN) -> Setting:
    return Setting(use="understood", default=default, allowed=allowed, words=words, why="a merge reads it", fix=fix)


def _irrelevant(default: Any, allowed: Callable[[Any], bool], words: str, why: str) -> Setting:
    return Setting(use="irrelevant", default=default, allowed=allowed, words=words, why=why)


def _off(default: Any, *off: object, why: str, fix: str = TRAIN_PLAIN) -> Setting:
    words = "only " + " or ".join(json.dumps(value) for value in (default, *off))
    return Setting(use="off", default=default, allowed=_one_of(default, *off), words=words, why=why, fix=fix)


WHERE = "says where LoRA acts, which the names of the tensors say as well"
START = "says how training started; a start that changes the base model is refused under init_lora_weights"
TRAINING = "acts in training only"
BOTH = (_flag, "true or false")
TEXT, OBJECT, TEXTS = (_text, "a text or null"), (_object, "an object or null"), (_texts, "a text, texts or null")

SETTINGS: Mapping[str, Setting] = {
    "peft_type": _understood(None, _one_of("LORA"), '"LORA"', "only LoRA adapters can be merged"),
    "base_model_name_or_path": _understood(None, *TEXT),
    "revision": _understood(None, *TEXT),
    "task_type": _understood(None, _one_of(None, *TASKS), f"null or one of {', '.join(TASKS)}"),
    "r": _understood(8, is_rank, "an integer of at least 1"),
    "lora_alpha": _understood(8, is_number, "a finite number"),
    "use_rslora": _understood(False, *BOTH),
    "rank_pattern": _understood({}, _pattern(is_rank), "an object of integers of at least 1"),
    "alpha_pattern": _understood({}, _pattern(is_number), "an object of finite numbers"),
    "fan_in_fan_out": _understood(False, *BOTH),
    "target_modules": _understood(None, *TEXTS),
    "modules_to_save": _understood(
        None,
        _heads_only,
        f"null or a list of heads: {', '.join(sorted(HEAD_MODULES))}",
        "train without it; only heads can be kept, one per party, since what lies below all parties share",
    ),
    "init_lora_weights": _understood(
        True, _one_of(True, False, *PLAIN_STARTS), f"true, false or one of {', '.join(PLAIN_STARTS)}", CONVERT
    ),
    "bias": _off("none", why="other biases than the base model's belong to the change", fix="train with bias = 'none'"),
    "peft_version": _irrelevant(None, lambda value: _text(value) and len(value or "") <= 64, "a version", "who wrote"),
    "auto_mapping": _irrelevant(None, *OBJECT, "names the class that the base model was opened in"),
    "inference_mode": _irrelevant(False, *BOTH, "says whether loading freezes the adapter"),
    "exclude_modules": _irrelevant(None, *TEXTS, WHERE),
    "layers_to_transform": _irrelevant(None, _layers, "an index, indices or null", WHERE),
    "layers_pattern": _irrelevant(None, *TEXTS, WHERE),
    "lora_dropout": _irrelevant(0.0, lambda value: is_number(value) and 0 <= value <= 1, "in [0, 1]", TRAINING),
    "megatron_core": _irrelevant("megatron.core", *TEXT, "is read where megatron_config is set, which is refused"),
    "loftq_config": _irrelevant({}, *OBJECT, START),
    "eva_config": _irrelevant(None, *OBJECT, START),
    "corda_config": _irrelevant(None, *OBJECT, START),
    "lora_ga_config": _irrelevant(None, *OBJECT, START),
    "velora_config": _irrelevant(None, *OBJECT, "changes gradients, and not what B A is"),
    "runtime_config": _irrelevant(None, *OBJECT, "says where a library computes"),
    "qalora_group_size": _irrelevant(
        16, is_rank, "an integer of at least 1", "is read with use_qalora, which is refused"
    ),
    "lora_dtype": _irrelevant(None, *TEXT, f"of ms-swift: {TRAINING}"),
    "lorap_lr_ratio": _irrelevant(
        None, lambda v: v is None or is_number(v), "a number or null", f"ms-swift: {TRAINING}"
    ),
    "lorap_emb_lr": _irrelevant(1e-6, lambda v: v is None or is_number(v), "a number or null", f"ms-swift: {TRAINING}"),
    "merge_weights": _irrelevant(
        False, _one_of(None, False, True), "true, false or null", "of PEFT 0.2: when to add B A"
    ),
    "enable_lora": _off(None, why="of PEFT 0.2: B A acts on parts of a fused layer"),
    "megatron_config": _off(None, why="the layers are Megatron's, split over devices"),
    "use_dora": _understood(False, *BOTH),
    "lora_bias": _off(False, why="B has a bias, which changes outputs beside the weight"),
    "use_qalora": _off(False, why="inputs are pooled before A"),
    "use_bdlora": _off(None, False, why="A or B is block-diagonal and stored in another shape"),
    "alora_invocation_tokens": _off(
        None, why="the adapter acts on some tokens only, which no one change of weights does"
    ),
    "arrow_config": _off(None, why="several adapters are routed per token, which no one change of weights does"),
    "kasa_config": _off(None, why="the base model's weights are cut and a diagonal stands between B and A"),
    "monteclora_config": _off(None, why="B A is sampled anew in every pass"),
    "trainable_token_indices": _off(None, why="rows of the embedding are replaced, of other tokens at every party"),
    "target_parameters": _off(
        None,
        [],
        why="B A changes fused parameters of experts, whose number the adapter does not say",
        fix="train on target_modules, or merge such parameters in full with PEFT's merge_and_unload",
    ),
    "layer_replication": _off(None, why="layers of the base model are repeated"),
    "ensure_weight_tying": _off(False, why="one B A stands for two layers that share a weight"),
}


def check_settings(config: Mapping[str, Any], party: str) -> None:
    """Refuse an adapter of which a setting is unknown, of another kind, or means more than W + scaling · B A.

    Args:
        config: PEFT's configuration.
        party: Named in every refusal.

    Raises:
        DpmergeError: DPM-402, naming party and setting.
    """
    if "peft_type" not in config:
        raise DpmergeError("DPM-402", f"{party}: {CONFIG} has no peft_type", SAVE_AGAIN)
    for key, value in config.items():
        where = f"{party}: {shown(key, quoted=False)} = {shown(value)}"
        setting = SETTINGS.get(key)
        if setting is None:
            fix = f"remove it from {CONFIG} if it does not change what B A is, or train without it"
            raise DpmergeError("DPM-402", f"{where} is no setting of LoRA that dpmerge knows", fix)
        if not setting.allowed(value):
            raise _refused(key, value, where, setting)


def _refused(key: str, value: object, where: str, setting: Setting) -> DpmergeError:
    if key == "init_lora_weights" and type(value) is str:
        changed = f"{where} takes B A out of the base model's weights before training, so that B A is not the change"
        if value.lower().startswith(CONVERTIBLE_STARTS):
            return DpmergeError("DPM-402", changed, CONVERT)
        if value == "loftq":
            return DpmergeError("DPM-402", changed, "train with init_lora_weights = true: PEFT cannot convert LoftQ")
    if setting.use == "off":
        return DpmergeError("DPM-402", f"{where} cannot be merged: {setting.why}", setting.fix)
    return DpmergeError("DPM-402", f"{where} is not {setting.words}", setting.fix)


def stated(config: Mapping[str, Any], key: str) -> Any:
    """Return a setting, or what PEFT takes where it is absent.

    Args:
        config: adapter_config.json.
        key: A setting's name.

    >>> stated({}, "lora_alpha"), stated({"r": 4}, "r")
    (8, 4)
    """
    return config.get(key, SETTINGS[key].default)


def differing(config: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return the settings in which one configuration is not another, by value and by JSON kind, in order of names.

    A key that only one of them has counts as PEFT's default there, so that parties may run other versions of PEFT; one
    that the table lacks always differs. The version itself is not compared, and the order of target modules is not.

    Args:
        config: A release's adapter_config.json.
        wanted: The federation's.

    >>> differing({"r": 2.0, "lora_alpha": 8, "cls": 0}, {"r": 2, "lora_dropout": 0.0})
    ['cls', 'r']
    """
    found = []
    for key in sorted({*config, *wanted} - {"peft_version"}):
        known = key in SETTINGS
        if not known or _canonical(key, stated(config, key)) != _canonical(key, stated(wanted, key)):
            found.append(key)
    return found


def _canonical(key: str, value: Any) -> str:
    if key in ("target_modules", "exclude_modules") and isinstance(value, list | tuple | set | frozenset):
        value = sorted(map(str, value)) if all(type(item) is str for item in value) else list(value)
    return json.dumps(value, sort_keys=True, default=repr)  # 2.0 is not 2 and true is not 1


def shown(value: object, *, quoted: bool = True) -> str:
    r"""Return what somebody else wrote as printable ASCII of bounded length.

    Args:
        value: Any JSON value.
        quoted: Whether a text keeps its quotes.

    >>> len(shown("a" * 200)), shown("pi\x1b[2J", quoted=False)
    (80, 'pi\\x1b[2J')
    """
    text = ascii(value) if quoted or not isinstance(value, str) else ascii(value)[1:-1]
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 4]}...{text[-1]}"


def factor_of(rank: float, alpha: float, *, root: bool) -> float:
    """Return what B A is multiplied by: alpha/rank, or alpha/√rank with rsLoRA.

    Args:
        rank: r, at least 1.
        alpha: lora_alpha.
        root: Whether rsLoRA divides by √r in place of r.

    >>> factor_of(4, 8, root=False), factor_of(4, 8, root=True)
    (2.0, 4.0)
    """
    return alpha / math.sqrt(rank) if root else alpha / rank
