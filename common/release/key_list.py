"""Who signs with which key: the list that a federation agrees on, on another channel than the releases.

schema = 1

[keys]
library = "ed25519:…"                    # one key, or a list of them while a party changes its key
shop = ["ed25519:…", "ed25519:…"]

[[revoked]]
key_id = "…"                             # SHA-256 of the public key
since = 2026-03-01T00:00:00Z             # what was received before stays valid
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dpmerge.common.config.rules import PARTY_NAME
from dpmerge.common.errors import DpmergeError
from dpmerge.common.release.signing import SHA256, PublicKey, Sealed
from dpmerge.common.untrusted.kinds import same
from dpmerge.common.untrusted.parsing import ReleaseRefused
from dpmerge.common.untrusted.reading import read_file

MAX_LIST_BYTES = 1 << 22
SERVER = "server"
"""The name under which a key list holds the key of the federation's server."""


@dataclass(frozen=True)
class KeyList:
    """Public keys by the name of their owner, and when which of them stopped being trusted.

    Attributes:
        keys: Name → keys; no key has two owners.
        revoked: Key id → since when (with time zone).
    """

    keys: Mapping[str, tuple[PublicKey, ...]]
    revoked: Mapping[str, datetime] = field(default_factory=dict)

    def __post_init__(self) -> None:
        owners: dict[str, str] = {}
        for name, keys in self.keys.items():
            for key in keys:
                if owners.setdefault(key.id, name) != name:
                    problem = f"{key} belongs to both {owners[key.id]!r} and {name!r}"
                    raise DpmergeError("DPM-205", problem, "give every party a key of its own")

    def check(self, sealed: Sealed, owner: str, at: datetime, origin: str) -> None:
        """Refuse a sealed object unless a key of this owner signed it and was trusted at that time.

        Args:
            sealed: The object.
            owner: Whose it claims to be.
            at: When it was received, with time zone: now, or what a receipt says.
            origin: Opens every refusal.

        Raises:
            ReleaseRefused: key, revoked or signature.
        """
        key = next((key for key in self.keys.get(owner, ()) if key.id == sealed.key_id), None)
        if key is None:
            fix = "sign with the key that the federation lists for this party"
            raise ReleaseRefused("key", f"{origin}: key {sealed.key_id[:16]}… is none of {owner!r}", fix)
        if not sealed.is_signed_by(key):
            raise ReleaseRefused("signature", f"{origin}: not signed by {key}", "send the files as dpmerge wrote them")
        since = self.revoked.get(key.id)
        if since is not None and at >= since:
            problem = f"{origin}: key {key.id[:16]}… of {owner!r} is revoked since {since.isoformat()}"
            raise ReleaseRefused("revoked", problem, "sign with a new key, and have the federation list it")


def load_key_list(path: Path) -> KeyList:
    """Read a key list.

    Raises:
        DpmergeError: DPM-205 if it cannot be read, has an unknown key, or lists something that is no key.
    """
    try:
        tables = tomllib.loads(read_file(path, MAX_LIST_BYTES, links=True).decode())
    except DpmergeError as refusal:
        raise _refusal(refusal.problem) from None
    except (OSError, ValueError, RecursionError) as problem:  # ValueErrors are wrong bytes, and wrong TOML
        reason = problem.strerror if isinstance(problem, OSError) else problem
        raise _refusal(f"{path} cannot be read: {reason}") from None
    unknown = sorted(tables.keys() - {"schema", "keys", "revoked"})
    if unknown:
        raise _refusal(f"{path} has the unknown key {unknown[0]!r}")
    if not same(tables.get("schema"), 1) or not isinstance(tables.get("keys"), dict):
        raise _refusal(f"{path} lacks schema = 1 or the table [keys]")
    entries = tables.get("revoked", [])
    if not isinstance(entries, list):
        raise _refusal(f"{path}: revoked is not written as [[revoked]]")
    keys = {name: _keys(name, value, path) for name, value in tables["keys"].items()}
    return KeyList(keys, dict(_revocation(entry, path) for entry in entries))


def _keys(name: str, value: Any, path: Path) -> tuple[PublicKey, ...]:
    texts = value if isinstance(value, list) else [value]
    if not PARTY_NAME.fullmatch(name) or not texts or not all(isinstance(text, str) for text in texts):
        raise _refusal(f"{path}: keys.{name} is not a party with its public keys")
    return tuple(PublicKey.parse(text) for text in texts)


def _revocation(entry: Any, path: Path) -> tuple[str, datetime]:
    if not isinstance(entry, dict) or entry.keys() != {"key_id", "since"}:
        raise _refusal(f"{path}: an entry of [[revoked]] does not consist of key_id and since")
    key_id, since = entry["key_id"], entry["since"]
    if not isinstance(key_id, str) or not SHA256.fullmatch(key_id):
        raise _refusal(f"{path}: revoked.key_id = {key_id!r} is not the SHA-256 of a public key")
    if not isinstance(since, datetime) or since.tzinfo is None:
        raise _refusal(f"{path}: revoked.since = {since!s} is not a time with its zone")
    return key_id, since.astimezone(UTC)


def _refusal(problem: str) -> DpmergeError:
    return DpmergeError("DPM-205", problem, "write the key list as docs/ledger.md shows it")
