"""`dpmerge config`: a file that validates, and never one replaced."""

import json
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "five-organisations.toml"


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


def test_config_schema_is_json_and_knows_the_merge_methods(dpmerge):
    code, out, _ = dpmerge("config", "schema")
    assert code == 0
    schema = json.loads(out)
    assert schema["required"] == ["base", "party"]
    assert "ties" in schema["properties"]["merge"]["properties"]["method"]["enum"]


@pytest.mark.parametrize(
    "command",
    [("config", "validate", "FILE"), ("plan", "FILE"), ("simulate", "FILE", "--out", "run")],
    ids=lambda command: command[0],
)
def test_a_merge_that_no_method_takes_is_refused_before_anything_else(command, dpmerge, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "federation.toml"
    path.write_text(EXAMPLE.read_text().replace("[merge]", "[merge]\ndensity = 0.5"))
    code, out, err = dpmerge(*(path if word == "FILE" else word for word in command))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"DPM-103: merge.density = 0.5 in {path} is no parameter of geometry")
    assert not (tmp_path / "run").exists()
