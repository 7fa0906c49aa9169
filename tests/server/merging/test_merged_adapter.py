"""What is written opens with PEFT under the names and shapes that are in the file, and is a valid input again."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dpmerge.common.errors import DpmergeError
from dpmerge.common.release.format import write_release
from dpmerge.common.untrusted.parsing import MAX_HEADER_BYTES
from dpmerge.server.evaluation.public_statistics import public_statistics
from dpmerge.server.merging.adapters.deltas import Adapter, read_adapter
from dpmerge.server.merging.gate.gate import inspect_adapters
from dpmerge.server.merging.merge import as_release, merge
from dpmerge.server.merging.spec.spec import spec_of

PREFIX = "base_model.model."


def model_of(names: Mapping[str, nn.Module]) -> nn.Module:
    root = nn.Module()
    for name, module in names.items():
        parent, parts = root, name.split(".")
        for part in parts[:-1]:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.add_module(parts[-1], module)
    return root


def tensors_for(names: list[str], rank: int = 1, width: int = 2) -> dict[str, Tensor]:
    tensors = {}
    for number, name in enumerate(names):
        tensors[f"{PREFIX}{name}.lora_A.weight"] = torch.full((rank, width), 1.0 + number)
        tensors[f"{PREFIX}{name}.lora_B.weight"] = torch.full((width, rank), 0.5)
    return tensors


def adapter(folder: Path, tensors: Mapping[str, Tensor], **config: Any) -> Path:
    folder.mkdir()
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 2, "base_model_name_or_path": "tiny"} | config
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def merged(folder: Path, *inputs: Path, **options: Any) -> tuple[Path, tuple[Adapter, ...]]:
    gate = inspect_adapters([(None, path) for path in inputs], strict=False)
    assert gate.refusals == ()
    options = {"method": "average", "strict": False} | options
    write_release(folder, as_release(merge(gate.adapters, spec_of(**options)), gate.adapters))
    return folder, gate.adapters


def opens_on_meta(names: Mapping[str, nn.Module], folder: Path) -> None:
    """Let PEFT make the adapter on the meta device, and compare names and shapes with the file."""
    config = PeftConfig.from_pretrained(str(folder))
    config.base_model_name_or_path = None  # these models have no name
    with torch.device("meta"):
        model = get_peft_model(model_of(names), config)
    expected = {key: tuple(value.shape) for key, value in get_peft_model_state_dict(model).items()}
    found = {key: tuple(value.shape) for key, value in load_file(folder / "adapter_model.safetensors").items()}
    assert found == expected


def linear(names: list[str], width: int = 2) -> dict[str, nn.Module]:
    return {name: nn.Linear(width, width, bias=False) for name in names}


def test_one_name_that_is_the_end_of_another_keeps_its_rank_and_adapts_nothing_else(tmp_path: Path) -> None:
    names = ["proj_out", "blocks.0.proj_out", "blocks.0.ff"]
    ranks = {"proj_out": 1, "blocks.0.proj_out": 2, "blocks.0.ff": 2}
    tensors = {key: value for name in names for key, value in tensors_for([name], ranks[name]).items()}
    shop = adapter(tmp_path / "shop", tensors, r=2, rank_pattern={"^proj_out": 1})
    out, (own,) = merged(tmp_path / "out", shop)
    opens_on_meta(linear([*names, "blocks.1.proj_out"]), out)
    again = read_adapter(out)
    for name, item in own.modules.items():
        torch.testing.assert_close(again.modules[name].delta(), item.delta())


@pytest.mark.parametrize("count", [882, 1568])
def test_many_modules_of_many_ranks_are_read_and_read_again(tmp_path: Path, count: int) -> None:
    """882 plain names were too many patterns, and our own result of 1,568 modules was no input."""
    names = [f"model.layers.{index // 7}.part{index % 7}.proj" for index in range(count)]
    tensors = {key: value for i, name in enumerate(names) for key, value in tensors_for([name], 1 + i % 3).items()}
    patterns = {name: 1 + i % 3 for i, name in enumerate(names)}
    shop = adapter(tmp_path / "shop", tensors, rank_pattern=patterns, alpha_pattern=dict.fromkeys(names, 2))
    out, (own,) = merged(tmp_path / "out", shop)
    twice, _ = merged(tmp_path / "twice", out)
    again = read_adapter(twice)
    assert len(again.modules) == count
    assert all(torch.equal(again.modules[name].delta(), item.delta()) for name, item in own.modules.items())


def test_a_header_as_long_as_that_of_a_mixture_of_experts_is_read(tmp_path: Path) -> None:
    shop = adapter(tmp_path / "shop", tensors_for(["q"]))
    save_file(tensors_for(["q"]), shop / "adapter_model.safetensors", {"note": "x" * (MAX_HEADER_BYTES + 1)})
    assert len(read_adapter(shop).modules) == 1


@pytest.mark.slow
@pytest.mark.parametrize("count", [4416, 18624])
def test_a_mixture_of_experts_of_thousands_of_modules_is_merged_and_read_again(tmp_path: Path, count: int) -> None:
    names = [
        f"model.layers.{i // 384}.mlp.experts.{i % 384 // 3}.{('up', 'gate', 'down')[i % 3]}_proj" for i in range(count)
    ]
    shop = adapter(tmp_path / "shop", tensors_for(names))
    out, _ = merged(tmp_path / "out", shop)
    assert len(read_adapter(out).modules) == count
    if count < 10_000:  # PEFT itself takes minutes for more
        opens_on_meta(linear(names), out)


WRAPPED = {
    "compiled": "base_model.model._orig_mod.layer.0.query",
    "distributed": "module.base_model.model.layer.0.query",
    "distributed inside": "base_model.model.module.layer.0.query",
    "doubled": "base_model.model.base_model.model.layer.0.query",
    "FSDP": "_fsdp_wrapped_module.base_model.model._fsdp_wrapped_module.layer.0._fsdp_wrapped_module.query",
    "checkpoint": "base_model.model.layer.0._checkpoint_wrapped_module.query",
    "all": "module._orig_mod.base_model.model.base_model.model._orig_mod.layer.0._checkpoint_wrapped_module.query",
}


@pytest.mark.parametrize("case", WRAPPED)
def test_what_libraries_put_around_a_model_is_not_in_the_result(tmp_path: Path, case: str) -> None:
    names = {
        f"{WRAPPED[case]}.lora_{part}.weight": torch.ones(*shape) for part, shape in {"A": (1, 2), "B": (2, 1)}.items()
    }
    out, _ = merged(tmp_path / "out", adapter(tmp_path / "shop", names, target_modules=["query"]))
    opens_on_meta(linear(["layer.0.query"]), out)


@pytest.mark.parametrize(
    "name",
    ["_forward_module.query", "layer._fpw_module.query", "a.base_model.query", "layer..query", "la yer.q", "x\x1by.q"],
)
def test_a_name_that_is_still_wrapped_or_none_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DpmergeError, match=r"DPM-402: shop: adapter_model.safetensors: .* names no module") as caught:
        read_adapter(adapter(tmp_path / "shop", tensors_for([name])))
    assert str(caught.value).isprintable()


def test_two_keys_that_become_one_name_are_refused(tmp_path: Path) -> None:
    tensors = tensors_for(["q"]) | tensors_for(["_orig_mod.q"])
    with pytest.raises(DpmergeError, match="two tensors are A of q"):
        read_adapter(adapter(tmp_path / "shop", tensors))


def test_a_module_of_this_name_is_no_wrapper(tmp_path: Path) -> None:
    item = read_adapter(adapter(tmp_path / "shop", tensors_for(["module.q", "other.q"])))
    assert sorted(item.modules) == ["module.q", "other.q"]


def test_tensors_that_peft_would_not_look_for_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DpmergeError, match=r"changes layer\.q, which target_modules of adapter_config\.json does not name"
    ):
        read_adapter(adapter(tmp_path / "shop", tensors_for(["layer.q"]), target_modules=["k"]))


def test_nothing_of_a_configuration_is_copied_that_was_not_understood(tmp_path: Path) -> None:
    kept = {"auto_mapping": {"base_model_class": "X"}, "megatron_core": "evil", "loftq_config": {"a": 1}}
    kept |= {"eva_config": {"rho": 2.0}, "layers_pattern": ["x"], "lora_dropout": 0.5, "peft_version": "9"}
    out, _ = merged(tmp_path / "out", adapter(tmp_path / "shop", tensors_for(["q"]), **kept))
    config = json.loads((out / "adapter_config.json").read_text())
    assert not {"auto_mapping", "megatron_core", "loftq_config", "eva_config", "layers_pattern", "peft_version"} & set(
        config
    )
    assert config["lora_dropout"] == 0.0
    opens_on_meta(linear(["q"]), out)


def embedded(folder: Path, seed: int, **config: Any) -> Path:
    """Let PEFT make LoRA on an embedding and on a linear layer."""
    modules = {"embed": nn.Embedding(7, 4), "q": nn.Linear(4, 4, bias=False)}
    model = get_peft_model(model_of(modules), LoraConfig(r=2, lora_alpha=6, target_modules=["embed", "q"], **config))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(generator=generator)
    tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
    settings = {"r": 2, "lora_alpha": 6, "target_modules": ["embed", "q"]} | config
    return adapter(folder, {key: value.contiguous() for key, value in tensors.items()}, **settings)


def test_embeddings_are_merged_and_written_as_peft_keeps_them(tmp_path: Path) -> None:
    folders = [embedded(tmp_path / party, seed) for seed, party in enumerate(("shop", "library"))]
    out, own = merged(tmp_path / "out", *folders)
    opens_on_meta({"embed": nn.Embedding(7, 4), "q": nn.Linear(4, 4, bias=False)}, out)
    again = read_adapter(out)
    assert again.embeddings == {"embed"}
    mean = (own[0].modules["embed"].delta() + own[1].modules["embed"].delta()) / 2
    torch.testing.assert_close(again.modules["embed"].delta(), mean)


@pytest.mark.parametrize("kind", ["gram", "fisher"])
def test_embeddings_have_no_statistics(tmp_path: Path, kind: Any) -> None:
    item = read_adapter(embedded(tmp_path / "shop", 1))
    with pytest.raises(DpmergeError, match="shop adapts embeddings"):
        public_statistics(None, [item], {"shop": ["a text"]}, kind=kind, max_length=8)  # type: ignore[arg-type]  # unread


def with_copy(folder: Path, seed: int, copy: Tensor) -> Path:
    path = embedded(folder, seed) / "adapter_model.safetensors"
    save_file(load_file(path) | {f"{PREFIX}embed.base_layer.weight": copy}, path)
    return folder


def test_a_copy_of_the_base_that_all_share_is_left_out_and_said(tmp_path: Path) -> None:
    folders = [with_copy(tmp_path / party, seed, torch.ones(7, 4)) for seed, party in enumerate(("shop", "library"))]
    gate = inspect_adapters([(None, folder) for folder in folders], strict=True)
    assert gate.refusals == ()
    assert "its copy of embed is taken for the base model's own and is not written" in gate.warnings[0]
    out, _ = merged(tmp_path / "out", *folders)
    opens_on_meta({"embed": nn.Embedding(7, 4), "q": nn.Linear(4, 4, bias=False)}, out)


def test_copies_of_the_base_that_differ_are_refused(tmp_path: Path) -> None:
    folders = [
        with_copy(tmp_path / name, seed, torch.ones(7, 4) + seed) for seed, name in enumerate(("shop", "library"))
    ]
    (refusal,) = inspect_adapters([(None, folder) for folder in folders], strict=True).refusals
    assert str(refusal).startswith("DPM-402: library: its copy of the base model's embed is not that of shop")


def test_a_whole_embedding_is_refused_with_what_to_do(tmp_path: Path) -> None:
    tensors = tensors_for(["q"]) | {f"{PREFIX}model.embed_tokens.weight": torch.ones(3, 2)}
    with pytest.raises(DpmergeError, match="save_embedding_layers=False"):
        read_adapter(adapter(tmp_path / "shop", tensors))


def test_heads_are_kept_per_party_and_again_after_a_second_merge(tmp_path: Path) -> None:
    folders = []
    for classes, party in ((2, "shop"), (3, "library")):
        head = {
            f"{PREFIX}classifier.weight": torch.full((classes, 2), 1.0),
            f"{PREFIX}classifier.bias": torch.zeros(classes),
        }
        config = {"task_type": "SEQ_CLS", "modules_to_save": ["classifier", "score"], "target_modules": ["q"]}
        folders.append(adapter(tmp_path / party, tensors_for(["layer.q"]) | head, **config))
    out, _ = merged(tmp_path / "out", *folders)
    opens_on_meta(linear(["layer.q", "classifier"]), out)
    twice, _ = merged(tmp_path / "twice", out)
    for folder in (out, twice):
        heads = load_file(folder / "modules.safetensors")
        assert {key: tuple(value.shape) for key, value in heads.items()} == {
            "shop/classifier.weight": (2, 2), "shop/classifier.bias": (2,),
            "library/classifier.weight": (3, 2), "library/classifier.bias": (3,),
        }  # fmt: skip
    (refusal,) = inspect_adapters([(None, out), (None, folders[0])], strict=True).refusals
    assert "brings a head of shop, and so does" in str(refusal)


def test_an_alpha_of_zero_is_merged_with_a_warning(tmp_path: Path) -> None:
    gate = inspect_adapters([(None, adapter(tmp_path / "shop", tensors_for(["q"]), lora_alpha=0))], strict=True)
    assert gate.refusals == ()
    assert gate.warnings == ("shop: lora_alpha = 0 for q, so that nothing is merged there",)
