"""What a stranger's statement or file may cost a merge: it is refused, or estimated, and never waited for."""

import time
from pathlib import Path

import pytest

from dpmerge.common.release.format import README, SIGNATURE, STATEMENT, write_files
from dpmerge.server.merging.adapters.deltas import read_adapter
from dpmerge.server.merging.gate.gate import inspect_adapters
from dpmerge.server.merging.noise.shares import MAX_REPLAY, noise_of
from tests.release_changes import edit
from tests.signed_releases import signed_files

SETTINGS = {"optimizer": "adam", "learning_rate": 0.01}


def write(folder: Path, **changes: object) -> Path:
    files = {name: data for name, data in signed_files().items() if name not in (README, SIGNATURE)}
    write_files(folder, edit(STATEMENT, **changes)(files))
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {"num_steps": 10**12},
        {"num_coordinates": 10**12},
        {"num_coordinates": 10**9},
        {"population": 10**12},
        {"num_steps": True},
        {"epsilon": "0"},
        {"task": "a\x1b[2K"},
    ],
)
def test_numbers_and_kinds_that_no_release_has_are_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    gate = inspect_adapters([(None, write(tmp_path / "a", **changes))], strict=True)
    assert [str(refusal).startswith("DPM-401") for refusal in gate.refusals] == [True]
    assert all(str(refusal).isprintable() for refusal in gate.refusals)


def test_a_replay_that_would_take_long_is_estimated_instead(tmp_path: Path) -> None:
    training = {"lora": {"train_a": False}, "training": SETTINGS}
    start = time.monotonic()
    long = noise_of(read_adapter(write(tmp_path / "long", num_steps=MAX_REPLAY // 10_000, training=training)))
    assert time.monotonic() - start < 5
    assert long.origin == "estimated"
