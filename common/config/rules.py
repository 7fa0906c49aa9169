"""What a configuration value may be, said once: the check, the words of the refusal and the JSON Schema fragment."""

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, TypeVar

from dpmerge.common.data.data_path import SPLIT_MARK, is_data_path
from dpmerge.common.errors import DpmergeError, closest

S = TypeVar("S")

MAX_INTEGER = 2**53 - 1  # the largest whole number that canonical JSON (RFC 8785) keeps exact

PARTY_NAME = re.compile(r"(?!(?:con|prn|aux|nul|com[0-9]|lpt[0-9])$)[a-z0-9][a-z0-9_-]{0,62}")
"""What a party may be called: a configuration accepts no name that a release would refuse.

The names left out are devices wherever Windows looks at a file name, with any ending; folders and files are named after
parties.
"""


class Refused(DpmergeError):
    """A refusal of one key, which the reader of a file can restate with the full path and the file's name.

    Args:
        section: Path of the table that holds the key; empty at the top of the file.
        key: The key, relative to `section`.
        value: The value, or None when there is none to show.
        complaint: A clause after "key = value", such as "is not a whole number".
        fix: What to do.
        code: The error's code.
        where: The file, as it may be shown.
    """

    def __init__(
        self, section: str, key: str, value: object, complaint: str, fix: str, *, code: str = "DPM-103", where: str = ""
    ) -> None:
        path = f"{section}.{key}" if section else key
        shown = path if value is None else f"{path} = {show(value)}"
        super().__init__(code, f"{shown}{f' in {where}' if where else ''} {complaint}", fix)
        self.section, self.key, self.value, self.complaint = section, key, value, complaint

    def at(self, section: str, where: str = "") -> "Refused":
        """The same refusal, placed in `section` of the file `where`."""
        return Refused(section, self.key, self.value, self.complaint, self.fix, code=self.code, where=where)


def show(value: object) -> str:
    """A value as one short line, close to how TOML writes it.

    >>> show(True), show("movie"), show({"k": 2})
    ('true', '"movie"', '{ k = 2 }')
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {show(item)}" for key, item in value.items()) + " }"
    line = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else " ".join(repr(value).split())
    return line if len(line) <= 80 else f"{line[:77]}…"


@dataclass(frozen=True)
class Rule:
    """One kind of value: `accepts` decides, `convert` normalises, the rest explains."""

    accepts: Callable[[Any], bool]
    constraint: str
    schema: Mapping[str, object]
    convert: Callable[[Any], object] = lambda value: value
    remedy: str = ""
    options: tuple[str, ...] = ()
    code: str = "DPM-103"

    def read(self, section: str, key: str, value: object, example: object) -> object:
        """The normalised value.

        Raises:
            Refused: If the rule does not accept the value.
        """
        if self.accepts(value):
            try:
                return self.convert(value)
            except Refused as inner:  # a table within the table
                path = f"{key}.{inner.key}"
                raise Refused(section, path, inner.value, inner.complaint, inner.fix, code=inner.code) from None
        fix = self.remedy or f"write, for example, {key.rpartition('.')[2]} = {show(example)}"
        if self.options:
            fix = f"choose one of {', '.join(self.options)}{closest(str(value), self.options)}"
        raise Refused(section, key, value, f"is not {self.constraint}", fix, code=self.code)


def whole(low: int, high: int = MAX_INTEGER, *, remedy: str = "") -> Rule:
    """A whole number in [low, high]; true and false are not numbers."""
    constraint = f"a whole number of at least {low}" + (f" and at most {high}" if high != MAX_INTEGER else "")
    schema = {"type": "integer", "minimum": low, "maximum": high}
    return Rule(lambda v: type(v) is int and low <= v <= high, constraint, schema, remedy=remedy)


def real(
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    remedy: str = "",
) -> Rule:
    """A finite number within the stated bounds."""
    bounds = {"above": above, "at least": at_least, "below": below, "at most": at_most}
    phrase = " and ".join(f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None)
    names = ("exclusiveMinimum", "minimum", "exclusiveMaximum", "maximum")
    limits = {name: bound for name, bound in zip(names, bounds.values(), strict=True) if bound is not None}

    def accepts(value: object) -> bool:
        return (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and abs(value) <= sys.float_info.max  # neither infinite nor NaN, nor a whole number beyond any float
            and (above is None or value > above)
            and (at_least is None or value >= at_least)
            and (below is None or value < below)
            and (at_most is None or value <= at_most)
        )

    return Rule(accepts, f"a finite number {phrase}".strip(), {"type": "number", **limits}, float, remedy)


def words(pattern: str = "") -> Rule:
    """A string that is not blank; with `pattern`, one that matches it as a whole."""
    if not pattern:
        return Rule(
            lambda v: isinstance(v, str) and bool(v.strip()) and "\0" not in v,
            "a text",
            {"type": "string", "minLength": 1},
        )
    matches = re.compile(pattern)
    constraint = f"a short name of lower-case letters, digits, _ and - ({pattern})"
    schema = {"type": "string", "pattern": f"^{pattern}$"}
    return Rule(lambda v: isinstance(v, str) and matches.fullmatch(v) is not None, constraint, schema)


def choice(*options: str, code: str = "DPM-103") -> Rule:
    """One of the named options."""
    return Rule(
        lambda v: isinstance(v, str) and v in options,
        "a known name" if code == "DPM-104" else "one of the options",
        {"enum": list(options)},
        options=options,
        code=code,
    )


def _is_layers(value: object) -> bool:
    if isinstance(value, str):
        return value == "all" or re.fullmatch(r"last:[1-9][0-9]{0,3}", value) is not None
    return _is_list(value, lambda item: type(item) is int and item >= 0)


def _is_list(value: object, accepts: Callable[[object], bool]) -> bool:
    """Whether `value` is a list without repeats, not empty, of items that `accepts` takes."""
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and all(accepts(item) for item in value)
        and len(set(value)) == len(value)
    )


def _listed(value: str | list[object]) -> object:
    return value if isinstance(value, str) else tuple(value)


def _is_labels(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and len(value) >= 2
        and all(isinstance(item, str) and item.strip() for pair in value.items() for item in pair)
    )


def _array_or(word: str, items: Mapping[str, object]) -> dict[str, object]:
    array = {"type": "array", "items": dict(items), "minItems": 1, "uniqueItems": True}
    return {"anyOf": [{"type": "string", "pattern": word}, array]}


FLAG = Rule(
    lambda v: isinstance(v, bool), "true or false", {"type": "boolean"}, remedy="write true or false, without quotes"
)
LAYERS = Rule(
    _is_layers,
    '"all", "last:K" or a list of layer indices from 0',
    _array_or("^(all|last:[1-9][0-9]{0,3})$", {"type": "integer", "minimum": 0}),
    _listed,
)
TARGETS = Rule(
    lambda v: v == "all-linear" or _is_list(v, lambda item: isinstance(item, str) and bool(item.strip())),
    '"all-linear" or a list of module names',
    _array_or("^all-linear$", {"type": "string", "minLength": 1}),
    _listed,
)
LABELS = Rule(
    _is_labels,
    "a table of at least two labels with a description each",
    {"type": "object", "minProperties": 2, "additionalProperties": {"type": "string", "minLength": 1}},
    dict,
    'write, for example, labels = { "1" = "a bad product", "5" = "a great product" }',
)
_TEXT = words()
DATA_PATH = replace(
    _TEXT,
    accepts=lambda v: _TEXT.accepts(v) and is_data_path(v),
    constraint=f"a path with at most one {SPLIT_MARK}, which names a split of the folder before it",
)
TABLE = Rule(lambda v: isinstance(v, Mapping), "a table", {"type": "object"}, dict, "write it as a table of its own")


def check_fields(settings: Any) -> None:
    """Check and normalise every field of a settings object in place, from its `__post_init__`.

    Raises:
        Refused: At the first value that its rule does not accept.
    """
    for key in fields(settings):
        value = getattr(settings, key.name)
        if value is None and key.default is None:
            continue
        object.__setattr__(settings, key.name, read_field(settings.section, key, value, key.name))


def read_field(section: str, key: Any, value: object, path: str) -> object:
    """The normalised value of the dataclass field `key`, which errors call `path`."""
    example = key.metadata["example"]
    example = key.default if example is None and key.default is not MISSING else example
    rule: Rule = key.metadata["rule"]
    return rule.read(section, path, value, example)


def check_overrides(settings: Any, name: str, cls: type[Any]) -> None:
    """Check the table `name` of a party, which holds some keys of the section `cls`, and normalise it in place.

    Raises:
        Refused: At an unknown key (DPM-102) or a value that its rule does not accept.
    """
    known = {key.name: key for key in fields(cls)}
    table = getattr(settings, name)
    checked = {}
    for key, value in table.items():
        if key not in known:
            raise unknown_key(settings.section, f"{name}.{key}", list(known))
        checked[key] = read_field(settings.section, known[key], value, f"{name}.{key}")
    object.__setattr__(settings, name, checked)


def unknown_key(section: str, key: str, valid: list[str]) -> Refused:
    """The refusal of a key that no setting has."""
    fix = f"use one of {', '.join(sorted(valid))}{closest(key.rpartition('.')[2], valid)}"
    return Refused(section, key, None, "is not a known key", fix, code="DPM-102")


def nested(cls: type[Any]) -> Rule:
    """A table within a table, or the settings object that was made of one."""
    properties = {
        key.name: {
            **key.metadata["rule"].schema,
            "description": key.metadata["about"],
            **({} if key.default is MISSING else {"default": key.default}),
        }
        for key in fields(cls)
    }
    required = [key.name for key in fields(cls) if key.default is MISSING]
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return Rule(
        lambda v: isinstance(v, Mapping | cls),
        "a table",
        schema,
        lambda v: v if isinstance(v, cls) else build(cls, v, ""),
    )


def build(cls: type[S], table: object, section: str) -> S:
    """A settings object from a TOML table, refusing unknown and missing keys by their full path."""
    if not isinstance(table, Mapping):
        raise Refused("", section, table, "is not a table", f"write [{section}] and its keys below")
    known = {key.name: key for key in fields(cls)}  # type: ignore[arg-type]  # every caller passes a dataclass
    for key in table:
        if key not in known:
            raise unknown_key(section, key, list(known))
    for name, key in known.items():
        if name not in table and key.default is MISSING and key.default_factory is MISSING:
            fix = f"add it, for example {name} = {show(key.metadata.get('example') or '…')}"
            raise Refused(section, name, None, "is missing", fix)
    try:
        return cls(**table)
    except Refused as refusal:
        raise refusal.at(section) from None
