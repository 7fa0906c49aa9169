"""What `dpmerge verify` and `dpmerge ledger verify` look at: files on this machine, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from dpmerge.client.budget.ledger import Ledger, Line
from dpmerge.client.budget.ledger_checks import check_against_head, check_against_release
from dpmerge.common.errors import DpmergeError
from dpmerge.common.release.format import MERGE, SIGNATURE, release_files, release_from_files, release_hash
from dpmerge.common.release.key_list import SERVER, load_key_list
from dpmerge.common.release.manifest import Manifest, manifest_hash, parse_signature
from dpmerge.common.release.merge_record import MERGE_RECORD
from dpmerge.common.release.receipt import Receipt, differences, parse_receipt
from dpmerge.common.release.signing import MAX_SEALED_BYTES, PublicKey, Sealed
from dpmerge.common.statement.verify import Check, Trust, check_manifest, check_release, verdict
from dpmerge.common.untrusted.kinds import Unfit
from dpmerge.common.untrusted.parsing import ReleaseRefused, parse_json
from dpmerge.common.untrusted.reading import read_file


def verify_path(
    path: Path, *, keys: Sequence[str], key_list: Path | None, receipt: Path | None, ledger: Path | None
) -> tuple[str, list[Check]]:
    """Return what lies at a path ("release", "merged model" or "receipt") and the verdicts on it.

    Raises:
        DpmergeError: If there is nothing at the path, or keys, key list, receipt or ledger cannot be read.
    """
    listed = None if key_list is None else load_key_list(key_list)
    trust = Trust(datetime.now(UTC), tuple(PublicKey.parse(key) for key in keys), listed)
    if path.is_file():
        _refuse_options("a receipt", receipt=receipt, ledger=ledger)
        return "receipt", _receipt_checks(path, trust)
    if not path.is_dir():
        raise DpmergeError("DPM-401", f"{path} is not there", "name a release, a merged model or a receipt")
    try:
        files = release_files(path)
    except ReleaseRefused as refusal:
        return "release", [Check("format", "FAIL", refusal.problem)]
    if MERGE in files:
        _refuse_options("a merged model, which nobody signs", key=keys, allow=key_list, receipt=receipt, ledger=ledger)
        return "merged model", _merged_checks(files)
    if receipt is None:
        checks = check_release(files, trust)
    else:
        checks = _release_with_receipt(files, receipt, trust)
    if ledger is not None and verdict(checks) != "FAIL":
        checks += _release_in_ledger(Ledger(existing(ledger)).lines(), files, path)
    return "release", checks


def _refuse_options(what: str, **given: object) -> None:
    """Refuse options that say nothing about what lies at the path, rather than let them seem to have been heeded."""
    if useless := [f"--{name}" for name, value in given.items() if value]:
        problem = f"{', '.join(useless)} cannot be used with {what}"
        raise DpmergeError("DPM-103", problem, "leave out what does not apply, or give the release itself")


def ledger_checks(lines: Sequence[Line], against: Path) -> list[Check]:
    """Return whether a ledger is the one that a release or a receipt was made on top of.

    Raises:
        DpmergeError: If what it is held against cannot be read, or is not whole.
    """
    if against.is_file():
        receipt, _ = read_receipt(against)
        return [check_against_head(lines, receipt.ledger_head)]
    return _release_in_ledger(lines, release_files(against), against)


def _release_in_ledger(lines: Sequence[Line], files: Mapping[str, bytes], against: Path) -> list[Check]:
    checks, manifest = check_manifest(files, Trust(datetime.now(UTC)))
    if verdict(checks) == "FAIL":
        raise DpmergeError("DPM-401", f"{against} is not whole: {checks[-1].detail}", "give a release as it was signed")
    head = None if manifest is None else manifest.ledger_head
    return check_against_release(lines, head, release_from_files(files).statement, release_hash(files))


def read_receipt(path: Path) -> tuple[Receipt, Sealed]:
    """Read a receipt whose signature is not checked yet.

    Raises:
        DpmergeError: DPM-404.
    """
    try:
        data = read_file(existing(path), MAX_SEALED_BYTES)
    except DpmergeError as refusal:
        raise DpmergeError("DPM-404", refusal.problem, refusal.fix) from None
    return parse_receipt(data, path.name)


def existing(path: Path) -> Path:
    """Return a path if there is a file.

    Raises:
        DpmergeError: DPM-303 if there is none.
    """
    if not path.is_file():
        raise DpmergeError("DPM-303", f"{path} cannot be read: no such file", "correct the path")
    return path


def _receipt_checks(path: Path, trust: Trust) -> list[Check]:
    try:
        receipt, sealed = read_receipt(path)
    except DpmergeError as refusal:
        return [Check("format", "FAIL", refusal.problem)]
    told = f"{receipt.party} in {receipt.federation}, {receipt.time}, manifest {receipt.manifest_sha256[:16]}…"
    return [Check("format", "PASS", told), trust.check(sealed, SERVER, path.name)]


def _release_with_receipt(files: Mapping[str, bytes], path: Path, trust: Trust) -> list[Check]:
    """Check a receipt first: only if it holds does its time decide whether a revoked key was still good."""
    receipt, sealed = read_receipt(path)
    signed = trust.check(sealed, SERVER, path.name)
    at = receipt.received_at if signed.status == "PASS" else trust.at
    checks = check_release(files, Trust(at, trust.keys, trust.key_list))
    _, manifest = check_manifest(files, Trust(at, trust.keys, trust.key_list))
    if manifest is not None and parse_signature(files[SIGNATURE], "release").key_id == sealed.key_id:
        signed = Check(signed.name, "FAIL", "signed with the release's own key: a party's word for what the server has")
    return [*checks, Check("receipt signature", signed.status, signed.detail), _fits(receipt, manifest, files)]


def _fits(receipt: Receipt, manifest: Manifest | None, files: Mapping[str, bytes]) -> Check:
    if manifest is None:
        return Check("receipt", "FAIL", "the release has no valid signature that a receipt could be for")
    differing = list(differences(receipt, manifest, manifest_hash(files[SIGNATURE])))
    if differing:
        return Check("receipt", "FAIL", f"it is for another release: {', '.join(differing)}")
    return Check("receipt", "PASS", f"received {receipt.time} as {receipt.spool_sha256[:16]}…")


def _merged_checks(files: Mapping[str, bytes]) -> list[Check]:
    """Return what a merged model shows by itself; that it is the merge of its inputs, only merging again shows."""
    try:
        release = release_from_files(files)
        record = parse_json(files[MERGE], MERGE)
    except DpmergeError as refusal:
        return [Check("format", "FAIL", refusal.problem)]
    try:
        MERGE_RECORD(record, MERGE)
    except Unfit as error:
        return [Check("inputs", "FAIL", str(error))]
    inputs = record["inputs"]
    claims = ", ".join(f"{entry['party']}: {_claim(entry['epsilon'])}" for entry in inputs)
    return [
        Check("signature", "WARN", "unsigned: anybody may have written this; merge its inputs again to be sure"),
        Check("format", "PASS", f"{len(release.adapter)} tensors, fp32 and finite"),
        Check("inputs", "PASS", f"{len(inputs)}, each named by its hash: verify these releases too"),
        Check("epsilon", "WARN", f"only copied from the releases ({claims}); merging itself costs nothing"),
    ]


def _claim(epsilon: object) -> str:
    return f"{epsilon:.6g}" if isinstance(epsilon, int | float) else "none stated"
