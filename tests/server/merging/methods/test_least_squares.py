"""RegMean against its own objective, Fisher merging entry by entry, and the public statistics that both need."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from dpmerge.common.encoder.base_model import Base
from dpmerge.common.encoder.heads import logits
from dpmerge.common.encoder.split_encoder import pool
from dpmerge.common.errors import DpmergeError
from dpmerge.common.release.format import Head
from dpmerge.server.evaluation.public_statistics import public_statistics
from dpmerge.server.merging.adapters.deltas import Adapter, LowRankDelta
from dpmerge.server.merging.merge import merge
from dpmerge.server.merging.spec.spec import spec_of

OUT, IN = 7, 6


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parties(count: int = 3) -> list[LowRankDelta]:
    return [LowRankDelta(normal(2, IN, seed=t), normal(OUT, 2, seed=10 + t), 0.5 + t) for t in range(count)]


def run(factors: Sequence[LowRankDelta], statistics: Mapping[str, Tensor], **options: Any) -> Tensor:
    config = {"base_model_name_or_path": "tiny"}
    adapters = [Adapter(f"p{t}", {"m": item}, config, f"{t}") for t, item in enumerate(factors)]
    given = {party: {"m": tensor} for party, tensor in statistics.items()}
    return merge(adapters, spec_of(statistics=given, **options)).modules["m"].delta().double()


def inputs(seed: int, count: int = 30) -> Tensor:
    return normal(count, IN, seed=seed) @ normal(IN, IN, seed=seed + 1)


def test_regmean_is_the_least_squares_fit_of_all_outputs() -> None:
    factors, data = parties(), [inputs(20 + t) for t in range(3)]
    found = run(factors, {f"p{t}": x.T @ x for t, x in enumerate(data)}, method="regmean", off_diagonal=1.0)
    stacked = torch.cat(data).double()
    targets = torch.cat([x.double() @ item.delta().double().T for x, item in zip(data, factors, strict=True)])
    expected = torch.linalg.lstsq(stacked, targets).solution.T
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_regmean_damps_what_lies_off_the_diagonal() -> None:
    factors, data = parties(), [inputs(20 + t) for t in range(3)]
    grams = {f"p{t}": x.T @ x for t, x in enumerate(data)}
    found = run(factors, grams, method="regmean", off_diagonal=0.0, coefficient=0.5)
    diagonals = [gram.diagonal().double() for gram in grams.values()]
    expected = sum(item.delta().double() * d for item, d in zip(factors, diagonals, strict=True)) / sum(diagonals)
    torch.testing.assert_close(found, 0.5 * expected, rtol=1e-4, atol=1e-5)


def test_regmean_averages_where_no_public_input_goes() -> None:
    factors = parties()
    seen = torch.diag(torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0]))
    found = run(factors, {f"p{t}": (1 + t) * seen for t in range(3)}, method="regmean")
    mean = torch.stack([item.delta().double() for item in factors]).mean(0)
    weighted = sum((1 + t) / 6 * item.delta().double() for t, item in enumerate(factors))
    torch.testing.assert_close(found[:, 4:], mean[:, 4:], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found[:, :4], weighted[:, :4], rtol=1e-4, atol=1e-4)
    nothing = run(factors, {f"p{t}": 0 * seen for t in range(3)}, method="regmean")
    torch.testing.assert_close(nothing, mean, rtol=1e-4, atol=1e-5)


def test_fisher_weighs_entry_by_entry() -> None:
    factors = parties()
    information = [normal(OUT, IN, seed=30 + t) ** 2 for t in range(3)]
    for tensor in information:
        tensor[0] = 0.0
    found = run(factors, {f"p{t}": f for t, f in enumerate(information)}, method="fisher", rank=IN)
    deltas = [item.delta().double() for item in factors]
    expected = sum(f.double() * d for f, d in zip(information, deltas, strict=True)) / sum(information)
    torch.testing.assert_close(found[1:], expected[1:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[0], torch.stack(deltas).mean(0)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("statistics", "message"),
    [
        ({"p0": torch.eye(IN)}, "has nothing for m of p1"),
        ({"p0": torch.eye(IN), "p1": torch.eye(OUT)}, r"of p1: m \(7, 7\) is not \(6, 6\)"),
        ({"p0": torch.eye(IN), "p1": torch.full((IN, IN), torch.nan)}, "not finite"),
        ({"p0": torch.eye(IN), "p1": -torch.eye(IN)}, "negative"),
    ],
)
def test_statistics_that_do_not_fit_are_refused(statistics: dict[str, Tensor], message: str) -> None:
    with pytest.raises(DpmergeError, match=message):
        run(parties(2), statistics, method="regmean")


class Words:
    """A tokenizer of letters."""

    pad_token_id = 0

    def __call__(self, texts: list[str], max_length: int, **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[1 + ord(letter) % 20 for letter in text][:max_length] for text in texts]}


TEXTS = {"shop": ["a short text", "longer than the other one"], "bank": ["money", "credit and debt", "interest"]}
LAYER = "encoder.layer.1.attention.self.query"


@pytest.fixture(scope="module")
def base() -> Base:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=24, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, num_labels=2
    )
    encoder = BertModel(config, add_pooling_layer=False).eval().requires_grad_(False)
    return Base(name="tiny", encoder=encoder, tokenizer=Words(), sha256="0" * 64, layers="encoder.layer")


def trained(party: str, seed: int, layers: Sequence[str] = (LAYER,)) -> Adapter:
    modules = {name: LowRankDelta(normal(2, 8, seed=seed), 0.3 * normal(8, 2, seed=seed + 1), 2.0) for name in layers}
    head = Head("linear", ("no", "maybe", "yes"), 0.2 * normal(3, 8, seed=seed + 2), torch.zeros(3))
    return Adapter(party, modules, {"base_model_name_or_path": "tiny"}, party, heads={party: head})


def test_gram_matrices_are_of_the_tokens_that_a_module_sees(base: Base) -> None:
    adapters = [trained("shop", 1), trained("bank", 4)]
    found = public_statistics(base, adapters, TEXTS, kind="gram", max_length=12)
    rows: list[Tensor] = []
    query = base.encoder.get_submodule(LAYER)
    handle = query.register_forward_pre_hook(lambda _, args: rows.append(args[0][0]))
    for text in TEXTS["bank"]:  # one by one, so without padding; nothing adapted lies below
        base.encoder(input_ids=torch.tensor([Words()([text], 12)["input_ids"][0]]))
    handle.remove()
    seen = torch.cat(rows)
    torch.testing.assert_close(found["bank"][LAYER], seen.T @ seen / len(seen), rtol=1e-4, atol=1e-5)
    assert not query._forward_hooks


def test_fisher_information_is_the_mean_square_of_gradients(base: Base) -> None:
    adapter = trained("bank", 4, (LAYER, "encoder.layer.0.attention.self.value"))
    found = public_statistics(base, [adapter], TEXTS, kind="fisher", max_length=12)["bank"]
    expected = {name: torch.zeros(8, 8) for name in adapter.modules}
    originals = {name: base.encoder.get_submodule(name).weight.data.clone() for name in adapter.modules}
    weights = [base.encoder.get_submodule(name).weight for name in adapter.modules]
    for name, weight in zip(adapter.modules, weights, strict=True):
        weight.data += adapter.modules[name].delta()
        weight.requires_grad_()
    for text in TEXTS["bank"]:
        ids = torch.tensor([Words()([text], 12)["input_ids"][0]])
        hidden = base.encoder(input_ids=ids).last_hidden_state
        beliefs = torch.log_softmax(logits(pool(hidden, torch.ones_like(ids)), adapter.heads["bank"]), -1)[0]
        for belief in beliefs:
            gradients = torch.autograd.grad(belief, weights, retain_graph=True)
            for name, gradient in zip(adapter.modules, gradients, strict=True):
                expected[name] += belief.detach().exp() * gradient.square() / len(TEXTS["bank"])
    for name, weight in zip(adapter.modules, weights, strict=True):
        weight.requires_grad_(False).data.copy_(originals[name])
        torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=1e-9)
        assert found[name].max() > 0


def test_statistics_feed_a_merge_and_are_recorded(base: Base) -> None:
    adapters = [trained("shop", 1), trained("bank", 4)]
    hashes = set()
    for method, kind in (("regmean", "gram"), ("fisher", "fisher")):
        found = public_statistics(base, adapters, TEXTS, kind=kind, max_length=12)  # type: ignore[arg-type]
        info = merge(adapters, spec_of(method, statistics=found)).info
        assert info["norm"] > 0
        hashes.add(info["statistics_sha256"])
    assert len(hashes) == 2
    assert merge(adapters, spec_of("average")).info["statistics_sha256"] is None


def test_statistics_refuse_what_they_cannot_see(base: Base) -> None:
    adapter = trained("shop", 1)
    with pytest.raises(DpmergeError, match="shop has no public texts"):
        public_statistics(base, [adapter], {"bank": ["x"]}, kind="gram", max_length=8)
    headless = Adapter("shop", adapter.modules, adapter.config, "x")
    with pytest.raises(DpmergeError, match="shop has no head"):
        public_statistics(base, [headless], TEXTS, kind="fisher", max_length=8)


def test_base_models_are_left_as_they_were(base: Base) -> None:
    before = {key: value.clone() for key, value in base.encoder.state_dict().items()}
    public_statistics(base, [trained("shop", 1)], TEXTS, kind="fisher", max_length=8)
    assert all(torch.equal(value, before[key]) for key, value in base.encoder.state_dict().items())
    assert all(isinstance(m, nn.Module) and not m._forward_hooks for m in base.encoder.modules())
