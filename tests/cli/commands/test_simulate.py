"""`dpmerge simulate`: exit codes that tell the truth, one line per refusal, stdout for results only."""

import errno
import json
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest

from dpmerge.cli import main as cli
from dpmerge.cli.commands import simulate
from dpmerge.common.errors import DpmergeError
from dpmerge.simulations.output_folder import MARKER, prepare_output
from dpmerge.simulations.reporting.results import Accuracies, PartyResult, Results

EXAMPLE = Path(__file__).parents[3] / "examples" / "five-organisations.toml"
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


def test_interrupting_exits_130_without_a_traceback(dpmerge, job, tmp_path):
    job.results = KeyboardInterrupt()
    code, out, err = dpmerge("simulate", EXAMPLE, "--out", tmp_path / "run")
    assert (code, out) == (130, "")
    assert "--resume" in err
    assert "Traceback" not in err


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


def test_simulate_without_ray_names_the_extra(dpmerge, monkeypatch, tmp_path):
    monkeypatch.setattr(simulate, "find_spec", lambda _name: None)
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


@pytest.mark.parametrize("output", ["text", "json"])
def test_a_refusal_is_one_line_and_exit_code_2(dpmerge, job, tmp_path, output):
    job.results = DpmergeError("DPM-201", "asset is not there", "fetch it")
    code, out, err = dpmerge("simulate", EXAMPLE, "--out", tmp_path / "run", "--format", output)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == "DPM-201: asset is not there; fetch it"
    assert "Traceback" not in err


def test_a_defect_is_not_hidden(monkeypatch, job, tmp_path):
    job.results = RuntimeError("a defect")
    monkeypatch.setattr(sys, "argv", ["dpmerge", "simulate", str(EXAMPLE), "--out", str(tmp_path / "run")])
    with pytest.raises(RuntimeError, match="a defect"):
        cli.main()
