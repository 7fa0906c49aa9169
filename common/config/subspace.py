"""`[training] subspace`: how many directions of the adapter are trained, and which public data they come from."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, get_args

from dpmerge.common.config.rules import DATA_PATH, Refused, Rule, check_fields, choice, nested, whole, words

Allocation = Literal["uniform", "public", "history"]
Clip = Literal["fixed", "public", "quantile"]

RANDOM = "none"
"""In place of a public source: directions from the shared public seed."""

AUTO: Literal["auto"] = "auto"
"""In place of k: as many directions as the sizing rule (`common/privacy/sizing.py`) chooses."""

_DIRECTIONS = whole(1, 2**20)
_DIRECTIONS_OR_AUTO = Rule(
    lambda v: v == AUTO or _DIRECTIONS.accepts(v),
    f'{_DIRECTIONS.constraint}, or "{AUTO}"',
    {"anyOf": [_DIRECTIONS.schema, {"const": AUTO}]},
)


def _meta(rule: Rule, about: str, example: object = None) -> Mapping[str, object]:
    return {"rule": rule, "about": about, "example": example}


@dataclass(frozen=True, kw_only=True)
class SubspaceSettings:
    """The table `subspace` of `[training]`; without it all coordinates are trained.

    >>> SubspaceSettings(k=64, public="mail").refresh_every_steps
    0
    """

    section: ClassVar[str] = "training.subspace"
    k: int | Literal["auto"] = field(
        metadata=_meta(
            _DIRECTIONS_OR_AUTO, 'Trained, and noised, coordinates; "auto" is as many as public texts advise.', 256
        )
    )
    public: str = field(
        metadata=_meta(
            DATA_PATH,
            'Public texts: a task of the registry that no party has, a file, or "none" for random directions.',
            "sms",
        )
    )
    text: str = field(default="text", metadata=_meta(words(), "Column of the text in a public file with columns."))
    num_public: int = field(default=1000, metadata=_meta(whole(1, 2**20), "Public texts used, at most."))
    refresh_every_steps: int = field(
        default=0, metadata=_meta(whole(0), "Steps between new directions, at the iterate reached; 0 keeps the first.")
    )
    allocation: Allocation = field(
        default="uniform",
        metadata=_meta(
            choice(*get_args(Allocation)), "How noise is spread over directions; history is of privatised gradients."
        ),
    )
    clip: Clip = field(
        default="fixed",
        metadata=_meta(
            choice(*get_args(Clip)),
            "privacy.l2_clip_norm, or the median norm of projected gradients: of public ones, or of private ones, by a "
            "noisy query more.",
        ),
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.public == RANDOM:
            if self.k == AUTO:
                complaint = 'is chosen by gradients of public texts, and public is "none"'
                raise Refused(self.section, "k", self.k, complaint, "name public texts, or state k")
            for key, value in (("allocation", self.allocation), ("clip", self.clip)):
                if value == "public":
                    fix = f"name public texts, or another {key}"
                    raise Refused(self.section, key, value, 'needs public texts, and public is "none"', fix)
        elif isinstance(self.k, int) and self.k > self.num_public:
            complaint = f"is more directions than num_public = {self.num_public} public texts can span"
            raise Refused(self.section, "k", self.k, complaint, "lower k, or raise num_public")
        if self.allocation == "history" and self.refresh_every_steps == 0:
            fix = "state refresh_every_steps, at which the history of privatised gradients is looked at"
            raise Refused(self.section, "allocation", "history", "needs a schedule", fix)


_TABLE = nested(SubspaceSettings)
SUBSPACE_OR_FALSE = replace(
    _TABLE,
    accepts=lambda v: v is False or _TABLE.accepts(v),
    constraint="a table, or false",
    schema={"anyOf": [_TABLE.schema, {"const": False}]},
    convert=lambda v: v and _TABLE.convert(v),
)
"""False is how a party leaves the federation's subspace and trains all coordinates: TOML has no word for nothing."""
