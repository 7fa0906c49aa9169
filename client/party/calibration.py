"""The mechanism that one party trains by, calibrated from its plan: for the training and for whoever foretells it."""

from __future__ import annotations

from typing import Any

from dpmerge.common.config.federation import PrivacySettings, TrainingSettings
from dpmerge.common.privacy.calibration import calibrate
from dpmerge.common.privacy.mechanism import Mechanism


def make_mechanism(
    privacy: PrivacySettings, training: TrainingSettings, num_coordinates: int, *, l2_clip_norm: float | None = None
) -> Mechanism:
    """Calibrate the mechanism that meets a party's ε at its δ; never above it.

    Args:
        privacy: ε, δ, population, unit, clip norm and noise mode, as a plan has resolved them.
        training: Expected batch, steps and form of sharpness.
        num_coordinates: P or k, the noised values per query; secure noise charges its sampler's error for each.
        l2_clip_norm: C where it is not the stated one: a clip norm from public gradients. A clip query starts with the
            stated one.
    """
    if privacy.population is None or privacy.delta is None:
        raise ValueError("Expected privacy.population and privacy.delta to be set in a resolved plan.")
    public: dict[str, Any] = {
        "population": privacy.population,
        "expected_batch_size": training.expected_batch_size,
        "num_steps": training.num_steps,
        "target_delta": privacy.delta,
        "num_coordinates": num_coordinates,
        "sharpness": training.sharpness,
        "ascent_sampling": training.ascent_sampling,
        "privacy_unit": privacy.unit,
    }
    if not privacy.private:
        no_ascent_noise = 0.0 if training.sharpness == "sam" else None
        return Mechanism(
            noise_multiplier=0.0,
            ascent_noise_multiplier=no_ascent_noise,
            l2_clip_norm=None,
            noise="fast",
            private=False,
            **public,
        )
    if privacy.epsilon is None:
        raise ValueError("Expected privacy.epsilon to be set in a resolved private plan.")
    asks = training.subspace is not None and training.subspace.clip == "quantile"
    clip_norm = privacy.l2_clip_norm if l2_clip_norm is None else l2_clip_norm
    public |= {"l2_clip_norm": clip_norm, "noise": privacy.noise, "num_clip_queries": int(asks)}
    return calibrate(target_epsilon=privacy.epsilon, **public)
