"""Adapters stay in their files, parties and modules are looked at one at a time, and neither changes a number."""

import json
import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file
from torch import Tensor

from dpmerge.common.errors import DpmergeError
from dpmerge.common.release.format import Head, Release, adapter_key, write_release
from dpmerge.common.untrusted.parsing import ReleaseRefused
from dpmerge.server.merging.adapters.deltas import Adapter, LowRankDelta, adapter_from_files, read_adapter
from dpmerge.server.merging.adapters.lazy_tensors import StoredTensor, open_tensors
from dpmerge.server.merging.gate.compatibility import gather
from dpmerge.server.merging.low_rank import algebra, strips
from dpmerge.server.merging.low_rank.algebra import beside_identity, factorise, total_norm, weighted_sum
from dpmerge.server.merging.merge import merge
from dpmerge.server.merging.methods.recipe import per_module
from dpmerge.server.merging.spec.spec import spec_of

RANK, OUT, IN = 2, 8, 6
CONFIG = {"peft_type": "LORA", "r": RANK, "lora_alpha": 3, "bias": "none", "base_model_name_or_path": "tiny"}
FILE = "adapter_model.safetensors"


def tensors(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name in ("layer.0.query", "layer.1.query"):
        found[adapter_key(name, "lora_A")] = torch.randn(RANK, IN, generator=generator).to(dtype)
        found[adapter_key(name, "lora_B")] = torch.randn(OUT, RANK, generator=generator).to(dtype)
    return found


def peft_folder(path: Path, seed: int, dtype: torch.dtype = torch.float32) -> Path:
    path.mkdir(parents=True)
    save_file(tensors(seed, dtype), path / FILE)
    (path / "adapter_config.json").write_text(json.dumps(CONFIG))
    return path


def release_folder(path: Path, seed: int) -> Path:
    head = Head("linear", ("no", "yes"), torch.ones(2, 6))
    statement = {"party": "shop", "epsilon": 2.0, "base_sha256": "0" * 64}
    write_release(path, Release("shop", tensors(seed), CONFIG, {"shop": head}, statement))
    return path


def in_memory(folder: Path) -> Adapter:
    return adapter_from_files({path.name: path.read_bytes() for path in folder.iterdir()}, folder.name)


def same(one: LowRankDelta, other: LowRankDelta) -> bool:
    return torch.equal(one.a, other.a) and torch.equal(one.b, other.b) and one.scaling == other.scaling


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, None])
def test_a_folder_reads_as_its_bytes_do(tmp_path: Path, dtype: torch.dtype | None) -> None:
    folder = tmp_path / "shop"
    folder = peft_folder(folder, 1, dtype) if dtype else release_folder(folder, 1)
    lazy, eager = read_adapter(folder), in_memory(folder)
    assert lazy.modules.keys() == eager.modules.keys()
    assert all(same(lazy.modules[name], eager.modules[name]) for name in eager.modules)
    assert all(isinstance(item.source_a, StoredTensor) for item in lazy.modules.values())
    assert all(item.a.dtype == torch.float32 for item in lazy.modules.values())
    assert [item.shape for item in lazy.modules.values()] == [(OUT, IN)] * 2
    assert (lazy.party, lazy.sha256, lazy.base_sha256) == (eager.party, eager.sha256, eager.base_sha256)
    assert (lazy.config, lazy.statement, lazy.heads.keys()) == (eager.config, eager.statement, eager.heads.keys())


def damaged(case: str) -> bytes:
    if case == "truncated":
        return save(tensors(1))[:-1]
    if case == "dtype":
        return save({key: value.double() for key, value in tensors(1).items()})
    broken = tensors(1)
    broken[adapter_key("layer.1.query", "lora_B")][3, 1] = float("nan")
    return save(broken)


@pytest.mark.parametrize("make", [peft_folder, release_folder])
@pytest.mark.parametrize("case", ["truncated", "dtype", "non-finite"])
def test_what_is_refused_in_bytes_is_refused_in_a_folder(tmp_path: Path, case: str, make: Any) -> None:
    folder = make(tmp_path / "shop", 1)
    (folder / FILE).write_bytes(damaged(case))
    for reading in (in_memory, read_adapter):
        with pytest.raises(ReleaseRefused, match=f"shop: {FILE}: ") as found:
            reading(folder)
        assert found.value.reason == case
        if case == "non-finite":
            assert "layer.1.query.lora_B" in str(found.value)


def test_a_file_that_changes_while_it_is_merged_is_refused_by_name(tmp_path: Path) -> None:
    folder = peft_folder(tmp_path / "shop", 1)
    item = read_adapter(folder)
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-4])
    with pytest.raises(DpmergeError, match=rf"shop: {FILE}: \S+: \d+ of \d+ bytes \[truncated\]"):
        merge([item], spec_of("average"))
    (folder / FILE).unlink()
    with pytest.raises(DpmergeError, match=r"\[missing-file\]"):
        merge([item], spec_of("average"))


def test_a_number_without_dimensions_is_no_factor(tmp_path: Path) -> None:
    folder = peft_folder(tmp_path / "shop", 1)
    save_file(tensors(1) | {"base_model.model.x.lora_A.weight": torch.tensor(1.0)}, folder / FILE)
    assert open_tensors(folder / FILE, "shop")[0]["base_model.model.x.lora_A.weight"].read() == 1
    with pytest.raises(DpmergeError, match="of x there is lora_A, which is no pair"):
        read_adapter(folder)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files as Linux lists them")
def test_a_thousand_adapters_keep_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = peft_folder(tmp_path / "shop", 1)
    before = len(os.listdir("/proc/self/fd"))
    most, read = 0, StoredTensor.read

    def counting(self: StoredTensor) -> Tensor:
        nonlocal most
        tensor = read(self)
        most = max(most, len(os.listdir("/proc/self/fd")))
        return tensor

    adapters = [read_adapter(folder, f"p{index:04d}") for index in range(1024)]
    monkeypatch.setattr(StoredTensor, "read", counting)
    merged = merge(adapters, spec_of("average"))
    assert most <= before + 1  # the listing itself
    torch.testing.assert_close(merged.modules["layer.0.query"].delta(), adapters[0].modules["layer.0.query"].delta())


@pytest.mark.parametrize("method", ["average", "concat", "task-arithmetic"])
def test_the_linear_family_holds_one_party_of_one_module(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters = [read_adapter(peft_folder(tmp_path / f"p{seed}", seed)) for seed in range(12)]
    alive, most, read = 0, 0, StoredTensor.read

    def freed() -> None:
        nonlocal alive
        alive -= 1

    def counting(self: StoredTensor) -> Tensor:
        nonlocal alive, most
        tensor = read(self)
        alive, most = alive + 1, max(most, alive + 1)
        weakref.finalize(tensor, freed)
        return tensor

    monkeypatch.setattr(StoredTensor, "read", counting)
    modules, _ = gather(adapters)
    assert most == 0
    options = {"coefficient": 0.5} if method == "task-arithmetic" else {}
    monkeypatch.setattr("dpmerge.server.merging.merge.measures", lambda *_: {})
    monkeypatch.setattr("dpmerge.server.merging.methods.recipe._cores", lambda: 1)
    monkeypatch.setattr(algebra, "BLOCK", RANK)
    merge(adapters, spec_of(method, **options))
    assert 0 < most <= 4
    assert len(modules["layer.0.query"]) == 12


def test_gather_says_where_factors_are_read_to(tmp_path: Path) -> None:
    lazy = read_adapter(peft_folder(tmp_path / "shop", 1))
    eager = in_memory(peft_folder(tmp_path / "bank", 2))
    modules, _ = gather([lazy, eager], device="meta")  # stands for an accelerator
    assert {item.a.device.type for row in modules.values() for item in row} == {"meta"}
    assert {item.device.type for row in modules.values() for item in row} == {"meta"}
    assert {item.a.device.type for item in lazy.modules.values()} == {"cpu"}


def pairs(count: int, out: int = OUT, width: int = IN) -> list[LowRankDelta]:
    generator = torch.Generator().manual_seed(3)
    return [
        LowRankDelta(torch.randn(RANK, width, generator=generator), torch.randn(out, RANK, generator=generator), 1.5)
        for _ in range(count)
    ]


def test_threads_change_no_bit_and_no_order() -> None:
    modules = {f"m{index}": tuple(pairs(3)) for index in (3, 1, 2, 0)}
    meeting = threading.Barrier(2, timeout=30)

    def rule(_: str, factors: tuple[LowRankDelta, ...]) -> tuple[LowRankDelta, float]:
        meeting.wait()  # passes only while two modules are under way
        return weighted_sum(factors, [1.0, -2.0, 0.5]), 0.25

    threaded = per_module(modules, rule, 1.0, workers=2)
    meeting = threading.Barrier(1)
    alone = per_module(modules, rule, 1.0, workers=1)
    assert list(threaded.modules) == list(threaded.lost) == list(modules)
    assert threaded.lost == alone.lost
    assert all(same(threaded.modules[name], alone.modules[name]) for name in modules)


def test_a_refusal_in_a_thread_is_the_callers() -> None:
    def rule(name: str, _: tuple[LowRankDelta, ...]) -> tuple[LowRankDelta, float]:
        raise DpmergeError("DPM-103", f"{name} is wrong", "do better")

    with pytest.raises(DpmergeError, match="m0 is wrong"):
        per_module({"m0": tuple(pairs(1)), "m1": tuple(pairs(1))}, rule, 1.0, workers=2)


@pytest.mark.parametrize(("cores", "threads", "expected"), [(8, 2, 4), (8, 16, 1), (2, 1, 2), (64, 1, 5)])
def test_workers_are_the_processors_that_torch_leaves(
    cores: int, threads: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    class Pool:
        def __init__(self, count: int) -> None:
            seen.append(count)

        def __enter__(self) -> "Pool":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        map = staticmethod(map)

    monkeypatch.setattr("dpmerge.server.merging.methods.recipe.ThreadPoolExecutor", Pool)
    monkeypatch.setattr("dpmerge.server.merging.methods.recipe._cores", lambda: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    per_module({f"m{i}": tuple(pairs(1)) for i in range(5)}, lambda _, factors: (factors[0], 0.0), 1.0)
    assert seen == ([expected] if expected > 1 else [])


@pytest.mark.parametrize(("out", "width"), [(OUT, IN), (IN, OUT), (OUT, OUT)])
def test_more_ranks_than_the_matrix_has_add_up_in_the_matrix(out: int, width: int) -> None:
    few, many = pairs(min(out, width) // RANK, out, width), pairs(200, out, width)
    assert weighted_sum(few, [1.0] * len(few)).rank == min(out, width)
    total = weighted_sum(many, [0.5] * len(many))
    assert total.rank == min(out, width)
    expected = 0.5 * torch.stack([item.delta().double() for item in many]).sum(0)
    assert (total.delta().double() - expected).norm() < 2e-6 * expected.norm()
    shared = [LowRankDelta(many[0].a, item.b, item.scaling) for item in many]
    assert weighted_sum(shared, [1.0] * len(shared)).rank == RANK


def test_at_full_rank_nothing_is_decomposed() -> None:
    for matrix in (torch.randn(OUT, IN), torch.randn(IN, OUT)):
        item, lost = factorise(matrix, 100)
        assert torch.equal(item.delta(), matrix)
        assert (item.rank, lost) == (IN, 0.0)


@pytest.mark.parametrize("shape", [(6, 9), (9, 6)])
def test_factorising_is_the_best_approximation(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    item, lost = factorise(matrix, 3)
    torch.testing.assert_close(item.delta().double(), (u[:, :3] * s[:3]) @ vh[:3], rtol=1e-5, atol=1e-6)
    assert lost == pytest.approx(float(s[3:].norm()), rel=1e-6)


@pytest.mark.parametrize(("out", "width", "rank"), [(900, 2000, 520), (700, 600, 550), (600, 620, 600)])
def test_norms_of_long_stacks(out: int, width: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(0)
    item = LowRankDelta(torch.randn(rank, width, generator=generator), torch.randn(out, rank, generator=generator), 0.3)
    full = 0.3 * item.b.double() @ item.a.double()
    assert total_norm([item]) == pytest.approx(float(full.norm()), rel=1e-6)
    assert total_norm([beside_identity(full.float())]) == pytest.approx(float(full.norm()), rel=1e-6)


def delta_of(method: str, factors: Sequence[LowRankDelta], **options: Any) -> Tensor:
    config = {"base_model_name_or_path": "tiny"}
    adapters = [Adapter(f"p{t}", {"m": item}, config, f"{t}") for t, item in enumerate(factors)]
    return merge(adapters, spec_of(method, rank=100, **options)).modules["m"].delta()


@pytest.mark.parametrize("method", ["ties", "dare", "dare-ties", "della", "breadcrumbs", "knots-ties"])
def test_rows_at_a_time_change_nothing(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    factors = pairs(3, out=40, width=30)
    whole = delta_of(method, factors, density=0.5)
    monkeypatch.setattr(strips, "STRIP", 7 * 30)
    torch.testing.assert_close(delta_of(method, factors, density=0.5), whole, rtol=1e-4, atol=1e-5)
