"""`dpmerge config`: a file that validates, and never one replaced."""

import json
from pathlib import Path

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


def test_config_schema_is_json(dpmerge):
    code, out, _ = dpmerge("config", "schema")
    assert code == 0
    assert json.loads(out)["required"] == ["base", "party"]
