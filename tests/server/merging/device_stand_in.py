"""Merging on another device than the processor: a stand-in shows that nothing is left behind or mixed up on the way.

The stand-in holds its numbers on the processor but says "meta". As on CUDA, an operation on tensors of both kinds is an
error (but for a number without dimensions in element-wise ones), and `numpy` is refused; unlike with real meta tensors
there are numbers, so that results can be compared. It tells nothing about the rounding or the speed of a GPU.

test_merging_device.py runs this file in a process of its own: models that transformers loads after it, in the same
process, have arbitrary numbers in their buffers.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from dpmerge.server.merging import merge as merge_module
from dpmerge.server.merging.adapters.deltas import Adapter, LowRankDelta
from dpmerge.server.merging.merge import Merged, merge
from dpmerge.server.merging.methods.recipe import REQUIRED
from dpmerge.server.merging.registry import METHODS
from dpmerge.server.merging.spec.spec import spec_of

PLACE = torch.device("meta")
COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)


class There(Tensor):
    """A tensor of the stand-in; `here` holds its numbers."""

    here: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, here: Tensor) -> "There":
        made: There = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, here.shape, here.stride(), here.storage_offset(), dtype=here.dtype, device=PLACE
        )
        made.here = here
        return made

    def tolist(self) -> Any:
        return self.here.tolist()

    def new_tensor(self, data: Any, **options: Any) -> Tensor:  # torch would make a real meta tensor, without numbers
        return There(self.here.new_tensor(data, **options))

    def __matmul__(
        self, other: "There"
    ) -> Tensor:  # torch would change a shape in place, which a wrapper cannot follow
        return There(self.here @ other.here)

    @classmethod
    def __torch_dispatch__(cls, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return carried_out(call, args, kwargs or {})


class StandIn(TorchDispatchMode):
    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return carried_out(call, args, kwargs or {})


def carried_out(call: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given = [item for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)]
    there = [item for item in given if isinstance(item, There)]
    if there and call not in COPIES:
        for item in given:
            number = item.dim() == 0 and torch.Tag.pointwise in call.tags
            if not isinstance(item, There) and not number:
                raise RuntimeError(f"{call} of tensors on {PLACE} and on {item.device}")
    asked = kwargs.get("device")
    away = isinstance(args[0], There) if call is COPIES[0] else asked == PLACE if asked else bool(there)
    if asked:
        kwargs = kwargs | {"device": torch.device("cpu")}
    result = call(*tree_map_only(There, lambda item: item.here, args), **tree_map_only(There, lambda i: i.here, kwargs))
    known = {id(item.here): item for item in there}  # what is changed in place stays who it is
    return tree_map_only(Tensor, lambda item: known.get(id(item), There(item)), result) if away else result


SHAPES = {"layer.0.query": (12, 10), "layer.0.output": (9, 14)}


def adapters(*, shared: bool, rank: int) -> list[Adapter]:
    found = []
    for t, party in enumerate(("bank", "library", "shop")):
        generator = torch.Generator().manual_seed(t)
        modules = {}
        for name, (out, width) in SHAPES.items():
            a = torch.randn(rank, width, generator=torch.Generator().manual_seed(9) if shared else generator)
            modules[name] = LowRankDelta(a, torch.randn(out, rank, generator=generator), 1.5)
        found.append(Adapter(party, modules, {"base_model_name_or_path": "tiny"}, party))
    return found


def run(method: str, inputs: list[Adapter], **options: Any) -> Merged:
    inputs = inputs[: METHODS[method].most]
    if METHODS[method].parameters.get("coefficient") == REQUIRED:
        options["coefficient"] = 0.5
    if kind := METHODS[method].statistics:
        numbers = {n: torch.eye(width) if kind == "gram" else torch.ones(o, width) for n, (o, width) in SHAPES.items()}
        options["statistics"] = {item.party: numbers for item in inputs}
    return merge(inputs, spec_of(method, **options))


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Merged]:
    """Merge on the stand-in."""
    made = torch.tensor

    def tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:  # as in `There.new_tensor`
        return made(data, device="cpu", **options).to(device or torch.empty(0).device)

    def call(*arguments: Any, **options: Any) -> Merged:
        with monkeypatch.context() as patch, StandIn():
            patch.setattr(torch, "tensor", tensor)
            patch.setattr(merge_module, "device_of", lambda _: PLACE)
            patch.setattr("dpmerge.server.merging.methods.recipe._cores", lambda: 1)  # modes do not reach other threads
            return run(*arguments, **options)

    return call


CASES: list[tuple[str, dict[str, Any]]] = [
    *((method, {}) for method in METHODS),
    *((method, {"core": True}) for method, row in METHODS.items() if not row.statistics),
    *((method, {"rank": 2}) for method in ("average", "concat", "tsv", "knots-ties", "regmean")),
    ("ties", {"semantics": "peft", "rank": 2}),
    ("average", {"robust": "median"}),
    ("tsv", {"robust": "clip"}),
    ("iso-c", {"denoise": True}),
    ("ties", {"layer_scales": {"query": 0.5}}),
]


@pytest.mark.parametrize(("method", "options"), CASES)
@pytest.mark.parametrize(("shared", "rank"), [(True, 6), (False, 2)])
def test_every_method_computes_where_it_is_told_and_brings_its_result_back(
    elsewhere: Callable[..., Merged], method: str, options: dict[str, Any], shared: bool, rank: int
) -> None:
    inputs = adapters(shared=shared, rank=rank)
    expected, found = run(method, inputs, **options), elsewhere(method, inputs, **options)
    assert found.info["parameters"].pop("device") == "meta"
    assert expected.info["parameters"].pop("device") == "cpu"
    for name, item in found.modules.items():
        assert type(item.a) is type(item.b) is Tensor
        torch.testing.assert_close(item.delta(), expected.modules[name].delta(), rtol=1e-4, atol=1e-5)
    assert found.info["norm"] == pytest.approx(expected.info["norm"], rel=1e-5)
    assert found.info["norms"] == pytest.approx(expected.info["norms"], rel=1e-5)


def test_the_stand_in_refuses_what_a_device_refuses() -> None:
    with StandIn():
        away = torch.ones(2, 2).to(PLACE)
        with pytest.raises(RuntimeError, match="on meta and on cpu"):
            _ = away + torch.ones(2, 2)
        with pytest.raises(RuntimeError, match="numpy"):
            away.numpy()
        assert (away * torch.tensor(3.0)).sum().item() == 12
