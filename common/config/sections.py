"""The sections of a federation file: every key, its default, what it may be, and what it is for.

Each section is a frozen dataclass that checks itself, so a settings object that exists is a valid one, whether it came
from TOML or from Python. A field carries its `Rule` and its description; errors and JSON Schema are made from these.

>>> LoraSettings(rank=8, alpha=16).alpha
16.0
>>> LoraSettings(rank=0)  # doctest: +ELLIPSIS
Traceback (most recent call last):
    ...
dpmerge.common.config.rules.Refused: DPM-103: lora.rank = 0 is not a whole number of at least 1; write, ...
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from dpmerge.common.config.rules import (
    DATA_PATH,
    FLAG,
    LABELS,
    LAYERS,
    PARTY_NAME,
    TABLE,
    TARGETS,
    Refused,
    Rule,
    check_fields,
    check_overrides,
    choice,
    real,
    unknown_key,
    whole,
    words,
)
from dpmerge.common.config.subspace import SUBSPACE_OR_FALSE, SubspaceSettings
from dpmerge.common.data.tabular.rows import MAX_RECORDS_PER_USER, MOST_RECORDS_PER_USER
from dpmerge.common.errors import closest
from dpmerge.common.privacy.bounds import MAX_EPSILON, MIN_DELTA
from dpmerge.common.privacy.mechanism import (
    CLIP_NORM_RANGE,
    LARGEST_COUNT,
    AscentSampling,
    NoiseMode,
    PrivacyUnit,
    Sharpness,
)

Optimizer = Literal["adam", "adamw", "sgd", "momentum", "dp-adam"]
Robust = Literal["clip", "median"]
Late = Literal["keep", "refuse"]
Loud = Literal["warn", "refuse"]

MERGE_KEYS = ("method", "core", "robust", "denoise", "layer_scales")
"""Keys of `[merge]` that are not about its method; every other one is a parameter, known to the server."""
MAX_PARAMETERS = 32
MAX_WORD = 200  # characters of a parameter's name or value

SCALES = Rule(
    lambda v: isinstance(v, Mapping) and len(v) > 0 and all(map(real().accepts, v.values())),
    "a table of module names with a finite factor each",
    {"type": "object", "minProperties": 1, "additionalProperties": {"type": "number"}},
    lambda v: {key: float(factor) for key, factor in v.items()},
    "write, for example, layer_scales = { query = 0.5 }",
)

EPSILON = real(
    above=0.0,
    at_most=MAX_EPSILON,  # accounting and mechanism own these bounds: what they refuse is refused before a run
    remedy="give a finite privacy budget, for example epsilon = 3.0, or say private = false to train without privacy",
)
POPULATION = whole(
    1,
    LARGEST_COUNT,
    remedy="declare the public, rounded size of the data, for example population = 3000; it is never read off the file",
)


def _meta(rule: Rule, about: str, example: object = None) -> dict[str, object]:
    return {"rule": rule, "about": about, "example": example}


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """`[run]`: what all parties share before anything private is touched."""

    section: ClassVar[str] = "run"
    seed: int = field(
        default=7, metadata=_meta(whole(0), "Public randomness only: the shared LoRA A and the splits; never noise.")
    )

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class BaseSettings:
    """`[base]`: the pretrained model that every party starts from."""

    section: ClassVar[str] = "base"
    model: str = field(metadata=_meta(words(), "An alias such as minilm-l6, a local folder or a hub id.", "minilm-l6"))
    max_length: int = field(default=32, metadata=_meta(whole(3, 32_768), "Tokens kept of each text."))

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """`[lora]`: the shape of the adapter, the same for every party."""

    section: ClassVar[str] = "lora"
    rank: int = field(default=8, metadata=_meta(whole(1), "Rank of each adapted linear."))
    alpha: float = field(default=16.0, metadata=_meta(real(above=0.0), "The adapter is scaled by alpha / rank."))
    layers: str | tuple[int, ...] = field(
        default="last:2", metadata=_meta(LAYERS, 'Adapted layers: "all", "last:K" or a list of indices from 0.')
    )
    targets: str | tuple[str, ...] = field(
        default="all-linear", metadata=_meta(TARGETS, '"all-linear", or a list of module names such as ["query"].')
    )
    train_a: bool = field(
        default=False,
        metadata=_meta(FLAG, "Train A too. Frozen and shared A halves the noise and makes averaging exact."),
    )
    rslora: bool = field(default=False, metadata=_meta(FLAG, "Scale by alpha / sqrt(rank) instead."))

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """`[training]`: the optimisation; a party overrides single keys in `[party.training]`."""

    section: ClassVar[str] = "training"
    num_steps: int = field(default=40, metadata=_meta(whole(1), "Noisy steps; each one costs privacy."))
    expected_batch_size: int = field(
        default=128,
        metadata=_meta(
            whole(1), "Mean number of units (records or users) in a Poisson sample, at most the population."
        ),
    )
    optimizer: Optimizer = field(
        default="adam",
        metadata=_meta(choice(*get_args(Optimizer)), "Works on the privatised gradient; dp-adam knows its noise."),
    )
    learning_rate: float = field(default=4e-3, metadata=_meta(real(above=0.0), "Step size."))
    sharpness: Sharpness = field(
        default="sat",
        metadata=_meta(choice(*get_args(Sharpness)), "Where the gradient is taken; sam spends a second query on it."),
    )
    ascent_sampling: AscentSampling = field(
        default="paired",
        metadata=_meta(
            choice(*get_args(AscentSampling)),
            "For sam: one Poisson sample for ascent and descent, or one each, which needs less noise unless q = 1.",
        ),
    )
    rho: float = field(default=0.1, metadata=_meta(real(at_least=0.0), "Radius of the ascent step; 0 is plain DP-SGD."))
    rho_warmup_steps: int = field(
        default=0, metadata=_meta(whole(0), "Steps of linear growth to rho, from rho / steps.")
    )
    alignment: float = field(
        default=0.0, metadata=_meta(real(at_least=0.0), "Pull λ towards the base, added after the noise; 0 is none.")
    )
    alignment_on: Literal["delta", "factors"] = field(
        default="delta", metadata=_meta(choice("delta", "factors"), "Whether the pull acts on s·B·A or on B and A.")
    )
    alignment_warmup_steps: int = field(
        default=0, metadata=_meta(whole(0), "Steps of linear growth to λ, from λ / steps.")
    )
    head: Literal["label-text", "linear"] = field(
        default="label-text",
        metadata=_meta(choice("label-text", "linear"), "Frozen head made of the label descriptions, or a trained one."),
    )
    subspace: SubspaceSettings | None = field(
        default=None,
        metadata=_meta(
            SUBSPACE_OR_FALSE,
            'Train k directions (or "auto") made from public data; false, at a party: all coordinates.',
            {"k": 256, "public": "sms"},
        ),
    )

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "subspace", self.subspace or None)
        if self.ascent_sampling != "paired" and self.sharpness != "sam":
            problem = 'is allowed only with sharpness = "sam", which alone has an ascent query'
            raise Refused(self.section, "ascent_sampling", self.ascent_sampling, problem, "remove ascent_sampling")
        if self.subspace is not None:
            self._check_subspace(self.subspace)

    def _check_subspace(self, subspace: SubspaceSettings) -> None:
        if self.head == "linear":
            problem = "has no gradients to find directions from: a linear head starts at zero"
            raise Refused(self.section, "subspace", None, problem, 'state head = "label-text", or remove subspace')
        if self.optimizer == "dp-adam" and subspace.allocation != "uniform":
            problem = "knows one noise for all coordinates"
            fix = 'use adam, or subspace.allocation = "uniform"'
            raise Refused(self.section, "optimizer", self.optimizer, problem, fix)


@dataclass(frozen=True, kw_only=True)
class PrivacySettings:
    """`[privacy]`: the guarantee; a party overrides single keys in `[party.privacy]`.

    `epsilon` has no default: either a budget is stated or `private = false` is. That of `delta` follows each party's
    population.
    """

    section: ClassVar[str] = "privacy"
    private: bool = field(default=True, metadata=_meta(FLAG, "false trains without privacy; marked in every output."))
    epsilon: float | None = field(default=None, metadata=_meta(EPSILON, "Target ε, never exceeded.", 3.0))
    delta: float | None = field(
        default=None,
        metadata=_meta(
            real(at_least=MIN_DELTA, below=1.0),
            "Target δ, below 1 / population; without it a tenth of that, at most 1e-5.",
            1e-5,
        ),
    )
    allow_large_delta: bool = field(
        default=False,
        metadata=_meta(FLAG, "Allow δ of 1 / population or more, for tests: the statement says so.", True),
    )
    l2_clip_norm: float = field(
        default=1.0,
        metadata=_meta(
            real(at_least=CLIP_NORM_RANGE[0], at_most=CLIP_NORM_RANGE[1]), "Bound on each unit's gradient norm."
        ),
    )
    noise: NoiseMode = field(
        default="secure",
        metadata=_meta(choice(*get_args(NoiseMode)), "fast: floating-point noise, for experiments only."),
    )
    noise_seed: int | None = field(
        default=None,
        metadata=_meta(whole(0), "For tests, with fast noise only: whoever knows it can remove the noise.", 1),
    )
    unit: PrivacyUnit = field(
        default="record",
        metadata=_meta(
            choice(*get_args(PrivacyUnit)), "What one neighbour differs in: one record, or all records of a user."
        ),
    )
    max_records_per_user: int = field(
        default=MAX_RECORDS_PER_USER,
        metadata=_meta(
            whole(1, MOST_RECORDS_PER_USER),
            "For unit = user: of each user so many records are read, the first in the file.",
        ),
    )
    population: int | None = field(
        default=None,
        metadata=_meta(POPULATION, "Declared public number of units (records or users) of own data.", 3000),
    )
    tuning: str = field(
        default="not disclosed", metadata=_meta(words(), "How these settings were chosen; part of every statement.")
    )

    def __post_init__(self) -> None:
        check_fields(self)
        _check_private(self.section, self.private, self.epsilon)
        if self.noise_seed is not None and self.noise != "fast":
            problem = 'is allowed only with noise = "fast"'
            raise Refused(self.section, "noise_seed", self.noise_seed, problem, "remove it: secure noise has no seed")


@dataclass(frozen=True, kw_only=True)
class IntakeSettings:
    """`[intake]`: how many releases a merge needs, how long they are waited for, what becomes of later ones."""

    section: ClassVar[str] = "intake"
    min_parties: int = field(
        default=1, metadata=_meta(whole(1), "With fewer accepted releases nothing is merged; at most all parties.")
    )
    deadline_minutes: float = field(
        default=0.0,
        metadata=_meta(
            real(at_least=0.0, at_most=1e7),
            "Minutes from the federation's founding after which nobody is waited for; 0 waits for all.",
            90.0,
        ),
    )
    late: Late = field(
        default="keep",
        metadata=_meta(choice(*get_args(Late)), "A release after the deadline is for the next merge, or is refused."),
    )
    loud: Loud = field(
        default="warn",
        metadata=_meta(
            choice(*get_args(Loud)),
            "A release far above the median norm of those accepted before: taken with a warning, or refused.",
        ),
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.late != "keep" and not self.deadline_minutes:
            fix = "state a deadline, for example deadline_minutes = 90, or remove late"
            raise Refused(self.section, "late", self.late, "needs a deadline", fix)


@dataclass(frozen=True, kw_only=True)
class MergeSettings:
    """`[merge]`: how the server turns the releases into one adapter.

    `parameters` are the method's own, plain keys of the section in a file. Names and values are bounded here; whether
    the method exists and takes them is for whoever merges: `dpmerge.server.merging.spec.federation`.
    """

    section: ClassVar[str] = "merge"
    method: str = field(default="geometry", metadata=_meta(words(), "The merge method."))
    parameters: Mapping[str, float | str] = field(
        default_factory=dict, metadata=_meta(TABLE, "What the method takes; see dpmerge merge --list.")
    )
    core: bool = field(
        default=False, metadata=_meta(FLAG, "Apply the method to coordinates in the adapters' shared bases.", True)
    )
    robust: Robust | None = field(
        default=None, metadata=_meta(choice(*get_args(Robust)), "Bound the influence of one party.", "clip")
    )
    denoise: bool = field(
        default=False, metadata=_meta(FLAG, "Let related parties' changes predict each other's signal first.", True)
    )
    layer_scales: Mapping[str, float] | None = field(
        default=None, metadata=_meta(SCALES, "Factors on merged modules, by the end of their names.", {"query": 0.5})
    )

    def __post_init__(self) -> None:
        check_fields(self)
        for key, value in self.parameters.items():
            if not _is_short(key) or len(self.parameters) > MAX_PARAMETERS:
                raise unknown_key(self.section, key[:MAX_WORD], list(MERGE_KEYS))
            if not (isinstance(value, bool) or real().accepts(value) or _is_short(value)):
                fix = f"write a number or a word in quotes, or remove {key}{closest(key, MERGE_KEYS)}"
                raise Refused(self.section, key, value, "is not a finite number or a short word", fix)

    def to_dict(self) -> dict[str, Any]:
        """The section as it stands in a file; settings that are absent stay absent."""
        others = {key: getattr(self, key) for key in MERGE_KEYS if key != "method"}
        return {
            "method": self.method,
            **self.parameters,
            **{key: value for key, value in others.items() if value not in (None, {})},
        }


def merge_table(table: object) -> object:
    """Put the keys of a `[merge]` table that are about its method into a table of their own.

    >>> merge_table({"method": "ties", "density": 0.3})
    {'method': 'ties', 'parameters': {'density': 0.3}}
    """
    if not isinstance(table, Mapping):
        return table
    parameters = {key: value for key, value in table.items() if key not in MERGE_KEYS}
    return {key: value for key, value in table.items() if key in MERGE_KEYS} | {"parameters": parameters}


def _is_short(text: object) -> bool:
    return isinstance(text, str) and 0 < len(text) <= MAX_WORD and text.isprintable()


@dataclass(frozen=True, kw_only=True)
class PartySettings:
    """`[[party]]`: one organisation: a task of the registry or its own file, its ε, and what it does differently."""

    section: ClassVar[str] = "party"
    name: str = field(metadata=_meta(words(PARTY_NAME.pattern), "Names its folder and its rows.", "library"))
    task: str | None = field(
        default=None, metadata=_meta(words(), "A task of the registry; or else give data.", "trec6")
    )
    data: str | None = field(
        default=None,
        metadata=_meta(DATA_PATH, "Own CSV, JSONL or data-set folder; relative to this file.", "reviews.csv"),
    )
    text: str | None = field(default=None, metadata=_meta(words(), 'Column of the text; "text" if not given.', "body"))
    label: str | None = field(
        default=None, metadata=_meta(words(), 'Column of the label; "label" if not given.', "stars")
    )
    user: str | None = field(
        default=None,
        metadata=_meta(words(), 'Column that tells whose record it is; needed for unit = "user".', "author"),
    )
    labels: Mapping[str, str] | None = field(
        default=None, metadata=_meta(LABELS, "Each label as it stands in the file, and its description in words.")
    )
    test: str | None = field(
        default=None, metadata=_meta(DATA_PATH, "Public test data with the same columns.", "public.csv")
    )
    population: int | None = field(
        default=None,
        metadata=_meta(POPULATION, "Declared public number of records, or of users with unit = user.", 3000),
    )
    epsilon: float | None = field(default=None, metadata=_meta(EPSILON, "This party's target ε.", 3.0))
    private: bool | None = field(default=None, metadata=_meta(FLAG, "This party's choice.", True))
    training: Mapping[str, Any] = field(
        default_factory=dict, metadata=_meta(TABLE, "Keys of [training] that this party sets for itself.")
    )
    privacy: Mapping[str, Any] = field(
        default_factory=dict, metadata=_meta(TABLE, "Keys of [privacy] that this party sets for itself.")
    )

    def __post_init__(self) -> None:
        check_fields(self)
        check_overrides(self, "training", TrainingSettings)
        check_overrides(self, "privacy", PrivacySettings)
        _check_source(self)
        for key in ("epsilon", "private", "population"):
            if getattr(self, key) is not None and key in self.privacy:
                fix = "keep one of the two"
                raise Refused(self.section, key, getattr(self, key), "is stated in [party.privacy] as well", fix)
        private, epsilon = self.stated("private"), self.stated("epsilon")
        _check_private(self.section, private is not False, epsilon)

    def stated(self, key: str) -> object:
        """What this party itself says about `private`, `epsilon` or `population`; None if nothing."""
        own: object = getattr(self, key)
        return self.privacy.get(key) if own is None else own


def _check_private(section: str, private: bool, epsilon: object) -> None:
    if not private and epsilon is not None:
        fix = "keep epsilon to train privately, or private = false to train without privacy"
        raise Refused(section, "epsilon", epsilon, "contradicts private = false", fix)


def _check_source(party: PartySettings) -> None:
    """One source each: a task, or a file with everything about it declared."""
    if (party.task is None) == (party.data is None):
        complaint = "is missing, and so is data" if party.task is None else "is stated beside data"
        fix = 'give a task of the registry, for example task = "trec6", or a file, for example data = "reviews.csv"'
        raise Refused(party.section, "task", party.task, complaint, fix)
    if party.task is None:
        if party.labels is None:
            fix = LABELS.remedy
            raise Refused(
                party.section, "labels", None, "is missing: the labels of own data are declared and public", fix
            )
        return
    for key in ("text", "label", "user", "labels", "test"):
        if getattr(party, key) is not None:
            raise Refused(
                party.section, key, getattr(party, key), "belongs to own data, not to a task", f"remove {key}"
            )
