"""`dpmerge assets`: the embedded models and public tasks, what they are and getting them."""

from typing import Annotated

import typer
from rich.table import Table

from dpmerge.cli.terminal import Format, FormatOption, answer, console, print_json
from dpmerge.simulations.progress import Progress

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Embedded models and public tasks, pinned by SHA-256."
)


@app.command("fetch", epilog="Example: dpmerge assets fetch minilm-l6 trec6 movie")
def fetch(
    names: Annotated[list[str], typer.Argument(metavar="NAME…", help="Assets, models or tasks.")],
    output: FormatOption = Format.text,
) -> None:
    """Download, verify and unpack assets; nothing but this and a base model named by hub id needs the network."""
    from dpmerge.common.data.assets import fetch

    with Progress("silent" if output is Format.json else None) as progress:
        folders = {name: str(folder) for name, folder in fetch(names, progress.note).items()}
    answer(output, {"assets": folders}, "\n".join(f"{name}: {folder}" for name, folder in folders.items()))


@app.command("list", epilog="Example: dpmerge assets list --format json")
def list_assets(output: FormatOption = Format.text) -> None:
    """Show what can be fetched, what is there, and under which licence."""
    from dpmerge.common.data.assets import listing

    rows = listing()
    if output is Format.json:
        print_json({"schema": 1, "assets": rows})
        return
    table = Table("name", "kind", "present", "MB", "tasks", "licence")
    for row in rows:
        present, size = "yes" if row["present"] else "no", f"{row['size_bytes'] / 1e6:.0f}"
        table.add_row(row["name"], row["kind"], present, size, ", ".join(row["tasks"]), row["licence"])
    console().print(table)
