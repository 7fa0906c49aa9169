"""Two parties with sixty records each and three steps: enough for every file that a federation makes."""

from datetime import UTC, datetime
from pathlib import Path

from dpmerge.client.app import answer, settle
from dpmerge.common.data.tasks import load_task
from dpmerge.common.errors import DpmergeError
from dpmerge.common.release.wire import Verdict
from dpmerge.server.app import Collection
from dpmerge.simulations.flower import sites_of
from tests.conftest import write_csv

SHARED = """
[base]
model = "minilm-l3"
max_length = 16
[lora]
layers = "last:1"
rank = 2
[training]
num_steps = 3
expected_batch_size = 16
learning_rate = 0.01
[privacy]
noise = "fast"
noise_seed = 3
[merge]
method = "average"
"""
PARTY = """
[[party]]
name = "{name}"
data = "{name}.csv"
text = "body"
label = "stars"
labels = {{ "1" = "a bad product", "5" = "a great product" }}
population = 60
epsilon = 4.0
test = "test.csv"
"""
NAMES = ("shop", "library")


def write_small_federation(folder: Path) -> Path:
    """Write the parties' records and the federation file; return its path."""
    data = load_task("product")
    stars = {0: "1", 1: "5"}
    for start, name in enumerate(NAMES):
        chosen = slice(60 * start, 60 * (start + 1))
        labels = [stars[label] for label in data.train.labels[chosen]]
        write_csv(folder / f"{name}.csv", list(data.train.texts[chosen]), labels)
    write_csv(folder / "test.csv", list(data.test.texts[:20]), [stars[label] for label in data.test.labels[:20]])
    path = folder / "federation.toml"
    path.write_text(SHARED + "".join(PARTY.format(name=name) for name in NAMES))
    return path


def collect_directly(plans, terms, reception, simulated, out, *, num_cpus, progress) -> Collection:
    """What Flower does, without Flower: each party's answer to the server, and the server's to the party."""
    collection = Collection()
    for site in sites_of(plans, simulated, out, num_threads=1):
        outcome = answer(site, terms)
        if outcome.code:
            collection.refuse(outcome.party, outcome.code, outcome.reason)
            continue
        try:
            received = reception.receive(outcome.party, outcome.files, datetime.now(UTC))
        except DpmergeError as error:
            collection.refuse(outcome.party, error.code, error.problem)
            settle(site, Verdict(code=error.code, reason=error.problem))
            continue
        collection.accept(outcome.party, received.sha256)
        settle(site, Verdict(receipt=received.receipt))
    return collection
