"""Somebody else's adapter: its patterns match as in PEFT or are refused, and nothing of it runs or is read for ever."""

import json
import os
import re
import socket
from pathlib import Path
from random import Random

import pytest
import torch
from peft.utils.other import get_pattern_key
from safetensors.torch import save_file

from dpmerge.common.errors import DpmergeError
from dpmerge.server.merging.adapters.deltas import read_adapter
from dpmerge.server.merging.adapters.names import MAX_NAME
from dpmerge.server.merging.adapters.patterns import PatternRefused, check, matches
from dpmerge.server.merging.gate.gate import inspect_adapters

NAMES = [
    *(f"model.layers.{layer}.self_attn.{target}" for layer in (0, 1, 10) for target in ("q_proj", "k_proj")),
    "model.layers.1.mlp.up_proj",
    "layersX1",
    "q_proj",
    "aaab",
    "x.aaab",
    "b",
]
TAKEN = [
    "q_proj", "proj", "1.self_attn.q_proj", "model.layers.0.self_attn.q_proj", "^model.layers.0.self_attn.q_proj",
    r"layers\.1\.mlp\.up_proj", "layers.1", r"layers.\d+.self_attn.[qk]_proj", r".*\.(0|10)\..*", "(q|k)_proj|up_proj",
    "(?:q|k)?_proj", "[^.]+", "a*b", "a+?b", "a??aab", "a|b", r"\w*_proj", "self_attn.*", r"\D+proj", "(a|aa)b",
    "^q_proj$", "(a+)+b", "(a|b)*", "((a))", "a{2}b?", r"model\.(layers\.(0|1)\.)?.*[qk]_proj", r"\bq_proj\b", "a)|(b",
    "(" * 90 + "b" + ")" * 90, r".*(?:layers\.\d{1,2}\.(?:self_attn|mlp))\.(?:q|up)_proj", r"[\w.]+\.up_proj",
]  # fmt: skip
REFUSED = [
    "(", "(?=a)", "(?<!a)b", "(?i)a", "(?P<n>a)", r"(a)\1", "a*+b", "a**", "^*", r"\Z", "[z-a]", "", "[[a]", "a(?#)",
    "a{,2}", "[[:alpha:]]", "[a[:alpha:]]", r"\pL", r"\Qa\E", "()()()()()()()()()()" r"\10", "a{99999999999}",
    "(?:a{1000}){1000}", "a" * 1100, "[" + "a-" * 100, "(" + "a|" * 100, "(" * 200, ".{999}" * 150,
]  # fmt: skip


@pytest.mark.parametrize("pattern", TAKEN)
def test_what_is_taken_matches_as_in_peft(pattern: str) -> None:
    check([pattern], NAMES)
    assert [name for name in NAMES if matches(pattern, name)] == [
        name for name in NAMES if get_pattern_key([pattern, "none"], name) == pattern
    ]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("pattern", REFUSED)
def test_other_forms_are_refused_by_name(pattern: str) -> None:
    with pytest.raises(PatternRefused):
        check([pattern], NAMES)


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("pattern", "fits"),
    [
        ("a*" * 8 + "b", ["b"]),
        ("(a|a)" * 30 + "b", []),
        ("a?" * 60 + "a" * 60, ["a" * 100]),
        (".*.*.*.*x", []),
        ("a+a+a+a+a+|b", ["a" * MAX_NAME, "a" * 100, "b"]),
        ("(a+)+b", []),
        ("(a|aa)*c", []),
    ],
)
def test_what_python_would_try_for_ever_is_answered_at_once(pattern: str, fits: list[str]) -> None:
    names = ["a" * MAX_NAME, "a" * 100, ".".join("a" * 100), "b"]
    check([pattern], names)
    assert [name for name in names if matches(pattern, name)] == fits


PIECES = [
    *"aab.\\()[]{}*+?|^$-:,1d#é", r"\d", r"\w", r"\b", r"\B", r"\D", r"\W", r"\.", r"\-", r"\A", r"\x61", r"\01",
    r"\101", "(?:", "(a|b)", "{2}", "{1,2}", "{2,}", "*?", "+?", "??", "[^", "[a-b]", "[a", "]", "&&", "||", "[]", "[:",
]  # fmt: skip
SHORT = ["a", "ab", "aab", "x.ab", "b.b", "b", "a-b", "a:b", "a{,3}", "1", "a1.b", "b.0.a_1", "{", "a^b", "a]b", "d"]


@pytest.mark.parametrize("names", [SHORT, ["é", "aé.b", "é.a", *SHORT]], ids=["ascii", "beyond"])
@pytest.mark.filterwarnings("ignore:Possible:FutureWarning")
def test_whatever_is_taken_means_to_both_engines_the_same(names: list[str]) -> None:
    random, taken = Random(0), 0
    for _ in range(5000):
        pattern = "".join(random.choices(PIECES, k=random.randint(1, 8)))
        try:
            check([pattern], names)
        except PatternRefused:
            continue
        taken += 1
        ours = {name for name in names if matches(pattern, name)}
        theirs = {name for name in names if re.match(rf"(.*\.)?({pattern})$", name)}  # as in get_pattern_key
        assert ours == theirs, pattern
    assert taken > 500


def test_classes_are_refused_among_names_that_only_python_knows_the_letters_of() -> None:
    assert matches("[^.]+_proj", "é.ü_proj")
    for call in (lambda: matches(r"\w+_proj", "ü_proj"), lambda: check([r"\w+_proj"], ["ü_proj"])):
        with pytest.raises(PatternRefused, match=r"'\\\\w', which is not taken among names beyond ASCII"):
            call()


@pytest.mark.timeout(60)
def test_many_patterns_are_counted_before_they_are_matched() -> None:
    names = [f"model.layers.{index}.mlp.experts.{index}.up_proj" for index in range(2000)]
    check(names[:600], names[:600])  # every module named in full
    with pytest.raises(PatternRefused, match="too many ways"):
        check([f".*{index}.*_proj" for index in range(2000)], names)
    with pytest.raises(PatternRefused, match="too many ways"):
        check(["(.?){300}b"], ["a" * MAX_NAME] * 2000)
    with pytest.raises(PatternRefused, match="300000 patterns"):
        check([str(index) for index in range(300_000)], ["q"])


def adapter(folder: Path, **config: object) -> Path:
    folder.mkdir()
    tensors = {"base_model.model.aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaac.lora_A.weight": torch.ones(1, 3)}
    tensors |= {key.replace("_A", "_B"): torch.ones(3, 1) for key in tensors}
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 2, "base_model_name_or_path": "tiny"} | config
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.timeout(30)
@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
def test_a_hostile_pattern_is_refused_at_the_gate_with_party_and_file(tmp_path: Path, key: str) -> None:
    folder = adapter(tmp_path / "shop", **{key: {"(?=a+)b": 1}})
    (refusal,) = inspect_adapters([(None, folder)], strict=True).refusals
    assert str(refusal).startswith(
        rf"DPM-402: shop: {key} of adapter_config.json: '(?=a+)b' has '(?', which is none of"
    )


@pytest.mark.timeout(30)
@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
def test_a_pattern_that_python_would_try_for_ever_is_read(tmp_path: Path, key: str) -> None:
    gate = inspect_adapters([(None, adapter(tmp_path / "shop", **{key: {"(a+)+b": 7}}))], strict=True)
    assert gate.refusals == ()


def pipe(path: Path) -> None:
    os.mkfifo(path)


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(path.name)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.timeout(30)
@pytest.mark.parametrize("make", [pipe, listening, device, Path.mkdir])
@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_what_is_no_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, make: object) -> None:
    folder = adapter(tmp_path / "shop")
    (folder / name).unlink()
    monkeypatch.chdir(folder)  # a socket's path is short
    make(folder / name)  # type: ignore[operator]
    (refusal,) = inspect_adapters([(None, folder)], strict=True).refusals
    assert str(refusal).startswith(f"DPM-402: shop: {name} is no regular file; ")


def test_a_link_to_a_file_is_read(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "shop")
    (folder / "adapter_config.json").rename(tmp_path / "blob")
    (folder / "adapter_config.json").symlink_to(tmp_path / "blob")
    assert read_adapter(folder).party == "shop"


def test_a_long_configuration_is_refused_by_its_size(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "shop")
    os.truncate(folder / "adapter_config.json", 1 << 40)  # sparse
    with pytest.raises(DpmergeError, match=r"shop: adapter_config.json: 1099511627776 bytes \[size\]"):
        read_adapter(folder)
