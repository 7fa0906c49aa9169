"""No code of a model's folder is run, and nobody is asked."""

import json
from pathlib import Path

import pytest

from dpmerge.common.encoder.base_model import load_base
from dpmerge.common.errors import DpmergeError
from dpmerge.common.untrusted.own_code import refuse_code
from dpmerge.server.merging.materialize import open_base

PLANTED = "from pathlib import Path\nPath({mark!r}).touch()\n"


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("opens", [load_base, open_base, refuse_code])
def test_a_folder_that_wants_code_is_refused_and_its_code_not_run(
    tmp_path: Path, file: str, opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    mark = tmp_path / "ran"
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "own.py").write_text(PLANTED.format(mark=str(mark)))
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    told = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps(told | {"auto_map": {"AutoConfig": "own.Config", "AutoModel": "own.Model"}}))
    with pytest.raises(DpmergeError, match="names code of its own"):
        opens(str(folder))
    assert not mark.exists()


def test_no_loader_is_called_without_saying_no() -> None:
    root = Path(__file__).parents[3]
    for path in [p for room in ("common", "client", "server", "simulations") for p in (root / room).rglob("*.py")]:
        for line in path.read_text().splitlines():
            if any(f"{name}.from_pretrained(source" in line for name in ("AutoModel", "AutoTokenizer", "AutoConfig")):
                assert "NO_CODE" in line, f"{path}: {line}"
