"""The manifest: what a party signs of its release, and what others hold it to.

It lists every file with its SHA-256 and says for which federation, by whom, on which base model and on top of which
ledger. It carries no time: the same release is the same bytes for ever.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from dpmerge.common.config.rules import PARTY_NAME
from dpmerge.common.release.format import FILES, SIGNATURE, STATEMENT
from dpmerge.common.release.key_list import KeyList
from dpmerge.common.release.signing import SHA256, Sealed, SigningKey, parse_sealed, seal
from dpmerge.common.untrusted.kinds import record, table_of, text
from dpmerge.common.untrusted.parsing import ReleaseRefused, parse_json

KIND = "manifest"
FEDERATION_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,127}")
"""A name and random bits, made once when the federation is founded: `reviews-2026-5f0c…`."""

_HASHES = ("base_sha256", "statement_sha256", "ledger_head")
_TEXTS = {name: text(128) for name in ("federation", "party", *_HASHES)}
_MANIFEST = record({**_TEXTS, "files": table_of(text(64), text(64, SHA256), most=len(FILES))})
_RESEND = "sign and send the release that this federation asked for"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What is signed.

    Attributes:
        federation: The federation's own id, never Flower's run id.
        party: Whose release it is.
        base_sha256: Hash of the base model, as in the statement.
        statement_sha256: Hash of `statement.json`.
        ledger_head: Head of the party's ledger, the charge for this release included.
        files: File name → SHA-256 of its bytes, of all files but `signature.json`.
    """

    federation: str
    party: str
    base_sha256: str
    statement_sha256: str
    ledger_head: str
    files: Mapping[str, str]

    def __post_init__(self) -> None:
        for name, pattern in (("federation", FEDERATION_ID), ("party", PARTY_NAME), *((h, SHA256) for h in _HASHES)):
            value = getattr(self, name)
            if not isinstance(value, str) or not pattern.fullmatch(value):
                raise ValueError(f"Expected {name}={value!r} to match {pattern.pattern}.")
        if not isinstance(self.files, Mapping) or not self.files.keys() <= FILES - {SIGNATURE}:
            raise ValueError(f"Expected files={self.files!r} to be files of a release, without {SIGNATURE}.")
        for name, digest in self.files.items():
            if not isinstance(digest, str) or not SHA256.fullmatch(digest):
                raise ValueError(f"Expected files[{name!r}]={digest!r} to be a SHA-256.")
        if self.files.get(STATEMENT) != self.statement_sha256:
            raise ValueError(f"Expected statement_sha256={self.statement_sha256!r} to be that of {STATEMENT}.")

    def to_dict(self) -> dict[str, Any]:
        """Return it as the JSON object that is signed."""
        return asdict(self) | {"files": dict(self.files)}


def make_manifest(files: Mapping[str, bytes], *, federation: str, ledger_head: str) -> Manifest:
    """Return the manifest of a release's files; party and base model are what its statement says.

    Raises:
        ValueError: If the federation id or the head is none.
    """
    statement = parse_json(files[STATEMENT], STATEMENT)
    return Manifest(
        federation=federation,
        party=statement["party"],
        base_sha256=statement["base_sha256"],
        statement_sha256=_sha256(files[STATEMENT]),
        ledger_head=ledger_head,
        files={name: _sha256(files[name]) for name in sorted(files) if name != SIGNATURE},
    )


def sign_manifest(manifest: Manifest, key: SigningKey) -> bytes:
    """Return the content of `signature.json`."""
    return seal(key, KIND, manifest.to_dict())


def manifest_hash(signature: bytes) -> str:
    """Name a signed manifest: the SHA-256 of `signature.json`, which receipts refer to."""
    return _sha256(signature)


def parse_signature(signature: bytes, origin: str) -> Sealed:
    """Read the outer form of a `signature.json`; nothing of it is checked or interpreted yet.

    Raises:
        ReleaseRefused: size, json or signature.
    """
    return parse_sealed(signature, KIND, f"{origin}: {SIGNATURE}")


def manifest_of(sealed: Sealed, origin: str) -> Manifest:
    """Return the manifest in a sealed object.

    Raises:
        ReleaseRefused: manifest, if it is none.
    """
    try:
        _MANIFEST(sealed.body, KIND)
        return Manifest(**sealed.body)
    except ValueError as error:
        raise ReleaseRefused("manifest", f"{origin}: {SIGNATURE}: {error}", _RESEND) from error


def check_signed(files: Mapping[str, bytes], *, party: str, federation: str, keys: KeyList, at: datetime) -> Manifest:
    """Return the manifest of a signed release, checked in this order: size, signature, hashes, meaning.

    No other file is parsed: their hashes are known to be signed before anybody reads them.

    Args:
        files: All files of the release, `signature.json` included.
        party: Who is said to have sent it.
        federation: This federation's id.
        keys: Who signs with which key.
        at: When it was received, with time zone; see `KeyList.check`.

    Raises:
        ReleaseRefused: unsigned, size, json, signature, key, revoked, manifest, federation or party-mismatch.
    """
    if SIGNATURE not in files:
        raise ReleaseRefused("unsigned", f"{party}: {SIGNATURE} is missing", "sign the release with the party's key")
    sealed = parse_signature(files[SIGNATURE], party)
    keys.check(sealed, party, at, f"{party}: {SIGNATURE}")
    manifest = manifest_of(sealed, party)
    check_hashes(manifest, files, party)
    if manifest.party != party:
        raise ReleaseRefused("party-mismatch", f"{party}: {SIGNATURE} is of {manifest.party!r}", _RESEND)
    if manifest.federation != federation:
        raise ReleaseRefused("federation", f"{party}: signed for {manifest.federation!r}", _RESEND)
    return manifest


def check_hashes(manifest: Manifest, files: Mapping[str, bytes], origin: str) -> None:
    """Refuse files other than those that the manifest lists.

    Raises:
        ReleaseRefused: manifest.
    """
    fix = "send the files as they were signed"
    for name in sorted(manifest.files.keys() ^ (files.keys() - {SIGNATURE})):
        listed = "is not there" if name in manifest.files else "is not in the manifest"
        raise ReleaseRefused("manifest", f"{origin}: {name} {listed}", fix)
    for name, digest in sorted(manifest.files.items()):
        if _sha256(files[name]) != digest:
            raise ReleaseRefused("manifest", f"{origin}: {name} has another hash than the manifest says", fix)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
