"""What a party really trains and sends is what the server expects, for either head and either treatment of A."""

from pathlib import Path

import pytest

from dpmerge.client.party.party import run_party
from dpmerge.common.config.federation import load_federation, party_plan
from dpmerge.common.encoder.base_model import load_base
from dpmerge.common.release.format import STATEMENT
from dpmerge.common.untrusted.parsing import ReleaseRefused
from dpmerge.server.intake.release_spec import release_spec_of
from dpmerge.server.intake.validation import validate

FEDERATION = """
[base]
model = "minilm-l3"
max_length = 8
[lora]
layers = "last:1"
rank = 2
train_a = {train_a}
[training]
num_steps = 1
expected_batch_size = 16
head = "{head}"
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
[[party]]
name = "cinema"
task = "movie"
epsilon = 8.0
"""


@pytest.mark.parametrize(("head", "train_a"), [("label-text", "false"), ("linear", "true")])
def test_a_trained_release_is_accepted(
    tmp_path: Path, product_files: tuple[Path, Path], head: str, train_a: str
) -> None:
    (tmp_path / "federation.toml").write_text(
        FEDERATION.format(head=head, train_a=train_a, data=product_files[0]), encoding="utf-8"
    )
    federation = load_federation(tmp_path / "federation.toml")
    plans = [party_plan(federation, name) for name in ("shop", "cinema")]
    files = run_party(plans[0], load_base("minilm-l3"), tmp_path / "shop")
    release_spec = release_spec_of(load_base("minilm-l3"), plans)
    release = validate("shop", files, release_spec)
    assert release.statement["num_coordinates"] > 0
    another_task = {STATEMENT: files[STATEMENT].replace(b'"task": "shop"', b'"task": "movie"')}
    with pytest.raises(ReleaseRefused, match="task = 'movie' is not 'shop'"):
        validate("shop", {**files, **another_task}, release_spec)
