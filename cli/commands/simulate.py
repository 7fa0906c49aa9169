"""`dpmerge simulate`: the whole job on this machine, from a federation file to a report."""

import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from dpmerge.cli.terminal import INTERRUPTED, PARTY_FAILED, Format, FormatOption, console, print_json
from dpmerge.common.config.federation import load_federation
from dpmerge.common.errors import DpmergeError
from dpmerge.server.merging.spec.federation import checked
from dpmerge.simulations.output_folder import Mode, check_output
from dpmerge.simulations.progress import Progress

app = typer.Typer(add_completion=False)


@app.command(epilog="Example: dpmerge simulate examples/five-organisations.toml --out runs/demo")
def simulate(
    federation: Annotated[
        Path, typer.Argument(metavar="FEDERATION.toml", help="The organisations and their settings.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the run goes; must be empty or new.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run in DIR.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the parties that finished in DIR.")] = False,
    output: FormatOption = Format.text,
    num_cpus: Annotated[int | None, typer.Option(min=1, help="Cores to use; all of them by default.")] = None,
) -> int:
    """Run the whole job on this machine: train every party privately, merge, evaluate, report."""
    if overwrite and resume:
        raise DpmergeError("DPM-301", "--overwrite and --resume contradict each other", "give one of them")
    mode: Mode = "overwrite" if overwrite else "resume" if resume else "new"
    check_output(out, mode, inputs=[federation])
    plan = checked(load_federation(federation), str(federation))
    check_output(out, mode, inputs=plan.files)
    if find_spec("ray") is None:
        fix = "run pip install 'dpmerge[simulation]'"
        raise DpmergeError("DPM-105", "simulate needs the package ray, which is not installed", fix)
    from dpmerge.cli.tables import results_table
    from dpmerge.simulations.federation import run
    from dpmerge.simulations.reporting.words import closing_lines

    try:
        with Progress("silent" if output is Format.json else None) as progress:
            results = run(plan, out, mode=mode, num_cpus=num_cpus, progress=progress)
    except KeyboardInterrupt:
        again = shlex.join(["dpmerge", "simulate", str(federation), "--out", str(out), "--resume"])
        print(f"interrupted; go on with: {again}", file=sys.stderr)
        return INTERRUPTED
    if output is Format.json:
        print_json(results.to_dict())
    else:
        terminal = console()
        terminal.print(results_table(results))
        for line in closing_lines(results):
            terminal.print(line, markup=False, highlight=False)
        print(out / "report.html")
    return 0 if results.complete else PARTY_FAILED
