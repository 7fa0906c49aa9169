"""`dpmerge report`: the page of a finished run, made again from its stored results."""

from pathlib import Path
from typing import Annotated

import typer

from dpmerge.cli.terminal import Format, FormatOption, answer

app = typer.Typer(add_completion=False)


@app.command(epilog="Example: dpmerge report runs/demo")
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a finished run.")],
    output: FormatOption = Format.text,
) -> None:
    """Rebuild report.html from the stored results."""
    from dpmerge.simulations.reporting.report import write_report

    path = write_report(folder)
    answer(output, {"report": str(path)}, str(path))
