"""`dpmerge plan`: numbers that a training then states, no private record read, and sizing where texts are public."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import BertConfig, BertModel, BertTokenizerFast

from dpmerge.client.party.party import run_party
from dpmerge.common.config.federation import load_federation, party_plan
from dpmerge.common.encoder.base_model import load_base
from dpmerge.common.privacy import sizing
from dpmerge.simulations import planning

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrst"]
SUBSPACE = 'subspace = {{ k = {k}, public = "public.txt", num_public = 60 }}'
AUTO = SUBSPACE.format(k='"auto", clip = "quantile"')
FEDERATION = """
[base]
model = "tiny"
max_length = 8
[lora]
rank = 2
layers = "all"
[training]
num_steps = 3
expected_batch_size = 20
{subspace}
[privacy]
noise = "{noise}"
[[party]]
name = "shop"
data = "own.csv"
label = "label"
labels = {{ a = "a b c", b = "d e f" }}
population = 200
{budget}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny encoder, public texts, and a private file that nobody can read."""
    folder = tmp_path_factory.mktemp("plan")
    torch.manual_seed(0)
    shape = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
    (folder / "tiny").mkdir()
    BertModel(BertConfig(vocab_size=len(WORDS), **shape)).save_pretrained(folder / "tiny")
    (folder / "tiny" / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizerFast(str(folder / "tiny" / "vocab.txt")).save_pretrained(folder / "tiny")
    letters = WORDS[5:]
    texts = {f"{a} {b} {c}" for a in letters for b in letters[:4] for c in letters[:2]}
    (folder / "public.txt").write_text("\n".join(sorted(texts)))
    (folder / "own.csv").write_bytes(b"\xff\x00 not a table")
    return folder


@pytest.fixture
def plan(folder, monkeypatch, dpmerge, tmp_path):
    """Run the command: settings of the federation, options → (exit code, stdout, stderr)."""
    monkeypatch.setenv("DPMERGE_CACHE", str(tmp_path))

    def call(*options, subspace="", budget="epsilon = 2.0", noise="fast", factors=(1.0,)):
        monkeypatch.setattr(planning, "FACTORS", factors)  # each scenario is a calibration
        path = folder / "federation.toml"
        path.write_text(FEDERATION.format(subspace=subspace, budget=budget, noise=noise))
        return dpmerge("plan", path, *options)

    return call


def told(result):
    code, out, err = result
    assert (code, err) == (0, "")
    (party,) = json.loads(out)["parties"]
    return party


@pytest.mark.parametrize(
    "subspace",
    [*(pytest.param(lines, marks=pytest.mark.slow) for lines in ("", SUBSPACE.format(k=8))), AUTO],
    ids=["full", "subspace", "auto"],
)
def test_a_training_states_and_writes_what_was_planned(plan, folder, tmp_path, subspace):
    party = told(plan("--format", "json", subspace=subspace, noise="secure"))
    own = party_plan(load_federation(folder / "federation.toml"), "shop")
    data = tmp_path / "own.csv"
    data.write_text("text,label\n" + "a b,a\nd e,b\n" * 30)
    files = run_party(
        replace(own, source=replace(own.source, path=str(data))), load_base(own.base.model), tmp_path / "shop"
    )
    statement = json.loads(files["statement.json"])
    for key in ("noise_multiplier", "sampling_prob", "num_steps", "epsilon", "num_coordinates"):
        assert party[key] == statement[key], key
    known_before = statement.get("subspace", {}).get("clip_middle", statement["l2_clip_norm"])
    assert party["l2_clip_norm"] == known_before
    assert party["delta"] == statement["target_delta"]
    written = len(files["adapter_model.safetensors"]) + len(files["head.safetensors"])
    assert 0 < written - party["upload_bytes"] < 8000  # names of tensors and the head's class names
    if subspace == AUTO:
        assert statement["subspace"]["k"] == party["size"]["k"] == party["size"]["planned"]["k"]


def test_public_gradients_size_the_subspace(plan):
    party = told(plan("--format", "json", subspace=SUBSPACE.format(k=16)))
    curve = {point["k"]: point for point in party["size"]["curve"]}
    assert list(curve) == list(sizing.candidates(60)) == [8, 16]
    assert party["size"]["k"] == max(curve.values(), key=lambda point: point["kept"])["k"]
    planned = party["size"]["planned"]
    assert planned["l2_clip_norm"] == party["l2_clip_norm"]
    assert planned["noise_std"] == party["noise_std"]
    assert curve[16]["l2_clip_norm"] != planned["l2_clip_norm"]
    same = next(row for row in party["what_if"] if row["noise_multiplier"] == party["noise_multiplier"])
    assert same["signal_to_noise"] == planned["signal_to_noise"]
    assert planned["signal_to_noise"] < same["signal_to_noise_bound"] == party["signal_to_noise_bound"]


@pytest.mark.slow
def test_too_few_public_texts_for_the_rule_leave_a_stated_k(plan):
    party = told(plan("--format", "json", subspace=SUBSPACE.format(k=4).replace("60", "12")))
    assert (party["size"], party["num_coordinates"]) == (None, 4)


def test_without_public_texts_only_a_bound_is_told(plan):
    party = told(plan("--format", "json"))
    assert party["size"] is None
    assert {row["signal_to_noise"] for row in party["what_if"]} == {None}
    assert party["signal_to_noise_bound"] == pytest.approx(
        20 / (party["noise_multiplier"] * party["num_parameters"] ** 0.5)
    )


@pytest.mark.parametrize(
    ("options", "num_rows"), [((), 4), pytest.param(("--full-grid",), 8, marks=pytest.mark.slow)], ids=["one", "all"]
)
def test_what_if_varies_budget_batch_and_steps(plan, options, num_rows):
    rows = told(plan("--format", "json", *options, factors=(1.0, 2.0)))["what_if"]
    sigmas = {(row["epsilon"], row["expected_batch_size"], row["num_steps"]): row["noise_multiplier"] for row in rows}
    assert len(sigmas) == len(rows) == num_rows
    asked = sigmas[2.0, 20, 3]
    assert sigmas[4.0, 20, 3] < asked < min(sigmas[2.0, 40, 3], sigmas[2.0, 20, 6])


def test_without_privacy_there_is_nothing_to_size(plan):
    party = told(plan("--format", "json", subspace=SUBSPACE.format(k=16), budget="private = false"))
    assert (party["epsilon"], party["noise_std"], party["size"], party["what_if"]) == (None, 0.0, None, [])


def test_the_words_say_what_is_chosen_and_assumed(plan):
    code, out, _ = plan("--party", "shop", subspace=SUBSPACE.format(k=16))
    assert code == 0
    words = " ".join(out.split())
    assert "plan: 16" in words
    assert "estimated" in words
    assert "Assumed: 1%" in words


def test_an_unknown_party_is_refused_in_one_line(plan):
    code, out, err = plan("--party", "shp")
    assert (code, out) == (2, "")
    assert "shp" in err
    assert len(err.strip().splitlines()) == 1
