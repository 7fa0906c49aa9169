"""The tables of docs/merging.md are what the registry says."""

from pathlib import Path

from dpmerge.server.merging.methods.parameter import Parameter
from dpmerge.server.merging.methods.recipe import REQUIRED, MergeMethod
from dpmerge.server.merging.registry import METHODS, parameters_of

PAGE = Path(__file__).parents[4] / "docs" / "merging.md"


def method_row(method: MergeMethod) -> str:
    source = "–" if method.source == "-" else f"[{method.source}](https://arxiv.org/abs/{method.source})"
    words = {None: "", REQUIRED: " (required)"}
    takes = [f"`{key}`" + words.get(value, f" = {value}") for key, value in method.parameters.items()]
    takes += ["`--public` texts"] * bool(method.statistics)
    return f"| `{method.name}` | {method.summary} | {source} | {', '.join(takes)} |"


def parameter_row(parameter: Parameter) -> str:
    schema = parameter.schema
    low = f"above {schema['exclusiveMinimum']:g}" if "exclusiveMinimum" in schema else ""
    low = f"at least {schema['minimum']:g}" if "minimum" in schema else low
    high = f"below {schema['exclusiveMaximum']:g}" if "exclusiveMaximum" in schema else ""
    high = f"at most {schema['maximum']:g}" if "maximum" in schema and parameter.kind is float else high
    allowed = ", ".join(map(str, parameter.options)) or ", ".join(filter(None, (low, high)))
    return f"| `{parameter.name}` | {parameter.about} | {allowed} |"


def tables() -> str:
    methods = ["| method | what it does | arXiv | takes |", "|---|---|---|---|", *map(method_row, METHODS.values())]
    head = ["| parameter | what it is for | in a federation file |", "|---|---|---|"]
    return "\n".join([*methods, "", *head, *map(parameter_row, parameters_of(METHODS).values())])


def test_the_page_has_every_method_and_every_parameter() -> None:
    assert tables() in PAGE.read_text(encoding="utf-8"), f"replace the tables under 'The methods' by:\n{tables()}"
