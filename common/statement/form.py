"""What each value of a privacy statement may be, before anything is computed from it.

The bounds are public constants for statements of others, and wider than what anybody trains with: they keep a number
that a stranger wrote from deciding how long a loop runs, how much memory a vector takes or how far a loss distribution
reaches. What the values must say together, `common/statement/statement.py` checks.
"""

import re
from collections.abc import Mapping
from typing import Any, get_args

from dpmerge.common.config.rules import PARTY_NAME
from dpmerge.common.privacy.mechanism import CLIP_NORM_RANGE, AscentSampling, NoiseMode, PrivacyUnit, Sharpness
from dpmerge.common.untrusted.kinds import (
    Unfit,
    boolean,
    exactly,
    integer,
    list_of,
    optional,
    plain,
    real,
    record,
    table_of,
    text,
)

MAX_STEPS = 10**5
MAX_POPULATION = 10**10
MAX_COORDINATES = 10**10
MAX_LABELS = 10_000
MAX_LOSS_CELLS = 1 << 22
"""Cells of a composed loss distribution that are worked through for a stranger: 32 MiB in float64."""

_HASH = re.compile("[0-9a-f]{64}")
_ACCOUNTANT = re.compile(r"dp-accounting [ -~]{1,50}")  # with its version: printable ASCII, at most 64 characters
_EPSILON = optional(real(0.0, 1e308))
_SIGMA = real(0.0, 1e9)
_WORDS = text(10_000)

STATEMENT = {
    "schema": exactly(1),
    "party": text(63, PARTY_NAME),
    "task": text(255),
    "labels": list_of(text(255), most=MAX_LABELS),
    "base_sha256": text(64, _HASH),
    "epsilon": _EPSILON,
    "noise_multiplier": _SIGMA,
    "l2_clip_norm": optional(real(*CLIP_NORM_RANGE)),
    "population": integer(1, MAX_POPULATION),
    "expected_batch_size": integer(1, MAX_POPULATION),
    "num_steps": integer(1, MAX_STEPS),
    "target_delta": real(0.0, 1.0),
    "num_coordinates": integer(0, MAX_COORDINATES),
    "sharpness": exactly(*get_args(Sharpness)),
    "ascent_noise_multiplier": optional(_SIGMA),
    "ascent_sampling": exactly(*get_args(AscentSampling)),
    "noise": exactly(*get_args(NoiseMode)),
    "privacy_unit": exactly(*get_args(PrivacyUnit)),
    "private": boolean,
    "num_clip_queries": integer(0, 1),
    "sampling_prob": real(0.0, 1.0),
    "neighboring_relation": text(64),
    "normalisation": text(64),
    "sampling": text(64),
    "noise_seed": exactly("operating system", "test"),
    "accountant": text(64, _ACCOUNTANT),
    "cross_check": record(dict.fromkeys(("epsilon_prv", "epsilon_rdp", "epsilon_optimistic"), _EPSILON)),
    "sampler_delta": real(0.0, 1.0),
    "company_margin": real(0.0, 1.0),
    "tuning_disclosure": _WORDS,
    "trust_model": _WORDS,
    "not_protected": list_of(_WORDS, most=32),
    "training": table_of(text(64), plain(most=10_000, depth=8, longest=10_000), most=32),
    "subspace": table_of(text(64), plain(most=100, depth=3, longest=255), most=32),
}
"""Key → kind, of the keys that a statement may have; which of them it must have, `statement.py` says."""


def form_problem(statement: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the kind or size of one value; None if nothing is. Keys are not looked at.

    >>> form_problem({"num_steps": 10, "private": True}), form_problem({"private": 1})
    (None, 'private = 1 is not true or false')
    """
    try:
        for key, kind in STATEMENT.items():
            if key in statement:
                kind(statement[key], key)
    except Unfit as error:
        return str(error)
    return None
