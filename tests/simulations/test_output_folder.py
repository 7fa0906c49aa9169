"""Overwriting a run removes its files, never the record of what it spent."""

from dpmerge.client.ledger import Ledger
from dpmerge.simulations.output_folder import prepare_output


def test_overwriting_keeps_every_ledger_and_closes_what_was_never_released(tmp_path):
    out = tmp_path / "run"
    prepare_output(out, "new")
    (out / "parties" / "shop").mkdir(parents=True)
    ledger = Ledger(out / "parties" / "shop" / "ledger.jsonl").create()
    ledger.reserve(dataset="shop", binding="b", charge={"epsilon": 1.0})
    (out / "parties" / "shop" / "checkpoint.safetensors").touch()

    prepare_output(out, "overwrite")
    assert [entry["kind"] for entry in ledger.entries()] == ["reserve", "abandoned"]
    assert not (out / "parties" / "shop" / "checkpoint.safetensors").exists()
    assert (out / "parties" / "shop" / "ledger.jsonl").stat().st_mode & 0o077 == 0
    assert ledger.reserve(dataset="shop", binding="b", charge={"epsilon": 1.0}).is_new
