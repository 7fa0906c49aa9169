"""One party, from private records to the files of one release.

    plan, base model ─ prepare, in public ─▶ all but the records, or a refusal in words
    records ─ encode once ─▶ activations ─ train privately ─▶ adapter, head ─ statement, signature ─▶ outbox

Everything written here stays in the party's own folder: the checkpoint of an interrupted training, the
release, which is the only thing ever sent, and a simulation's ledger (where a site's is kept, `client/budget/policy.py`
says).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel, get_peft_model_state_dict

from dpmerge.client.budget.ledger import reservation_id
from dpmerge.client.budget.policy import Account, Policy
from dpmerge.client.gradients.per_example import PerExampleGradients
from dpmerge.client.party.checkpoint import erase, load_checkpoint, save_checkpoint
from dpmerge.client.party.outbox import RELEASE, Signer, outbox_files, put, record_receipt
from dpmerge.client.party.preparation import Training, append_log, prepared
from dpmerge.client.privacy.noise import FastNoise, NoiseSource, SecureNoise
from dpmerge.client.privacy.sampling import PoissonSampler
from dpmerge.client.privacy.units import Users
from dpmerge.client.training.train import Classifier, PrivateData, TrainingState, train
from dpmerge.common.config.federation import PartyPlan, TaskSource
from dpmerge.common.data.records import Records, read_with_report
from dpmerge.common.data.tabular.rows import ReadReport, max_characters
from dpmerge.common.data.tasks import load_task
from dpmerge.common.encoder.activations import Activations
from dpmerge.common.encoder.base_model import Base
from dpmerge.common.errors import DpmergeError
from dpmerge.common.files import make_folder
from dpmerge.common.privacy.mechanism import Mechanism
from dpmerge.common.public.corpus import overlaps
from dpmerge.common.release.format import Head, Release, release_hash
from dpmerge.common.statement.statement import with_clip_norm
from dpmerge.common.training.alignment import LoraView

CHECKPOINT = "checkpoint.safetensors"
CHECKPOINT_EVERY_STEPS = 10

OVERLAP = (
    "public texts of the subspace are also among this party's records: are they really public, and may they name "
    "directions? Training went on, since a stop would show the overlap to others\n"
)

OnProgress = Callable[[str, int, int], None]
"""Called with a stage ("caching" or "training"), the count done, and the total.

Counts of records are private: the caller keeps them at the party."""


def run_party(
    plan: PartyPlan,
    base: Base,
    folder: Path,
    *,
    on_progress: OnProgress = lambda _stage, _done, _total: None,
    before_records: Callable[[], None] = lambda: None,
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
        before_records: Called once, before the first byte of a record is read. What is raised later may depend on
            records: nobody but the party may learn more of it than that the party failed.
        cache_trunk: False runs the frozen layers again whenever a record is drawn: the same release, in less memory.
        activations: The same records, already encoded at the split of the same base and layers: for whoever trains
            on them many times. None encodes them here.
        policy: The site's own rules, ledgers and caps. None, for simulations, charges a ledger in the folder.
        signer: For which federation the release is signed, by which key; None leaves it unsigned, for experiments.

    Raises:
        DpmergeError: Before records are read: for models, targets or privacy settings that cannot be used; DPM-506 or
            DPM-507 if the site's policy does not allow it. After: for records that cannot be read; DPM-302 if the
            folder holds a release or an interrupted training of other records or settings, or a release for another
            federation.
    """
    make_folder(folder, mode=0o700)
    with prepared(plan, base, folder, policy) as ready:
        before_records()
        records = _read(plan, folder)
        binding = _binding(plan.fingerprint() + base.sha256, records)
        if ready.training is not None and not (folder / RELEASE).exists():
            release = _train(
                plan, records, binding, ready.account, ready.training, folder, on_progress, cache_trunk, activations
            )
            put(folder, release, ready.account.ledger.head(), signer)
        erase(folder / CHECKPOINT)  # nothing goes on from it any more, and it holds the key of the last steps' noise
        return _outbox(folder, ready.account, binding, signer)


def _read(plan: PartyPlan, folder: Path) -> Records:
    """Read the party's records; what became of its file's is said in its own log."""
    records, report = read_training(plan)
    if report is not None:
        append_log(folder, "".join(f"{line}\n" for line in report.lines()))
    return records


def read_training(plan: PartyPlan) -> tuple[Records, ReadReport | None]:
    """Read the private half of a plan's source, within public bounds, and tell what became of a file's records.

    A registry task has no report: its records are public and all of one kind.
    """
    source = plan.source
    if isinstance(source, TaskSource):
        return load_task(source.task).train, None
    return read_with_report(
        source.path,
        text=source.text,
        label=source.label,
        labels=source.labels,
        user=source.user,
        max_characters=max_characters(plan.base.max_length),
        max_records_per_user=plan.privacy.max_records_per_user,
    )


def _outbox(folder: Path, account: Account, binding: str, signer: Signer | None) -> dict[str, bytes]:
    """Return what is sent, once the ledger holds the charge for it.

    Raises:
        DpmergeError: DPM-302 if the release was made of other records or settings.
    """
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


def _binding(trained: str, records: Records) -> str:
    """Return the SHA-256 over data and what is trained on them, which binds a reservation; it stays with the party."""
    digest = hashlib.sha256(trained.encode())
    columns = [column for column in (records.texts, records.labels, records.users) if column is not None]
    for record in zip(*columns, strict=True):
        digest.update(json.dumps(record).encode())
    return digest.hexdigest()


def _train(
    plan: PartyPlan,
    records: Records,
    binding: str,
    account: Account,
    made: Training,
    folder: Path,
    on_progress: OnProgress,
    cache_trunk: bool,
    activations: Activations | None,
) -> Release:
    model, mechanism, gradients = made.model, made.mechanism, made.gradients
    if made.corpus is not None and overlaps(made.corpus, records.texts):
        append_log(folder, OVERLAP)
    if activations is None:
        activations = _encoded(records, made, plan.base.max_length, on_progress, cache_trunk)
    elif len(activations) != len(records):
        raise ValueError(f"Expected activations of {len(records)} records, not of {len(activations)}.")
    users = None if records.users is None else Users(records.users)
    data = PrivateData(activations, torch.tensor(records.labels, dtype=torch.long), users)
    seed = _test_seed(plan.privacy.noise_seed, plan.party)
    run = _reserved(seed, mechanism, made.statement, data.num_units, binding, account, folder)

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
        coordinates=made.space.coordinates,
        resume_from=run.state,
        after_step=after_step,
    )
    run.noise.erase()
    run.sampler.erase()
    return _release(plan.party, made, ran)


def _encoded(
    records: Records, made: Training, max_length: int, on_progress: OnProgress, cache_trunk: bool
) -> Activations:
    return Activations(
        made.model.base,
        made.model.split,
        records.texts,
        max_length=max_length,
        cached=cache_trunk,
        is_fixed=made.is_fixed,
        on_progress=lambda num_done: on_progress("caching", num_done, len(records)),
    )


def _release(party: str, made: Training, ran: Mechanism) -> Release:
    adapter = get_peft_model_state_dict(made.model.encoder, save_embedding_layers=False)
    return Release(
        party=party,
        adapter={key: value.detach().clone() for key, value in adapter.items()},
        adapter_config=made.config,
        heads={party: _trained_head(made.model.head, made.model.classifier)},
        statement=with_clip_norm(made.statement, ran),
    )


@dataclass(frozen=True)
class _Run:
    """Randomness of one reserved training, fresh or taken up where a crash left it."""

    noise: NoiseSource
    sampler: PoissonSampler
    state: TrainingState | None


def _reserved(
    seed: int | None,
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
    noise: NoiseSource = SecureNoise() if mechanism.noise == "secure" else FastNoise(seed)
    return _Run(noise, PoissonSampler(mechanism.sampling_prob, num_units, seed), None)


def _test_seed(seed: int | None, party: str) -> int | None:
    """Return the party's own seed for noise and samples, if the plan has a test seed: parties share that, not noise."""
    if seed is None:
        return None
    return int.from_bytes(hashlib.sha256(f"{seed}|{party}".encode()).digest()[:8], "little")


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
