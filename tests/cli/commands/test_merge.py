"""`dpmerge merge`: what it writes, what it says, and that whatever is refused leaves nothing behind."""

import copy
import csv
import importlib
import json
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    BertTokenizerFast,
)

from dpmerge.cli import main as cli
from dpmerge.common.config.federation import parse_federation
from dpmerge.common.encoder.base_model import load_base
from dpmerge.common.errors import DpmergeError
from dpmerge.common.privacy.accounting import cross_check
from dpmerge.common.privacy.mechanism import Mechanism
from dpmerge.common.release import format as release_module
from dpmerge.common.release.format import Head, Release, read_release, write_release
from dpmerge.common.statement.statement import build_statement
from dpmerge.server.evaluation import coefficient
from dpmerge.server.evaluation.evaluate import Accuracy, TaskScores
from dpmerge.server.merging.adapters.deltas import read_adapter
from dpmerge.server.merging.card import OVERLAP, POST_PROCESSING
from dpmerge.server.merging.party_heads import load_head
from dpmerge.server.merging.registry import METHODS
from dpmerge.server.merging.spec.federation import checked, merge_lines, merge_schema

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

EXAMPLE = Path(__file__).parents[3] / "examples" / "five-organisations.toml"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "fine", "awful", "film"]
TARGETS = ["query", "value"]


@pytest.fixture
def dpmerge(dpmerge, capsys):
    """Run `dpmerge merge` in this process: arguments → (exit code, stdout, stderr)."""

    def call(*arguments):
        capsys.readouterr()  # of what made the adapters
        return dpmerge("merge", *arguments)

    return call


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny encoder with a tokenizer, as a folder."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12
    )
    BertModel(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


@lru_cache
def base_sha256(folder):
    return load_base(str(folder)).sha256


def adapter(folder, base, seed, *, targets=TARGETS, dtype=torch.float32, **config):
    """Save a PEFT adapter of the tiny model."""
    model = AutoModel.from_pretrained(base)
    model = get_peft_model(model, LoraConfig(**{"r": 2, "lora_alpha": 6, "target_modules": targets, **config}))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.3, generator=generator)
    model.save_pretrained(folder)
    change_config(folder, base_model_name_or_path=str(base))
    if dtype != torch.float32:
        change_tensors(folder, lambda tensors: {key: value.to(dtype) for key, value in tensors.items()})
    return folder


@lru_cache
def _statement_json():
    mechanism = Mechanism(
        noise_multiplier=2.0, l2_clip_norm=1.0, population=2800, expected_batch_size=128, num_steps=3,
        target_delta=1e-5, num_coordinates=64,
    )  # fmt: skip
    training = {"training": {"learning_rate": 0.01, "num_steps": 3}, "seed": 7, "max_length": 8}
    words = {"task": "films", "labels": ("bad", "good"), "base_sha256": "0" * 64, "tuning_disclosure": "none"}
    return json.dumps(build_statement(mechanism, cross_check(mechanism), party="shop", training=training, **words))


def release(folder, base, seed, **changes):
    """Write a release of the party that the folder is named after; `changes` go into its statement."""
    plain = read_adapter(adapter(folder.with_name(f"{folder.name}-plain"), base, seed))
    tensors = load_file(Path(folder.with_name(f"{folder.name}-plain")) / "adapter_model.safetensors")
    party = folder.name
    statement = json.loads(_statement_json()) | {"party": party, "base_sha256": base_sha256(base)} | changes
    head = Head("linear", ("bad", "good"), torch.randn(2, 8, generator=torch.Generator().manual_seed(seed)))
    config = plain.config | {"base_model_name_or_path": base.name}
    write_release(folder, Release(party, tensors, config, {party: head}, statement))
    return folder


def change_config(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder, change):
    path = folder / "adapter_model.safetensors"
    save_file(change(load_file(path)), path)


def poison(tensors):
    next(iter(tensors.values()))[0, 0] = float("nan")
    return tensors


@pytest.fixture
def pair(tmp_path, base):
    return adapter(tmp_path / "shop", base, 1), adapter(tmp_path / "library", base, 2, r=3)


def features(model):
    return model(input_ids=torch.tensor([[2, 5, 9, 3]])).last_hidden_state


def test_peft_opens_the_mean_of_two_plain_adapters(dpmerge, base, pair, tmp_path):
    code, out, err = dpmerge(
        *pair, "--out", tmp_path / "merged", "--weights", "shop=3,library=1", "--method", "average"
    )
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == str(tmp_path / "merged")
    assert "library" in out
    assert "F32" in out
    loaded = PeftModel.from_pretrained(AutoModel.from_pretrained(base), tmp_path / "merged").eval()
    expected = AutoModel.from_pretrained(base).eval()
    for weight, folder in zip((0.75, 0.25), pair, strict=True):
        for name, item in read_adapter(folder).modules.items():
            expected.get_submodule(name).weight.data += weight * item.delta()
    torch.testing.assert_close(features(loaded), features(expected), rtol=1e-4, atol=1e-5)


def test_materialize_writes_the_full_model_of_the_base_class_without_pickle(dpmerge, base, pair, tmp_path):
    assert dpmerge(*pair, "--out", tmp_path / "adapter")[0] == 0
    assert dpmerge(*pair, "--out", tmp_path / "full", "--materialize")[0] == 0
    merged = AutoModel.from_pretrained(tmp_path / "full").eval()
    loaded = PeftModel.from_pretrained(AutoModel.from_pretrained(base), tmp_path / "adapter").eval()
    assert type(merged) is BertModel
    torch.testing.assert_close(features(merged), features(loaded), rtol=1e-4, atol=1e-5)
    names = {path.name for path in (tmp_path / "full").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "merge.json", "README.md"} <= names
    assert not {name for name in names if name.endswith((".bin", ".pt"))}


def test_materialize_keeps_head_and_precision_of_a_base_with_more_than_its_body(dpmerge, base, pair, tmp_path):
    torch.manual_seed(1)
    whole = BertForMaskedLM(AutoModel.from_pretrained(base).config).to(torch.bfloat16)
    whole.save_pretrained(tmp_path / "whole")
    options = ("--materialize", "--base", tmp_path / "whole", "--method", "average")
    assert dpmerge(*pair, "--out", tmp_path / "full", *options)[0] == 0
    name = "bert.encoder.layer.0.attention.self.query.weight"
    before, after = whole.state_dict(), load_file(tmp_path / "full" / "model.safetensors")
    deltas = [read_adapter(folder).modules[name[5:-7]].delta() for folder in pair]
    assert torch.equal(after[name], (before[name].float() + sum(deltas) / 2).bfloat16())
    assert torch.equal(
        after["cls.predictions.transform.dense.weight"], before["cls.predictions.transform.dense.weight"]
    )


@pytest.fixture(scope="module")
def releases(tmp_path_factory, base):
    folder = tmp_path_factory.mktemp("releases")
    return release(folder / "shop", base, 1), release(folder / "library", base, 2)


def test_the_card_says_what_went_in_and_what_privacy_is_claimed(dpmerge, releases, tmp_path):
    out = tmp_path / "merged"
    assert dpmerge(*releases, "--out", out, "--explain")[0] == 0
    card = ModelCard.load(out / "README.md")
    assert (card.data.library_name, card.data.base_model) == ("peft", "tiny")
    assert {"lora", "differential-privacy"} <= set(card.data.tags)
    record = json.loads((out / "merge.json").read_text())
    for entry in record["inputs"]:
        assert entry["sha256"] in card.text
    assert "| shop | 1 | 0.227 | 1e-05 | record |" in card.text  # ε = 0.22651… is never rounded down
    assert POST_PROCESSING in card.text
    assert OVERLAP in card.text
    assert "shop (films): ε = " in card.text
    assert read_release(out).merge == record  # the card and the picture do not stand in the way
    assert (out / "explain.svg").read_bytes().startswith(b"<?xml")


def test_the_same_inputs_in_any_order_give_the_same_bytes(dpmerge, releases, tmp_path):
    options = ("--method", "dare-ties", "--seed", 3, "--explain")
    dpmerge(*releases, "--out", tmp_path / "one", *options)
    dpmerge(*releases[::-1], "--out", tmp_path / "two", *options)
    one, two = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert len(one) == 6
    assert one == two


def test_json_is_one_envelope_and_explain_alone_writes_nothing(dpmerge, releases, pair, tmp_path):
    before = sorted(tmp_path.iterdir())
    code, out, err = dpmerge(*releases, f"plain={pair[0]}", "--explain", "--format", "json")
    answer = json.loads(out)
    assert (code, err, answer["schema"], answer["out"]) == (0, "", 1, None)
    assert sorted(tmp_path.iterdir()) == before
    explanation = answer["explanation"]
    assert explanation["parties"] == ["library", "plain", "shop"]
    shares = dict(zip(explanation["parties"], explanation["noise_share"], strict=True))
    assert explanation["noise_origin"] == ["stated", "estimated", "stated"]
    assert 0 < shares["shop"] < 0.1 < shares["plain"]  # three steps of noise, and a spectrum without an edge
    assert [row[place] for place, row in enumerate(explanation["overlap"])] == [1.0, 1.0, 1.0]
    assert sum(explanation["kept"]) > 0
    rows = {row["party"]: row for row in answer["gate"]}
    assert rows["plain"]["a_sha256"] == rows["shop"]["a_sha256"] != rows["library"]["a_sha256"]
    assert (rows["shop"]["dtypes"], rows["shop"]["ranks"], rows["shop"]["scalings"]) == (["F32"], [2], [3.0])


def test_kept_is_the_whole_of_a_party_merged_alone(dpmerge, pair):
    _, out, _ = dpmerge(pair[0], "--explain", "--format", "json")
    assert json.loads(out)["explanation"]["kept"] == [pytest.approx(1.0, rel=1e-5)]


def test_explain_says_what_is_only_an_upper_estimate(dpmerge, pair):
    code, out, _ = dpmerge(*pair, "--explain")
    assert code == 0
    assert "≤ " in out
    assert "overlap (cosine)" in out


def test_list_shows_every_method(dpmerge):
    code, out, _ = dpmerge("--list", "--format", "json")
    methods = {row["name"]: row for row in json.loads(out)["methods"]}
    assert code == 0
    assert methods.keys() == METHODS.keys()
    assert methods["task-arithmetic"]["needs"] == ["coefficient"]
    assert methods["regmean"]["needs"] == ["public"]
    assert methods["ties"]["takes"]["density"] == 0.2
    assert "task-arithmetic" in dpmerge("--list")[1]


def test_absent_modules_count_as_0_only_when_asked_for(dpmerge, base, pair, tmp_path):
    other = adapter(tmp_path / "other", base, 3, targets=["query"])
    code, out, err = dpmerge(pair[0], other, "--out", tmp_path / "merged")
    assert (code, out) == (2, "")
    assert "other: does not adapt encoder.layer.0.attention.self.value" in err
    assert "--no-strict" in err
    code, out, _ = dpmerge(pair[0], other, "--out", tmp_path / "merged", "--no-strict")
    assert code == 0
    assert "taken as 0: other: encoder.layer.1.attention.self.value" in out


def write_labelled(path, rows):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *rows])
    return path


def test_a_coefficient_is_chosen_on_public_files_that_are_named(dpmerge, base, releases, tmp_path):
    texts = [("good film", "good"), ("bad film", "bad"), ("fine film", "good"), ("awful film", "bad")]
    public = write_labelled(tmp_path / "public.csv", texts)
    options = ("--method", "task-arithmetic", "--base", base, "--validate", f"shop={public}")
    code, out, _ = dpmerge(*releases, "--out", tmp_path / "merged", *options, "--format", "json")
    assert code == 0
    validation = json.loads(out)["validation"]
    record = json.loads((tmp_path / "merged" / "merge.json").read_text())
    assert record["validation"] == validation
    assert record["coefficient"] == record["parameters"]["coefficient"] == validation["coefficient"]
    assert validation["files"]["shop"]["num_records"] == 4
    scores = dict(validation["grid"])
    assert len(scores) == 7
    assert scores[validation["coefficient"]] == max(scores.values()) == validation["mean_accuracy"]
    assert "public data of shop" in (tmp_path / "merged" / "README.md").read_text()


def test_the_best_mean_wins_and_the_smallest_of_equals(dpmerge, base, releases, tmp_path, monkeypatch):
    means = [0.5, 0.75, 0.25, 0.75, 0.5, 0.5, 0.5]

    def measured(_base, _first, tasks, adapters, _merged, *, max_length):
        scores = {name: Accuracy.of(int(4 * mean), 4) for name, mean in zip(adapters, [*means, 1.0], strict=True)}
        return {party: TaskScores(scores["grid-0"], scores, scores["grid-0"]) for party in tasks}

    monkeypatch.setattr(coefficient, "evaluate", measured)
    public = write_labelled(tmp_path / "public.csv", [("good film", "good")])
    options = ("--method", "concat", "--base", base, "--validate", f"shop={public}", "--format", "json")
    _, out, _ = dpmerge(*releases, *options, "--out", tmp_path / "merged")
    validation = json.loads(out)["validation"]
    assert (validation["coefficient"], validation["mean_accuracy"], validation["own"]) == (0.4, 0.75, {"shop": 1.0})


def test_a_stated_coefficient_is_measured_and_the_gap_predicted(dpmerge, base, releases, tmp_path):
    public = write_labelled(tmp_path / "public.csv", [("good film", "good"), ("bad film", "bad"), ("fine", "bad")])
    options = ("--base", base, "--validate", f"shop={public}", "--explain", "--format", "json")
    _, out, _ = dpmerge(*releases, "--method", "concat", "--coefficient", 0.1, *options)
    answer = json.loads(out)
    assert [pair[0] for pair in answer["validation"]["grid"]] == [answer["merge"]["coefficient"]] == [0.1]
    gap = answer["explanation"]["gaps"]["shop"]
    assert gap["predicted"] == pytest.approx(gap["slope"] + gap["curvature"] + gap["third_order"])
    assert gap["predicted"] == pytest.approx(gap["measured"], abs=0.1 * abs(gap["measured"]))
    _, out, _ = dpmerge(releases[0], "--method", "average", *options)
    assert json.loads(out)["explanation"]["gaps"]["shop"]["measured"] == pytest.approx(0.0, abs=1e-6)
    assert json.loads(out)["validation"]["own"] == json.loads(out)["validation"]["accuracy"]


def test_statistics_come_from_public_texts_that_are_named(dpmerge, base, pair, tmp_path):
    (tmp_path / "public.txt").write_text("good film\nbad film\nawful\n")
    options = [f"--public={folder.name}={tmp_path / 'public.txt'}" for folder in pair]
    assert dpmerge(*pair, "--method", "regmean", *options, "--out", tmp_path / "merged")[0] == 0
    assert json.loads((tmp_path / "merged" / "merge.json").read_text())["statistics_sha256"]


def test_one_partys_change_can_be_scaled_per_layer(dpmerge, pair, tmp_path):
    scaled = ("--layer-scale", "shop:value=2", "--layer-scale", "query=.5")
    assert dpmerge(*pair, "--method", "average", *scaled, "--out", tmp_path / "merged")[0] == 0
    merged, shop, library = (read_adapter(path).modules for path in (tmp_path / "merged", *pair))
    for name, item in merged.items():
        value = name.endswith("value")
        mean = (shop[name].delta() * (2 if value else 1) + library[name].delta()) / 2
        torch.testing.assert_close(item.delta(), mean * (1 if value else 0.5), rtol=1e-5, atol=1e-6)


def classified(folder, base, seed, classes):
    """Train nothing, but save what PEFT saves of a text classifier: LoRA and the head."""
    config = AutoModel.from_pretrained(base).config
    config.num_labels = classes
    torch.manual_seed(seed)
    model = get_peft_model(
        BertForSequenceClassification(config), LoraConfig(r=2, target_modules=TARGETS, task_type="SEQ_CLS")
    )
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.data.normal_(std=0.3)
    model.save_pretrained(folder)
    change_config(folder, base_model_name_or_path=str(base))
    return folder


def test_classifier_heads_are_kept_per_party_and_loaded_into_the_merged_model(dpmerge, base, tmp_path):
    """A merge with one party alone gives back its classifier, logits and all; of two, each keeps its own classes."""
    shop, library = (classified(tmp_path / name, base, c, c) for name, c in (("shop", 2), ("library", 3)))
    assert dpmerge(shop, "--method", "average", "--out", tmp_path / "alone")[0] == 0
    assert dpmerge(shop, library, "--method", "average", "--out", tmp_path / "merged")[0] == 0
    config = AutoModel.from_pretrained(base).config
    config.num_labels = 2
    torch.manual_seed(7)
    blank = BertForSequenceClassification(config).eval()
    x = torch.tensor([[2, 5, 9, 3]])
    own = PeftModel.from_pretrained(copy.deepcopy(blank), shop).eval()
    alone = PeftModel.from_pretrained(copy.deepcopy(blank), tmp_path / "alone").eval()
    assert load_head(alone, tmp_path / "alone", "shop") == [
        "base_model.model.classifier.bias", "base_model.model.classifier.weight",
    ]  # fmt: skip
    torch.testing.assert_close(alone(input_ids=x).logits, own(input_ids=x).logits, rtol=1e-5, atol=1e-6)
    merged = PeftModel.from_pretrained(copy.deepcopy(blank), tmp_path / "merged")
    load_head(merged, tmp_path / "merged", "shop")
    with pytest.raises(DpmergeError, match="open the base model with a head of the party's number of classes"):
        load_head(merged, tmp_path / "merged", "library")
    with pytest.raises(DpmergeError, match="has no head of 'cinema'; it has those of library, shop"):
        load_head(merged, tmp_path / "merged", "cinema")
    assert "load_head" in (tmp_path / "merged" / "README.md").read_text()


def test_a_warning_is_on_stderr_and_in_the_answer(dpmerge, base, tmp_path):
    still = adapter(tmp_path / "still", base, 1, lora_alpha=0)
    code, out, err = dpmerge(still, "--method", "average", "--out", tmp_path / "merged", "--format", "json")
    assert code == 0
    assert err.startswith("warning: still: lora_alpha = 0 for encoder.layer.0")
    assert [f"warning: {line}" for line in json.loads(out)["warnings"]] == err.splitlines()


def test_what_goes_around_a_method_is_recorded(dpmerge, pair, tmp_path):
    around = ("--core", "--denoise", "--robust", "clip", "--layer-scale", "query=.5", "--device", "cpu")
    assert dpmerge(*pair, "--method", "ties", "--rank", 2, *around, "--out", tmp_path / "merged")[0] == 0
    parameters = json.loads((tmp_path / "merged" / "merge.json").read_text())["parameters"]
    expected = {
        "core": True,
        "denoise": True,
        "robust": "clip",
        "layer_scales": {"query": 0.5},
        "party_layer_scales": {},
        "rank": 2,
        "device": "cpu",
    }
    assert {key: parameters[key] for key in expected} == expected


REFUSED_OPTIONS: dict[str, tuple[list[str], str]] = {
    "unknown method": (["--method", "tie"], "DPM-104: merge method 'tie' is unknown; choose one of average"),
    "weights of others": (["--weights", "shop=1,cinema=2"], "weights name cinema, shop"),
    "weights that are no numbers": (["--weights", "shop=1,library=x"], "DPM-103: --weights library=x is no number"),
    "a weight that is not finite": (["--weights", "shop=1,library=inf"], "merge.weights.library = inf is not finite"),
    "weights without names": (["--weights", "1,2"], "DPM-103: --weights '1' is not of the form"),
    "a party weighed twice": (["--weights", "shop=1,library=1,shop=2"], "DPM-103: --weights names shop twice"),
    "density 0": (["--method", "ties", "--density", "0"], "DPM-103: merge.density = 0.0 is outside (0, 1]"),
    "density above 1": (["--method", "ties", "--density", "1.5"], "DPM-103: merge.density = 1.5 is outside (0, 1]"),
    "coefficient missing": (["--method", "task-arithmetic"], "DPM-103: merge.coefficient"),
    "parameter of another method": (["--method", "average", "--density", "0.5"], "is no parameter of average"),
    "a device that no merge knows": (["--device", "tpu"], "DPM-103: merge.device = 'tpu' is unknown"),
    "validation that is not there": (["--method", "concat", "--validate", "shop=x.csv"], "DPM-103: --validate shop"),
    "a layer factor without a number": (["--layer-scale", "query"], "DPM-103: --layer-scale 'query'"),
    "a party weighed in two options": (
        ["--weights", "shop=1,library=1", "--weights", "shop=2"],
        "DPM-103: --weights names shop twice",
    ),
    "a coefficient beyond fp32": (["--coefficient", "1e300"], "merge.coefficient = 1e+300 is not finite in fp32"),
    "a layer factor beyond fp32": (["--layer-scale", "query=1e300"], "query = 1e+300 is not finite in fp32"),
    "a sum beyond fp32": (["--coefficient", "3e38", "--weights", "shop=9,library=9"], "DPM-103: the merged change is"),
    "a sum of low rank beyond fp32": (["--coefficient", "3e38", "--rank", "1"], "DPM-103: the merged change is"),
    "a matrix beyond fp32": (["--method", "ties", "--coefficient", "3e38"], "DPM-103: the merged change is too large"),
    "density near 0": (["--method", "dare", "--density", "1e-300"], "DPM-103: the merged change is too large for fp32"),
    "validation without a head": (["--validate", "shop=x.csv", "--base", "no/such"], "no release has a head of shop"),
    "unknown robustness": (
        ["--robust", "trim"],
        "DPM-103: merge.robust = 'trim' is unknown; choose one of clip, median",
    ),
    "statistics missing": (["--method", "regmean"], "DPM-103: regmean needs public texts for library, shop"),
    "statistics of no use": (["--public", "shop=x.txt"], "DPM-103: --public is for methods that need statistics"),
    "statistics of one party": (
        ["--method", "regmean", "--public", "shop=x.txt"],
        "DPM-103: regmean needs public texts for library; give --public library=FILE",
    ),
    "another base": (["--materialize", "--base", "no/such/model"], "DPM-204: base model 'no/such/model'"),
}


@pytest.mark.parametrize("case", REFUSED_OPTIONS)
def test_refused_options_write_nothing(dpmerge, pair, tmp_path, case):
    options, message = REFUSED_OPTIONS[case]
    before = sorted(tmp_path.rglob("*"))
    code, out, err = dpmerge(*pair, "--out", tmp_path / "merged", *options)
    assert (code, out) == (2, "")
    assert message in err
    assert err.splitlines()[-1].startswith("DPM-")
    assert sorted(tmp_path.rglob("*")) == before


def truncate(folder):
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def empty(folder):
    for path in folder.iterdir():
        path.unlink()


def pickle_only(folder):
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def drop_b(tensors):
    return {
        key: value for key, value in tensors.items() if not key.endswith("layer.0.attention.self.query.lora_B.weight")
    }


def embedding(tensors):
    return tensors | {"base_model.model.embeddings.word_embeddings.lora_embedding_A": torch.zeros(2, 10)}


def widen(tensors):
    return {key: value.repeat(1, 2) if "lora_A" in key else value for key, value in tensors.items()}


FIRST = "encoder.layer.0.attention.self.query"
BROKEN: dict[str, tuple[Any, list[str]]] = {
    "empty folder": (empty, ["bad lacks adapter_config.json or adapter_model.safetensors"]),
    "pickle": (pickle_only, ["holds only pickled weights (adapter_model.bin)"]),
    "truncated": (truncate, ["bad: adapter_model.safetensors", "[truncated]"]),
    "NaN": (lambda f: change_tensors(f, poison), ["bad: ", "adapter_model.safetensors", FIRST]),
    "DoRA": (
        lambda f: change_config(f, use_dora=True),
        ["bad: encoder.layer.0.attention.self.query is without lengths under DoRA"],
    ),
    "bias": (lambda f: change_config(f, bias="lora_only"), ["bad: ", "bias = 'lora_only'"]),
    "LoRA bias": (lambda f: change_config(f, lora_bias=True), ["bad: lora_bias = True"]),
    "modules to save": (lambda f: change_config(f, modules_to_save=["pooler"]), ["bad: modules_to_save"]),
    "embedding": (
        lambda f: change_tensors(f, embedding),
        ["bad: ", "embeddings.word_embeddings"],
    ),
    "not LoRA": (lambda f: change_config(f, peft_type="IA3"), ["bad: peft_type = 'IA3'"]),
    "half a pair": (lambda f: change_tensors(f, drop_b), ["bad: ", "lora_A"]),
    "another shape": (lambda f: change_tensors(f, widen), [f"bad: {FIRST} is (8, 16) but (8, 8) at shop, library"]),
    "another rank": (lambda f: change_config(f, r=5), [f"bad: {FIRST} has A (2, 8)"]),
    "another base": (
        lambda f: change_config(f, base_model_name_or_path="x/other"),
        ["bad: base model x/other but tiny"],
    ),
    "no base": (lambda f: change_config(f, base_model_name_or_path=""), ["bad: names no base model"]),
    "null for a base": (lambda f: change_config(f, base_model_name_or_path=None), ["bad: names no base model"]),
    "a change beyond fp32": (
        lambda f: change_config(f, lora_alpha=1e300),
        [f"bad: adapter_model.safetensors: the change of {FIRST} is too large for fp32"],
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_adapters_are_refused_by_name_and_nothing_is_written(dpmerge, base, pair, tmp_path, case):
    damage, words = BROKEN[case]
    damage(adapter(tmp_path / "bad", base, 3))
    before = sorted(tmp_path.rglob("*"))
    code, out, err = dpmerge(*pair, tmp_path / "bad", "--out", tmp_path / "merged")
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    refusals = [line for line in err.splitlines() if line.startswith("DPM-40")]
    assert refusals
    assert any(all(word in line for word in words) for line in refusals)
    assert sorted(tmp_path.rglob("*")) == before


def test_every_mismatch_is_listed_at_once_with_a_line_and_a_remedy_each(dpmerge, base, releases, tmp_path):
    stranger = release(tmp_path / "stranger", base, 3, base_sha256="f" * 64, training={"seed": 8})
    pickle_only(adapter(tmp_path / "pickled", base, 4))
    code, out, err = dpmerge(
        *releases, stranger, tmp_path / "pickled", tmp_path / "absent", "--out", tmp_path / "merged", "--format", "json"
    )
    assert (code, out) == (2, "")
    lines = err.splitlines()
    assert len(lines) == 4
    assert all(line.startswith("DPM-402: ") and "; " in line for line in lines)
    assert sum("stranger: base model tiny has SHA-256 ffffffffffff" in line for line in lines) == 1
    assert sum("stranger: A was made from seed 8 but 7 at shop, library" in line for line in lines) == 1


def test_two_folders_of_one_name_are_told_apart_by_naming_them(dpmerge, base, tmp_path):
    one, two = (adapter(tmp_path / run / "checkpoint-9", base, seed) for seed, run in enumerate("ab"))
    code, _, err = dpmerge(one, two, "--out", tmp_path / "merged")
    assert code == 2
    assert "DPM-402: checkpoint-9: 2 adapters have this name; name them" in err
    assert dpmerge(f"a={one}", f"b={two}", "--out", tmp_path / "merged")[0] == 0


def test_a_release_counts_once_and_keeps_its_own_name(dpmerge, releases, tmp_path):
    code, _, err = dpmerge(*releases, f"other={releases[0]}", "--out", tmp_path / "merged")
    assert code == 2
    assert "other: " in err
    assert "is a release of shop" in err
    assert "shop: brings a head of shop" in err


def test_an_output_folder_in_use_is_left_alone(dpmerge, pair, tmp_path):
    out = tmp_path / "merged"
    out.mkdir()
    (out / "note.txt").write_text("mine")
    for inputs in (pair, [tmp_path / "absent"]):  # and before anything is read
        code, stdout, err = dpmerge(*inputs, "--out", out)
        assert (code, stdout) == (2, "")
        assert err.startswith("DPM-301: ")
    assert [path.name for path in out.iterdir()] == ["note.txt"]


def test_a_place_that_cannot_be_or_is_read_is_refused_before_anything_is_read(dpmerge, pair, tmp_path):
    for out, words in ((pair[0] / "merged", "lies in"), (tmp_path / ("x" * 300), "cannot be written: File name too")):
        code, stdout, err = dpmerge(*pair, "--out", out)
        assert (code, stdout) == (2, "")
        assert err.startswith("DPM-301: ")
        assert words in err
        assert len(err.splitlines()) == 1


@pytest.mark.parametrize("name", ["", " ", "a\nb", "a\x1b[31m"])
def test_a_party_has_a_name_that_can_be_printed(dpmerge, pair, tmp_path, name):
    code, stdout, err = dpmerge(f"{name}={pair[0]}", pair[1], "--out", tmp_path / "merged")
    assert (code, stdout) == (2, "")
    assert err.splitlines()[-1].startswith("DPM-")


def test_interrupting_leaves_nothing_and_says_so(dpmerge, pair, tmp_path, monkeypatch):
    """The interrupt comes while files are written, in the temporary folder that takes the output's place."""
    before = sorted(tmp_path.rglob("*"))

    def stop(code):
        raise SystemExit(code)

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(release_module, "fsync_folder", interrupted)
    monkeypatch.setattr(cli.os, "_exit", stop)
    code, out, err = dpmerge(*pair, "--out", tmp_path / "merged")
    assert (code, out, err) == (130, "", "interrupted; nothing was written\n")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_base_model_of_another_hash_is_not_merged_into(dpmerge, base, releases, tmp_path):
    torch.manual_seed(5)
    BertModel(AutoModel.from_pretrained(base).config).save_pretrained(tmp_path / "other")
    BertTokenizerFast.from_pretrained(base).save_pretrained(tmp_path / "other")
    code, _, err = dpmerge(*releases, "--out", tmp_path / "merged", "--materialize", "--base", tmp_path / "other")
    assert code == 2
    assert "DPM-204: base model other is not the one of " in err
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("arguments", [[], ["--out", "x"]])
def test_without_adapters_or_a_place_to_go_it_says_what_is_missing(dpmerge, arguments):
    code, out, err = dpmerge(*arguments)
    assert (code, out) == (2, "")
    assert "--out" in err or "DPM-403" in err


TOY = '''
"""A family of one method, as somebody would add it."""

from dpmerge.server.merging.methods.linear import weighted
from dpmerge.server.merging.methods.parameter import RANK, Parameter, Range
from dpmerge.server.merging.methods.recipe import MergeMethod

SHRINKAGE = Parameter(
    name="shrinkage", kind=float, about="How much of the sum is left.", example=0.5, range=Range(low=0.0, high=1.0)
)


def shrunk(modules, recipe):
    return weighted(modules, recipe.weights, recipe.rank, recipe[SHRINKAGE])


METHODS = (
    MergeMethod(
        name="shrunk",
        summary="The sum, shortened.",
        source="-",
        function=shrunk,
        laws=frozenset({"cancels", "rotation-free", "factor-free"}),
        takes={SHRINKAGE: 0.25, RANK: None},
        is_weighted_sum=True,
    ),
)
'''


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """One new file, and its methods in the registry; the command is made anew, as a new process would."""
    (tmp_path / "shrunk_family.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    (method,) = importlib.import_module("shrunk_family").METHODS
    monkeypatch.setitem(METHODS, method.name, method)
    command = sys.modules.pop("dpmerge.cli.commands.merge", None)
    yield
    sys.modules.pop("shrunk_family")
    sys.modules.pop("dpmerge.cli.commands.merge", None)
    if command:
        sys.modules["dpmerge.cli.commands.merge"] = command


@pytest.mark.usefixtures("toy")
def test_one_new_file_is_a_method_of_the_command_and_of_a_federation_file(dpmerge, pair, tmp_path):
    out = tmp_path / "merged"
    code, _, err = dpmerge(*pair, "--method", "shrunk", "--shrinkage", 0.75, "--robust", "median", "--out", out)
    assert (code, err) == (0, "")
    record = json.loads((out / "merge.json").read_text())
    assert (record["method"], record["parameters"]["shrinkage"]) == ("shrunk", 0.75)
    _, listed, _ = dpmerge("--list", "--format", "json")
    assert json.loads(listed)["methods"][-1]["takes"] == {"shrinkage": 0.25, "rank": None}
    _, _, err = dpmerge(*pair, "--method", "shrunk", "--shrinkage", 2, "--out", tmp_path / "other")
    assert err == "DPM-103: merge.shrinkage = 2.0 is outside [0, 1]; state shrinkage, for example 0.5\n"

    file = EXAMPLE.read_text().replace("[merge]", "[merge]\nshrinkage = 0.5").replace('"geometry"', '"shrunk"')
    federation = checked(parse_federation(file, "f.toml"), "f.toml")
    assert federation.merge.parameters["shrinkage"] == 0.5
    assert "shrinkage" in merge_schema()
    assert any("How much of the sum is left." in line for line in merge_lines())
