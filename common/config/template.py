"""A first federation file and its JSON Schema, both written from the sections, so that they cannot fall behind.

>>> from dpmerge.common.config.federation import parse_federation
>>> [party.name for party in parse_federation(TEMPLATE, "template").parties]
['library', 'cinema']
"""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from itertools import chain
from typing import Any

from dpmerge.common.config.federation import SECTIONS
from dpmerge.common.config.rules import show
from dpmerge.common.config.sections import MergeSettings, PartySettings, PrivacySettings, TrainingSettings

_PARTIES = """\
# One [[party]] per organisation.
[[party]]
name = "library"                          # names its folder and its rows
task = "trec6"                            # a task of the registry: see `dpmerge assets list`
epsilon = 1.0                             # its own privacy budget

[[party]]
name = "cinema"
task = "movie"
epsilon = 2.0
[party.training]                          # any key of [training], for this party only
learning_rate = 0.002

# An organisation with its own data instead of a task:
# [[party]]
# name = "shop"
# data = "reviews.csv"                    # CSV, JSONL or a data-set folder; relative to this file
# text = "body"                           # column of the text
# label = "stars"                         # column of the label
# user = "author"                         # column that tells whose record it is; only with unit = "user"
# labels = { "1" = "a bad product", "5" = "a great product" }   # declared, public; others are left out
# population = 3000                       # declared, public, rounded; counts the unit; never read off the file
# test = "public_reviews.csv"             # public test data with the same columns; without it no accuracy
# epsilon = 3.0
# private = false                         # instead of epsilon: no privacy, marked in every output
"""


def setting_line(name: str, value: object, about: str, *, optional: bool) -> str:
    """`name = value  # what it is for`; commented out where it is optional."""
    setting = f"{'# ' if optional else ''}{name} = {show(value)}"
    return f"{setting:<41} # {about}"


def _line(key: Field[Any]) -> str:
    optional = key.default is None
    value = key.metadata["example"] if optional or key.default is MISSING else key.default
    return setting_line(key.name, value, key.metadata["about"], optional=optional)


def template(merge_lines: Sequence[str] = ()) -> str:
    """A first federation file.

    Args:
        merge_lines: Of `setting_line`, one for each parameter that a merge method takes: the server knows them.
    """
    head = "# A federation: organisations that train privately and merge once. Check it with `dpmerge config validate`."
    tables = []
    for name, cls in SECTIONS.items():
        lines = [[_line(key)] if key.name != "parameters" else merge_lines for key in fields(cls)]
        tables.append("\n".join([f"[{name}]", *chain.from_iterable(lines)]))
    return "\n\n".join([head, *tables, _PARTIES])


TEMPLATE = template()


def json_schema(merge: Mapping[str, object] | None = None) -> dict[str, object]:
    """JSON Schema (draft 2020-12) of a federation file, for editors that check TOML against one.

    Args:
        merge: Properties of `[merge]` that the server knows: the methods' names, and the parameters that they take.
            Without them, any number or word is allowed there.

    >>> json_schema()["properties"]["lora"]["properties"]["rank"]["default"]
    8
    """
    overrides = {"training": _table(TrainingSettings, partial=True), "privacy": _table(PrivacySettings, partial=True)}
    party = _table(PartySettings)
    party["properties"] |= overrides
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "dpmerge federation",
        "type": "object",
        "properties": {
            **{name: _table(cls) for name, cls in SECTIONS.items() if cls is not MergeSettings},
            "merge": _merge_table(merge),
            "party": {"type": "array", "minItems": 1, "items": party},
        },
        "required": ["base", "party"],
        "additionalProperties": False,
    }


def _merge_table(known: Mapping[str, object] | None) -> dict[str, Any]:
    table = _table(MergeSettings)
    del table["properties"]["parameters"]
    if known is None:
        return table | {"additionalProperties": {"type": ["number", "string", "boolean"]}}
    return table | {"properties": table["properties"] | known}


def _table(cls: type[Any], *, partial: bool = False) -> dict[str, Any]:
    """The schema of one section; a `partial` one requires nothing and inherits what it leaves out."""
    required = [key.name for key in fields(cls) if key.default is MISSING and key.default_factory is MISSING]
    table: dict[str, Any] = {
        "type": "object",
        "description": (cls.__doc__ or "").partition("\n")[0],
        "properties": {key.name: _property(key, with_default=not partial) for key in fields(cls)},
        "additionalProperties": False,
    }
    return table if partial or not required else table | {"required": required}


def _property(key: Field[Any], *, with_default: bool) -> dict[str, object]:
    rule: Mapping[str, object] = key.metadata["rule"].schema
    described = {**rule, "description": key.metadata["about"]}
    stated = with_default and key.default is not MISSING and key.default is not None
    return {**described, "default": key.default} if stated else described
