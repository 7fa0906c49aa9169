"""Which base model adapters are of: by hub id in full, by weights on this machine, or as `--base` says."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import BertConfig, BertForMaskedLM, BertModel

from dpmerge.server.merging.adapters.bases import base_id, difference, same_name
from dpmerge.server.merging.gate.gate import Gate, inspect_adapters

QUERY = "encoder.layer.0.attention.self.query"


def adapter(folder: Path, base: str, name: str = QUERY, width: int = 4) -> tuple[None, Path]:
    folder.mkdir()
    tensors = {
        f"base_model.model.{name}.lora_A.weight": torch.ones(1, width),
        f"base_model.model.{name}.lora_B.weight": torch.ones(4, 1),
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 2, "base_model_name_or_path": base}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return None, folder


def gate_of(tmp_path: Path, *bases: str, base: str = "") -> Gate:
    return inspect_adapters([adapter(tmp_path / f"p{i}", name) for i, name in enumerate(bases)], strict=True, base=base)


def tiny(folder: Path, seed: int = 0, kind: type = BertModel) -> Path:
    torch.manual_seed(seed)
    config = BertConfig(vocab_size=8, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4)
    kind(config).save_pretrained(folder)
    return folder


def test_two_organisations_are_two_models(tmp_path: Path) -> None:
    (refusal,) = gate_of(tmp_path, "alice/chat-model", "alice/chat-model", "bob/chat-model").refusals
    assert str(refusal).startswith("DPM-402: p2: base model bob/chat-model but alice/chat-model at p0, p1; ")
    assert "--base" in refusal.fix


def test_a_snapshot_in_the_hubs_cache_is_the_model_of_that_id(tmp_path: Path) -> None:
    snapshot = "/home/x/.cache/huggingface/hub/models--alice--chat-model/snapshots/0a1b2c/"
    gate = gate_of(tmp_path, snapshot, "alice/chat-model", "Alice/chat-model", "/data/chat-model")
    assert gate.refusals == ()
    assert base_id(snapshot.replace("/", "\\")) == "alice/chat-model"


def test_what_the_user_says_decides_and_is_said(tmp_path: Path) -> None:
    gate = gate_of(tmp_path, "alice/chat-model", "bob/chat-model", base="alice/chat-model")
    assert gate.refusals == ()
    assert gate.warnings == ("p1: merged as an adapter of alice/chat-model, as --base says, and not of bob/chat-model",)
    assert {adapter.base for adapter in gate.adapters} == {"alice/chat-model"}


@pytest.mark.parametrize(
    ("name", "original", "how"),
    [
        ("unsloth/llama-3-8b-bnb-4bit", "meta-llama/llama-3-8b", "4bit"),
        ("unsloth/llama-3-8b-unsloth-bnb-4bit", "meta-llama/Llama-3-8B", "4bit"),
        ("TheBloke/chat-7B-AWQ", "alice/chat-7B", "awq"),
        ("TheBloke/chat-7B-GPTQ", "alice/chat-7B", "gptq"),
    ],
)
def test_a_quantised_copy_is_told(tmp_path: Path, name: str, original: str, how: str) -> None:
    (refusal,) = gate_of(tmp_path, original, original, name).refusals
    assert f"{name} is a {how} copy of {original}, whose weights it rounds" in str(refusal)
    assert not difference("alice/chat", "bob/chat")
    assert not same_name(name, original)


def test_copies_on_this_machine_are_one_by_their_weights(tmp_path: Path) -> None:
    one, two, other = (tiny(tmp_path / name, seed) for name, seed in (("one", 0), ("two", 0), ("other", 1)))
    assert gate_of(tmp_path, str(one), str(two)).refusals == ()
    (refusal,) = inspect_adapters(
        [(None, tmp_path / "p0"), (None, tmp_path / "p1"), adapter(tmp_path / "p3", str(other))], strict=True
    ).refusals
    assert str(refusal).startswith("DPM-402: p3: base model other but one at p0, p1; ")


def test_an_adapter_of_which_the_base_has_no_module_is_refused(tmp_path: Path) -> None:
    base = tiny(tmp_path / "tiny", kind=BertForMaskedLM)
    good, headed, bad = (
        adapter(tmp_path / party, str(base), name)
        for party, name in (("a", QUERY), ("b", f"bert.{QUERY}"), ("c", "model.layers.0.q_proj"))
    )
    assert inspect_adapters([good], strict=True).refusals == ()
    assert inspect_adapters([headed], strict=True).refusals == ()
    (refusal,) = inspect_adapters([bad], strict=True).refusals
    assert str(refusal).startswith("DPM-402: c: the base model has none of its modules, such as model.layers.0.q_proj")
    (refusal,) = inspect_adapters([adapter(tmp_path / "d", str(base), QUERY, width=6)], strict=True).refusals
    assert f"d: {QUERY} is (4, 6) but (4, 4) in the base model" in str(refusal)


def test_a_copy_that_is_not_the_bases_is_refused_where_the_base_is_at_hand(tmp_path: Path) -> None:
    base = tiny(tmp_path / "tiny")
    name, folder = adapter(tmp_path / "shop", str(base))
    weight = BertModel.from_pretrained(base).get_submodule(QUERY).weight.detach()
    for copy, count in ((weight, 0), (weight + 1, 1)):
        file = folder / "adapter_model.safetensors"
        pair = {
            f"base_model.model.{QUERY}.lora_A.weight": torch.ones(1, 4),
            f"base_model.model.{QUERY}.lora_B.weight": torch.ones(4, 1),
        }
        save_file(pair | {f"base_model.model.{QUERY}.base_layer.weight": copy.contiguous()}, file)
        assert len(inspect_adapters([(name, folder)], strict=True).refusals) == count
