"""Small real data for tests: public records of the registry, written as the files an organisation would have."""

import csv
import hashlib
import itertools
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)  # `--hypothesis-profile=default` searches anew
settings.load_profile("repeatable")

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Several test processes share few cores; more threads than cores make everything many times slower."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _known_keys(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of noise and samples that differ from draw to draw and from test to test, and not from run to run.

    They hang on the names of file and test, not on the folder: a test that moves keeps its keys.

    Tests look at random numbers with thresholds that chance passes now and then: what held once holds always. It
    reaches this process only; a child that is started afresh draws from the operating system, and so does a test that
    asks for `real_keys`.
    """
    if "real_keys" in request.fixturenames:
        return
    draws, owner = itertools.count(), f"{request.node.path.name}::{request.node.name}"

    def urandom(size: int) -> bytes:
        return hashlib.shake_256(f"{owner}|{next(draws)}".encode()).digest(size)

    monkeypatch.setattr("dpmerge.client.privacy.keystream.os", SimpleNamespace(urandom=urandom))


@pytest.fixture
def real_keys() -> None:
    """The operating system's random bytes, as in deployment: `_known_keys` leaves such a test alone."""


def write_csv(path: Path, texts: list[str], labels: list[str]) -> Path:
    """Write a two-column CSV file with the columns `body` and `stars`."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["body", "stars"])
        writer.writerows(zip(texts, labels, strict=True))
    return path


@pytest.fixture(scope="session")
def product_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A "private" file of 240 product reviews and a public test file of 120 others."""
    from dpmerge.common.data.tasks import load_task

    folder = tmp_path_factory.mktemp("product")
    data = load_task("product")
    files = []
    for name, records, count in (("reviews", data.train, 240), ("public", data.test, 120)):
        stars = ["5" if label == 1 else "1" for label in records.labels[:count]]
        files.append(write_csv(folder / f"{name}.csv", list(records.texts[:count]), stars))
    return files[0], files[1]


@pytest.fixture
def dpmerge(monkeypatch, capsys):
    """Run `dpmerge` with arguments → (exit code, stdout, stderr)."""
    from dpmerge.cli import main as cli  # in a test, so that the filters of warnings hold

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["dpmerge", *map(str, arguments)])
        monkeypatch.setattr(cli.os, "_exit", sys.exit)  # else an interruption would end the tests themselves
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code, *capsys.readouterr()

    return call
