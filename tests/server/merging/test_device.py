"""Merging where it is told to: on a stand-in for another device, on CUDA where there is one, else a refusal."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dpmerge.common.errors import DpmergeError
from dpmerge.server.merging.merge import merge
from dpmerge.server.merging.registry import METHODS
from dpmerge.server.merging.spec.checks import device_of
from dpmerge.server.merging.spec.spec import spec_of
from tests.server.merging.device_stand_in import adapters, run


def test_every_method_works_on_a_stand_in_for_another_device() -> None:
    path = Path(__file__).with_name("device_stand_in.py")
    options = ("-q", "-p", "no:cacheprovider", "-n", "0", "--rootdir", str(path.parents[3]))
    command = [sys.executable, "-m", "pytest", *options, str(path)]
    child = subprocess.run(command, capture_output=True, text=True, cwd=path.parents[3], check=False)
    assert child.returncode == 0, child.stdout[-3000:]
    assert int(child.stdout.rpartition(" passed")[0].split()[-1]) > 2 * len(METHODS)


def test_cuda_is_refused_in_words_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DpmergeError, match=r"DPM-103: merge\.device = 'cuda' is not there: torch sees no CUDA device"):
        merge(adapters(shared=True, rank=2), spec_of("average", device="cuda"))
    with pytest.raises(DpmergeError, match="'tpu' is unknown; choose one of cpu, cuda, auto"):
        merge(adapters(shared=True, rank=2), spec_of("average", device="tpu"))  # type: ignore[arg-type]
    assert device_of("auto").type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [device_of(name).type for name in ("auto", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_cuda_gives_what_the_processor_gives(method: str) -> None:
    inputs = adapters(shared=False, rank=3)
    expected, found = run(method, inputs), run(method, inputs, device="cuda")
    for name, item in found.modules.items():
        torch.testing.assert_close(item.delta(), expected.modules[name].delta(), rtol=1e-4, atol=1e-5)
