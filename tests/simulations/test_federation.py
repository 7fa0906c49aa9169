"""The whole job on real records through real Flower and Ray: a small federation, one of whose parties fails."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from dpmerge.client.party.party import run_party
from dpmerge.common.config.federation import load_federation, party_plan
from dpmerge.common.data.tasks import load_task
from dpmerge.common.encoder.base_model import load_base
from dpmerge.common.release.format import ADAPTER, release_files
from dpmerge.simulations import federation as federation_module
from dpmerge.simulations.progress import Progress
from dpmerge.simulations.reporting.results import load_results
from tests.deployment.small_federation import collect_directly

FEDERATION = """
[base]
model = "minilm-l3"
max_length = 16
[lora]
layers = "last:1"
rank = 4
[training]
num_steps = 4
expected_batch_size = 48
learning_rate = 0.01
[privacy]
noise = "fast"
noise_seed = 3
[[party]]
name = "shop"
data = "{data}"
text = "body"
label = "stars"
labels = {{ "1" = "a bad product", "5" = "a great product" }}
population = 240
epsilon = 4.0
test = "{test}"
[[party]]
name = "cinema"
task = "movie"
epsilon = 8.0
[[party]]
name = "late"
data = "{late}"
text = "body"
label = "stars"
labels = {{ "1" = "a bad product", "5" = "a great product" }}
population = 240
private = false
"""


def write_federation(folder: Path, data: Path, test: Path) -> Path:
    path = folder / "federation.toml"
    path.write_text(FEDERATION.format(data=data, test=test, late=folder / "late.csv"))
    return path


COMMAND = (sys.executable, "-c", "from dpmerge.cli.main import main; main()", "simulate")


def simulate(path: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own, as its users do: Ray leaves its caller's open files behind."""
    command = [*COMMAND, str(path), "--out", str(out), "--num-cpus", "2", "--format", "json", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def first_run(tmp_path_factory, product_files):
    """One run in which the party "late" has a file without the named columns."""
    folder = tmp_path_factory.mktemp("federation")
    (folder / "late.csv").write_text("some text,3\nI am the second record,1\n")  # no header: columns are a record
    path = write_federation(folder, *product_files)
    process = simulate(path, folder / "run")
    assert process.returncode == 1, process.stderr  # one party failed, the run finished
    assert json.loads(process.stdout) == json.loads((folder / "run" / "results.json").read_text())
    return path, folder / "run", load_results(folder / "run")


def test_a_failing_party_does_not_sink_the_run(first_run):
    _, out, results = first_run
    rows = {row.party: row for row in results.parties}
    assert [row.party for row in results.absent] == ["late"]
    assert rows["late"].reason.startswith("DPM-599")  # the reply of a deployed party
    assert "there: DPM-203, private data cannot be read; in full in parties/late/failure.txt" in rows["late"].reason
    assert "has no column 'body'" in (out / "parties" / "late" / "failure.txt").read_text()
    assert rows["shop"].status == rows["cinema"].status == "finished"
    assert "some text" not in json.dumps(results.to_dict())  # no message quotes a record
    assert sorted(path.name for path in (out / "releases").iterdir()) == ["cinema", "shop"]
    assert (out / "report.html").stat().st_size > 5000


def test_numbers_come_from_what_ran(first_run):
    _, out, results = first_run
    for row in results.parties[:2]:
        statement = json.loads((out / "releases" / row.party / "statement.json").read_text())
        assert (row.epsilon, row.noise_multiplier) == (statement["epsilon"], statement["noise_multiplier"])
        assert row.accuracy.complete()
        assert row.drift > 0
        assert 0 < row.noise_share <= 1
    assert json.loads((out / "results.json").read_text()) == json.loads(json.dumps(results.to_dict()))


@pytest.mark.parametrize(("folder", "column"), [("merged", "merged"), ("releases/cinema", "own")])
def test_anybody_with_peft_reproduces_the_reported_accuracy(first_run, folder, column):
    """Opens the folder with PEFT and evaluates it with plain transformers calls: none of our model code."""
    _, out, results = first_run
    base = load_base("minilm-l3")
    model = PeftModel.from_pretrained(base.encoder, str(out / folder)).eval()
    head = load_file(out / folder / "head.safetensors")["cinema.weight"]
    test = load_task("movie").test
    num_correct = 0
    for start in range(0, len(test), 50):
        texts, labels = list(test.texts[start : start + 50]), torch.tensor(test.labels[start : start + 50])
        batch = base.tokenizer(texts, padding=True, truncation=True, max_length=16, return_tensors="pt")
        with torch.no_grad():
            hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"].unsqueeze(-1)
        mean = (hidden * mask).sum(1) / mask.sum(1)
        num_correct += int(((mean @ head.T).argmax(1) == labels).sum())
    reported = getattr(next(row for row in results.parties if row.party == "cinema").accuracy, column)
    assert abs(num_correct / len(test) - reported) <= 1 / len(test) + 1e-9  # one record may sit on the boundary


def test_simulation_and_a_lone_party_give_the_same_bytes(first_run, tmp_path):
    path, out, _ = first_run
    plan = party_plan(load_federation(path), "shop")
    torch.set_num_threads(1)
    alone = run_party(plan, load_base(plan.base.model), tmp_path / "shop")
    assert alone[ADAPTER] == release_files(out / "releases" / "shop")[ADAPTER]


def test_resume_refuses_another_configuration_by_key(first_run, dpmerge):
    path, out, _ = first_run
    changed = path.with_name("changed.toml")
    changed.write_text(path.read_text().replace("learning_rate = 0.01", "learning_rate = 0.02"))
    code, _, err = dpmerge("simulate", changed, "--out", out, "--format", "json", "--resume")
    assert code == 2
    assert err.startswith("DPM-302: ")
    assert "training.learning_rate" in err
    assert err.count("\n") == 1


def test_resume_keeps_finished_releases_and_trains_the_rest(first_run, product_files, monkeypatch):
    """With calls in place of Flower, which the slow test of an interruption resumes under."""
    path, out, _ = first_run
    before = release_files(out / "releases" / "cinema")
    ledger = (out / "parties" / "cinema" / "ledger.jsonl").read_bytes()
    (path.parent / "late.csv").write_bytes(product_files[0].read_bytes())
    monkeypatch.setattr(federation_module, "collect", collect_directly)
    federation_module.run(load_federation(path), out, mode="resume", num_cpus=1, progress=Progress("silent"))
    results = load_results(out)
    assert results.complete
    assert release_files(out / "releases" / "cinema") == before
    assert (out / "parties" / "cinema" / "ledger.jsonl").read_bytes() == ledger
    late = results.parties[2]
    assert not late.private
    assert late.epsilon is None
    assert late.accuracy.own is None  # no public test file, so nothing is measured on its private records
    assert "WITHOUT privacy" in late.sentence


@pytest.mark.slow
def test_interrupt_leaves_nothing_running_and_resume_finishes(tmp_path, product_files):
    (tmp_path / "late.csv").write_bytes(product_files[0].read_bytes())
    path = write_federation(tmp_path, *product_files)
    path.write_text(path.read_text().replace("num_steps = 4", "num_steps = 400"))
    out = tmp_path / "run"
    process = subprocess.Popen([*COMMAND, str(path), "--out", str(out), "--num-cpus", "2"], start_new_session=True)
    deadline = time.monotonic() + 240
    while not list(out.glob("parties/*/checkpoint.safetensors")):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout=90) == 130
    time.sleep(5)
    assert _session_processes(process.pid) == []
    again = simulate(path, out, "--resume")
    assert again.returncode == 0, again.stderr
    for ledger in out.glob("parties/*/ledger.jsonl"):
        assert [json.loads(line)["kind"] for line in ledger.read_text().splitlines()] == [
            "reserve",
            "released",
            "receipt",
        ]


def _session_processes(session: int) -> list[str]:
    """Command lines of the processes of that session that are still alive."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append((stat.parent / "cmdline").read_text().replace("\0", " "))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found
