"""The command line: exit codes that tell the truth, one line per refusal, stdout for results only."""

import errno
import json
import subprocess
import sys
import types
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from dpmerge.common.errors import DpmergeError
from dpmerge.simulations.output_folder import MARKER, check_output, prepare_output
from dpmerge.simulations.reporting.results import Accuracies, PartyResult, Results, write_results

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # typer 0.20 reads names that click 8.5 deprecates
    from dpmerge.cli import main as cli

EXAMPLE = Path(__file__).parents[2] / "examples" / "five-organisations.toml"
COMMANDS = [
    ["simulate"],
    ["merge"],
    ["plan"],
    ["report"],
    ["assets", "fetch"],
    ["assets", "list"],
    ["config", "init"],
    ["config", "validate"],
    ["config", "schema"],
    ["audit", "mechanism"],
    ["verify"],
    ["ledger", "show"],
    ["ledger", "verify"],
    ["ledger", "compose"],
    ["ledger", "create"],
    ["ledger", "bind"],
    ["spool", "show"],
    ["spool", "withdraw"],
]
FINE = PartyResult(party="shop", task="movie", epsilon=1.0, accuracy=Accuracies(base=0.5, own=0.7, merged=0.6))
FAILED = PartyResult(party="cinema", task="movie", status="failed", reason="DPM-599: not told")


def results(*parties):
    return Results(config={}, versions={}, merge={"method": "average"}, seconds={"train": 1.0}, parties=parties)


@pytest.fixture
def job(monkeypatch):
    """Replace the whole job, which has tests of its own, by one that notes its arguments and returns `job.results`."""
    module = types.ModuleType("dpmerge.simulations.federation")
    module.results, module.calls = results(FINE), []

    def run(federation, out, *, mode, num_cpus, progress):
        module.calls.append((mode, num_cpus))
        progress.note("working")
        if isinstance(module.results, BaseException):
            raise module.results
        return module.results

    module.run = run
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example(dpmerge, command):
    code, out, _ = dpmerge(*command, "--help")
    assert code == 0
    assert f"Example: dpmerge {' '.join(command)}" in " ".join(out.split())


def test_every_command_is_listed_above():
    groups = {"assets": cli.assets_app, "config": cli.config_app, "audit": cli.audit_app}
    groups |= {"ledger": cli.ledger_app.app, "spool": cli.spool_app.app}
    names = [[command.name or command.callback.__name__] for command in cli.app.registered_commands]
    names += [[group, command.name] for group, app in groups.items() for command in app.registered_commands]
    assert sorted(names) == sorted(COMMANDS)


def test_help_loads_nothing_heavy():
    heavy = "{'torch', 'flwr', 'ray', 'matplotlib', 'numpy'}"
    script = f"import sys, dpmerge.cli.main; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_version(dpmerge):
    assert dpmerge("--version") == (0, "0.1.0\n", "")


def test_a_run_prints_the_table_and_the_path_of_the_report(dpmerge, job, tmp_path):
    code, out, err = dpmerge("simulate", EXAMPLE, "--out", tmp_path / "run", "--num-cpus", 2)
    assert code == 0
    assert "70.0" in out
    assert out.splitlines()[-1] == str(tmp_path / "run" / "report.html")
    assert "working" in err
    assert job.calls == [("new", 2)]


def test_json_is_all_that_stdout_gets(dpmerge, job, tmp_path):
    code, out, err = dpmerge("simulate", EXAMPLE, "--out", tmp_path / "run", "--format", "json")
    assert (code, err) == (0, "")
    assert json.loads(out) == json.loads(json.dumps(job.results.to_dict()))


@pytest.mark.parametrize("output", ["text", "json"])
def test_a_failed_party_is_told_and_makes_the_exit_code_1(dpmerge, job, tmp_path, output):
    job.results = results(FINE, FAILED)
    code, out, _ = dpmerge("simulate", EXAMPLE, "--out", tmp_path / "run", "--format", output)
    assert code == 1
    assert "DPM-599: not told" in out


def test_a_merge_below_the_quorum_makes_the_exit_code_1(dpmerge, job, tmp_path):
    job.results = replace(results(FINE), not_merged="1 of 2 releases are here")
    code, out, _ = dpmerge("simulate", EXAMPLE, "--out", tmp_path / "run")
    assert code == 1
    assert "NOTHING WAS MERGED: 1 of 2 releases are here" in out


@pytest.mark.parametrize("output", ["text", "json"])
def test_a_refusal_is_one_line_and_exit_code_2(dpmerge, job, tmp_path, output):
    job.results = DpmergeError("DPM-201", "asset is not there", "fetch it")
    code, out, err = dpmerge("simulate", EXAMPLE, "--out", tmp_path / "run", "--format", output)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == "DPM-201: asset is not there; fetch it"
    assert "Traceback" not in err


def test_interrupting_exits_130_without_a_traceback(dpmerge, job, tmp_path):
    job.results = KeyboardInterrupt()
    code, out, err = dpmerge("simulate", EXAMPLE, "--out", tmp_path / "run")
    assert (code, out) == (130, "")
    assert "--resume" in err
    assert "Traceback" not in err


def test_a_defect_is_not_hidden(monkeypatch, job, tmp_path):
    job.results = RuntimeError("a defect")
    monkeypatch.setattr(sys, "argv", ["dpmerge", "simulate", str(EXAMPLE), "--out", str(tmp_path / "run")])
    with pytest.raises(RuntimeError, match="a defect"):
        cli.main()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([EXAMPLE], "--out"),
        ([EXAMPLE, "--out", "RUN", "--num-cpus", "0"], "num-cpus"),
        ([EXAMPLE, "--out", "RUN", "--format", "yaml"], "--format"),
        ([EXAMPLE, "--out", "RUN", "--overwrite", "--resume"], "DPM-301"),
        ([EXAMPLE, "--out", "RUN", "--resume"], "DPM-302"),
        (["absent.toml", "--out", "RUN"], "DPM-101"),
        ([EXAMPLE, "--out", EXAMPLE], "DPM-301"),
        ([EXAMPLE, "--out", EXAMPLE.parent], "DPM-301"),
        ([EXAMPLE, "--out", EXAMPLE.parent, "--overwrite"], "DPM-301"),
    ],
    ids=["no out", "cpus", "format", "both", "nothing to resume", "no file", "out is a file", "occupied", "foreign"],
)
def test_bad_arguments_are_refused_before_anything_is_written(dpmerge, job, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    before = EXAMPLE.read_bytes()
    code, out, err = dpmerge("simulate", *arguments)
    assert (code, out, job.calls) == (2, "", [])
    assert words in err
    assert list(tmp_path.iterdir()) == []
    assert EXAMPLE.read_bytes() == before


def test_a_refused_file_leaves_an_old_run_in_place(dpmerge, job, tmp_path):
    prepare_output(tmp_path / "run", "new")
    (tmp_path / "bad.toml").write_text("[base]\nmodel = 'm'\n[lora]\nrank = 0\n")
    code, _, err = dpmerge("simulate", tmp_path / "bad.toml", "--out", tmp_path / "run", "--overwrite")
    assert code == 2
    assert "lora.rank" in err
    assert (tmp_path / "run" / MARKER).exists()


def test_overwrite_does_not_remove_what_the_run_reads(dpmerge, job, tmp_path):
    prepare_output(tmp_path / "run", "new")
    inside = tmp_path / "run" / "federation.toml"
    inside.write_bytes(EXAMPLE.read_bytes())
    code, _, err = dpmerge("simulate", inside, "--out", tmp_path / "run", "--overwrite")
    assert code == 2
    assert "which this run reads" in err


def test_the_output_folder_is_replaced_only_if_it_is_a_run(tmp_path):
    run = tmp_path / "a" / "run"
    prepare_output(run, "new")
    prepare_output(run, "resume")
    (run / "results.json").write_text("{}")
    with pytest.raises(DpmergeError, match="DPM-301"):
        prepare_output(run, "new")
    prepare_output(run, "overwrite")
    assert [path.name for path in run.iterdir()] == [MARKER]
    (run / MARKER).unlink()
    (run / "results.json").write_text("someone else's")
    with pytest.raises(DpmergeError, match="holds no run"):
        prepare_output(run, "overwrite")
    assert (run / "results.json").exists()


def test_a_link_is_not_followed_into_removal(tmp_path):
    prepare_output(tmp_path / "run", "new")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with pytest.raises(DpmergeError, match="DPM-301"):
        check_output(tmp_path / "link", "overwrite")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DpmergeError, match="DPM-301"):
        prepare_output(tmp_path / "file" / "run", "new")


def test_report_rebuilds_the_page(dpmerge, tmp_path):
    write_results(tmp_path, results(FINE))
    assert dpmerge("report", tmp_path) == (0, f"{tmp_path / 'report.html'}\n", "")
    assert (tmp_path / "report.html").exists()
    code, out, err = dpmerge("report", tmp_path / "elsewhere")
    assert (code, out) == (2, "")
    assert err.startswith("DPM-303")


def test_config_init_writes_a_file_that_validates_and_never_replaces_one(dpmerge, tmp_path):
    path = tmp_path / "federation.toml"
    assert dpmerge("config", "init", path)[0] == 0
    code, out, _ = dpmerge("config", "validate", path)
    assert (code, out) == (0, f"{path} is valid: library, cinema\n")
    path.write_text("mine")
    code, _, err = dpmerge("config", "init", path)
    assert (code, path.read_text()) == (2, "mine")
    assert err.startswith("DPM-301")
    code, out, err = dpmerge("config", "validate", path, "--format", "json")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("DPM-101")


def test_config_validate_json_gives_the_resolved_tables(dpmerge):
    code, out, _ = dpmerge("config", "validate", EXAMPLE, "--format", "json")
    assert code == 0
    assert json.loads(out)["federation"]["lora"]["rank"] == 8


def test_config_schema_is_json(dpmerge):
    code, out, _ = dpmerge("config", "schema")
    assert code == 0
    assert json.loads(out)["required"] == ["base", "party"]


def test_assets_list(dpmerge, monkeypatch, tmp_path):
    monkeypatch.setenv("DPMERGE_CACHE", str(tmp_path))
    code, out, _ = dpmerge("assets", "list", "--format", "json")
    assert code == 0
    assert {row["name"]: row["present"] for row in json.loads(out)["assets"]}["minilm-l6"] is False
    code, out, _ = dpmerge("assets", "list")
    assert code == 0
    assert "minilm-l6" in out


def test_assets_fetch_refuses_an_unknown_name(dpmerge, monkeypatch, tmp_path):
    monkeypatch.setenv("DPMERGE_CACHE", str(tmp_path))
    code, out, err = dpmerge("assets", "fetch", "minilm-l7")
    assert (code, out) == (2, "")
    assert err.startswith("DPM-104")


def test_simulate_without_ray_names_the_extra(dpmerge, monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "find_spec", lambda _name: None)
    code, _, err = dpmerge("simulate", str(EXAMPLE), "--out", str(tmp_path / "run"))
    assert code == 2
    assert err.startswith("DPM-105: ")
    assert "dpmerge[simulation]" in err
    assert not (tmp_path / "run").exists()


def test_a_full_disk_is_one_line_with_the_file_and_how_to_go_on(dpmerge, job, tmp_path):
    job.results = OSError(errno.ENOSPC, "No space left on device", "run/results.json")
    code, out, err = dpmerge("simulate", EXAMPLE, "--out", tmp_path / "run")
    last = err.splitlines()[-1]
    assert (code, out) == (2, "")
    assert last.startswith("DPM-305: run/results.json cannot be written: No space left on device; make room")
    assert "--resume" in last
    assert "Traceback" not in err


def test_a_path_of_no_use_is_one_line(dpmerge, job, tmp_path):
    (tmp_path / "state").touch()
    (tmp_path / "policy.toml").write_text(
        f'schema = 1\nstate = "state/x"\nbase_models = ["{"a" * 64}"]\nserver_keys = ["ed25519:{"a" * 64}"]\n'
        '[dataset.reviews]\ndata = "r.csv"\nepsilon_cap = 1.0\ndelta = 1e-5\n'
    )
    code, out, err = dpmerge("ledger", "create", tmp_path / "policy.toml")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith(f"DPM-305: {tmp_path / 'state'}")
    assert "Not a directory" in err


@pytest.mark.parametrize("delta", ["nan", "0", "1", "-1e-5", "inf"])
def test_a_delta_that_is_none_composes_nothing(dpmerge, tmp_path, delta):
    (tmp_path / "ledger.jsonl").touch()
    code, out, err = dpmerge("ledger", "compose", tmp_path, "--delta", delta, "--format", "json")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith("DPM-103: --delta")
