"""`dpmerge audit`: measure what leaks, against what is claimed."""

from dataclasses import asdict
from typing import Annotated

import typer

from dpmerge.cli.terminal import CLAIM_REFUTED, Format, FormatOption, answer

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Measure what leaks, against what is claimed.")


@app.callback()
def _group() -> None:
    """Make a group of a single command, which typer would take for the group itself."""


@app.command("mechanism", epilog="Example: dpmerge audit mechanism --epsilon 1 --num-steps 16")
def mechanism(
    epsilon: Annotated[float, typer.Option(help="The claim to calibrate for.")] = 1.0,
    delta: Annotated[float, typer.Option(help="δ of the claim; near 0.01 a violation is easiest to witness.")] = 0.01,
    num_steps: Annotated[int, typer.Option(min=1, help="Noisy steps.")] = 16,
    expected_batch_size: Annotated[int, typer.Option(min=1, help="Mean size of the Poisson samples.")] = 64,
    population: Annotated[int, typer.Option(min=1, help="Declared size of the data.")] = 512,
    sharpness: Annotated[str, typer.Option(help="none, sat, sat-momentum or sam.")] = "none",
    num_trials: Annotated[int, typer.Option(min=1, help="Canaries to guess about.")] = 200_000,
    seconds: Annotated[float, typer.Option(min=1, help="Stop after this time with what there is.")] = 60.0,
    output: FormatOption = Format.text,
) -> int:
    """Play the membership game against the real sampler, clipping and noise; exit code 1 if ε is exceeded."""
    from dpmerge.client.audit.membership_game import NUM_CANARIES
    from dpmerge.client.audit.membership_game import audit_mechanism as audit
    from dpmerge.common.privacy.calibration import calibrate

    mechanism = calibrate(
        target_epsilon=epsilon,
        target_delta=delta,
        population=population,
        expected_batch_size=expected_batch_size,
        num_steps=num_steps,
        l2_clip_norm=1.0,
        sharpness=sharpness,  # type: ignore[arg-type]  # Mechanism refuses what it does not know
        noise="secure",
        num_coordinates=NUM_CANARIES,
    )
    result = audit(mechanism, num_trials=num_trials, max_seconds=seconds)
    verdict = "the claim holds" if result.holds else "THE CLAIM IS REFUTED"
    words = (
        f"{verdict}: ε ≥ {result.epsilon_lower:.3f} measured, ε = {result.epsilon_claimed:.3f} claimed "
        f"at δ = {result.target_delta:g} ({result.confidence:.1%} confidence, {result.num_trials} trials)"
    )
    answer(output, {"audit": asdict(result) | {"holds": result.holds}, "mechanism": asdict(mechanism)}, words)
    return 0 if result.holds else CLAIM_REFUTED
