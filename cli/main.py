"""The command line. Exit codes: 0 done, 1 a party is missing or a claim is refuted, 2 bad input, 130 interrupted.

With `--format json` the result object is all that stdout gets; whatever is said in words goes to stderr. Torch, Flower
and Ray are imported inside the commands that need them, so that `dpmerge --help` answers at once.
"""

import os
import shlex
import sys
import warnings
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from click.exceptions import Abort, ClickException
from rich.table import Table

from dpmerge.cli.commands import ledger as ledger_app
from dpmerge.cli.commands import merge as merge_app
from dpmerge.cli.commands import plan as plan_app
from dpmerge.cli.commands import spool as spool_app
from dpmerge.cli.commands import verify as verify_app
from dpmerge.cli.terminal import (
    BAD_INPUT,
    CLAIM_REFUTED,
    INTERRUPTED,
    PARTY_FAILED,
    Format,
    FormatOption,
    answer,
    console,
    print_json,
)
from dpmerge.common.config.federation import load_federation
from dpmerge.common.config.template import TEMPLATE, json_schema
from dpmerge.common.errors import DpmergeError
from dpmerge.common.files import NO_PLACE, NO_SPACE, storage_refusal
from dpmerge.simulations.output_folder import Mode, check_output
from dpmerge.simulations.progress import Progress

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Private LoRA fine-tuning at many organisations, one upload each, one merged multi-task model.",
    epilog="Start with: [bold]dpmerge config init[/] and [bold]dpmerge simulate federation.toml --out runs/first[/]",
)
assets_app = typer.Typer(no_args_is_help=True, help="Embedded models and public tasks, pinned by SHA-256.")
config_app = typer.Typer(no_args_is_help=True, help="Write, check and describe federation files.")
audit_app = typer.Typer(no_args_is_help=True, help="Measure what leaks, against what is claimed.")
app.add_typer(assets_app, name="assets")
app.add_typer(audit_app, name="audit")
app.add_typer(config_app, name="config")
app.add_typer(ledger_app.app, name="ledger")
app.add_typer(spool_app.app, name="spool")
app.command("merge", epilog=merge_app.EXAMPLE)(merge_app.merge)
app.command("plan", epilog=plan_app.EXAMPLE)(plan_app.plan)
app.command("verify", epilog=verify_app.EXAMPLE)(verify_app.verify)


def main() -> None:
    """Run the command line and exit with a code that tells the truth."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # what libraries say to their developers is noise to our users; -W shows it
    try:
        code = app(standalone_mode=False)
    except DpmergeError as refusal:
        print(refusal, file=sys.stderr)
        code = BAD_INPUT
    except ClickException as usage:
        usage.show()
        code = BAD_INPUT
    except OSError as problem:
        if problem.errno not in NO_SPACE | NO_PLACE:
            raise
        print(storage_refusal(problem), file=sys.stderr)
        code = BAD_INPUT
    except (Abort, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        code = INTERRUPTED
    if code == INTERRUPTED:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(INTERRUPTED)  # not sys.exit: a thread of Flower's may wait for ever for a worker that is gone
    sys.exit(code or 0)


@app.callback(invoke_without_command=True)
def _root(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if show_version:
        print(version("dpmerge"))
        raise typer.Exit


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
    plan = load_federation(federation)
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


@app.command(epilog="Example: dpmerge report runs/demo")
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a finished run.")],
    output: FormatOption = Format.text,
) -> None:
    """Rebuild report.html from the stored results."""
    from dpmerge.simulations.reporting.report import write_report

    path = write_report(folder)
    answer(output, {"report": str(path)}, str(path))


@assets_app.command("fetch", epilog="Example: dpmerge assets fetch minilm-l6 trec6 movie")
def assets_fetch(
    names: Annotated[list[str], typer.Argument(metavar="NAME…", help="Assets, models or tasks.")],
    output: FormatOption = Format.text,
) -> None:
    """Download, verify and unpack assets; nothing but this and a base model named by hub id needs the network."""
    from dpmerge.common.data.assets import fetch

    with Progress("silent" if output is Format.json else None) as progress:
        folders = {name: str(folder) for name, folder in fetch(names, progress.note).items()}
    answer(output, {"assets": folders}, "\n".join(f"{name}: {folder}" for name, folder in folders.items()))


@assets_app.command("list", epilog="Example: dpmerge assets list --format json")
def assets_list(output: FormatOption = Format.text) -> None:
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


@audit_app.command("mechanism", epilog="Example: dpmerge audit mechanism --epsilon 1 --num-steps 16")
def audit_mechanism(
    epsilon: Annotated[float, typer.Option(help="The claim to calibrate for.")] = 1.0,
    delta: Annotated[float, typer.Option(help="δ of the claim; near 0.01 a violation is easiest to witness.")] = 0.01,
    num_steps: Annotated[int, typer.Option(min=1, help="Noisy steps.")] = 16,
    expected_batch_size: Annotated[int, typer.Option(min=1, help="Mean size of the Poisson samples.")] = 64,
    population: Annotated[int, typer.Option(min=1, help="Declared size of the data.")] = 512,
    sharpness: Annotated[str, typer.Option(help="none, sat, sat-momentum or sam.")] = "none",
    num_trials: Annotated[int, typer.Option(min=1, help="Canaries to guess about.")] = 200_000,
    seconds: Annotated[float, typer.Option(min=1, help="Stop after this time with what there is.")] = 60.0,
    output: FormatOption = Format.text,
) -> int:
    """Play the membership game against the real sampler, clipping and noise; exit code 1 if ε is exceeded."""
    from dpmerge.client.audit.membership_game import NUM_CANARIES
    from dpmerge.client.audit.membership_game import audit_mechanism as audit
    from dpmerge.common.privacy.accounting import calibrate

    mechanism = calibrate(
        target_epsilon=epsilon,
        target_delta=delta,
        population=population,
        expected_batch_size=expected_batch_size,
        num_steps=num_steps,
        l2_clip_norm=1.0,
        sharpness=sharpness,  # type: ignore[arg-type]  # Mechanism refuses what it does not know
        noise="secure",
        num_coordinates=NUM_CANARIES,
    )
    result = audit(mechanism, num_trials=num_trials, max_seconds=seconds)
    verdict = "the claim holds" if result.holds else "THE CLAIM IS REFUTED"
    words = (
        f"{verdict}: ε ≥ {result.epsilon_lower:.3f} measured, ε = {result.epsilon_claimed:.3f} claimed "
        f"at δ = {result.target_delta:g} ({result.confidence:.1%} confidence, {result.num_trials} trials)"
    )
    answer(output, {"audit": asdict(result) | {"holds": result.holds}, "mechanism": asdict(mechanism)}, words)
    return 0 if result.holds else CLAIM_REFUTED


@config_app.command("init", epilog="Example: dpmerge config init federation.toml")
def config_init(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The file to write.")] = Path("federation.toml"),
    output: FormatOption = Format.text,
) -> None:
    """Write a first federation file with every setting, its default and what it is for."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(TEMPLATE)
    except OSError as problem:
        raise DpmergeError("DPM-301", f"{path} cannot be written: {problem.strerror}", "give another PATH") from None
    answer(output, {"path": str(path)}, f"wrote {path}; run it with `dpmerge simulate {path} --out runs/first`")


@config_app.command("validate", epilog="Example: dpmerge config validate federation.toml")
def config_validate(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="A federation file.")],
    output: FormatOption = Format.text,
) -> None:
    """Check a federation file without running anything; exit code 2 and one line if it is refused."""
    federation = load_federation(path)
    parties = [party.name for party in federation.parties]
    answer(output, {"valid": True, "federation": federation.to_dict()}, f"{path} is valid: {', '.join(parties)}")


@config_app.command("schema", epilog="Example: dpmerge config schema > federation.schema.json")
def config_schema() -> None:
    """Print the JSON Schema of federation files, for editors."""
    print_json(json_schema())
