"""What a merge method takes: a parameter's name, range and meaning, stated once, and those that several methods share.

From these are made the check of ranges, the keys of `[merge]` in a federation file with their JSON Schema and template,
the options of `dpmerge merge`, `--list` and the table in docs/merging.md. A method's own parameter stands beside its
function.
"""

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from dpmerge.common.errors import DpmergeError, closest
from dpmerge.server.merging.adapters.deltas import LARGEST

T = TypeVar("T", float, int, str)
Value = float | int | str


class ParameterRefused(DpmergeError):
    """A refusal of one parameter, which whoever read it from a file can restate with the file's name."""

    def __init__(
        self, key: str, value: object, complaint: str, fix: str, *, where: str = "", code: str = "DPM-103"
    ) -> None:
        """State the refusal.

        Args:
            key: The parameter, or another key of `[merge]`.
            value: What was given.
            complaint: A clause after "key = value", such as "is outside (0, 1]".
            fix: What to do.
            where: The file, as it may be shown.
            code: The error's code.
        """
        place = f" in {where}" if where else ""
        super().__init__(code, f"merge.{key} = {value!r}{place} {complaint}", fix)
        self.key, self.value, self.complaint = key, value, complaint

    def at(self, where: str) -> "ParameterRefused":
        """Return the same refusal, placed in the file `where`."""
        return ParameterRefused(self.key, self.value, self.complaint, self.fix, where=where, code=self.code)


@dataclass(frozen=True, kw_only=True)
class Range:
    """Finite numbers between two bounds.

    Attributes:
        low: Smallest number.
        high: Largest number; `LARGEST` stands for any that fp32 holds.
        open_low: Whether `low` itself is left out.
        open_high: Whether `high` itself is left out.
    """

    low: float = -LARGEST
    high: float = LARGEST
    open_low: bool = False
    open_high: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        return above and (value < self.high if self.open_high else value <= self.high)

    @property
    def complaint(self) -> str:
        """What is wrong with a number outside."""
        if self.high < LARGEST:
            left, right = "(" if self.open_low else "[", ")" if self.open_high else "]"
            return f"is outside {left}{self.low:g}, {self.high:g}{right}"
        if self.low == -LARGEST:
            return "is not finite in fp32"
        return f"is {'not above' if self.open_low else 'below'} {self.low:g} or not finite in fp32"

    @property
    def schema(self) -> dict[str, float]:
        """The bounds as JSON Schema."""
        low, high = (
            "exclusiveMinimum" if self.open_low else "minimum",
            "exclusiveMaximum" if self.open_high else "maximum",
        )
        bounds = {low: self.low, high: self.high}
        return {name: bound for name, bound in bounds.items() if abs(bound) < LARGEST}


@dataclass(frozen=True, kw_only=True)
class Parameter(Generic[T]):
    """One value that a merge method takes. Its default is the method's: see `MergeMethod.parameters`.

    Attributes:
        name: Key of `[merge]`, keyword in Python, and, with dashes, option of `dpmerge merge`.
        kind: float, int or str.
        about: What it is for, in a sentence.
        example: A value that shows what is meant.
        range: Of a number.
        file_range: Where a federation file holds to narrower bounds than a merge by hand.
        options: Of a word, all that it may be.
        implied: What stands for nothing said: given to a method that does not take the parameter, it is no mistake.
    """

    name: str
    kind: type[T]
    about: str
    example: T
    range: Range = field(default_factory=Range)
    file_range: Range | None = None
    options: tuple[T, ...] = ()
    implied: T | None = None

    def read(self, value: Any, *, in_file: bool = False) -> T:
        """Return a value as it is used.

        Args:
            value: What was given.
            in_file: Whether a federation file gives it.

        Raises:
            ParameterRefused: DPM-103 for a value of another type, or out of range.
        """
        if self.options:
            if value not in self.options:
                words = list(map(str, self.options))
                fix = f"choose one of {', '.join(words)}{closest(str(value), words)}"
                raise ParameterRefused(self.name, value, "is unknown", fix)
            return self.kind(value)
        fix = f"state {self.name}, for example {self.example!r}"
        if isinstance(value, bool) or not isinstance(value, int if self.kind is int else int | float):
            raise ParameterRefused(self.name, value, f"is not {self._noun}", fix)
        allowed = self.file_range if in_file and self.file_range else self.range
        if value not in allowed:
            complaint = allowed.complaint if self.kind is not int else f"is not {self._noun}"
            raise ParameterRefused(self.name, value, complaint, fix)
        return self.kind(value)

    @property
    def schema(self) -> dict[str, Any]:
        """The parameter as JSON Schema of a federation file."""
        described: dict[str, Any] = {"description": self.about}
        if self.implied is not None:
            described["default"] = self.implied
        if self.options:
            return {"enum": list(self.options), **described}
        kind = "integer" if self.kind is int else "number"
        return {"type": kind, **(self.file_range or self.range).schema, **described}

    @property
    def _noun(self) -> str:
        return "a positive integer" if self.kind is int else "a number"


COEFFICIENT = Parameter(
    name="coefficient",
    kind=float,
    about="Factor on the sum.",
    example=0.5,
    file_range=Range(low=0.0, open_low=True),
)
DENSITY = Parameter(
    name="density",
    kind=float,
    about="Share of entries to keep.",
    example=0.2,
    range=Range(low=0.0, high=1.0, open_low=True),
)
SEMANTICS = Parameter(
    name="semantics",
    kind=str,
    about="Whose TIES: paper, peft or mergekit.",
    example="paper",
    options=("paper", "peft", "mergekit"),
    implied="paper",
)
RANK = Parameter(
    name="rank",
    kind=int,
    about="Rank of the result; exact if not given.",
    example=8,
    range=Range(low=1, high=2**53 - 1),  # the largest that canonical JSON keeps exact
)
