"""The benchmarks' short way to an accuracy gives what the product's evaluation gives, and leaves the base as it was."""

import importlib
from pathlib import Path

import pytest
import torch

from dpmerge.common.config.federation import LoraSettings
from dpmerge.common.data.tasks import TASKS, load_task
from dpmerge.common.encoder.base_model import adapter_config, load_base, lora_shapes
from dpmerge.common.encoder.heads import label_text_head
from dpmerge.common.release.format import to_files, write_files
from dpmerge.server.evaluation.evaluate import PublicTask, evaluate
from dpmerge.server.merging.adapters.deltas import Adapter, LowRankDelta
from dpmerge.server.merging.merge import as_release, merge
from dpmerge.server.merging.spec.spec import spec_of

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
BASE, TASK, MAX_LENGTH = "minilm-l3", "product", 16

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def merged_accuracy():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("merged_accuracy")


@pytest.fixture(scope="module")
def examiner(merged_accuracy):
    sizes = {"num_validation": 30, "num_test": 60}
    return merged_accuracy.Examiner(BASE, "last:2", [TASK], max_length=MAX_LENGTH, **sizes)


@pytest.fixture(scope="module")
def adapter() -> Adapter:
    base, lora = load_base(BASE), LoraSettings(layers="last:2")
    generator = torch.Generator().manual_seed(1)
    modules = {
        name: LowRankDelta(
            torch.randn(lora.rank, width_in, generator=generator) * width_in**-0.5,
            torch.randn(width_out, lora.rank, generator=generator) * 0.05,
        )
        for name, (width_out, width_in) in lora_shapes(base, lora).items()
    }
    return Adapter("one", modules, adapter_config(base, lora), "0" * 64)


def test_answers_are_those_of_the_product(merged_accuracy, examiner, adapter, tmp_path):
    merged = merge([adapter], spec_of("average"))
    write_files(tmp_path / "merged", to_files(as_release(merged, [adapter])))
    base = load_base(BASE)
    head = label_text_head(base, TASKS[TASK].labels)
    records = merged_accuracy.halves(load_task(TASK).test, 30, 60)["test"]
    tasks = {TASK: PublicTask(records, head, head)}
    scores = evaluate(base, base.num_layers - 2, tasks, {}, tmp_path / "merged", max_length=MAX_LENGTH)[TASK]
    assert examiner.answers(TASK, "test", merged.modules).mean() == scores.merged.value
    assert examiner.answers(TASK, "test", {}).mean() == scores.base.value
    assert scores.merged.value != scores.base.value


def test_the_base_comes_back_to_the_bit(examiner, adapter):
    before = {name: value.clone() for name, value in examiner._encoder.state_dict().items()}
    changed = examiner.answers(TASK, "test", adapter.modules, 3.0)
    after = examiner._encoder.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert (changed != examiner.answers(TASK, "test", {})).any()


def test_no_record_is_both_chosen_by_and_reported_on(merged_accuracy):
    parts = merged_accuracy.halves(load_task(TASK).test, 10**6, 10**6)
    assert not set(parts["validation"].texts) & set(parts["test"].texts)
    assert sum(map(len, parts.values())) == len(load_task(TASK).test)
