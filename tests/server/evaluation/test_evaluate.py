"""Accuracies are those of the models that PEFT opens, wherever the encoder is split."""

import importlib
import logging
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict

from dpmerge.common.config.federation import LoraSettings
from dpmerge.common.data.records import Records
from dpmerge.common.encoder.base_model import adapter_config, attach_lora, load_base
from dpmerge.common.encoder.heads import logits, zero_linear_head
from dpmerge.common.encoder.split_encoder import pad, pool, tokenize
from dpmerge.common.release.format import Release, to_files, write_files
from dpmerge.server.evaluation.evaluate import PublicTask, evaluate
from dpmerge.server.evaluation.predicted_gap import predicted_gaps

TEXTS = [f"record {number} of a {kind} film" for number in range(12) for kind in ("fine", "dull", "long")]

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and PEFT, about tiny configurations

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    architectures = importlib.import_module("architectures")


def released(model_folder: Path, out: Path, layers: str, seed: int) -> Path:
    """Write a release with random factors, and return its folder."""
    base, lora = load_base(str(model_folder)), LoraSettings(rank=2, layers=layers)
    config, head = adapter_config(base, lora), zero_linear_head(base, ("a", "b", "c"))
    encoder = attach_lora(base, lora, seed=seed)
    torch.manual_seed(seed)
    for name, parameter in encoder.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.3)
    adapter = {key: value.clone() for key, value in get_peft_model_state_dict(encoder).items()}
    release = Release(
        party="shop", adapter=adapter, adapter_config=config, heads={"shop": head}, statement={"party": "shop"}
    )
    write_files(out, to_files(release))
    return out


@torch.no_grad()
def features_by_peft(model_folder, release):
    """Return every text's feature, alone and unpadded, from a fresh model with the release's adapter on it."""
    base = load_base(str(model_folder))
    model = PeftModel.from_pretrained(base.encoder, str(release)).eval()
    rows = []
    for row in tokenize(base, TEXTS, 32):
        ids, mask = pad([row], 1, len(row))
        rows.append(pool(model(input_ids=ids, attention_mask=mask).last_hidden_state, mask))
    return torch.cat(rows)


def answers_by_peft(model_folder, release, head) -> list[int]:
    return logits(features_by_peft(model_folder, release), head).argmax(-1).tolist()


def random_head(model_folder, release):
    """Return a head to which no class is likelier than another on the texts, as the release sees them."""
    features = features_by_peft(model_folder, release)
    head = zero_linear_head(load_base(str(model_folder)), ("a", "b", "c"))
    head.weight.normal_(generator=torch.Generator().manual_seed(5))
    scores = logits(features, head)
    head.weight.div_(scores.std(0)[:, None])
    head.bias.copy_(-scores.mean(0) / scores.std(0))
    return head


@pytest.mark.parametrize(
    ("name", "layers"), [("Gemma 3", "last:1"), ("Gemma 3", "all"), ("GPT-2", "last:1"), ("MPNet", "last:1")]
)
def test_accuracy_is_that_of_the_release_as_peft_opens_it(name, layers, tmp_path):
    base = architectures.tiny_base(name, tmp_path / "model")
    own = released(tmp_path / "model", tmp_path / "own", layers, seed=1)
    merged = released(tmp_path / "model", tmp_path / "merged", layers, seed=2)
    head = random_head(tmp_path / "model", own)
    truth = answers_by_peft(tmp_path / "model", own, head)
    assert len(set(truth)) > 1
    others = answers_by_peft(tmp_path / "model", merged, head)
    task = PublicTask(Records(tuple(TEXTS), tuple(truth)), head, head)
    first = base.num_layers - 1 if layers == "last:1" else 0
    scores = evaluate(base, first, {"shop": task}, {"shop": own}, merged, max_length=32)["shop"]
    assert scores.by_adapter["shop"].value == 1.0
    assert scores.merged.value == sum(a == b for a, b in zip(truth, others, strict=True)) / len(TEXTS)


def test_a_split_that_is_not_the_model_is_given_up_and_the_log_says_so(tmp_path, caplog):
    """Adapters on all layers, and a first layer above them: the layers below are not the same for all of them."""
    base = architectures.tiny_base("BERT", tmp_path / "model")
    own = released(tmp_path / "model", tmp_path / "own", "all", seed=1)
    merged = released(tmp_path / "model", tmp_path / "merged", "all", seed=2)
    head = random_head(tmp_path / "model", own)
    truth = answers_by_peft(tmp_path / "model", own, head)
    task = PublicTask(Records(tuple(TEXTS), tuple(truth)), head, head)
    with caplog.at_level(logging.WARNING):
        scores = evaluate(base, 3, {"shop": task}, {"shop": own}, merged, max_length=32)["shop"]
    assert scores.by_adapter["shop"].value == 1.0
    assert "evaluation: model cannot be split at layer 3" in caplog.text


def test_a_prediction_runs_through_the_same_model(tmp_path):
    architectures.tiny_base("BERT", tmp_path / "model")
    own = released(tmp_path / "model", tmp_path / "own", "all", seed=1)
    merged = released(tmp_path / "model", tmp_path / "merged", "all", seed=2)
    head = random_head(tmp_path / "model", own)
    task = PublicTask(Records(tuple(TEXTS[:6]), (0, 1, 2, 0, 1, 2)), head, head)

    def gap(first):
        fresh = load_base(str(tmp_path / "model"))
        return predicted_gaps(fresh, first, {"shop": task}, {"shop": own}, merged, max_length=32)["shop"]

    assert gap(3).measured == pytest.approx(gap(0).measured, rel=1e-5)
