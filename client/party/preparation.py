"""The public part of a party's work: all that can be made, checked and refused before a byte of a record is read.

Whatever fails here fails for reasons that the server knows or may know: the plan, the base model, public texts, the
site's rules, what was charged before. It may be told in words. What comes after it may not (`client/app.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor, nn

from dpmerge.client.budget.composition import check_cap
from dpmerge.client.budget.ledger import reservation_id
from dpmerge.client.budget.policy import Account, Policy, open_account
from dpmerge.client.gradients.per_example import DEFAULT_MEMORY_BUDGET_BYTES, PerExampleGradients
from dpmerge.client.party.calibration import make_mechanism
from dpmerge.client.party.model import PartyModel, party_model
from dpmerge.client.party.outbox import RELEASE
from dpmerge.client.party.trained_space import TrainedSpace, trained_space
from dpmerge.common.config.federation import FileSource, PartyPlan
from dpmerge.common.data.tabular.places import check_place
from dpmerge.common.encoder.activations import ENCODE_BATCH, fill, shapes_of
from dpmerge.common.encoder.base_model import Base, adapter_config
from dpmerge.common.encoder.row_bits import rows_are_alike, widths_of
from dpmerge.common.encoder.split_encoder import (
    check_length,
    check_reach,
    check_vocabulary,
    pad,
    padded_length,
    tokenize,
)
from dpmerge.common.files import append_file
from dpmerge.common.privacy.accounting import cross_check
from dpmerge.common.privacy.mechanism import Mechanism
from dpmerge.common.public.corpus import PublicCorpus, public_corpus
from dpmerge.common.public.terms import label_descriptions, noise_origin, public_settings, task_name
from dpmerge.common.statement.statement import build_statement

_PASSED: set[str] = set()
"""What `_check_independent` has found independent in this process; several parties may be simulated in one."""

FIXED_SHAPES = (
    "on this machine, with so many threads, the last bits of matrix products depend on their size: all batches of one "
    "length have one shape, which makes steps slower\n"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Training:
    """A training that lacks nothing but the records.

    Attributes:
        config: LoRA's, as the release states it.
        model: The model at the shared start.
        gradients: Of its classifier.
        corpus: Public texts that directions are taken from; None without.
        space: The coordinates that are trained.
        mechanism: As it is charged.
        statement: As it is charged; what cannot be stated is not trained.
        is_fixed: Whether all batches of one length must have one shape on this machine.
    """

    config: dict[str, Any]
    model: PartyModel
    gradients: PerExampleGradients
    corpus: PublicCorpus | None
    space: TrainedSpace
    mechanism: Mechanism
    statement: dict[str, Any]
    is_fixed: bool


@dataclass(frozen=True)
class Prepared:
    """Where a party's work is charged, and the training; None where the folder holds its release already."""

    account: Account
    training: Training | None


@contextmanager
def prepared(plan: PartyPlan, base: Base, folder: Path, policy: Policy | None) -> Iterator[Prepared]:
    """Hold the party's folder and make everything ready, without a look at any record.

    Args:
        plan: What to train, on what, under which privacy.
        base: The base model, freshly loaded; LoRA is attached to it in place.
        folder: The party's own, which exists.
        policy: The site's rules; None for simulations.

    Raises:
        DpmergeError: For a data path, model, target, public text or privacy setting that cannot be used; DPM-506 or
            DPM-507 if the site's policy does not allow the training or its charge.
    """
    with FileLock(folder / "party.lock"):
        account = open_account(plan, base.sha256, folder, policy)
        if isinstance(plan.source, FileSource):
            check_place(plan.source.path)
        if (folder / RELEASE).exists():
            yield Prepared(account, None)
            return
        check_length(base, plan.base.max_length)
        check_vocabulary(base)
        config = adapter_config(base, plan.lora)  # before LoRA's modules are in the base model
        model = party_model(base, plan)
        for note in model.notes:
            append_log(folder, f"{note}\n")
        with _gradients(model, plan.training.expected_batch_size, folder) as gradients:
            training = _training(plan, config, model, gradients, account.public_texts, folder)
            _check_charge(account, folder, training.statement)
            yield Prepared(account, training)


def _training(
    plan: PartyPlan,
    config: dict[str, Any],
    model: PartyModel,
    gradients: PerExampleGradients,
    public_texts: frozenset[str],
    folder: Path,
) -> Training:
    """Return the training that the plan asks for, having tried on public texts that it can be run and accounted."""
    check_reach(model.base, partial(_run, model), plan.base.max_length)
    is_fixed = not rows_are_alike(widths_of(model.encoder), torch.get_num_threads())
    if is_fixed:
        append_log(folder, FIXED_SHAPES)
    checked = _what_is_checked(gradients, model, plan, is_fixed)
    if checked not in _PASSED:
        texts = list(label_descriptions(plan.source).values())
        _check_independent(gradients, model, texts, plan.base.max_length, is_fixed=is_fixed)
        _PASSED.add(checked)
    subspace = plan.training.subspace
    corpus = None if subspace is None else public_corpus(subspace, public_texts)
    space = trained_space(plan, model, gradients, corpus)
    num_coordinates = space.coordinates.vector.numel()
    mechanism = make_mechanism(plan.privacy, plan.training, num_coordinates, l2_clip_norm=space.l2_clip_norm)
    return Training(
        config=config,
        model=model,
        gradients=gradients,
        corpus=corpus,
        space=space,
        mechanism=mechanism,
        statement=_statement(plan, mechanism, model.base, model.head.labels, space.description),
        is_fixed=is_fixed,
    )


def append_log(folder: Path, text: str) -> None:
    """Append to the party's own log, readable by its owner only."""
    append_file(folder / "party.log", text)


def _gradients(model: PartyModel, expected_batch_size: int, folder: Path) -> PerExampleGradients:
    """Return the gradients of the classifier; a physical batch below the expected one is said in the party's log."""
    wanted, budget = model.max_examples or expected_batch_size, DEFAULT_MEMORY_BUDGET_BYTES
    gradients = PerExampleGradients(model.classifier, max_examples=wanted, memory_budget_bytes=budget)
    if gradients.capacity < wanted:
        append_log(
            folder,
            f"physical batches hold {gradients.capacity} records where {wanted} are expected: more gradients of "
            f"{gradients.theta.numel()} coordinates would exceed the memory budget of {budget} bytes\n",
        )
    return gradients


def _check_independent(
    gradients: PerExampleGradients, model: PartyModel, texts: Sequence[str], max_length: int, *, is_fixed: bool
) -> None:
    """Refuse a model that mixes the examples of a batch, found out on the public class descriptions before any charge.

    Batches have the largest and the smallest shape of the training, at its shortest and longest padded length; the
    frozen layers are run too. Descriptions are repeated up to the length, less a few tokens.

    Raises:
        DpmergeError: DPM-502 if an example's gradient depends on its company.
    """
    tokens = tokenize(model.base, texts, max_length)
    for length in sorted({padded_length(1, max_length), padded_length(max_length, max_length)}):
        shapes = shapes_of(length, gradients.capacity, is_fixed=is_fixed)
        if shapes.most < 2:
            continue  # batches of one: no example has company
        num_examples = shapes.most
        filled = [(tokens[n % len(tokens)] * length)[: max(1, length - n % 4)] for n in range(num_examples)]
        ids, mask = pad(filled, int(model.base.tokenizer.pad_token_id), length)
        labels = torch.arange(num_examples) % len(tokens)

        def losses(places: Tensor, ids: Tensor = ids, mask: Tensor = mask, labels: Tensor = labels) -> Tensor:
            hidden = model.split.trunk(ids[places], mask[places])
            scores = model.classifier(hidden, mask[places])
            return nn.functional.cross_entropy(scores, labels[places], reduction="none")

        gradients.check_independent(losses, num_examples, num_bystanders=gradients.capacity, fewest=shapes.least)


def _what_is_checked(gradients: PerExampleGradients, model: PartyModel, plan: PartyPlan, is_fixed: bool) -> str:
    """Return all that the outcome of `_check_independent` is a function of: a process asks it once of each."""
    head = (model.head.kind, model.head.labels, model.head.feature_scale)
    texts = tuple(label_descriptions(plan.source).values())
    numbers = (plan.seed, plan.base.max_length, gradients.capacity, is_fixed, torch.get_num_threads())
    return repr((model.base.sha256, plan.lora, head, texts, numbers))


def _run(model: PartyModel, ids: Tensor, mask: Tensor) -> None:
    """Run the model on one record [1, length], its trunk on as many as are encoded at once.

    Else the first record of a length might be the first to need that memory.
    """
    hidden = model.split.trunk(fill(ids, ENCODE_BATCH), fill(mask, ENCODE_BATCH))
    model.classifier(hidden[:1], mask)


def _statement(
    plan: PartyPlan, mechanism: Mechanism, base: Base, labels: tuple[str, ...], subspace: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the statement of this mechanism, made before training: what cannot be stated is not trained."""
    return build_statement(
        mechanism,
        cross_check(mechanism),
        party=plan.party,
        task=task_name(plan.party, plan.source),
        labels=labels,
        base_sha256=base.sha256,
        tuning_disclosure=plan.privacy.tuning,
        training=public_settings(plan),
        noise_seed=noise_origin(plan.privacy),
        subspace=subspace,
    )


def _check_charge(account: Account, folder: Path, statement: dict[str, Any]) -> None:
    """Refuse what the cap leaves no room for, as the reservation will once the records are read.

    Raises:
        DpmergeError: DPM-506 or DPM-507; DPM-504 if the ledger is damaged.
    """
    is_charged = account.ledger.find(reservation_id(folder)) is not None
    if account.cap is not None and not is_charged:
        check_cap(account.ledger.entries(), account.dataset, statement, account.cap)
