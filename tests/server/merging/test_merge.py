"""`merge` on files: what PEFT computes, what the gate refuses, what is written."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save, save_file
from torch import Tensor, nn

from dpmerge.common.errors import DpmergeError
from dpmerge.common.release.format import Head, Release, read_release, release_hash, to_files, write_release
from dpmerge.server.merging.adapters.deltas import Adapter, LowRankDelta, adapter_from_files, lora_factors, read_adapter
from dpmerge.server.merging.diagnostics import MAX_OVERLAP_PARTIES
from dpmerge.server.merging.merge import as_release, merge
from dpmerge.server.merging.methods.geometry import cosines
from dpmerge.server.merging.registry import METHODS
from dpmerge.server.merging.spec.spec import spec_of

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


class Tiny(nn.Module):
    """Two layers of two linears, with the names of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.ModuleList(
            nn.ModuleDict({"query": nn.Linear(6, 6), "dense": nn.Linear(6, 6)}) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layer:
            x = torch.tanh(layer["dense"](layer["query"](x)))  # type: ignore[index]  # ModuleDict
        return x


CONFIGS: dict[str, dict[str, Any]] = {
    "alpha is rank": {"r": 4, "lora_alpha": 4},
    "alpha is not rank": {"r": 4, "lora_alpha": 10},
    "rslora": {"r": 4, "lora_alpha": 10, "use_rslora": True},
    "patterns": {"r": 4, "lora_alpha": 10, "rank_pattern": {"query": 2, "0.dense": 3}, "alpha_pattern": {"1.query": 7}},
}


def peft_folder(path: Path, seed: int, dtype: torch.dtype = torch.float32, **config: Any) -> PeftModel:
    model = get_peft_model(Tiny(), LoraConfig(target_modules=["query", "dense"], **config))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.3, generator=generator)
            parameter.data = parameter.data.to(dtype).float()
    model.save_pretrained(path)
    config_file = path / "adapter_config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"base_model_name_or_path": "tiny"}))
    if dtype != torch.float32:
        tensors = {key: value.to(dtype) for key, value in model.state_dict().items() if "lora_" in key}
        save_file(
            {key.replace(".default", ""): value for key, value in tensors.items()}, path / "adapter_model.safetensors"
        )
    return model


def peft_deltas(model: PeftModel) -> dict[str, Tensor]:
    found = {}
    for name, module in model.base_model.model.named_modules():
        if hasattr(module, "get_delta_weight"):
            found[name] = module.get_delta_weight("default").detach()
    return found


def statement(party: str) -> dict[str, Any]:
    return {"party": party, "epsilon": 2.0, "base_sha256": "0" * 64}


def as_party(folder: Path, party: str) -> Release:
    """Make a release out of a PEFT folder."""
    item = read_adapter(folder)
    tensors = {}
    for name, f in item.modules.items():
        tensors |= {f"base_model.model.{name}.lora_A.weight": f.a, f"base_model.model.{name}.lora_B.weight": f.b}
    head = Head("linear", ("no", "yes"), torch.ones(2, 6))
    return Release(party, tensors, item.config, {party: head}, statement(party))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", CONFIGS)
def test_deltas_are_those_that_peft_computes(tmp_path: Path, config: str, dtype: torch.dtype) -> None:
    model = peft_folder(tmp_path, 1, dtype, **CONFIGS[config])
    item, expected = read_adapter(tmp_path), peft_deltas(model)
    assert item.modules.keys() == expected.keys()
    for name, target in expected.items():
        torch.testing.assert_close(item.modules[name].delta(), target, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("config", "rank"), [*((config, None) for config in CONFIGS), ("patterns", 3)])
@pytest.mark.parametrize("method", METHODS)
def test_peft_opens_what_is_written_and_computes_the_merged_model(
    tmp_path: Path, method: str, config: str, rank: int | None
) -> None:
    adapters = []
    for seed, party in enumerate(("shop", "library")):
        peft_folder(tmp_path / "peft" / party, seed, **CONFIGS[config])
        write_release(tmp_path / party, as_party(tmp_path / "peft" / party, party))
        adapters.append(read_adapter(tmp_path / party))
    options: dict[str, Any] = {"coefficient": 0.5} if method == "task-arithmetic" else {}
    if METHODS[method].statistics:  # every module of this model is square, so one shape serves both kinds
        options["statistics"] = {
            party: {name: torch.eye(6) for name in adapters[0].modules} for party in ("shop", "library")
        }
    merged = merge(adapters, spec_of(method, rank=rank, **options))
    write_release(tmp_path / "merged", as_release(merged, adapters))

    expected = Tiny()
    for name, f in merged.modules.items():
        expected.get_submodule(name).weight.data += f.delta()
    loaded = PeftModel.from_pretrained(Tiny(), tmp_path / "merged").eval()
    x = torch.randn(5, 6)
    torch.testing.assert_close(loaded(x), expected(x), rtol=1e-4, atol=1e-5)
    back = read_release(tmp_path / "merged")
    assert back.merge is not None
    assert sorted(back.heads) == ["library", "shop"]
    assert [entry["party"] for entry in back.merge["inputs"]] == ["library", "shop"]
    assert [entry["sha256"] for entry in back.merge["inputs"]] == [a.sha256 for a in adapters[::-1]]
    assert [entry["epsilon"] for entry in back.merge["inputs"]] == [2.0, 2.0]
    assert back.merge["base_sha256"] == "0" * 64


def test_the_record_is_enough_to_merge_again_to_the_same_bytes(tmp_path: Path) -> None:
    for seed, party in enumerate(("shop", "library")):
        peft_folder(tmp_path / party, seed, r=4)
    adapters = [read_adapter(tmp_path / party) for party in ("shop", "library")]
    first = to_files(as_release(merge(adapters, spec_of("dare-ties", weights=None, density=0.4, seed=5)), adapters))
    record = json.loads(first["merge.json"])
    parameters = record["parameters"]
    weights = {entry["party"]: entry["weight"] for entry in record["inputs"]}
    again = to_files(as_release(merge(adapters, spec_of(record["method"], weights=weights, **parameters)), adapters))
    assert again == first


def test_a_merged_model_can_be_merged_again(tmp_path: Path) -> None:
    for seed, party in enumerate("abc"):
        peft_folder(tmp_path / party, seed, r=2)
    a, b, c = (read_adapter(tmp_path / party) for party in "abc")
    write_release(tmp_path / "ab", as_release(merge([a, b], spec_of("average")), [a, b]))
    nested = merge([read_adapter(tmp_path / "ab"), c], spec_of("average", weights={"ab": 2, "c": 1}))
    flat = merge([a, b, c], spec_of("average"))
    for name, f in flat.modules.items():
        torch.testing.assert_close(nested.modules[name].delta(), f.delta(), rtol=1e-4, atol=1e-6)


def pair(*, shared: bool) -> list[Adapter]:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(4, 20, generator=generator)
    adapters = []
    for party in ("x", "y"):
        own = a if shared else torch.randn(4, 20, generator=generator)
        modules = {"m": LowRankDelta(own, torch.randn(30, 4, generator=generator), 2.0)}
        adapters.append(Adapter(party, modules, {"base_model_name_or_path": "tiny"}, party))
    return adapters


def test_shared_a_keeps_its_rank_and_its_bits() -> None:
    x, y = pair(shared=True)
    merged = merge([x, y], spec_of("average")).modules["m"]
    assert torch.equal(merged.a, x.modules["m"].a)
    assert torch.equal(merged.b, x.modules["m"].b + y.modules["m"].b)  # scaling 2, weight 1/2: exact
    assert merge([x, y], spec_of("concat")).modules["m"].rank == 8


def test_independent_a_has_no_cross_terms() -> None:
    x, y = pair(shared=False)
    merged = merge([x, y], spec_of("task-arithmetic", coefficient=0.7, weights={"x": 2, "y": -1}))
    expected = 0.7 * (2 * x.modules["m"].delta() - y.modules["m"].delta())
    torch.testing.assert_close(merged.modules["m"].delta(), expected, rtol=1e-5, atol=1e-5)
    assert merged.modules["m"].rank == 8


def test_cosines_of_what_did_not_move() -> None:
    assert torch.isfinite(cosines(torch.zeros(2, 2))).all()


def test_weights_are_shares_of_an_average() -> None:
    x, y = pair(shared=True)
    merged = merge([x, y], spec_of("average", weights={"x": 3, "y": 1}))
    expected = 0.75 * x.modules["m"].delta() + 0.25 * y.modules["m"].delta()
    torch.testing.assert_close(merged.modules["m"].delta(), expected, rtol=1e-5, atol=1e-5)


def test_many_parties_report_norms_without_overlaps() -> None:
    x, _ = pair(shared=True)
    many = [replace(x, party=f"p{i:03d}") for i in range(MAX_OVERLAP_PARTIES + 1)]
    info = merge(many, spec_of("average")).info
    assert info["overlap"] is None
    assert info["norms"] == pytest.approx([info["norm"]] * len(many), rel=1e-5)


def bad_modules(change: Callable[[LowRankDelta], LowRankDelta]) -> Callable[[Adapter], Adapter]:
    return lambda item: replace(item, modules={name: change(f) for name, f in item.modules.items()})


GATE: dict[str, tuple[Callable[[Adapter], Adapter], str]] = {
    "shape": (bad_modules(lambda f: LowRankDelta(f.a[:, 1:], f.b)), r"y: m is \(30, 19\) but \(30, 20\) at x"),
    "NaN": (
        bad_modules(lambda f: LowRankDelta(f.a * float("nan"), f.b)),
        "y: adapter_model.safetensors: the change of m is not finite",
    ),
    "module": (
        lambda item: replace(item, modules={"n": item.modules["m"]}),
        "x: does not adapt n, which others do; y: does not adapt m, which others do",
    ),
    "base name": (
        lambda item: replace(item, config={"base_model_name_or_path": "big"}),
        "base model big but tiny at x",
    ),
    "same party": (lambda item: replace(item, party="x"), "x: 2 adapters have this name"),
}


@pytest.mark.parametrize("case", GATE)
def test_the_gate_names_party_and_module(case: str) -> None:
    x, y = pair(shared=True)
    change, message = GATE[case]
    with pytest.raises(DpmergeError, match=message) as caught:
        merge([x, change(y)], spec_of("average"))
    assert caught.value.code == "DPM-402"


def test_the_gate_compares_bases_by_hash_and_lists_everything() -> None:
    x, y = pair(shared=True)
    x, y = replace(x, base_sha256="aa"), replace(y, base_sha256="bb")
    y = replace(y, modules={"m": LowRankDelta(y.modules["m"].a[:, 1:], y.modules["m"].b)})
    with pytest.raises(DpmergeError, match=r"base model tiny has SHA-256 bb… but aa… at x; y: m is"):
        merge([x, y], spec_of("average"))
    renamed = replace(x, party="z", config={"base_model_name_or_path": "elsewhere"})
    merge([x, renamed], spec_of("average"))  # one hash, two names: the same model


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ({"method": "magic"}, "DPM-104", "average, task-arithmetic"),
        ({"method": "task-arithmetic"}, "DPM-103", "merge.coefficient = None has no default"),
        ({"method": "task-arithmetic", "coefficient": math.nan}, "DPM-103", "merge.coefficient = nan"),
        ({"method": "average", "coefficient": 0.5}, "DPM-103", "merge.coefficient = 0.5 is no parameter of average"),
        ({"method": "average", "density": 0.5}, "DPM-103", "merge.density"),
        ({"method": "average", "semantics": "peft"}, "DPM-103", "merge.semantics"),
        ({"method": "ties", "density": 0.0}, "DPM-103", r"merge.density = 0.0 is outside \(0, 1\]"),
        ({"method": "ties", "density": 1.1}, "DPM-103", "merge.density"),
        ({"method": "ties", "semantics": "mine"}, "DPM-103", "merge.semantics = 'mine'"),
        ({"method": "ties", "weights": {"x": 1, "y": 2}}, "DPM-103", "semantics peft or mergekit"),
        ({"method": "average", "rank": 0}, "DPM-103", "merge.rank = 0"),
        ({"method": "average", "weights": {"x": 1}}, "DPM-103", "weights name x, but the parties are x, y"),
        ({"method": "average", "weights": {"x": 1, "y": -1}}, "DPM-103", "no shares of an average"),
        ({"method": "average", "weights": {"x": 0, "y": 0}}, "DPM-103", "no shares of an average"),
        ({"method": "average", "weights": {"x": 1, "y": math.inf}}, "DPM-103", "merge.weights.y = inf"),
    ],
)
def test_bad_parameters_are_refused(options: dict[str, Any], code: str, message: str) -> None:
    with pytest.raises(DpmergeError, match=message) as caught:
        merge(pair(shared=True), spec_of(**options))
    assert caught.value.code == code


def test_nothing_to_merge() -> None:
    with pytest.raises(DpmergeError, match="DPM-403"):
        merge([], spec_of("average"))


LORA = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "bias": "none", "base_model_name_or_path": "tiny"}
PAIR = {"base_model.model.q.lora_A.weight": torch.zeros(2, 3), "base_model.model.q.lora_B.weight": torch.zeros(3, 2)}


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"peft_type": "IA3"}, {}, "peft_type = 'IA3'"),
        ({"bias": "all"}, {}, "bias = 'all'"),
        ({"use_dora": True}, {}, "use_dora"),
        ({"lora_bias": True}, {}, "lora_bias"),
        ({"modules_to_save": ["head"]}, {}, "modules_to_save"),
        ({"r": 3}, {}, "q has A .* rank 3"),
        ({"r": None}, {}, "r = None is not an integer of at least 1"),
        ({"lora_alpha": "4"}, {}, "lora_alpha = '4' is not a finite number"),
        ({"lora_alpha": 10**400}, {}, "is not a finite number"),
        ({"use_rslora": "false"}, {}, "use_rslora = 'false'"),
        ({"rank_pattern": [2]}, {}, r"rank_pattern = \[2\] is no object"),
        ({"rank_pattern": {"(": 2}}, {}, "rank_pattern of adapter_config.json: '\\(' is none of"),
        ({"alpha_pattern": {"q": True}}, {}, "alpha_pattern.q = True is no finite number"),
        ({}, {"base_model.model.e.lora_embedding_A": torch.zeros(2, 3)}, "lora_embedding_A"),
        ({}, {"base_model.model.q.lora_magnitude_vector": torch.zeros(3)}, "lora_magnitude_vector"),
        ({}, {"base_model.model.k.lora_A.weight": torch.zeros(2, 3)}, "of k there is lora_A, which is no pair"),
        ({}, {"base_model.model.k.lora_B.weight": torch.zeros(2, 3)}, "of k there is lora_B, which is no pair"),
        ({}, {"base_model.model.q.lora_A.weight": torch.zeros(2, 3, 1, 1)}, "q has A"),
    ],
)
def test_what_is_no_plain_lora_is_refused_by_name(
    config: dict[str, Any], tensors: dict[str, Tensor], message: str
) -> None:
    with pytest.raises(DpmergeError, match=message) as caught:
        lora_factors(PAIR | tensors, LORA | config, "shop")
    assert caught.value.code == "DPM-402"
    assert "shop" in str(caught.value)


def test_folders_without_an_adapter_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DpmergeError, match="lacks adapter_config"):
        read_adapter(tmp_path)
    with pytest.raises(DpmergeError, match="absent is no folder"):
        read_adapter(tmp_path / "absent")
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(DpmergeError, match="only pickled weights"):
        read_adapter(tmp_path)


def test_the_name_of_an_input_is_its_hash() -> None:
    files = {"adapter_config.json": json.dumps(LORA).encode(), "adapter_model.safetensors": save(PAIR)}
    item = adapter_from_files(files, "shop")
    assert item.sha256 == release_hash(files)
    moved = files | {"adapter_config.json": json.dumps(LORA | {"base_model_name_or_path": "/models/tiny/"}).encode()}
    assert adapter_from_files(moved, "shop").base == "tiny"
    assert as_release(merge([adapter_from_files(moved, "a")], spec_of("average")), [adapter_from_files(moved, "a")])


def test_concat_is_what_peft_calls_cat(tmp_path: Path) -> None:
    model = peft_folder(tmp_path / "shop", 1, **CONFIGS["alpha is not rank"])
    peft_folder(tmp_path / "bank", 2, **CONFIGS["alpha is not rank"])
    model.load_adapter(str(tmp_path / "bank"), adapter_name="bank")
    model.add_weighted_adapter(["default", "bank"], [0.7, 0.3], "sum", combination_type="cat")
    adapters = [read_adapter(tmp_path / party) for party in ("shop", "bank")]
    merged = merge(adapters, spec_of("concat", weights={"shop": 0.7, "bank": 0.3}))
    for name, f in merged.modules.items():
        expected = model.base_model.model.get_submodule(name).get_delta_weight("sum").detach()
        torch.testing.assert_close(f.delta(), expected, rtol=1e-4, atol=1e-6)
        assert f.rank == 8


@pytest.mark.parametrize(
    ("name", "base"),
    [("org/model", "org/model"), ("/data/models/model/", "model"), ("C:\\models\\model", "model"), ("model", "model")],
)
def test_a_merge_names_a_hub_model_in_full_and_of_a_path_the_last_part(name: str, base: str) -> None:
    x, y = pair(shared=True)
    x, y = (replace(item, config=item.config | {"base_model_name_or_path": name}) for item in (x, y))
    assert as_release(merge([x, y], spec_of("average")), [x, y]).adapter_config["base_model_name_or_path"] == base
