"""What a party's model finds out about itself, on public texts, before a record is read."""

import importlib
import json
from pathlib import Path

import pytest
import torch

from dpmerge.client.party.model import party_model
from dpmerge.client.party.party import run_party
from dpmerge.common.config.federation import parse_federation, party_plan
from dpmerge.common.encoder.base_model import load_base
from dpmerge.common.release.format import ADAPTER

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and PEFT, about tiny configurations

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    architectures = importlib.import_module("architectures")


def make_plan(model, data):
    text = f"""
    [base]
    model = {json.dumps(str(model))}
    max_length = 16
    [lora]
    layers = "last:2"
    rank = 2
    [training]
    num_steps = 2
    expected_batch_size = 24
    [privacy]
    noise = "fast"
    noise_seed = 3
    [[party]]
    name = "shop"
    data = "{data}"
    text = "body"
    label = "stars"
    labels = {{ "1" = "bad", "5" = "great" }}
    population = 240
    epsilon = 4.0
    """
    return party_plan(parse_federation(text, "test.toml"), "shop")


def add_embeddings(_encoder, args, output):
    """What some models do around their layers: it is lost where the layers below a split do not run."""
    output.last_hidden_state = output.last_hidden_state + 1e-3 * args[0]
    return output


@pytest.mark.parametrize("name", [pytest.param("DeBERTa v2", marks=pytest.mark.slow), "DeBERTa v3"])
def test_records_that_share_a_layers_input_are_trained_one_at_a_time(name, tmp_path, product_files):
    architectures.tiny_base(name, tmp_path / "model")
    plan = make_plan(tmp_path / "model", product_files[0])
    model = party_model(load_base(plan.base.model), plan)
    assert model.max_examples == 1
    files = run_party(plan, load_base(plan.base.model), tmp_path / "shop")
    assert ADAPTER in files
    log = (tmp_path / "shop" / "party.log").read_text()
    assert "physical batches hold one record: all records of a batch share what encoder.layer.2" in log
    assert "memory budget" not in log


def test_another_model_trains_its_batches_together(tmp_path, product_files):
    architectures.tiny_base("GPT-2", tmp_path / "model")
    plan = make_plan(tmp_path / "model", product_files[0])
    model = party_model(load_base(plan.base.model), plan)
    assert model.max_examples is None
    assert model.notes == ()
    run_party(plan, load_base(plan.base.model), tmp_path / "shop")


def test_a_model_that_cannot_be_split_trains_as_a_whole_and_the_partys_log_says_so(tmp_path, product_files):
    architectures.tiny_base("BERT", tmp_path / "model")
    plan = make_plan(tmp_path / "model", product_files[0])

    def odd():
        base = load_base(plan.base.model)
        base.encoder.encoder.register_forward_hook(add_embeddings)
        return base

    model = party_model(odd(), plan)
    assert model.split.first == 0
    ids = torch.tensor([[0, 20, 21, 2]])
    whole = model.encoder(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
    assert torch.equal(model.split.top(model.split.trunk(ids, torch.ones_like(ids)), torch.ones_like(ids)), whole)
    run_party(plan, odd(), tmp_path / "shop")
    assert "model cannot be split at layer 2" in (tmp_path / "shop" / "party.log").read_text()
