"""The private mechanism: one immutable description that the trainer, the accountant and the statement all read.

A step draws a Poisson sample of the population, clips every unit's gradient to `l2_clip_norm`, adds Gaussian noise
of standard deviation `noise_multiplier * l2_clip_norm` to the sum, and divides by `expected_batch_size`.
All of these numbers are public.

>>> mechanism = Mechanism(noise_multiplier=1.0, l2_clip_norm=1.0, population=2800, expected_batch_size=128,
...                       num_steps=40, target_delta=1e-5, num_coordinates=49152)
>>> round(mechanism.sampling_prob, 4), mechanism.queries
(0.0457, ((1.0, 40),))
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, get_args

from dpmerge.common.errors import DpmergeError

Sharpness = Literal["none", "sat", "sat-momentum", "sam"]
AscentSampling = Literal["paired", "separate"]
NoiseMode = Literal["secure", "fast"]
PrivacyUnit = Literal["record", "user"]

GRID_STEPS_PER_SIGMA = 2**20
"""Secure noise lives on integers; its standard deviation is this many grid steps (so a step is σ·C/2²⁰)."""

MIN_SECURE_NOISE_MULTIPLIER = 1 / 16
"""Below it a clipped coordinate could exceed 2²⁴ grid steps, the last integer up to which fp32 is exact."""

COMPANY_MARGIN = 2.0**-10
"""Share of C that clipping leaves free, for rows of other units that rounding may change when one comes or goes.

Rows are computed in shapes in which they did not change by a bit wherever that was measured. The margin is for
what was not measured; docs/noise.md derives how much it covers.
"""

SAMPLER_TV_PER_VALUE = 2.0**-68
"""Bound on one secure noise value's total-variation distance from a rounded Gaussian (derived in docs/noise.md)."""

CLIP_NORM_RANGE = (1e-12, 1e12)
"""Far inside fp32, so that neither C, C/σ nor the grid step can over- or underflow."""

_NOISE_RANGE = (1e-9, 1e9)
LARGEST_COUNT = 10**12
_CHOICES = {
    "sharpness": get_args(Sharpness),
    "ascent_sampling": get_args(AscentSampling),
    "noise": get_args(NoiseMode),
    "privacy_unit": get_args(PrivacyUnit),
}


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """T steps of the Poisson-subsampled Gaussian mechanism, with or without a privatised ascent query or clip query.

    Guarantees:
        Unit: one record, or one user (`privacy_unit`). Neighbours: add or remove one unit. L2 sensitivity of each
        query's sum: `l2_clip_norm`. Nothing in it depends on private data: `population` is declared, never counted.

    Attributes:
        noise_multiplier: σ of the descent query: the noise's standard deviation over the clip norm; 0 if not private.
        l2_clip_norm: C, bound on each unit's gradient over all trainable coordinates together; None (no clipping) is
            for `private = False` only.
        population: Declared, public number of units.
        expected_batch_size: B, the mean of the Poisson sample's size, and the divisor of every noisy sum.
        num_steps: T.
        target_delta: δ of the claim, in (0, 1).
        num_coordinates: P, length of the trainable vector; needed by secure noise, whose error is charged per value.
        sharpness: Where the gradient is taken; only "sam" spends another query.
        ascent_noise_multiplier: σ of the ascent query ("sam" only).
        ascent_sampling: Whether the ascent query shares the step's Poisson sample ("sam" only). "separate" samples meet
            a target with less noise, since each query is amplified by its own subsampling; the same if q = 1.
        noise: "secure", or "fast" for experiments.
        privacy_unit: What is added or removed.
        private: False trains without noise: ε is infinite, and everything that is written says so.
        num_clip_queries: 1 if a histogram of norms is asked for before the first step, of a Poisson sample of its own,
            with the descent query's σ and q, and the clip norm of the steps is what it names; 0 if not.

    Raises:
        DpmergeError: DPM-103 if a value is out of range, DPM-502 if σ = 0 is not declared as `private = false`.

    References:
        arXiv 1607.00133 (DP-SGD); arXiv 2306.05651 (SAT); arXiv 2608.26655 (paired ascent query).
    """

    neighboring_relation: ClassVar[str] = "add_or_remove_one"

    noise_multiplier: float
    l2_clip_norm: float | None
    population: int
    expected_batch_size: int
    num_steps: int
    target_delta: float
    num_coordinates: int = 0
    sharpness: Sharpness = "none"
    ascent_noise_multiplier: float | None = None
    ascent_sampling: AscentSampling = "paired"
    noise: NoiseMode = "secure"
    privacy_unit: PrivacyUnit = "record"
    private: bool = True
    num_clip_queries: int = 0

    def __post_init__(self) -> None:
        for name, least in (("population", 1), ("expected_batch_size", 1), ("num_steps", 1), ("num_coordinates", 0)):
            value = getattr(self, name)
            _check(_is_int(value) and least <= value <= LARGEST_COUNT, name, value, f"an integer of at least {least}")
        _check(isinstance(self.private, bool), "private", self.private, "true or false")
        clip_queries = self.num_clip_queries
        is_allowed = _is_int(clip_queries) and clip_queries in (0, int(self.private))
        _check(is_allowed, "num_clip_queries", clip_queries, "0, or 1 with privacy")
        _check(
            _is_real(self.target_delta) and 0 < self.target_delta < 1,
            "target_delta",
            self.target_delta,
            "inside (0, 1)",
        )
        for name, allowed in _CHOICES.items():
            _check(getattr(self, name) in allowed, name, getattr(self, name), f"one of {', '.join(allowed)}")
        if self.expected_batch_size > self.population:
            problem = f"expected_batch_size = {self.expected_batch_size} is larger than population = {self.population}"
            raise DpmergeError(
                "DPM-103", problem, "lower the batch size, or declare the population that the party really has"
            )
        self._check_clip_norm()
        self._check_noise()

    def _check_clip_norm(self) -> None:
        low, high = CLIP_NORM_RANGE
        clip = self.l2_clip_norm
        if clip is None:
            _check(
                not self.private,
                "l2_clip_norm",
                clip,
                f"a number in [{low:g}, {high:g}] (only private = false may omit it)",
            )
        else:
            _check(_is_real(clip) and low <= clip <= high, "l2_clip_norm", clip, f"a number in [{low:g}, {high:g}]")

    def _check_noise(self) -> None:
        sigma, ascent = self.noise_multiplier, self.ascent_noise_multiplier
        if self.private and sigma == 0:
            raise DpmergeError(
                "DPM-502", "noise_multiplier = 0 gives no privacy", "add noise, or state private = false"
            )
        self._check_multiplier("noise_multiplier")
        if self.sharpness == "sam":
            self._check_multiplier("ascent_noise_multiplier")
        else:
            _check(ascent is None, "ascent_noise_multiplier", ascent, f"absent with sharpness = {self.sharpness}")
            _check(self.ascent_sampling == "paired", "ascent_sampling", self.ascent_sampling, "left alone without sam")
        if self.private and self.noise == "secure":
            _check(self.num_coordinates >= 1, "num_coordinates", self.num_coordinates, "at least 1 with secure noise")
            smallest = min(sigma, ascent if ascent is not None else sigma)
            _check(
                smallest >= MIN_SECURE_NOISE_MULTIPLIER, "noise_multiplier", smallest, "at least 1/16 with secure noise"
            )

    def _check_multiplier(self, name: str) -> None:
        value = getattr(self, name)
        if self.private:
            low, high = _NOISE_RANGE
            _check(_is_real(value) and low <= value <= high, name, value, f"a number in [{low:g}, {high:g}]")
        else:
            _check(_is_real(value) and value == 0, name, value, "0 when private = false")

    @property
    def sampling_prob(self) -> float:
        """q, the probability with which each unit enters a step's sample: B over the declared population, in (0, 1]."""
        return self.expected_batch_size / self.population

    @property
    def noise_std(self) -> float:
        """σC/B: standard deviation of the noise in each coordinate of the averaged gradient; 0 without privacy."""
        if not self.private or self.l2_clip_norm is None:
            return 0.0
        return self.noise_multiplier * self.l2_clip_norm / self.expected_batch_size

    @property
    def queries(self) -> tuple[tuple[float, int], ...]:
        """The (σ, count) pairs of subsampled Gaussian queries that the training is accounted as.

        A paired ascent query shares the descent query's sample. Together they are one vector query whose two blocks
        have sensitivity C each and noises σ_a·C and σ_d·C, so one Gaussian query, subsampled once, with
        σ_eff = (σ_a⁻² + σ_d⁻²)^(−1/2).

        >>> sam = dict(l2_clip_norm=1.0, population=9, expected_batch_size=3, num_steps=5, target_delta=1e-5,
        ...            noise="fast", sharpness="sam", noise_multiplier=4.0, ascent_noise_multiplier=3.0)
        >>> Mechanism(**sam).queries
        ((2.4, 5),)
        >>> Mechanism(**sam, ascent_sampling="separate").queries
        ((4.0, 5), (3.0, 5))

        A clip query has a sample of its own, and is one more of the descent query's σ.

        >>> Mechanism(**sam, num_clip_queries=1).queries
        ((2.4, 5), (4.0, 1))
        """
        descent, ascent, steps = self.noise_multiplier, self.ascent_noise_multiplier, self.num_steps
        counts = {descent: steps}
        if ascent is not None and self.private and self.ascent_sampling == "paired":
            counts = {(ascent**-2 + descent**-2) ** -0.5: steps}
        elif ascent is not None and self.private:
            counts[ascent] = counts.get(ascent, 0) + steps
        if self.num_clip_queries:
            counts[descent] = counts.get(descent, 0) + self.num_clip_queries
        return tuple(counts.items())

    @property
    def num_noise_values(self) -> int:
        """How many noise values a training draws at most: P a query; each secure one's error is charged to δ."""
        num_queries = self.num_steps * (2 if self.sharpness == "sam" else 1) + self.num_clip_queries
        return num_queries * self.num_coordinates


OPTIONAL_FIELDS = frozenset({"num_clip_queries"})
"""Left out of statements and ledgers where they have their default, so that older ones can be read."""

FIELD_NAMES = tuple(field.name for field in fields(Mechanism) if field.name not in OPTIONAL_FIELDS)
"""Names of the mechanism's other values, in order; a statement carries exactly these."""


def stated_values(mechanism: Mechanism) -> dict[str, Any]:
    """Return what a statement says of the mechanism.

    >>> mechanism = Mechanism(noise_multiplier=1.0, l2_clip_norm=1.0, population=9, expected_batch_size=3, num_steps=2,
    ...                       target_delta=1e-5, noise="fast", num_clip_queries=1)
    >>> mechanism_of(stated_values(mechanism)) == mechanism
    True
    """
    defaults = {field.name: field.default for field in fields(Mechanism)}
    values = {name: getattr(mechanism, name) for name in (*FIELD_NAMES, *sorted(OPTIONAL_FIELDS))}
    return {key: value for key, value in values.items() if key not in OPTIONAL_FIELDS or value != defaults[key]}


def mechanism_of(values: Mapping[str, Any]) -> Mechanism:
    """Return the mechanism that a statement or a ledger's charge says; other keys are not looked at.

    Raises:
        KeyError: If a value is missing.
        DpmergeError: DPM-103 if one is out of range.
    """
    names = (*FIELD_NAMES, *(OPTIONAL_FIELDS & values.keys()))
    return Mechanism(**{name: values[name] for name in names})


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value  # nan differs from itself


def _check(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise DpmergeError("DPM-103", f"{name} = {value!r} is refused", f"it must be {wanted}")
