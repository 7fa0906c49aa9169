"""What anyone can check of a release offline: who signed it, that it is whole, and that its ε follows from its numbers.

Every check is a row with a verdict; none hides another. What nobody can check is whether the noise was really added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from dpmerge.common.errors import DpmergeError
from dpmerge.common.printable import MAX_TEXT, shown
from dpmerge.common.privacy.accounting import cross_check
from dpmerge.common.privacy.bounds import is_large
from dpmerge.common.privacy.mechanism import Mechanism
from dpmerge.common.release.format import SIGNATURE, Release, release_from_files
from dpmerge.common.release.key_list import KeyList
from dpmerge.common.release.manifest import Manifest, check_hashes, manifest_of, parse_signature
from dpmerge.common.release.signing import PublicKey, Sealed
from dpmerge.common.statement.statement import check_cost, check_statement, check_witnesses, mechanism_from_statement
from dpmerge.common.untrusted.kinds import same
from dpmerge.common.untrusted.parsing import ReleaseRefused

Status = Literal["PASS", "WARN", "FAIL"]

UNDISCLOSED = "not disclosed"
EPSILON_TOLERANCE = 1e-4  # between two machines' FFTs


@dataclass(frozen=True)
class Check:
    """One row of a verdict; its detail may quote what somebody else wrote, and is made safe to show."""

    name: str
    status: Status
    detail: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "detail", shown(self.detail, MAX_TEXT))


def verdict(checks: Iterable[Check]) -> Status:
    """Return the worst status.

    >>> verdict([Check("a", "PASS", ""), Check("b", "WARN", "")])
    'WARN'
    """
    found = {check.status for check in checks}
    return "FAIL" if "FAIL" in found else "WARN" if "WARN" in found else "PASS"


@dataclass(frozen=True)
class Trust:
    """What a verifier knows on another channel.

    Attributes:
        keys: Public keys believed whoever's release it is.
        key_list: The federation's list, with revocations.
        at: When the release was received, with time zone: what a checked receipt says, or now.
    """

    at: datetime
    keys: tuple[PublicKey, ...] = ()
    key_list: KeyList | None = None

    def check(self, sealed: Sealed, owner: str, origin: str) -> Check:
        """Return the verdict on a signature."""
        name = "signature"
        if self.key_list is None and not self.keys:
            detail = f"signed with key {sealed.key_id[:16]}…, not checked: give --key or --allow"
            return Check(name, "WARN", detail)
        if any(sealed.is_signed_by(key) for key in self.keys):
            return Check(name, "PASS", f"by the given key {sealed.key_id[:16]}…")
        try:
            (self.key_list or KeyList({})).check(sealed, owner, self.at, origin)
        except ReleaseRefused as refusal:
            return Check(name, "FAIL", refusal.problem)
        return Check(name, "PASS", f"by {owner}'s key {sealed.key_id[:16]}…")


def check_release(files: Mapping[str, bytes], trust: Trust) -> list[Check]:
    """Return every verdict on one party's release: signature, hashes, then meaning.

    A release whose signature or hashes fail is not parsed further: what it says is not its party's word.
    """
    checks, manifest = check_manifest(files, trust)
    if verdict(checks) == "FAIL":
        return checks
    try:
        release = release_from_files(files)
    except DpmergeError as refusal:
        return [*checks, Check("format", "FAIL", refusal.problem)]
    if problem := _labels_problem(release):
        return [*checks, Check("format", "FAIL", problem)]
    checks.append(Check("format", "PASS", f"{len(release.adapter)} tensors, fp32 and finite"))
    if manifest is not None:
        checks.append(_meaning(manifest, release.statement))
    return checks + check_privacy(release)


def check_manifest(files: Mapping[str, bytes], trust: Trust) -> tuple[list[Check], Manifest | None]:
    """Return the verdicts on signature and hashes, and the manifest if there is one."""
    if SIGNATURE not in files:
        known = trust.key_list is not None or bool(trust.keys)
        return [Check("signature", "FAIL" if known else "WARN", "unsigned: anybody may have written this")], None
    try:
        sealed = parse_signature(files[SIGNATURE], "release")
        signed = trust.check(sealed, _claimed_party(sealed), SIGNATURE)
        if signed.status == "FAIL":
            return [signed], None
        manifest = manifest_of(sealed, "release")
    except ReleaseRefused as refusal:
        return [Check("signature", "FAIL", refusal.problem)], None
    try:
        check_hashes(manifest, files, "release")
    except ReleaseRefused as refusal:
        return [signed, Check("files", "FAIL", refusal.problem)], manifest
    return [signed, Check("files", "PASS", f"{len(manifest.files)} files as the manifest lists them")], manifest


def check_privacy(release: Release) -> list[Check]:
    """Return the verdicts on a release's privacy statement."""
    statement = release.statement
    try:
        mechanism = mechanism_from_statement(statement)
    except DpmergeError as refusal:
        return [Check("statement", "FAIL", refusal.problem)]
    if not mechanism.private:
        return [_consistency(statement), Check("epsilon", "WARN", "no privacy is claimed, and none must be assumed")]
    return [
        *_epsilon(statement, mechanism),
        _consistency(statement),
        _coordinates(release, mechanism),
        _noise(statement),
        _delta(mechanism),
        _tuning(statement),
    ]


def _labels_problem(release: Release) -> str | None:
    labels = list(release.heads[release.party].labels)
    return None if same(release.statement.get("labels"), labels) else "statement and head name other labels"


def _claimed_party(sealed: Sealed) -> str:
    """Return whose release it claims to be: only to look up that party's key."""
    party = sealed.body.get("party")
    return party if isinstance(party, str) else ""


def _meaning(manifest: Manifest, statement: Mapping[str, Any]) -> Check:
    differing = [name for name in ("party", "base_sha256") if getattr(manifest, name) != statement.get(name)]
    if differing:
        return Check("manifest", "FAIL", f"{differing[0]} differs between manifest and statement")
    return Check("manifest", "PASS", f"federation {manifest.federation}, ledger {manifest.ledger_head[:16]}…")


def _epsilon(statement: Mapping[str, Any], mechanism: Mechanism) -> list[Check]:
    claimed = statement["epsilon"]
    if not isinstance(claimed, int | float):
        return [Check("epsilon by PLD", "FAIL", f"epsilon = {claimed!r} is no number")]
    try:
        check_cost(mechanism)
        found = cross_check(mechanism)
    except DpmergeError as refusal:
        return [Check("epsilon by PLD", "FAIL", refusal.problem)]
    agrees = abs(claimed - found.epsilon) <= EPSILON_TOLERANCE
    pld = f"{claimed:.6g} claimed, {found.epsilon:.6g} recomputed from σ, q, T and δ"
    covered = found.epsilon_optimistic - EPSILON_TOLERANCE <= claimed <= found.epsilon_prv + EPSILON_TOLERANCE
    prv = f"PRV's upper end {found.epsilon_prv:.6g}, RDP {found.epsilon_rdp:.6g}, both at or above the claim"
    return [
        Check("epsilon by PLD", "PASS" if agrees else "FAIL", pld),
        Check("epsilon by PRV", "PASS", prv)
        if covered
        else Check("epsilon by PRV", "FAIL", f"{claimed:.6g} claimed, but PRV gives up to {found.epsilon_prv:.6g}"),
    ]


def _consistency(statement: Mapping[str, Any]) -> Check:
    try:
        mechanism = check_statement(statement)
        check_witnesses(statement, mechanism)
    except DpmergeError as refusal:
        return Check("statement", "FAIL", refusal.problem)
    asked = " + 1 for the clip norm" if mechanism.num_clip_queries else ""
    told = f"q = {mechanism.expected_batch_size} / {mechanism.population}, T = {mechanism.num_steps}{asked}"
    return Check("statement", "PASS", f"complete and consistent: {told}, σ = {mechanism.noise_multiplier:.6g}")


def _coordinates(release: Release, mechanism: Mechanism) -> Check:
    """Hold the number of noised coordinates to the tensors: all that was trained must have been noised."""
    name = "coordinates"
    training = release.statement["training"]
    settings = training.get("lora") if isinstance(training, Mapping) else None
    if not isinstance(settings, Mapping) or not isinstance(settings.get("train_a"), bool):
        return Check(name, "WARN", "the training settings do not say whether A was trained")
    trained = [t for key, t in release.adapter.items() if settings["train_a"] or ".lora_A." not in key]
    for head in release.heads.values():
        if head.kind == "linear":
            trained += [tensor for tensor in (head.weight, head.bias) if tensor is not None]
    total, stated = sum(tensor.numel() for tensor in trained), mechanism.num_coordinates
    if "subspace" in release.statement:
        fits, told = stated <= total, f"{stated} directions of {total} coordinates"
    else:
        fits, told = stated == total, f"{stated} noised, {total} trained"
    return Check(name, "PASS" if fits else "FAIL", told)


def _noise(statement: Mapping[str, Any]) -> Check:
    if statement["noise_seed"] == "test":
        return Check("noise", "FAIL", "from a test seed: whoever knows it can remove the noise")
    if statement["noise"] != "secure":
        return Check("noise", "WARN", "floating-point noise, for experiments: its low bits may tell of the data")
    return Check("noise", "PASS", "secure: integers from a stream cipher seeded by the operating system")


def _delta(mechanism: Mechanism) -> Check:
    told = f"{mechanism.target_delta:g} for a declared population of {mechanism.population}"
    if not is_large(mechanism.target_delta, mechanism.population):
        return Check("delta", "PASS", told)
    return Check("delta", "WARN", f"{told}: a mechanism that publishes a random record would meet it")


def _tuning(statement: Mapping[str, Any]) -> Check:
    told = str(statement["tuning_disclosure"])
    if told == UNDISCLOSED:
        return Check("tuning", "WARN", "not disclosed: settings chosen on the private data would cost more")
    return Check("tuning", "PASS", " ".join(told.split()))
