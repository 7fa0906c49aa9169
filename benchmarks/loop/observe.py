"""What one `run_party` does, written down at seams below the loop: no defect of the loop replaces any of them.

| seen | where |
|---|---|
| which records are asked for | `Activations.batches` |
| the rows that come of them, at which θ | `PerExampleGradients.compute` |
| noise as it is drawn | `SecureNoise.sample`, `FastNoise.sample` |
| the gradient that is stepped with, and what it steps | torch's hook before every optimizer's step |
| keys | `os.urandom` as `Keystream` calls it, and every start of a stream |
| what was charged, and what was released | the ledger on disk, the release |
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dpmerge.client.budget.ledger import Ledger
from dpmerge.client.gradients.per_example import PerExampleGradients
from dpmerge.client.party import party
from dpmerge.client.privacy import keystream
from dpmerge.client.privacy.keystream import Keystream
from dpmerge.client.privacy.noise import FastNoise, SecureNoise
from dpmerge.client.subspace.coordinates import Subspace
from dpmerge.common.config.federation import PartyPlan, load_federation, party_plan
from dpmerge.common.encoder.activations import Activations
from dpmerge.common.encoder.base_model import Base, load_base
from dpmerge.common.privacy.accounting import cross_check, epsilon_pld
from dpmerge.common.privacy.calibration import calibrate
from dpmerge.common.privacy.mechanism import Mechanism, mechanism_of


@dataclass(frozen=True, kw_only=True)
class Form:
    """One training to observe, small enough for a second.

    Attributes:
        num_records: N, all usable; the declared population too.
        expected_batch_size: B, so that q = B/N.
        num_steps: T.
        rank: LoRA's rank; P grows with it.
        training: Further lines of `[training]`.
        privacy: Further lines of `[privacy]`.
    """

    num_records: int
    expected_batch_size: int
    num_steps: int
    rank: int
    training: str
    privacy: str = ""


FORMS = {
    "many records, sam": Form(
        num_records=64, expected_batch_size=32, num_steps=12, rank=8, training='sharpness = "sam"'
    ),
    "one record at a time, sat": Form(
        num_records=8, expected_batch_size=1, num_steps=48, rank=2, training='sharpness = "sat"'
    ),
    "fast noise, sam on two samples": Form(
        num_records=64,
        expected_batch_size=32,
        num_steps=12,
        rank=8,
        training='sharpness = "sam"\nascent_sampling = "separate"',
        privacy='noise = "fast"',
    ),
    "subspace with a clip query": Form(
        num_records=64,
        expected_batch_size=32,
        num_steps=4,
        rank=2,
        training='sharpness = "none"\nsubspace = { k = 16, public = "public.txt", clip = "quantile" }',
    ),
}
SECURE = ("many records, sam", "one record at a time, sat")
"""The forms in which a defect is looked for; that both noises are sound is asked of the real loop in all of them."""

LEARNING_RATE, RHO, CLIP = 1e-3, 0.1, 0.05
FEDERATION = """
[base]
model = "minilm-l3"
max_length = 16
[lora]
layers = "last:1"
rank = {form.rank}
[training]
num_steps = {form.num_steps}
expected_batch_size = {form.expected_batch_size}
optimizer = "sgd"
learning_rate = {learning_rate}
rho = {rho}
{form.training}
[privacy]
epsilon = 4.0
delta = 1e-3
l2_clip_norm = {clip}
{form.privacy}
[[party]]
name = "shop"
data = "reviews.csv"
labels = {{ "1" = "a bad product", "5" = "a great product" }}
population = {form.num_records}
"""
"""Plain gradient descent without a pull: θ tells every g̃."""


@dataclass(frozen=True)
class Rows:
    """The gradients [n, P] of some records [n], at θ [P]; what is clipped of them is them, or a projection [P, k]."""

    records: Tensor
    gradients: Tensor
    theta: Tensor
    projection: Tensor | None


@dataclass(frozen=True)
class Noise:
    """One draw, in standard deviations."""

    values: Tensor


@dataclass(frozen=True)
class Step:
    """One step of the optimizer: the vector that it is about to step, which is θ [P] or c [k], and the gradient."""

    vector: Tensor
    gradient: Tensor


@dataclass
class Observed:
    """One training as it was seen.

    Attributes:
        form: What was trained.
        plan: The same, as the party reads it.
        texts: The records' texts.
        labels: Their classes.
        events: Rows, noise and steps, in order.
        drawn_keys: What the operating system was asked for.
        fresh_keys: Keys with which streams were started.
        later_keys: Keys by which streams replaced their own.
        num_before_charge: Draws of noise and rows of records before the ledger knew of the training.
        charged: The mechanism that the ledger says.
        release: The release's files.
        scales: D of a subspace.
    """

    form: Form
    plan: PartyPlan
    texts: list[str]
    labels: list[int]
    events: list[Rows | Noise | Step] = field(default_factory=list)
    drawn_keys: list[bytes] = field(default_factory=list)
    fresh_keys: list[bytes] = field(default_factory=list)
    later_keys: list[bytes] = field(default_factory=list)
    num_before_charge: int = 0
    charged: Mechanism = field(init=False)
    release: dict[str, bytes] = field(default_factory=dict)
    scales: Tensor | None = None

    @property
    def released_theta(self) -> Tensor:
        """All values of B in the release, sorted: names and layouts do not matter."""
        adapter = load(self.release["adapter_model.safetensors"])
        return torch.cat([value.flatten() for name, value in adapter.items() if "lora_B" in name]).sort().values


_accounted: dict[Any, Any] = {
    function: lru_cache(maxsize=None)(function) for function in (calibrate, cross_check, epsilon_pld)
}


_base = cache(load_base)


def fresh_base(model: str) -> Base:
    """Return a base model whose encoder nobody else has; the tokenizer, which takes longer to copy, all share."""
    base = _base(model)
    return replace(base, encoder=copy.deepcopy(base.encoder))


def everywhere(original: Any, replacement: Any) -> Any:
    """Return a context in which every module of dpmerge that imported `original` by name has the replacement."""
    stack = ExitStack()
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("dpmerge."):
            for name, value in list(vars(module).items()):
                if value is original:
                    stack.enter_context(mock.patch.object(module, name, replacement))
    return stack


def make_records(form: Form) -> tuple[list[str], list[int]]:
    """Return N short texts and their classes, as public as they are dull."""
    kinds = ("works well", "broke", "love it", "no good at all", "very happy with this", "returned")
    texts = [f"{kinds[number % len(kinds)]} number {number}" for number in range(form.num_records)]
    return texts, [number // 2 % 2 for number in range(form.num_records)]


def observe(form: Form, folder: Path) -> Observed:
    """Run one party whole, on records and a federation file of its own, and return what was seen.

    ε is computed once per mechanism and then remembered: the accountants are tested elsewhere, and take longer than
    all the rest.
    """
    folder.mkdir(parents=True)
    texts, labels = make_records(form)
    rows = [f"{(1, 5)[label]},{text}" for text, label in zip(texts, labels, strict=True)]
    (folder / "reviews.csv").write_text("\n".join(["label,text", *rows]))
    (folder / "public.txt").write_text("\n".join(f"public text {number} is {'x' * number}" for number in range(32)))
    settings = FEDERATION.format(form=form, learning_rate=LEARNING_RATE, rho=RHO, clip=CLIP)
    (folder / "federation.toml").write_text(settings)
    plan = party_plan(load_federation(folder / "federation.toml"), "shop")
    seen = Observed(form, plan, texts, labels)
    ledger = folder / "party" / "ledger.jsonl"
    with ExitStack() as stack:
        for function, remembered in _accounted.items():
            stack.enter_context(everywhere(function, remembered))
        stack.enter_context(_watched(seen, ledger))
        seen.release = party.run_party(plan, fresh_base(plan.base.model), folder / "party")
    seen.charged = mechanism_of(_charge(ledger) or {})
    return seen


def _charge(ledger: Path) -> dict[str, Any] | None:
    charges = [entry["charge"] for entry in Ledger(ledger).entries() if entry["kind"] == "reserve"]
    return charges[0] if charges else None


@contextmanager
def _watched(seen: Observed, ledger: Path) -> Iterator[None]:
    compute, batches, rows, start = (
        PerExampleGradients.compute,
        Activations.batches,
        Subspace.rows,
        Keystream._start,
    )
    current: list[Any] = [None, None]  # records that are being computed, and the projection of their gradients
    is_charged = False

    def note(event: Rows | Noise) -> None:
        nonlocal is_charged
        is_charged = is_charged or _charge(ledger) is not None
        seen.num_before_charge += not is_charged
        seen.events.append(event)

    def watched_batches(self: Activations, *args: Any, **options: Any) -> Iterator[Any]:
        outer = current[0]
        for batch in batches(self, *args, **options):
            current[0] = batch.records if len(self) == seen.form.num_records else None
            yield batch
            current[0] = outer

    def watched_compute(self: PerExampleGradients, *args: Any, **options: Any) -> Tensor:
        gradients = compute(self, *args, **options)
        if current[0] is not None:  # rows beyond the records asked for fill up a batch
            num_records = len(current[0])
            note(Rows(current[0].clone(), gradients[:num_records].clone(), self.theta.clone(), current[1]))
        return gradients

    def watched_rows(self: Subspace, *args: Any, **options: Any) -> Iterator[Tensor]:
        seen.scales = self.scales.double()
        current[1] = (self.basis.rows.double() / seen.scales[:, None]).T
        yield from rows(self, *args, **options)

    def watched_sample(sample: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def sampled(self: SecureNoise | FastNoise, num_values: int) -> Tensor:
            values = sample(self, num_values)
            note(Noise(values.double() / self.steps_per_sigma))
            return values

        return sampled

    def watched_start(self: Keystream, key: bytes) -> None:
        (seen.later_keys if sys._getframe(1).f_code.co_name == "ratchet" else seen.fresh_keys).append(bytes(key))
        start(self, key)

    urandom = keystream.os.urandom

    def watched_urandom(size: int) -> bytes:
        seen.drawn_keys.append(urandom(size))
        return seen.drawn_keys[-1]

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        (vector,) = optimizer.param_groups[0]["params"]
        seen.events.append(Step(vector.detach().clone(), vector.grad.clone()))

    hook = register_optimizer_step_pre_hook(before_step)
    try:
        with (
            mock.patch.object(PerExampleGradients, "compute", watched_compute),
            mock.patch.object(Activations, "batches", watched_batches),
            mock.patch.object(Subspace, "rows", watched_rows),
            mock.patch.object(SecureNoise, "sample", watched_sample(SecureNoise.sample)),
            mock.patch.object(FastNoise, "sample", watched_sample(FastNoise.sample)),
            mock.patch.object(Keystream, "_start", watched_start),
            mock.patch.object(keystream, "os", SimpleNamespace(urandom=watched_urandom)),
        ):
            yield
    finally:
        hook.remove()
