"""How much a record's row changes when another record comes or goes, before fixed shapes and with them.

    python benchmarks/bystanders.py [--quick] [--format json]

The row is what the privatiser clips: the per-example gradient, and its projection to a subspace. One record is left out
of the data set and of the sample, everything is encoded and computed anew, and every other record's row is compared:
‖difference‖ / ‖row‖, the largest over all bystanders and neighbours. `plain` encodes and computes batches of whatever
records there are; the other figures are those of `Activations` as it is. MKL_ENABLE_INSTRUCTIONS = SSE4_2, AVX2 or
AVX512 shows the arithmetic of other processors.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from dpmerge.client.gradients import fused_linear
from dpmerge.client.gradients.per_example import PerExampleGradients
from dpmerge.client.subspace.basis import random_basis
from dpmerge.client.subspace.coordinates import Subspace
from dpmerge.client.training import train
from dpmerge.client.training.train import Classifier, PrivateData, _private_rows
from dpmerge.common.config.federation import LoraSettings, SubspaceSettings
from dpmerge.common.data.tasks import load_task
from dpmerge.common.encoder import activations
from dpmerge.common.encoder.activations import Activations, Batch, Shapes
from dpmerge.common.encoder.attention import always_mask
from dpmerge.common.encoder.base_model import Base, attach_lora, load_base
from dpmerge.common.encoder.heads import head_module, zero_linear_head
from dpmerge.common.encoder.split_encoder import SplitEncoder

MODELS = ("minilm-l6", "minilm-l3", "llama")
MAX_LENGTH, PLAIN_ENCODE_BATCH, NUM_DIRECTIONS = 32, 64, 64
LABELS = ("a bad product", "a great product")


class Plain(Activations):
    """Batches of whatever records there are: as many as fit, and no more rows than records."""

    def _encoded(self, ids: Tensor, mask: Tensor) -> Iterator[Tensor]:
        for some_ids, some_mask in zip(ids.split(PLAIN_ENCODE_BATCH), mask.split(PLAIN_ENCODE_BATCH), strict=True):
            yield self._split.trunk(some_ids, some_mask)

    def batches(self, records: Tensor, capacity: int) -> Iterator[Batch]:
        """Yield one batch per padded length, or several of at most `capacity` records."""
        with mock.patch.object(activations, "shapes_of", lambda _length, capacity, **_: Shapes(1, 1, capacity)):
            for batch in super().batches(records, capacity):
                num_records = len(batch.records)
                yield Batch(batch.records, batch.hidden[:num_records].clone(), batch.mask[:num_records])


@contextmanager
def plain_arithmetic() -> Iterator[None]:
    """Padded lengths in steps of 4, heads by one product for all rows, projections of as many rows as there are."""

    def projected(self: Subspace, gradients: list[Tensor]) -> Tensor:
        return torch.cat(gradients) @ self._projection

    with (
        mock.patch.object(activations, "padded_length", lambda tokens, _most: max(4, -(-tokens // 4) * 4)),
        mock.patch.object(train, "linear_by_row", nn.functional.linear),
        mock.patch.object(fused_linear, "linear_by_row", nn.functional.linear),
        mock.patch.object(fused_linear, "FEWEST_OUTPUTS", 0),
        mock.patch.object(Subspace, "_projected", projected),
    ):
        yield


class Bystanders:
    """One model with trained factors of usual size, and the rows of its records in any company."""

    def __init__(self, model: str, num_records: int, capacity: int = 128) -> None:
        self._base = _llama() if model == "llama" else load_base(model)
        lora = LoraSettings(rank=8, layers="last:2", targets="all-linear", train_a=model == "llama")
        encoder = attach_lora(self._base, lora, seed=1)
        self._split = SplitEncoder(encoder, self._base.layers, self._base.num_layers - 2)
        head = zero_linear_head(self._base, LABELS)
        self._model = Classifier(encoder, self._split, head_module(head), head.feature_scale)
        data = load_task("product").train
        self._texts, self._labels = data.texts[:num_records], data.labels[:num_records]
        gradients = PerExampleGradients(self._model, max_examples=capacity)
        gradients.theta.add_(0.02 * torch.randn(gradients.theta.shape, generator=torch.Generator().manual_seed(2)))
        settings = SubspaceSettings(k=NUM_DIRECTIONS, public="none")
        self._space = Subspace(
            gradients, settings, lambda number: random_basis(gradients.theta.numel(), NUM_DIRECTIONS, f"{number}")
        )

    def rows(self, kept: Sequence[int], kind: type[Activations]) -> dict[int, tuple[Tensor, Tensor]]:
        """Return record → its gradient [P] and its projection [k], computed among `kept` and nobody else."""
        encoded = kind(self._base, self._split, [self._texts[n] for n in kept], max_length=MAX_LENGTH)
        data = PrivateData(encoded, torch.tensor([self._labels[n] for n in kept]))
        sample, gradients = torch.arange(len(kept)), []
        compute = self._space.compute

        def noted(losses):  # type: ignore[no-untyped-def]
            gradients.append(compute(losses))
            return gradients[-1]

        with mock.patch.object(self._space, "compute", noted):
            projected = torch.cat(list(_private_rows(sample, self._model, data, self._space)))
        batches = list(encoded.batches(sample, self._space.capacity))
        gradients = [rows[: len(batch.records)] for rows, batch in zip(gradients, batches, strict=True)]
        order = [kept[place] for place in torch.cat([batch.records for batch in batches]).tolist()]
        return dict(zip(order, zip(torch.cat(gradients), projected, strict=True), strict=True))

    def largest_change(self, left_out: Sequence[int], kind: type[Activations]) -> tuple[float, float]:
        """Return the largest relative changes of a gradient and of a projection, over all bystanders."""
        if kind is Plain:
            with plain_arithmetic():
                return self._largest_change(left_out, kind)
        return self._largest_change(left_out, kind)

    def _largest_change(self, left_out: Sequence[int], kind: type[Activations]) -> tuple[float, float]:
        everybody = self.rows(range(len(self._texts)), kind)
        worst = [0.0, 0.0]
        for absent in left_out:
            others = self.rows([n for n in range(len(self._texts)) if n != absent], kind)
            for record, changed in others.items():
                for place, (one, two) in enumerate(zip(everybody[record], changed, strict=True)):
                    worst[place] = max(worst[place], float((one - two).norm() / one.norm()))
        return worst[0], worst[1]


def _llama() -> Base:
    """A small Llama with random weights, and MiniLM's tokenizer."""
    torch.manual_seed(0)
    tokenizer = load_base("minilm-l3").tokenizer
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    encoder: nn.Module = LlamaModel(config).eval().requires_grad_(False)
    always_mask(encoder)
    return Base(name="llama", encoder=encoder, tokenizer=tokenizer, sha256="0" * 64, layers="layers")


def figures(num_records: int, num_neighbours: int) -> dict[str, float]:
    """Return `bystander_change_max` and, without fixed shapes, `bystander_change_max_plain`; and each model's own."""
    found: dict[str, float] = defaultdict(float)
    for model in MODELS:
        bystanders = Bystanders(model, num_records)
        left_out = range(0, num_records, max(1, num_records // num_neighbours))
        for name, kind in (("", Activations), ("_plain", Plain)):
            gradient, projection = bystanders.largest_change(left_out, kind)
            found[f"{model}_gradient{name}"], found[f"{model}_projection{name}"] = gradient, projection
            key = f"bystander_change_max{name}"
            found[key] = max(found[key], gradient, projection)
            print(f"{model}{name}: gradient {gradient:.2g}, projection {projection:.2g}", file=sys.stderr, flush=True)
    return dict(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="48 records and 4 neighbours in place of 128 and 32")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(arguments.threads)
    found = figures(*((48, 4) if arguments.quick else (128, 32)))
    environment = {
        "machine": platform.machine(),
        "torch": torch.__version__,
        "num_threads": arguments.threads,
        "mkl_enable_instructions": os.environ.get("MKL_ENABLE_INSTRUCTIONS", "unset"),
    }
    if arguments.format == "json":
        print(json.dumps({"benchmark": "bystanders", "figures": found, "environment": environment}))
    else:
        for key, value in found.items():
            print(f"{key:34} {value:.3g}")


if __name__ == "__main__":
    main()
