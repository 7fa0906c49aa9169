"""The example of the general path does what it prints: a budget that is kept, and an adapter that moves."""

import importlib.util
from functools import partial
from pathlib import Path

import pytest

from dpmerge.client.privacy.noise import SecureNoise
from dpmerge.client.privacy.sampling import PoissonSampler

SCRIPT = Path(__file__).parents[2] / "examples" / "other_adapters.py"

pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")  # PEFT's prefix tuning


@pytest.fixture(scope="module")
def example():
    """The script, with known randomness: otherwise as many records may be right after a short training as before."""
    spec = importlib.util.spec_from_file_location("other_adapters", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.SecureNoise = lambda: SecureNoise.from_state(bytes([4] * 32))
    module.PoissonSampler = partial(PoissonSampler, seed=0)
    return module


@pytest.mark.parametrize(
    "adapter", ["prefix", *(pytest.param(a, marks=pytest.mark.slow) for a in ("layer norms", "IA³"))]
)
def test_an_adapter_that_is_not_lora_trains_within_its_budget(example, adapter):
    epsilon, before, after = example.run(adapter, epsilon=2.0, num_steps=3)
    assert 1.99 < epsilon <= 2.0
    assert before > 0.6  # two classes, and a head made of their descriptions
    assert after != before


@pytest.mark.slow
def test_training_helps(example):
    epsilon, before, after = example.run("IA³", epsilon=8.0, num_steps=30)
    assert epsilon <= 8.0
    assert after > before + 0.01


def test_the_script_covers_every_kind_that_it_names(example):
    assert set(example.ADAPTERS) == {"layer norms", "IA³", "prefix"}
