"""`dpmerge assets`: what there is, and what there is not."""

import json


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
