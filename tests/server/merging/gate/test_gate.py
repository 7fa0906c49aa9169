"""The merge gate, the model card, and the weights of a materialised model, each on its own."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import save_file
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2Model

from dpmerge.common.errors import DpmergeError
from dpmerge.common.privacy.accounting import cross_check
from dpmerge.common.privacy.mechanism import Mechanism
from dpmerge.common.release.format import MERGE, release_from_files, to_files
from dpmerge.common.statement.statement import build_statement
from dpmerge.server.evaluation.coefficient import first_layer, grid, max_length
from dpmerge.server.merging.adapters import lazy_tensors
from dpmerge.server.merging.adapters.deltas import LowRankDelta, read_adapter
from dpmerge.server.merging.card import merge_card
from dpmerge.server.merging.gate.compatibility import MAX_NAMED
from dpmerge.server.merging.gate.gate import _entry, inspect_adapters
from dpmerge.server.merging.materialize import add_change
from dpmerge.server.merging.merge import Merged, as_release, merge
from dpmerge.server.merging.spec.spec import spec_of


def plain(folder, *, base="tiny", modules=("layer.0.query",), width=4, value=1.0, dtype=torch.float32, **config):
    """Write an adapter of rank 1 by hand, and return what the gate takes."""
    folder.mkdir()
    tensors = {}
    for name in modules:
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.full((1, width), value, dtype=dtype)
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.full((4, 1), value, dtype=dtype)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 2, "base_model_name_or_path": base} | config
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return None, folder


def refusals(*inputs, strict=True):
    return [str(refusal) for refusal in inspect_adapters(inputs, strict=strict).refusals]


def test_what_most_parties_share_counts_as_right_whoever_comes_first(tmp_path):
    odd = plain(tmp_path / "odd", base="other", width=6, modules=("layer.0.query", "layer.0.key"))
    others = [plain(tmp_path / name) for name in ("shop", "library")]
    lines = refusals(odd, *others, strict=False)
    assert len(lines) == 2
    assert lines[0].startswith("DPM-402: odd: base model other but tiny at shop, library; ")
    assert lines[1].startswith("DPM-402: odd: layer.0.query is (4, 6) but (4, 4) at shop, library; ")
    lines = refusals(odd, *others)
    assert [line[9:].partition(":")[0] for line in lines] == ["odd", "odd", "shop", "library"]
    assert all("does not adapt layer.0.key" in line for line in lines[2:])


def test_a_merge_from_python_is_refused_in_the_words_of_the_gate(tmp_path):
    gate = inspect_adapters(
        [plain(tmp_path / "odd", base="other", width=6, modules=("layer.0.key",)), plain(tmp_path / "shop")],
        strict=True,
    )
    with pytest.raises(DpmergeError) as caught:
        merge(gate.adapters, spec_of("average"))
    assert len(gate.refusals) == 3
    assert caught.value.problem == "; ".join(refusal.problem for refusal in gate.refusals)
    with pytest.raises(DpmergeError) as caught:
        merge(gate.adapters, spec_of("average", strict=False))
    assert str(caught.value) == str(gate.refusals[0])  # one alone keeps its remedy


def test_the_gate_reads_every_byte_once(tmp_path, monkeypatch):
    folders = [plain(tmp_path / name, modules=("layer.0.query", "layer.0.key")) for name in ("shop", "library")]
    count, following = 0, lazy_tensors._next

    def counting(*arguments):
        nonlocal count
        tensor = following(*arguments)
        count += tensor.nbytes
        return tensor

    monkeypatch.setattr(lazy_tensors, "_next", counting)
    assert not inspect_adapters(folders, strict=True).refusals
    assert count == 2 * 2 * (4 + 4) * 4  # adapters, modules, numbers of A and B, bytes of one


def test_a_path_and_a_hub_id_of_one_model_agree(tmp_path):
    assert not refusals(plain(tmp_path / "a", base="org/tiny"), plain(tmp_path / "b", base="/models/tiny/"))
    assert len(refusals(plain(tmp_path / "c", base="org/tiny"), plain(tmp_path / "d", base="tiny-2"))) == 1


def test_it_shows_what_is_stored_and_who_shares_an_a(tmp_path):
    gate = inspect_adapters(
        [plain(tmp_path / "a"), plain(tmp_path / "b", dtype=torch.bfloat16, lora_alpha=3, use_rslora=True),
         plain(tmp_path / "c", value=2.0)], strict=True
    )  # fmt: skip
    a, b, c = gate.entries
    assert (a.dtypes, b.dtypes) == (("F32",), ("BF16",))
    assert (a.scalings, b.scalings) == ((2.0,), (3.0,))
    assert a.a_sha256 == b.a_sha256 != c.a_sha256
    assert (a.claim, a.base_sha256, a.to_dict()["targets"]) == ("no statement", None, ["layer.0.query"])


def test_many_modules_are_counted_and_not_all_listed(tmp_path):
    names = tuple(f"layer.{index}.query" for index in range(MAX_NAMED + 5))
    (line,) = refusals(plain(tmp_path / "all", modules=names), plain(tmp_path / "one", modules=names[:1]))
    assert "and 4 more, which others do" in line


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_name_party_file_and_tensor(tmp_path, value):
    lines = refusals(plain(tmp_path / "good"), plain(tmp_path / "bad", value=value))
    assert lines
    assert all("bad: adapter_model.safetensors: " in line and "layer.0.query" in line for line in lines)


def merged_release(tmp_path, *names, **config):
    gate = inspect_adapters([plain(tmp_path / name, **config) for name in names], strict=True)
    assert not gate.refusals
    return as_release(merge(gate.adapters, spec_of("average")), gate.adapters), gate


def test_names_in_a_card_are_names_and_no_markup(tmp_path):
    release, gate = merged_release(tmp_path, "<script>alert(1)<", "a|b*c", base="ti: [ny]\n# x")
    text = merge_card(release, gate.entries, materialized=False, pictured=False)
    assert r"\<script\>" in text
    assert "<script>" not in text
    assert r"a\|b\*c" in text
    assert ModelCard(text).data.base_model == "ti: [ny]\n# x"
    assert "came without a privacy statement: nothing is claimed" in text


def test_a_card_claims_nothing_that_the_statement_does_not(tmp_path):
    release, gate = merged_release(tmp_path, "shop", "library")
    said = {"party": "shop", "epsilon": 1.00001, "private": True}
    entry = replace(gate.entries[0], statement=said, private=True, epsilon=1.00001, target_delta=1e-5, unit="record")
    text = merge_card(release, [entry, gate.entries[1]], materialized=False, pictured=False)
    assert "shop came with an incomplete privacy statement: nothing is claimed" in text
    assert "| shop | 1 | 1.001 | 1e-05 | record |" in text  # never rounded down
    silent = replace(entry, private=False)
    assert "not private" in merge_card(release, [silent, gate.entries[1]], materialized=False, pictured=False)


@pytest.mark.parametrize("change", [{"epsilon": "1"}, {"epsilon": -1}, {"target_delta": None}])
def test_a_card_claims_nothing_for_a_statement_whose_claim_is_no_number(tmp_path, change):
    """The gate takes such a number for not stated; `merge` does not verify statements, so the card must not trip."""
    mechanism = Mechanism(
        noise_multiplier=2.0, l2_clip_norm=1.0, population=2800, expected_batch_size=128, num_steps=3,
        target_delta=1e-5, num_coordinates=64,
    )  # fmt: skip
    words = {"task": "films", "labels": ("bad", "good"), "base_sha256": "0" * 64, "tuning_disclosure": "none"}
    statement = build_statement(mechanism, cross_check(mechanism), party="shop", training={}, **words) | change
    entry = _entry(replace(read_adapter(plain(tmp_path / "shop")[1]), statement=statement), tmp_path / "shop")
    release, _ = merged_release(tmp_path, "library")
    release = replace(release, merge=release.merge | {"inputs": [{"party": "shop", "weight": 1.0}]})
    text = merge_card(release, [entry], materialized=False, pictured=False)
    assert "shop came with an incomplete privacy statement: nothing is claimed" in text


def test_the_card_stays_out_of_the_hash_and_the_record_in_it(tmp_path):
    release, gate = merged_release(tmp_path, "shop", "library")
    card = merge_card(release, gate.entries, materialized=False, pictured=True)
    files = to_files(release) | {"README.md": card.encode(), "explain.svg": b"<svg/>"}
    assert release_from_files(files).merge == json.loads(files[MERGE])
    assert "](explain.svg)" in card


def ones(out, width):
    return torch.ones(1, width), torch.arange(1.0, out + 1)[:, None]


def test_a_change_is_added_the_way_round_that_the_module_stores_it():
    model = GPT2Model(GPT2Config(vocab_size=8, n_positions=4, n_embd=4, n_layer=1, n_head=1))
    name = "h.0.attn.c_attn"  # a Conv1D: stores [in, out]
    before = model.get_submodule(name).weight.clone()
    add_change(model, Merged({name: LowRankDelta(*ones(12, 4))}, {}))
    added = model.get_submodule(name).weight - before
    torch.testing.assert_close(added, torch.arange(1.0, 13).expand(4, 12))


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("bert.encoder.layer.0.attention.self.gone", (4, 4), "has no module"),
        ("bert.encoder.layer.0.attention.self.key", (4, 6), "is (4, 4) in the base model, but its change is (4, 6)"),
        ("bert.embeddings.word_embeddings", (8, 4), "is of class Embedding"),
        ("cls.predictions.decoder", (8, 4), "shares its weight"),
    ],
)
def test_a_change_that_does_not_fit_leaves_every_weight_alone(name, shape, words):
    config = BertConfig(
        vocab_size=8, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = BertForMaskedLM(config)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    fits = "encoder.layer.0.attention.self.query"  # named as in the body
    with pytest.raises(DpmergeError) as caught:
        add_change(model, Merged({fits: LowRankDelta(*ones(4, 4)), name: LowRankDelta(*ones(*shape))}, {}))
    assert caught.value.code == "DPM-402"
    assert words in str(caught.value)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_sum_that_the_base_cannot_hold_in_its_precision_is_refused():
    config = BertConfig(vocab_size=8, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4)
    query = "encoder.layer.0.attention.self.query"
    change = Merged({query: LowRankDelta(*ones(4, 4), scaling=1e6)}, {})
    add_change(BertForMaskedLM(config), change)
    with pytest.raises(DpmergeError, match=r"DPM-103: .*query with the merged change is too large .*float16"):
        add_change(BertForMaskedLM(config).half(), change)


def test_coefficients_begin_at_the_average_and_end_at_the_sum():
    assert grid(5)[0] == 0.2
    assert all(sorted(grid(t)) == list(grid(t)) and grid(t)[-1] == 1.0 for t in (1, 2, 8))


def test_evaluation_is_cut_below_the_lowest_layer_that_any_adapter_changes():
    base = SimpleNamespace(layers="encoder.layer")
    low, high = (SimpleNamespace(modules={f"encoder.layer.{index}.x": None}, statement={}) for index in (3, 10))
    outside = SimpleNamespace(modules={"pooler.dense": None}, statement={"training": {"max_length": 64}})
    assert first_layer(base, [high, low]) == 3
    assert first_layer(base, [high, outside]) == 0
    assert (max_length([low, outside]), max_length([low])) == (64, 32)
