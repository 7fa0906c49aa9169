"""Files that options name are regular ones: nobody waits for a pipe, and a place that holds no folder is named."""

import os

import pytest

COMMANDS = {
    "config validate": ["config", "validate", "PIPE"],
    "plan": ["plan", "PIPE"],
    "simulate": ["simulate", "PIPE", "--out", "OUT"],
    "ledger create": ["ledger", "create", "PIPE"],
    "ledger show": ["ledger", "show", "PIPE"],
    "ledger verify": ["ledger", "verify", "PIPE"],
    "ledger with a policy": ["ledger", "show", "reviews", "--policy", "PIPE"],
    "report": ["report", "PIPE"],
    "spool show": ["spool", "show", "PIPE"],
    "verify": ["verify", "PIPE"],
    "merge": ["merge", "PIPE", "--out", "OUT"],
    "merge from a spool": ["merge", "--from-spool", "PIPE", "--out", "OUT"],
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", COMMANDS)
def test_nobody_waits_for_a_pipe(dpmerge, tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    places = {"PIPE": tmp_path / "pipe", "OUT": tmp_path / "out"}
    code, out, err = dpmerge(*(places.get(word, word) for word in COMMANDS[name]))
    assert (code, out) == (2, "")
    assert err.startswith("DPM-")
    assert str(tmp_path / "pipe") in err
    assert err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pipe"]


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "txt"])
@pytest.mark.timeout(60)
def test_a_partys_file_that_is_a_pipe_is_refused_before_anything_runs(dpmerge, tmp_path, suffix):
    os.mkfifo(tmp_path / f"own.{suffix}")
    (tmp_path / "federation.toml").write_text(
        '[base]\nmodel = "minilm-l6"\n[[party]]\nname = "shop"\n'
        f'data = "own.{suffix}"\nlabels = {{ "1" = "bad", "5" = "good" }}\npopulation = 500\nepsilon = 3.0\n'
    )
    code, _, err = dpmerge("config", "validate", tmp_path / "federation.toml")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("DPM-203")


@pytest.mark.parametrize("command", [["simulate", "FEDERATION", "--out"], ["config", "init"]])
def test_a_place_where_no_folder_can_be_is_one_line(dpmerge, tmp_path, command):
    if not os.path.isdir("/proc/self"):
        pytest.skip("no /proc here")
    (tmp_path / "federation.toml").write_text(
        '[base]\nmodel = "minilm-l3"\n[[party]]\nname = "shop"\ntask = "product"\nepsilon = 3.0\n'
    )
    words = [tmp_path / "federation.toml" if word == "FEDERATION" else word for word in command]
    code, _, err = dpmerge(*words, "/proc/nowhere")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(("DPM-305: /proc/nowhere", "DPM-301: /proc/nowhere"))
