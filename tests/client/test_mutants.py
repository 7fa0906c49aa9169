"""Twelve planted defects, each caught by a generic check that does not know it; the real parts pass every check."""

import time
from dataclasses import replace
from functools import partial

import pytest

from . import checks
from .checks import PART_CHECKS, seeded
from .mutants import PART_MUTANTS, TRAINING_MUTANTS
from .transcripts import record, released_through_the_mechanism_only, replay

CAUGHT_BY = {
    "noise x0.5": ("ks_noise_scale", "empty_step_is_noised", "audit"),
    "clipping off": ("sensitivity_bound", "audit"),
    "noise per physical batch": ("ks_noise_scale",),
    "empty batch skipped": ("empty_step_is_noised",),
    "realised-batch normaliser": ("normaliser_is_public",),
    "shuffled batches": ("sampling_is_poisson",),
    "reused seed": ("streams_are_independent",),
    "reused seed, every step": ("streams_are_independent",),
    "reused seed, noise and sampling": ("streams_are_independent",),
    "norm over some layers only": ("sensitivity_bound", "audit"),
    "ascent from the raw gradient": ("released_through_the_mechanism_only",),
    "non-private teacher": ("released_through_the_mechanism_only",),
    "basis from private gradients": ("released_through_the_mechanism_only",),
    "clip norm from raw norms": ("released_through_the_mechanism_only",),
}


def catch(mutant, check, folder):
    """Fail unless the check refuses the mutant."""
    if mutant in PART_MUTANTS:
        suspect = partial(PART_CHECKS[check], PART_MUTANTS[mutant]())
    else:
        form = {"basis": "sat-subspace", "clip norm": "sat-subspace-quantile"}.get(mutant.split(" from ")[0], "sat")
        with TRAINING_MUTANTS[mutant]():
            first = record(folder, form)
            second = replay(folder, form, "replaced", first)
        suspect = partial(released_through_the_mechanism_only, first, second)
    with pytest.raises(AssertionError):
        suspect()


@pytest.mark.parametrize(("mutant", "check"), [(mutant, check) for mutant, by in CAUGHT_BY.items() for check in by])
def test_mutant_is_caught(mutant, check, tmp_path):
    catch(mutant, check, tmp_path)


@pytest.mark.parametrize("check", PART_CHECKS)
def test_real_parts_pass(check):
    PART_CHECKS[check](seeded())


@pytest.mark.parametrize(
    "check", ["ks_noise_scale", "empty_step_is_noised", "sensitivity_bound", "normaliser_is_public"]
)
def test_real_parts_pass_with_fast_noise(check):
    PART_CHECKS[check](seeded(), checks.FAST)


@pytest.mark.parametrize("factor", [0.98, 1.02])
def test_two_percent_of_noise_are_seen(factor):
    def misscaled(mechanism, *args, **options):
        return seeded().privatiser(
            replace(mechanism, noise_multiplier=factor * mechanism.noise_multiplier), *args, **options
        )

    with pytest.raises(AssertionError):
        checks.ks_noise_scale(seeded(privatiser=misscaled))


@pytest.mark.slow
def test_every_mutant_is_caught(tmp_path):
    started = time.monotonic()
    names = {mutant.split(",")[0] for mutant in CAUGHT_BY}
    for mutant in names:
        (tmp_path / mutant).mkdir()
        catch(mutant, CAUGHT_BY[mutant][0], tmp_path / mutant)
    seconds = time.monotonic() - started
    print(f"{len(names)} of 12 planted mutants caught in {seconds:.1f} s")
    assert len(names) == 12
