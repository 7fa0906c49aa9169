"""`dpmerge ledger`: what is refused in one line."""

import pytest


def test_a_path_of_no_use_is_one_line(dpmerge, tmp_path):
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
