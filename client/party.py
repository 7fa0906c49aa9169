"""One party, from private records to the files of one release.

    records ─ encode once ─▶ activations ─ train privately ─▶ adapter, head ─ statement, signature ─▶ outbox

Everything written here stays in the party's own folder: the checkpoint of an interrupted training, the
release, which is the only thing ever sent, and a simulation's ledger (a site's is kept elsewhere: `client/policy.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from filelock import FileLock
from peft import PeftModel, get_peft_model_state_dict
from torch import nn

from dpmerge.client.checkpoint import erase, load_checkpoint, save_checkpoint
from dpmerge.client.gradients import DEFAULT_MEMORY_BUDGET_BYTES, PerExampleGradients
from dpmerge.client.ledger import reservation_id
from dpmerge.client.noise import FastNoise, NoiseSource, SecureNoise
from dpmerge.client.outbox import RELEASE, Signer, outbox_files, put, record_receipt
from dpmerge.client.party_mechanism import make_mechanism
from dpmerge.client.party_model import PartyModel, party_model
from dpmerge.client.policy import Account, Policy, open_account
from dpmerge.client.sampling import PoissonSampler
from dpmerge.client.train import Classifier, PrivateData, TrainingState, train
from dpmerge.client.trained_space import trained_space
from dpmerge.client.units import Users
from dpmerge.common.accounting import cross_check
from dpmerge.common.activations import Activations
from dpmerge.common.alignment import LoraView
from dpmerge.common.config import FileSource, PartyPlan, TaskSource
from dpmerge.common.errors import DpmergeError
from dpmerge.common.files import append_file
from dpmerge.common.mechanism import Mechanism
from dpmerge.common.model import Base, adapter_config
from dpmerge.common.public_corpus import PublicCorpus, overlaps, public_corpus
from dpmerge.common.records import Records, read_records
from dpmerge.common.release import Head, Release, release_hash
from dpmerge.common.sources import label_descriptions, noise_origin, public_settings, task_name
from dpmerge.common.split_encoder import pad, padded_length, tokenize
from dpmerge.common.statement import build_statement, with_clip_norm
from dpmerge.common.tasks import load_task

CHECKPOINT = "checkpoint.safetensors"
CHECKPOINT_EVERY_STEPS = 10

OnProgress = Callable[[str, int, int], None]
"""Called with a stage ("caching" or "training"), the count done, and the total.

Counts of records are private: the caller keeps them at the party."""


def run_party(
    plan: PartyPlan,
    base: Base,
    folder: Path,
    *,
    on_progress: OnProgress = lambda _stage, _done, _total: None,
    cache_trunk: bool = True,
    activations: Activations | None = None,
    policy: Policy | None = None,
    signer: Signer | None = None,
) -> dict[str, bytes]:
    """Return the party's release as files, training it first unless this folder already holds it.

    The release is in the folder, signed and on disk, before this returns: a party that sends it again, after whatever
    went wrong, sends the same bytes, and is charged for nothing more.

    Args:
        plan: What to train, on what, under which privacy.
        base: The base model, freshly loaded; LoRA is attached to it in place.
        folder: The party's own folder, created with owner-only rights.
        on_progress: See `OnProgress`.
        cache_trunk: False runs the frozen layers again whenever a record is drawn: the same release, in less memory.
        activations: The same records, already encoded at the split of the same base and layers: for whoever trains
            on them many times. None encodes them here.
        policy: The site's own rules, ledgers and caps. None, for simulations, charges a ledger in the folder.
        signer: For which federation the release is signed, by which key; None leaves it unsigned, for experiments.

    Raises:
        DpmergeError: For records, models, targets or privacy settings that cannot be used; DPM-302 if the folder
            holds a release or an interrupted training of other records or settings, or a release for another
            federation; DPM-506 or DPM-507 if the site's policy does not allow it, before anything is charged.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with FileLock(folder / "party.lock"):
        account = open_account(plan, base.sha256, folder, policy)
        records = training_records(plan.source)
        if not len(records):
            append_log(folder, "none of the records can be used: check text, label and labels\n")
        binding = _binding(plan, base, records)
        if not (folder / RELEASE).exists():
            release = _train(plan, base, records, binding, account, folder, on_progress, cache_trunk, activations)
            put(folder, release, account.ledger.head(), signer)
        erase(folder / CHECKPOINT)  # nothing goes on from it any more, and it holds the key of the last steps' noise
        reservation = account.ledger.find(reservation_id(folder))
        if reservation is None or reservation.binding != binding:
            raise DpmergeError(
                "DPM-302",
                "the party's folder holds a release of other records or settings",
                "resume with the records and settings it was made for, or use another folder, as a second charge",
            )
        files = outbox_files(folder, signer)
        account.ledger.released(reservation, release_hash(files))
        record_receipt(folder, account, reservation)
        return files


def training_records(source: TaskSource | FileSource) -> Records:
    """Read the private half of a source: the training split of a registry task, or the party's own file."""
    if isinstance(source, TaskSource):
        return load_task(source.task).train
    return read_records(source.path, text=source.text, label=source.label, labels=source.labels, user=source.user)


def _binding(plan: PartyPlan, base: Base, records: Records) -> str:
    """Return the SHA-256 over data, configuration and base model that binds a reservation; it stays with the party."""
    digest = hashlib.sha256((plan.fingerprint() + base.sha256).encode())
    columns = [column for column in (records.texts, records.labels, records.users) if column is not None]
    for record in zip(*columns, strict=True):
        digest.update(json.dumps(record).encode())
    return digest.hexdigest()


def _train(
    plan: PartyPlan,
    base: Base,
    records: Records,
    binding: str,
    account: Account,
    folder: Path,
    on_progress: OnProgress,
    cache_trunk: bool,
    activations: Activations | None,
) -> Release:
    config = adapter_config(base, plan.lora)
    model = party_model(base, plan)

    if activations is None:
        activations = Activations(
            base,
            model.split,
            records.texts,
            max_length=plan.base.max_length,
            cached=cache_trunk,
            on_progress=lambda num_done: on_progress("caching", num_done, len(records)),
        )
    elif len(activations) != len(records):
        raise ValueError(f"Expected activations of {len(records)} records, not of {len(activations)}.")
    users = None if records.users is None else Users(records.users)
    data = PrivateData(activations, torch.tensor(records.labels, dtype=torch.long), users)

    with _gradients(model.classifier, plan, folder) as gradients:
        _check_independent(gradients, model, plan)
        corpus = _public_corpus(plan, records, folder)
        space = trained_space(plan, model, gradients, corpus)
        mechanism = make_mechanism(plan, space.coordinates.vector.numel(), l2_clip_norm=space.l2_clip_norm)
        statement = _statement(plan, mechanism, base, model.head.labels, space.description)
        run = _reserved(plan, mechanism, statement, data.num_units, binding, account, folder)

        def after_step(step: int, capture: Callable[[], TrainingState]) -> None:
            if step % CHECKPOINT_EVERY_STEPS == 0 and step < mechanism.num_steps:
                save_checkpoint(folder / CHECKPOINT, capture(), binding)
            if step > 0:
                on_progress("training", step, mechanism.num_steps)

        ran = train(
            model.classifier,
            data,
            gradients,
            lora_views(gradients, model.encoder),
            mechanism,
            plan.training,
            run.sampler,
            run.noise,
            coordinates=space.coordinates,
            resume_from=run.state,
            after_step=after_step,
        )
        run.noise.erase()
        run.sampler.erase()
    return Release(
        party=plan.party,
        adapter={
            key: value.detach().clone()
            for key, value in get_peft_model_state_dict(model.encoder, save_embedding_layers=False).items()
        },
        adapter_config=config,
        heads={plan.party: _trained_head(model.head, model.classifier)},
        statement=with_clip_norm(statement, ran),
    )


def _gradients(classifier: Classifier, plan: PartyPlan, folder: Path) -> PerExampleGradients:
    """Return the gradients of the classifier; a physical batch below the expected one is said in the party's log."""
    wanted, budget = plan.training.expected_batch_size, DEFAULT_MEMORY_BUDGET_BYTES
    gradients = PerExampleGradients(classifier, max_examples=wanted, memory_budget_bytes=budget)
    if gradients.capacity < wanted:
        append_log(
            folder,
            f"physical batches hold {gradients.capacity} records where {wanted} are expected: more gradients of "
            f"{gradients.theta.numel()} coordinates would exceed the memory budget of {budget} bytes\n",
        )
    return gradients


def _public_corpus(plan: PartyPlan, records: Records, folder: Path) -> PublicCorpus | None:
    """Read the public texts of the plan's subspace, if there are any; say in the party's log if some are its own.

    Training goes on all the same. A party that stopped here, or left these texts out, would tell whoever chose them
    that they are among its records.
    """
    corpus = None if plan.training.subspace is None else public_corpus(plan.training.subspace)
    if corpus is not None and overlaps(corpus, records.texts):
        append_log(
            folder,
            "public texts of the subspace are also among this party's records: are they really public, and may they "
            "name directions? Training went on, since a stop would show the overlap to others\n",
        )
    return corpus


def _check_independent(gradients: PerExampleGradients, model: PartyModel, plan: PartyPlan) -> None:
    """Refuse a model that mixes the examples of a batch, found out on the public class descriptions before any charge.

    Raises:
        DpmergeError: DPM-502 if an example's gradient depends on its company.
    """
    if gradients.capacity < 2:
        return  # batches of one: no example has company
    rows = tokenize(model.base, list(label_descriptions(plan.source).values()), plan.base.max_length)
    ids, mask = pad(rows, int(model.base.tokenizer.pad_token_id), padded_length(max(map(len, rows))))
    hidden, labels = model.split.trunk(ids, mask), torch.arange(len(rows))
    gradients.check_independent(
        lambda some: nn.functional.cross_entropy(
            model.classifier(hidden[some], mask[some]), labels[some], reduction="none"
        ),
        min(len(rows), gradients.capacity),
    )


def append_log(folder: Path, text: str) -> None:
    """Append to the party's own log, readable by its owner only."""
    append_file(folder / "party.log", text)


def _statement(
    plan: PartyPlan, mechanism: Mechanism, base: Base, labels: tuple[str, ...], subspace: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the statement of this mechanism, made before training: what cannot be stated is not trained."""
    return build_statement(
        mechanism,
        cross_check(mechanism),
        party=plan.party,
        task=task_name(plan),
        labels=labels,
        base_sha256=base.sha256,
        tuning_disclosure=plan.privacy.tuning,
        training=public_settings(plan),
        noise_seed=noise_origin(plan),
        subspace=subspace,
    )


@dataclass(frozen=True)
class _Run:
    """Randomness of one reserved training, fresh or taken up where a crash left it."""

    noise: NoiseSource
    sampler: PoissonSampler
    state: TrainingState | None


def _reserved(
    plan: PartyPlan,
    mechanism: Mechanism,
    charge: dict[str, Any],
    num_units: int,
    binding: str,
    account: Account,
    folder: Path,
) -> _Run:
    """Charge the training before its first noise draw, or find the state in which a crash left it.

    Raises:
        DpmergeError: DPM-302 if the reservation was made earlier and its state is gone: noise may have been drawn,
            and drawing anew would be a second training on one charge. The same if it was charged for other numbers.
    """
    checkpoint = folder / CHECKPOINT
    reservation = account.ledger.reserve(
        reservation=reservation_id(folder), dataset=account.dataset, binding=binding, charge=charge, cap=account.cap
    )
    if not reservation.is_new:
        if not checkpoint.exists() or reservation.charge != json.loads(json.dumps(charge)):
            raise DpmergeError(
                "DPM-302",
                "an earlier training was charged here, and its state is gone or another version would account it anew",
                "train into another output folder, as a second charge",
            )
        state = load_checkpoint(checkpoint, binding)
        source = SecureNoise if mechanism.noise == "secure" else FastNoise
        sampler = PoissonSampler.from_state(mechanism.sampling_prob, num_units, state.sampler)
        return _Run(source.from_state(state.noise), sampler, state)
    seed = _test_seed(plan)
    noise: NoiseSource = SecureNoise() if mechanism.noise == "secure" else FastNoise(seed)
    return _Run(noise, PoissonSampler(mechanism.sampling_prob, num_units, seed), None)


def _test_seed(plan: PartyPlan) -> int | None:
    """Return the party's own seed for noise and samples, if the plan has a test seed: parties share that, not noise."""
    seed = plan.privacy.noise_seed
    if seed is None:
        return None
    return int.from_bytes(hashlib.sha256(f"{seed}|{plan.party}".encode()).digest()[:8], "little")


def lora_views(gradients: PerExampleGradients, encoder: PeftModel) -> tuple[LoraView, ...]:
    """Return where each LoRA module's factors lie in θ."""
    slots = {slot.name: slot for slot in gradients.layout}
    views = []
    for name, slot in slots.items():
        if ".lora_B." not in name:
            continue
        a_slot = slots.get(name.replace(".lora_B.", ".lora_A."))
        module = cast(Any, encoder.get_submodule(name.removeprefix("encoder.").split(".lora_B.")[0]))
        views.append(
            LoraView(
                lora_a=module.lora_A["default"].weight.detach(),
                b_slice=slice(slot.start, slot.stop),
                b_shape=(slot.shape[0], slot.shape[1]),
                scaling=float(module.scaling["default"]),
                a_slice=None if a_slot is None else slice(a_slot.start, a_slot.stop),
            )
        )
    return tuple(views)


def _trained_head(head: Head, classifier: Classifier) -> Head:
    if head.kind == "label-text":
        return head
    bias = classifier.head.bias.detach().clone()
    return Head(head.kind, head.labels, classifier.head.weight.detach().clone(), bias, head.feature_scale)
