"""What secure noise costs a training step, and how tight the accounting is.

    python benchmarks/noise.py [--quick] [--format json]

`secure_over_fast_step` compares whole private steps (forward, backward, clipping, noise) of the last two layers of a
MiniLM-shaped encoder (r = 8 on all linears, B trained), 128 records of 32 tokens, one thread. The two noises take
turns; the gradients, which both share, and each privatising count with their fastest turn.
`calibration_seconds` is the slowest of the settings' first calibrations.
`calibration_slack` is σ/σ* − 1, σ* being the root of a PLD with cells half as wide.
`epsilon_error_max` is the largest distance from tests/golden.
Times are processor seconds, which a busy machine disturbs least.
"""

import argparse
import json
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch
from dp_accounting.pld import privacy_loss_distribution as pld
from peft import LoraConfig, get_peft_model
from scipy.optimize import brentq
from torch import nn
from transformers import BertConfig, BertModel

from dpmerge.client.gradients.per_example import PerExampleGradients
from dpmerge.client.privacy.noise import FastNoise, SecureNoise
from dpmerge.client.privacy.privatiser import Privatiser
from dpmerge.common.privacy.accounting import epsilon_pld
from dpmerge.common.privacy.calibration import calibrate
from dpmerge.common.privacy.mechanism import Mechanism

NUM_RECORDS, NUM_TOKENS, WIDTH = 128, 32, 384
SETTINGS = {
    "target_delta": 1e-5,
    "population": 2800,
    "expected_batch_size": NUM_RECORDS,
    "num_steps": 40,
    "l2_clip_norm": 1.0,
}
GOLDEN = Path(__file__).parents[1] / "tests" / "golden" / "accounting.json"


def encoder() -> nn.Module:
    """Two layers of MiniLM's shape with random weights: what a step costs does not depend on their values."""
    config = BertConfig(
        hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=2, num_attention_heads=12, vocab_size=8
    )
    base = BertModel(config, add_pooling_layer=False).eval()
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")).eval()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    return model


def step_seconds(num_turns: int) -> tuple[dict[str, float], int]:
    """Return the fastest gradients and the fastest privatising by each noise (CPU seconds), and the coordinates."""
    torch.set_num_threads(1)
    hidden = torch.randn(NUM_RECORDS, NUM_TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))
    model = encoder()
    gradients = PerExampleGradients(model)
    num_coordinates = gradients.theta.numel()
    privatisers = {}
    for source in (FastNoise(), SecureNoise()):
        mechanism = Mechanism(noise_multiplier=1.0, num_coordinates=num_coordinates, noise=source.mode, **SETTINGS)
        privatisers[source.mode] = Privatiser(mechanism, num_coordinates, source)
    fastest = dict.fromkeys(("gradients", *privatisers), float("inf"))
    for turn in range(num_turns + 1):
        for mode, privatiser in privatisers.items():
            marks = [time.process_time()]
            rows = gradients.compute(lambda: model(inputs_embeds=hidden).last_hidden_state.square().mean((1, 2)))
            marks.append(time.process_time())
            privatiser.accumulate(rows)
            privatiser.finish()
            marks.append(time.process_time())
            if turn > 0:  # the first warms up
                fastest["gradients"] = min(fastest["gradients"], marks[1] - marks[0])
                fastest[mode] = min(fastest[mode], marks[2] - marks[1])
    return fastest, num_coordinates


def calibration(targets: tuple[float, ...]) -> tuple[float, float]:
    """Return the slowest calibration (CPU seconds) and the worst slack over the targets."""
    slowest = worst = 0.0
    for target in targets:
        start = time.process_time()
        mechanism = calibrate(target_epsilon=target, **SETTINGS)
        slowest = max(slowest, time.process_time() - start)
        worst = max(worst, mechanism.noise_multiplier / least_noise(mechanism, target) - 1)
    return slowest, worst


def least_noise(mechanism: Mechanism, target: float) -> float:
    """Return σ*: where a PLD with cells of 5e-5 meets the target."""

    def excess(sigma: float) -> float:
        step = pld.from_gaussian_mechanism(
            sigma, sampling_prob=mechanism.sampling_prob, value_discretization_interval=5e-5
        )
        return step.self_compose(mechanism.num_steps).get_epsilon_for_delta(mechanism.target_delta) - target

    sigma = mechanism.noise_multiplier
    return float(brentq(excess, sigma * (1 - 1e-3), sigma * (1 + 1e-3), xtol=1e-7 * sigma))


def golden_error() -> float:
    """Return the largest |ε − golden| over the rows of the golden file."""
    worst = 0.0
    for sigma, q, num_steps, delta, _, epsilon in json.loads(GOLDEN.read_text())["rows"]:
        population = 10**9
        mechanism = Mechanism(
            noise_multiplier=sigma,
            l2_clip_norm=1.0,
            population=population,
            expected_batch_size=round(q * population),
            num_steps=num_steps,
            target_delta=delta,
            noise="fast",
        )
        worst = max(worst, abs(epsilon_pld(mechanism) - epsilon))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer turns and targets")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    arguments = parser.parse_args()
    print("timing steps", file=sys.stderr)
    seconds, num_coordinates = step_seconds(7 if arguments.quick else 25)
    print("calibrating", file=sys.stderr)
    slowest, slack = calibration((1.0, 8.0) if arguments.quick else (0.5, 1.0, 2.0, 3.0, 4.0, 8.0))
    figures = {
        "secure_over_fast_step": (seconds["gradients"] + seconds["secure"]) / (seconds["gradients"] + seconds["fast"]),
        "calibration_seconds": slowest,
        "calibration_slack": slack,
        "epsilon_error_max": golden_error(),
        **{f"{part}_seconds": value for part, value in seconds.items()},
        "num_coordinates": num_coordinates,
    }
    if arguments.format == "json":
        environment = {
            "machine": platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "dp-accounting": version("dp-accounting"),
            "num_threads": 1,
        }
        print(json.dumps({"benchmark": "noise", "figures": figures, "environment": environment}))
    else:
        for key, value in figures.items():
            print(f"{key:24} {value:.6g}")


if __name__ == "__main__":
    main()
