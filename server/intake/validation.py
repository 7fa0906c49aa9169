"""What the server accepts: every byte of a release is checked against what the federation agreed on.

One party's bad release is refused for a reason (`common/untrusted/parsing.py`) that the party is told.
The others go on. Cheap checks come first, and nothing is parsed before its size is known.
Who a release is of, `reception.py` has checked before.

What the server cannot know is whether a party really added noise: only that the statement's numbers fit each other,
the tensors and the agreement.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dpmerge.common.errors import DpmergeError
from dpmerge.common.release.format import (
    ADAPTER,
    CONFIG,
    FILES,
    HEAD,
    MAX_CARD_BYTES,
    README,
    SIGNATURE,
    STATEMENT,
    Head,
    Release,
    release_from_files,
    to_files,
)
from dpmerge.common.statement.statement import check_statement, check_witnesses, mechanism_from_statement
from dpmerge.common.untrusted.kinds import brief, same
from dpmerge.common.untrusted.parsing import ReleaseRefused
from dpmerge.server.merging.adapters.deltas import lora_factors
from dpmerge.server.merging.adapters.settings import SETTINGS, differing, shown
from dpmerge.server.merging.low_rank.algebra import gram, total_norm

CHECKED = frozenset({CONFIG, ADAPTER, HEAD, STATEMENT, SIGNATURE, README})
"""All that a party may send. The card is a text by the party, which is the only thing that its signature says of it."""
HEAD_TOLERANCE = 1e-3  # a label-text head is computed by each party; processors differ in the last digits
RESEND = "train with the federation's settings and send that release"


@dataclass(frozen=True, kw_only=True, eq=False)
class PartyTerms:
    """What one party agreed to.

    Attributes:
        head: A label-text head, which must come back as it is, or the start of a linear head, of which kind, labels,
            shapes and feature scale must.
        mechanism: What the statement must say exactly: the agreed fields of `Mechanism` (population,
            expected_batch_size, num_steps, l2_clip_norm, …), and whatever else of it was agreed, such as noise_seed.
            A tuple leaves the choice among its values.
            num_coordinates is that of all trained tensors unless it is agreed here, as for a subspace.
        epsilon: Upper bound on the stated ε; None only where `private` is False.
    """

    head: Head
    mechanism: Mapping[str, Any]
    epsilon: float | None


@dataclass(frozen=True, kw_only=True, eq=False)
class ReleaseSpec:
    """What every release of a federation must look like.

    Attributes:
        parties: Terms by party; nobody else may send.
        base_sha256: Hash of the base model and its tokenizer.
        adapter_config: PEFT's settings, compared by value and JSON kind. What only one side names must be at PEFT's
            default, and a setting that `server/merging/adapters/settings.py` does not hold is refused.
        shapes: Tensor key → shape; exactly these keys.
        shared_a: Tensor key → the frozen A that all parties share, compared bit for bit; empty when A is trained.
        max_bytes: Bound on the sum of all files.
        max_delta_norm: Bound on the Frobenius norm of the weight change over all modules.
        max_head_norm: Bound on the Frobenius norm of a linear head's weight and bias.
    """

    parties: Mapping[str, PartyTerms]
    base_sha256: str
    adapter_config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    shared_a: Mapping[str, Tensor] = field(default_factory=dict)
    max_bytes: int = 64 << 20
    max_delta_norm: float = 250.0
    max_head_norm: float = 250.0


def validate(party: str, files: Mapping[str, bytes], release_spec: ReleaseSpec) -> Release:
    """Check a party's files and return the release that they hold.

    Args:
        party: Whose they are. The statement and the head must name the same one.
        files: File name → bytes.
        release_spec: What the federation agreed on.

    Raises:
        ReleaseRefused: DPM-401 with a reason, naming party and tensor.
    """
    check_size(party, files, release_spec)
    terms = release_spec.parties[party]
    for name in sorted(files.keys() & (FILES - CHECKED)):
        problem = f"{party}: {name!r} is part of the format, but of no party's release"
        raise ReleaseRefused("unknown-file", problem, f"send only {', '.join(sorted(CHECKED))}")
    release = release_from_files(files, party)
    if release.party != party:
        raise ReleaseRefused("party-mismatch", f"{party}: {STATEMENT} is of {release.party!r}", RESEND)
    _check_config(release, release_spec)
    _check_tensors(release, release_spec)
    _check_norm(release, release_spec)
    _check_head(release, terms.head, release_spec.max_head_norm)
    _check_statement(release, terms, release_spec)
    _check_form(release, files)
    return release


def check_size(party: str, files: Mapping[str, bytes], release_spec: ReleaseSpec) -> None:
    """Refuse a party that was not invited, and more bytes than any release has: all that costs nothing to find out.

    Raises:
        ReleaseRefused: unknown-party or size.
    """
    if party not in release_spec.parties:
        raise ReleaseRefused("unknown-party", f"{party!r} is not of this federation", "ask for an invitation")
    total = sum(len(data) for data in files.values())
    if total > release_spec.max_bytes or len(files) > len(FILES):
        problem = f"{party}: {len(files)} files of {total} bytes"
        raise ReleaseRefused("size", problem, f"send at most {release_spec.max_bytes} bytes")
    if len(files.get(README, b"")) > MAX_CARD_BYTES:
        raise ReleaseRefused("size", f"{party}: {README} is too long", f"keep it under {MAX_CARD_BYTES} bytes")


def _check_config(release: Release, release_spec: ReleaseSpec) -> None:
    """Compare settings with the agreed ones, value and JSON kind; what only one side has must be at PEFT's default."""
    config, wanted = release.adapter_config, release_spec.adapter_config
    version = config.get("peft_version")
    if not (version is None or SETTINGS["peft_version"].allowed(version)):
        raise ReleaseRefused("config", f"{release.party}: {CONFIG}: peft_version is no version", RESEND)
    for key in differing(config, wanted):
        value, name = shown(config.get(key)), shown(key, quoted=False)
        other = f"not {shown(wanted[key])}" if key in wanted else "was not agreed"
        said = f"{name} = {value} {'is ' if key in wanted else ''}{other}"
        raise ReleaseRefused("config", f"{release.party}: {CONFIG}: {said}", RESEND)


def _check_tensors(release: Release, release_spec: ReleaseSpec) -> None:
    where = f"{release.party}: {ADAPTER}"
    for key in sorted(release.adapter.keys() - release_spec.shapes.keys()):
        raise ReleaseRefused("unknown-key", f"{where}: {key}", RESEND)
    for key, shape in sorted(release_spec.shapes.items()):
        if key not in release.adapter:
            raise ReleaseRefused("missing-key", f"{where}: {key}", RESEND)
        found = tuple(release.adapter[key].shape)
        if found != tuple(shape):
            raise ReleaseRefused("shape", f"{where}: {key} is {found} and not {tuple(shape)}", RESEND)
    for key, shared in sorted(release_spec.shared_a.items()):
        if not torch.equal(release.adapter[key], shared):
            raise ReleaseRefused("shared-a", f"{where}: {key}", RESEND)


def _check_norm(release: Release, release_spec: ReleaseSpec) -> None:
    factors = lora_factors(release.adapter, release.adapter_config, release.party)
    norm = total_norm(factors.values())
    if not norm <= release_spec.max_delta_norm:
        largest = max(factors, key=lambda name: float(gram([factors[name]])))
        problem = f"{release.party}: weight change of norm {norm:.4g} (most of it in {largest})"
        raise ReleaseRefused(
            "norm", problem, f"keep it under {release_spec.max_delta_norm:g}: train with a smaller step"
        )


def _check_head(release: Release, expected: Head, max_norm: float) -> None:
    head, where = release.heads[release.party], f"{release.party}: {HEAD}"
    for name in ("kind", "labels", "feature_scale"):
        if not same(getattr(head, name), getattr(expected, name)):
            problem = f"{where}: {name} = {brief(getattr(head, name))} is not {brief(getattr(expected, name))}"
            raise ReleaseRefused("head", problem, RESEND)
    if head.weight.shape != expected.weight.shape or (head.bias is None) != (expected.bias is None):
        raise ReleaseRefused("head", f"{where}: weight {tuple(head.weight.shape)} or bias differs in shape", RESEND)
    if expected.kind == "label-text":
        if not torch.allclose(head.weight, expected.weight, rtol=HEAD_TOLERANCE, atol=HEAD_TOLERANCE):
            raise ReleaseRefused("head", f"{where}: not the label texts' embeddings", RESEND)
    elif (
        not math.hypot(*(float(torch.linalg.vector_norm(t)) for t in (head.weight, head.bias) if t is not None))
        <= max_norm
    ):
        raise ReleaseRefused("norm", f"{where}: larger than {max_norm:g}", "train with a smaller step")


def _check_statement(release: Release, terms: PartyTerms, release_spec: ReleaseSpec) -> None:
    where, statement = f"{release.party}: {STATEMENT}", release.statement
    if statement.get("base_sha256") != release_spec.base_sha256:
        raise ReleaseRefused("base-mismatch", f"{where}: base_sha256 = {statement.get('base_sha256')!r}", RESEND)
    try:
        mechanism = mechanism_from_statement(statement)
    except DpmergeError as error:
        raise ReleaseRefused("statement-inconsistent", f"{where}: {error.problem}", error.fix) from error
    agreed = {"num_coordinates": _num_coordinates(terms.head, release_spec), **terms.mechanism}
    for name, wanted in sorted(agreed.items()):
        allowed = wanted if isinstance(wanted, tuple) else (wanted,)
        if not any(same(statement.get(name), value) for value in allowed):
            words = " or ".join(map(brief, allowed[:8]))
            problem = f"{where}: {name} = {brief(statement.get(name))} is not {words}"
            raise ReleaseRefused("statement-terms", problem, RESEND)
    epsilon = statement.get("epsilon")
    if mechanism.private and not (isinstance(epsilon, float) and epsilon <= (terms.epsilon or 0.0)):
        raise ReleaseRefused("epsilon-above-plan", f"{where}: epsilon = {epsilon} above {terms.epsilon}", RESEND)
    if not mechanism.private and terms.epsilon is not None:
        raise ReleaseRefused("statement-terms", f"{where}: not private", RESEND)
    try:
        check_statement(statement)  # last: these compose the privacy loss again, which takes a second
        check_witnesses(statement, mechanism)
    except DpmergeError as error:
        raise ReleaseRefused("statement-inconsistent", f"{where}: {error.problem}", error.fix) from error


def _check_form(release: Release, files: Mapping[str, bytes]) -> None:
    """Refuse a release in other bytes than those in which its content is written: one release has one form."""
    for name, data in to_files(release).items():
        if files[name] != data:
            raise ReleaseRefused("form", f"{release.party}: {name} is not written as dpmerge writes it", RESEND)


def _num_coordinates(head: Head, release_spec: ReleaseSpec) -> int:
    """Return the length of the trainable vector: every LoRA tensor that is not shared, and a linear head."""
    trained = [shape for key, shape in release_spec.shapes.items() if key not in release_spec.shared_a]
    if head.kind == "linear":
        trained += [tuple(tensor.shape) for tensor in (head.weight, head.bias) if tensor is not None]
    return sum(math.prod(shape) for shape in trained)
