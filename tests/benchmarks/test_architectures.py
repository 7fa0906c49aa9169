"""The table of architectures: the split is the whole, gradients are exact, releases mean the same to PEFT."""

import importlib
from pathlib import Path

import pytest

from dpmerge.common.config.federation import LoraSettings
from dpmerge.common.encoder.architecture import num_positions
from dpmerge.common.encoder.base_model import adapter_config, lora_shapes
from dpmerge.common.encoder.split_encoder import check_length
from dpmerge.common.errors import DpmergeError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and PEFT, about tiny configurations

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(BENCHMARKS)
    table = importlib.import_module("architectures")


@pytest.mark.parametrize("name", table.CONFIGS)
def test_an_architecture_is_right(name, tmp_path):
    errors = table.measure(name, tmp_path / "model")
    assert errors.split == 0.0  # the same arithmetic in the same order
    assert errors.release < 1e-6  # rounding of the head and the pooling
    assert errors.gradients < (1e-5 if name in table.FLOAT32_ONLY else 1e-6), errors


@pytest.mark.parametrize("name", table.REFUSED)
def test_another_kind_of_model_is_refused_by_its_name(name, tmp_path):
    with pytest.raises(DpmergeError, match=rf"DPM-204: (?i:.*{name})") as caught:
        table.tiny_base(name, tmp_path / "model")
    assert "one stack of layers" in str(caught.value)


def test_positions_that_count_from_the_padding_token_are_fewer_than_their_rows(tmp_path):
    base = table.tiny_base("RoBERTa", tmp_path / "model")  # 66 rows, padding token 1
    assert num_positions(base.encoder) == 64
    check_length(base, 64)
    with pytest.raises(DpmergeError, match=r"DPM-103: .* 64 positions"):
        check_length(base, 65)


def test_a_transposed_linear_layer_is_described_as_peft_wants_it(tmp_path):
    base = table.tiny_base("GPT-2", tmp_path / "model")
    lora = LoraSettings(rank=2, layers="last:1", targets=("c_attn",))
    assert lora_shapes(base, lora) == {"h.3.attn.c_attn": (96, 32)}
    assert adapter_config(base, lora)["fan_in_fan_out"] is True
    bert = table.tiny_base("BERT", tmp_path / "bert")
    assert adapter_config(bert, LoraSettings(rank=2))["fan_in_fan_out"] is False
