"""Every merge method against every law that it declares, and against those that hold for all, on awkward adapters."""

import doctest
import importlib
import math
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dpmerge.server import merging
from dpmerge.server.merging.adapters.deltas import Adapter, LowRankDelta
from dpmerge.server.merging.merge import Merged, merge
from dpmerge.server.merging.methods.recipe import LAWS, REQUIRED
from dpmerge.server.merging.registry import METHODS
from dpmerge.server.merging.spec.spec import spec_of

SHAPES = {"encoder.layer.0.query": (12, 10), "encoder.layer.0.output": (9, 14)}

Variant = Callable[[int, int], LowRankDelta]


def normal(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


def factors(name: str, seed: int, rank: int, scaling: float, *, shared: bool = False) -> LowRankDelta:
    out, width = SHAPES[name]
    return LowRankDelta(normal((rank, width), 7 if shared else 2 * seed), normal((out, rank), 2 * seed + 1), scaling)


def adapter(party: str, seed: int, rank: int = 3, scaling: float = 2.0, **options: bool) -> Adapter:
    modules = {name: factors(name, 10 * seed + i, rank, scaling, **options) for i, name in enumerate(sorted(SHAPES))}
    return Adapter(party, modules, {"base_model_name_or_path": "tiny", "r": rank}, f"{party}-{seed}")


def mapped(item: Adapter, change: Callable[[LowRankDelta], LowRankDelta], party: str | None = None) -> Adapter:
    return replace(item, party=party or item.party, modules={name: change(f) for name, f in item.modules.items()})


VARIANTS: dict[str, Callable[[], list[Adapter]]] = {
    "independent": lambda: [adapter("a", 1), adapter("b", 2), adapter("c", 3)],
    "shared A": lambda: [adapter("a", 1, shared=True), adapter("b", 2, shared=True), adapter("c", 3, shared=True)],
    "scalings": lambda: [adapter("a", 1, 4, 16 / 4), adapter("b", 2, 4, 16 / math.sqrt(4)), adapter("c", 3, 4, 0.3)],
    "ragged": lambda: [adapter("a", 1, 1), adapter("b", 2, 5), adapter("c", 3, 2)],
    "rank pattern": lambda: [
        replace(item, modules={n: factors(n, 7 * i + j, 1 + 4 * j, 0.5 + j) for j, n in enumerate(sorted(SHAPES))})
        for i, item in enumerate((adapter("a", 1), adapter("b", 2)))
    ],
    "more ranks than width": lambda: [adapter(name, i, 8) for i, name in enumerate("abcd")],
    "half precision": lambda: [
        mapped(adapter(name, i), lambda f: LowRankDelta(f.a.bfloat16().float(), f.b.half().float(), f.scaling))
        for i, name in enumerate("abc")
    ],
    "one": lambda: [adapter("a", 1)],
}
EXTREME: dict[str, Callable[[], list[Adapter]]] = {
    "zero": lambda: [mapped(adapter(name, 1), lambda f: LowRankDelta(f.a, 0 * f.b)) for name in "abc"],
    "one zero": lambda: [mapped(adapter("a", 1), lambda f: LowRankDelta(f.a, 0 * f.b)), adapter("b", 2)],
    "collinear": lambda: [
        mapped(adapter("a", 1), lambda f, k=k: LowRankDelta(f.a, k * f.b), str(k)) for k in (1, 2, 3)
    ],
    "antipodal": lambda: [adapter("a", 1), mapped(adapter("b", 1), lambda f: LowRankDelta(f.a, -f.b, f.scaling))],
    "tiny": lambda: [
        mapped(adapter(n, i), lambda f: LowRankDelta(1e-15 * f.a, 1e-15 * f.b)) for i, n in enumerate("ab")
    ],
    "subnormal": lambda: [
        mapped(adapter(n, i), lambda f: LowRankDelta(1e-25 * f.a, 1e-25 * f.b)) for i, n in enumerate("ab")
    ],
    "huge": lambda: [mapped(adapter(n, i), lambda f: LowRankDelta(1e8 * f.a, 1e8 * f.b)) for i, n in enumerate("ab")],
    "single entry": lambda: [
        Adapter(n, {"x": LowRankDelta(torch.tensor([[v]]), torch.tensor([[1.0]]))}, {"base_model_name_or_path": "t"}, n)
        for n, v in (("a", 1.0), ("b", -2.0))
    ],
}


def few(method: str, adapters: Sequence[Adapter]) -> Sequence[Adapter]:
    """As many of the adapters as the method takes: the same ones in whatever order they come."""
    taken = sorted(item.party for item in adapters)[: METHODS[method].most]
    return [item for item in adapters if item.party in taken]


def public_statistics(kind: str, adapters: Sequence[Adapter]) -> dict[str, dict[str, Tensor]]:
    """Stand-ins for what public texts would say: other numbers per party and module."""
    found: dict[str, dict[str, Tensor]] = {}
    names = {name: f.shape for item in adapters for name, f in item.modules.items()}
    for t, item in enumerate(sorted(adapters, key=lambda item: item.party)):
        found[item.party] = {}
        for i, (name, (out, width)) in enumerate(sorted(names.items())):
            seed = 100 + 10 * t + i
            inputs = normal((40, width), seed)
            found[item.party][name] = inputs.T @ inputs / 40 if kind == "gram" else normal((out, width), seed) ** 2
    return found


def run(method: str, adapters: Sequence[Adapter], **options: Any) -> Merged:
    adapters = few(method, adapters)
    kind = METHODS[method].statistics
    if kind:
        options = {"statistics": public_statistics(kind, adapters)} | options
    if METHODS[method].parameters.get("coefficient") == REQUIRED:
        options = {"coefficient": 1.0} | options
    return merge(adapters, spec_of(method, **options))


def plain(method: str) -> dict[str, float]:
    """Limiting parameters, under which nothing is dropped."""
    return {"density": 1.0} if "density" in METHODS[method].parameters else {}


def assert_close(merged: Merged, expected: dict[str, Tensor], tolerance: float = 2e-5) -> None:
    assert merged.modules.keys() == expected.keys()
    for name, target in expected.items():
        error = torch.linalg.vector_norm(merged.modules[name].delta() - target)
        scale = torch.linalg.vector_norm(target)
        assert error <= tolerance * (scale if scale > 0 else 1), f"{name}: {error} of {scale}"


def deltas(item: Adapter, factor: float = 1.0) -> dict[str, Tensor]:
    return {name: factor * f.delta() for name, f in item.modules.items()}


def lawful(law: str) -> list[str]:
    assert law in LAWS
    return [name for name, row in METHODS.items() if law in row.laws]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("method", lawful("identity"))
def test_identity(method: str, variant: str) -> None:
    for item in VARIANTS[variant]():
        assert_close(run(method, [item], **plain(method)), deltas(item))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("method", lawful("idempotent"))
def test_idempotent(method: str, variant: str) -> None:
    item = VARIANTS[variant]()[0]
    same = [replace(item, party=party) for party in "abc"]
    assert_close(run(method, same, **plain(method)), deltas(item))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("method", lawful("additive"))
def test_additive(method: str, variant: str) -> None:
    item = VARIANTS[variant]()[0]
    same = [replace(item, party=party) for party in "abc"]
    assert_close(run(method, same), deltas(item, 3.0))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("method", lawful("cancels"))
def test_cancels(method: str, variant: str) -> None:
    item = VARIANTS[variant]()[0]
    merged = run(method, [item, replace(item, party="z")], weights={item.party: 1, "z": -1})
    assert_close(merged, deltas(item, 0.0), 1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("method", lawful("factor-free"))
def test_factor_free(method: str, variant: str) -> None:
    adapters = VARIANTS[variant]()

    def transform(item: LowRankDelta) -> LowRankDelta:
        g = torch.eye(item.rank) + 0.3 * normal((item.rank, item.rank), item.rank)
        return LowRankDelta(g @ item.a, item.b @ torch.linalg.inv(g), item.scaling)

    def pad(item: LowRankDelta) -> LowRankDelta:
        a = torch.cat([item.a, normal((2, item.a.shape[1]), 5)])
        return LowRankDelta(a, torch.cat([item.b, torch.zeros(len(item.b), 2)], 1), item.scaling)

    # every rank is stated, because the default of element-wise methods is the sum of the stored ranks
    reference = run(method, adapters, rank=20)
    expected = {name: f.delta() for name, f in reference.modules.items()}
    for change in (transform, pad):
        assert_close(run(method, [mapped(item, change) for item in adapters], rank=20), expected, 1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("method", lawful("rotation-free"))
def test_rotation_free(method: str, variant: str) -> None:
    adapters = VARIANTS[variant]()
    expected = {name: f.delta() for name, f in run(method, adapters).modules.items()}
    assert_close(run(method, adapters, core=True), expected)


@pytest.mark.parametrize("method", [name for name, row in METHODS.items() if row.limit])
@pytest.mark.parametrize("variant", VARIANTS)
def test_limit(method: str, variant: str) -> None:
    limit = METHODS[method].limit
    assert limit is not None
    parameters, other = limit
    adapters = VARIANTS[variant]()
    common = {key: value for key, value in parameters.items() if key in METHODS[other].parameters}
    expected = {name: f.delta() for name, f in run(other, adapters, **common).modules.items()}
    assert_close(run(method, adapters, **parameters), expected)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("method", METHODS)
def test_order_does_not_matter_and_bytes_repeat(method: str, variant: str) -> None:
    adapters = VARIANTS[variant]()
    one, two = run(method, adapters, seed=3), run(method, adapters[::-1], seed=3)
    assert one.info == two.info
    for name, item in one.modules.items():
        assert torch.equal(item.a, two.modules[name].a)
        assert torch.equal(item.b, two.modules[name].b)


@pytest.mark.parametrize("method", METHODS)
def test_inputs_are_not_mutated_and_results_own_their_memory(method: str) -> None:
    adapters = VARIANTS["shared A"]()
    before = [{name: (f.a.clone(), f.b.clone()) for name, f in item.modules.items()} for item in adapters]
    merged = run(method, adapters)
    for item, copy in zip(adapters, before, strict=True):
        for name, (a, b) in copy.items():
            assert torch.equal(item.modules[name].a, a)
            assert torch.equal(item.modules[name].b, b)
    assert all(f.scaling == 1.0 and f.a.dtype == f.b.dtype == torch.float32 for f in merged.modules.values())


PLACES = [(name, core) for name, row in METHODS.items() for core in (False, True) if not (core and row.statistics)]


@pytest.mark.parametrize("case", EXTREME)
@pytest.mark.parametrize(("method", "core"), PLACES)
def test_finite_on_extreme_adapters(method: str, case: str, core: bool) -> None:
    merged = run(method, EXTREME[case](), core=core)
    for item in merged.modules.values():
        assert torch.isfinite(item.a).all()
        assert torch.isfinite(item.b).all()
    assert all(
        math.isfinite(value) for value in (merged.info["coefficient"], merged.info["norm"], *merged.info["norms"])
    )


@pytest.mark.parametrize(("method", "core"), PLACES)
def test_tiny_adapters_do_not_vanish(method: str, core: bool) -> None:
    tiny = run(method, EXTREME["tiny"](), core=core)
    plain = run(method, [adapter("a", 0), adapter("b", 1)], core=core)
    for name, item in plain.modules.items():
        if item.delta().abs().max() > 0:
            assert tiny.modules[name].a.abs().max() * tiny.modules[name].b.abs().max() > 1e-34


@pytest.mark.parametrize("rank", [1, 2, 6])
@pytest.mark.parametrize("method", METHODS)
def test_rank_truncates_by_svd_and_says_what_is_lost(method: str, rank: int) -> None:
    adapters = VARIANTS["independent"]()
    whole = run(method, adapters, rank=100)
    cut = run(method, adapters, rank=rank)
    assert whole.info["truncation_error"] < 1e-6
    tails, squares = [], []
    for name, item in whole.modules.items():
        singular = torch.linalg.svdvals(item.delta().double())
        tails.append(singular[rank:].square().sum())
        squares.append(singular.square().sum())
        assert cut.modules[name].rank == rank
        error = torch.linalg.vector_norm(cut.modules[name].delta().double() - item.delta().double())
        assert error == pytest.approx(math.sqrt(tails[-1]), rel=1e-4, abs=1e-5)
    assert cut.info["truncation_error"] == pytest.approx(math.sqrt(sum(tails) / sum(squares)), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("method", lawful("factor-free"))
def test_a_module_that_a_party_lacks_counts_as_zero(method: str) -> None:
    first, second = adapter("a", 1), adapter("b", 2)
    name = min(SHAPES)
    lacking = replace(second, modules={k: v for k, v in second.modules.items() if k != name})
    zero = replace(
        second, modules=second.modules | {name: LowRankDelta(second.modules[name].a, 0 * second.modules[name].b)}
    )
    loose = run(method, [first, lacking], strict=False, rank=100)
    assert loose.info["absent"] == [f"b: {name}"]
    expected = {key: f.delta() for key, f in run(method, [first, zero], rank=100).modules.items()}
    assert_close(loose, expected)


@pytest.mark.parametrize("name", sorted(module.name for module in pkgutil.iter_modules(merging.__path__)))
def test_examples_in_docstrings_are_true(name: str) -> None:
    module = importlib.import_module(f"{merging.__name__}.{name}")
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed == 0
