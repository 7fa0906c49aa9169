"""`[merge]` of a federation file is what the registry says: its keys, ranges, refusals, schema and template."""

import json
import tomllib
from dataclasses import replace
from typing import Any

import pytest

from dpmerge.common.config.federation import Federation, parse_federation
from dpmerge.common.config.sections import MergeSettings
from dpmerge.common.config.template import json_schema, template
from dpmerge.common.errors import DpmergeError
from dpmerge.server.merging.methods.recipe import REQUIRED
from dpmerge.server.merging.registry import METHODS, parameters_of
from dpmerge.server.merging.spec.federation import (
    checked,
    merge_lines,
    merge_schema,
    offered,
    spec_of_settings,
)

START = """
[base]
model = "minilm-l6"
[privacy]
epsilon = 3.0
[[party]]
name = "cinema"
task = "movie"
[merge]
"""


def federation(section: str) -> Federation:
    return checked(parse_federation(START + section, "f.toml"), "f.toml")


REFUSALS = {
    "unknown method": ('method = "tie"', "DPM-104", "(closest: ties)"),
    "method of public texts": (
        'method = "regmean"',
        "DPM-104",
        "merge.method = 'regmean' in f.toml is not a known name",
    ),
    "unknown key": ("densty = 0.2", "DPM-102", "(closest: density)"),
    "wrapper with a typo": ("cor = true", "DPM-102", "(closest: core)"),
    "parameter of no offered method": ("off_diagonal = 0.2", "DPM-102", "is not a known key"),
    "no coefficient": ('method = "task-arithmetic"', "DPM-103", "has no default for task-arithmetic"),
    "stray density": (
        "density = 0.2",
        "DPM-103",
        "merge.density = 0.2 in f.toml is no parameter of geometry; remove it",
    ),
    "stray semantics": ('semantics = "peft"', "DPM-103", "is no parameter of geometry"),
    "unknown semantics": ('method = "ties"\nsemantics = "pef"', "DPM-103", "(closest: peft)"),
    "density 0": ('method = "ties"\ndensity = 0', "DPM-103", "merge.density = 0 in f.toml is outside (0, 1]"),
    "density 2": ('method = "ties"\ndensity = 2', "DPM-103", "state density, for example 0.2"),
    "density in quotes": ('method = "ties"\ndensity = "0.2"', "DPM-103", "is not a number"),
    "density true": ('method = "ties"\ndensity = true', "DPM-103", "is not a number"),
    "outliers 1": ('method = "breadcrumbs"\noutliers = 1', "DPM-103", "is outside [0, 1)"),
    "ridge below 0": ('method = "wudi"\nridge = -1', "DPM-103", "is below 0 or not finite"),
    "coefficient 0": ("coefficient = 0.0", "DPM-103", "merge.coefficient = 0.0 in f.toml is not above 0"),
    "coefficient 1e300": ("coefficient = 1e300", "DPM-103", "not finite in fp32"),
    "rank 0": ("rank = 0", "DPM-103", "merge.rank = 0 in f.toml is not a positive integer"),
    "rank 2.5": ("rank = 2.5", "DPM-103", "is not a positive integer"),
    "robust": ('robust = "median"', "DPM-103", "choose clip, or one of average, task-arithmetic, concat"),
}


@pytest.mark.parametrize(("section", "code", "words"), REFUSALS.values(), ids=REFUSALS)
def test_a_bad_section_is_refused_in_one_line_that_says_why(section: str, code: str, words: str) -> None:
    with pytest.raises(DpmergeError) as refusal:
        federation(section)
    message = str(refusal.value)
    assert refusal.value.code == code
    assert words in message
    assert "f.toml" in message
    assert "\n" not in message


def test_a_checked_section_is_written_as_it_always_was() -> None:
    found = federation('method = "della"\nrank = 4\nspread = 1\ndensity = 0.5\ncore = true')
    expected = {
        "method": "della",
        "density": 0.5,
        "spread": 1.0,
        "semantics": "paper",
        "rank": 4,
        "core": True,
        "denoise": False,
    }
    assert json.dumps(found.to_dict()["merge"]) == json.dumps(expected)
    plain = json.dumps(federation("").to_dict()["merge"])
    assert plain == '{"method": "geometry", "semantics": "paper", "core": false, "denoise": false}'
    assert checked(found) == found


def test_what_was_not_said_is_the_methods_default() -> None:
    spec = spec_of_settings(federation('method = "ties"\nrobust = "clip"').merge, seed=5)
    assert spec.parameters == {"semantics": "paper"}
    assert (spec.method, spec.wrappers.robust, spec.seed) == ("ties", "clip", 5)


def test_a_file_may_name_every_method_that_needs_no_public_texts() -> None:
    assert {name for name in METHODS if name not in offered()} == {"regmean", "fisher"}
    for name, method in offered().items():
        needed = {key: 0.5 for key, value in method.parameters.items() if value == REQUIRED}
        settings = MergeSettings(method=name, parameters=needed)
        assert checked(replace(federation(""), merge=settings)).merge.method == name


@pytest.mark.parametrize("parameter", list(parameters_of(METHODS).values()), ids=lambda each: each.name)
def test_every_parameter_and_default_is_in_its_own_range(parameter: Any) -> None:
    assert parameter.about.endswith(".")
    assert parameter.read(parameter.example, in_file=True) == parameter.example
    for method in METHODS.values():
        default = method.takes.get(parameter)
        assert default in (None, REQUIRED) or parameter.read(default, in_file=True) == default


def test_the_template_has_a_line_for_every_parameter_and_is_a_valid_file() -> None:
    text = template(merge_lines())
    assert checked(parse_federation(text, "template")).merge == federation("").merge
    section = text.partition("[merge]")[2].partition("[[party]]")[0]
    for name, parameter in parameters_of(offered()).items():
        assert f"{name} = " in section
        assert parameter.about in section


def test_the_schema_and_the_check_agree() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json_schema(merge_schema())
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    assert list(validator.iter_errors(tomllib.loads(template(merge_lines())))) == []
    of_the_method = ("no coefficient", "stray density", "stray semantics", "robust", "coefficient 1e300")
    for name, (section, _, _) in REFUSALS.items():
        found = list(validator.iter_errors(tomllib.loads(START + section)))
        assert bool(found) != (name in of_the_method), name


def test_two_methods_cannot_mean_two_things_by_one_name() -> None:
    wudi, iso = METHODS["wudi"], METHODS["iso-cts"]
    (ridge,) = (each for each in wudi.takes if each.name == "ridge")
    other = replace(iso, takes={replace(ridge, about="Something else."): 0.0})
    with pytest.raises(ValueError, match=r"'ridge'.*iso-cts declares another"):
        parameters_of({"wudi": wudi, "iso-cts": other})
