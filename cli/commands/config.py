"""`dpmerge config`: write, check and describe federation files."""

from pathlib import Path
from typing import Annotated

import typer

from dpmerge.cli.terminal import Format, FormatOption, answer, print_json
from dpmerge.common.config.federation import load_federation
from dpmerge.common.config.template import json_schema, template
from dpmerge.common.errors import DpmergeError
from dpmerge.server.merging.spec.federation import checked, merge_lines, merge_schema

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Write, check and describe federation files.")


@app.command("init", epilog="Example: dpmerge config init federation.toml")
def init(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The file to write.")] = Path("federation.toml"),
    output: FormatOption = Format.text,
) -> None:
    """Write a first federation file with every setting, its default and what it is for."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(template(merge_lines()))
    except OSError as problem:
        raise DpmergeError("DPM-301", f"{path} cannot be written: {problem.strerror}", "give another PATH") from None
    answer(output, {"path": str(path)}, f"wrote {path}; run it with `dpmerge simulate {path} --out runs/first`")


@app.command("validate", epilog="Example: dpmerge config validate federation.toml")
def validate(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="A federation file.")],
    output: FormatOption = Format.text,
) -> None:
    """Check a federation file without running anything; exit code 2 and one line if it is refused."""
    federation = checked(load_federation(path), str(path))
    parties = [party.name for party in federation.parties]
    answer(output, {"valid": True, "federation": federation.to_dict()}, f"{path} is valid: {', '.join(parties)}")


@app.command("schema", epilog="Example: dpmerge config schema > federation.schema.json")
def schema() -> None:
    """Print the JSON Schema of federation files, for editors."""
    print_json(json_schema(merge_schema()))
