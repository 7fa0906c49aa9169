"""A first federation file and its JSON Schema, both written from the sections, so that they cannot fall behind.

>>> from dpmerge.common.config.federation import parse_federation
>>> [party.name for party in parse_federation(TEMPLATE, "template").parties]
['library', 'cinema']
"""

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any

from dpmerge.common.config.federation import SECTIONS
from dpmerge.common.config.rules import show
from dpmerge.common.config.sections import PartySettings, PrivacySettings, TrainingSettings

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


def _line(key: Field[Any]) -> str:
    """`key = value  # what it is for`; commented out where there is no default."""
    optional = key.default is None
    value = key.metadata["example"] if optional or key.default is MISSING else key.default
    setting = f"{'# ' if optional else ''}{key.name} = {show(value)}"
    return f"{setting:<41} # {key.metadata['about']}"


def _template() -> str:
    head = "# A federation: organisations that train privately and merge once. Check it with `dpmerge config validate`."
    tables = ["\n".join([f"[{name}]", *map(_line, fields(cls))]) for name, cls in SECTIONS.items()]
    return "\n\n".join([head, *tables, _PARTIES])


TEMPLATE = _template()


def json_schema() -> dict[str, object]:
    """JSON Schema (draft 2020-12) of a federation file, for editors that check TOML against one.

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
            **{name: _table(cls) for name, cls in SECTIONS.items()},
            "party": {"type": "array", "minItems": 1, "items": party},
        },
        "required": ["base", "party"],
        "additionalProperties": False,
    }


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
