"""The receipt: the server's signed word that a release is on its disk; it closes the party's outbox.

>>> from datetime import timedelta
>>> minute_of(datetime(2026, 3, 1, 12, 30, 59, tzinfo=UTC) + timedelta(seconds=0.5))
'2026-03-01T12:30:00Z'
"""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from typing import Any

from dpmerge.common.config.rules import PARTY_NAME
from dpmerge.common.errors import DpmergeError
from dpmerge.common.release.manifest import FEDERATION_ID, Manifest
from dpmerge.common.release.signing import SHA256, PublicKey, Sealed, parse_sealed
from dpmerge.common.untrusted.kinds import record, text
from dpmerge.common.untrusted.parsing import ReleaseRefused

KIND = "receipt"
RECEIPT = "receipt.json"

_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:00Z", re.ASCII)
_AGAIN = "send the release again, and ask the server for the receipt of this very manifest"


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """What the server signs.

    Attributes:
        federation: The federation's own id.
        party: Whose release was received.
        manifest_sha256: Hash of its `signature.json`.
        ledger_head: The party's ledger at that time, as its manifest says: a ledger that was cut later does not fit.
        spool_sha256: Name of the entry in the server's spool.
        time: UTC, to the minute: 2026-03-01T12:30:00Z.
    """

    federation: str
    party: str
    manifest_sha256: str
    ledger_head: str
    spool_sha256: str
    time: str

    def __post_init__(self) -> None:
        hashes = ("manifest_sha256", "ledger_head", "spool_sha256")
        patterns = {"federation": FEDERATION_ID, "party": PARTY_NAME, "time": _TIME, **dict.fromkeys(hashes, SHA256)}
        for name, pattern in patterns.items():
            value = getattr(self, name)
            if not isinstance(value, str) or not pattern.fullmatch(value):
                raise ValueError(f"Expected {name}={value!r} to match {pattern.pattern}.")
        datetime.fromisoformat(self.time)  # refuses February 30th

    def to_dict(self) -> dict[str, Any]:
        """Return it as the JSON object that is signed."""
        return asdict(self)

    @property
    def received_at(self) -> datetime:
        """The time, with its zone."""
        return datetime.fromisoformat(self.time)


def minute_of(time: datetime) -> str:
    """Write a time with zone as receipts do: in UTC, to the minute."""
    if time.tzinfo is None:
        raise ValueError(f"Expected time={time} to have a time zone.")
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:00Z")


def parse_receipt(data: bytes, origin: str) -> tuple[Receipt, Sealed]:
    """Read a receipt; its signature is not checked.

    Raises:
        DpmergeError: DPM-404 if it is none.
    """
    try:
        sealed = parse_sealed(data, KIND, origin)
    except ReleaseRefused as refusal:
        raise DpmergeError("DPM-404", refusal.problem, _AGAIN) from refusal
    try:
        record({field.name: text(128) for field in fields(Receipt)})(sealed.body, KIND)
        return Receipt(**sealed.body), sealed
    except ValueError as error:  # an Unfit is one
        raise DpmergeError("DPM-404", f"{origin}: {error}", _AGAIN) from error


def differences(receipt: Receipt, manifest: Manifest, manifest_sha256: str) -> dict[str, str]:
    """Return what keeps a receipt from being for this very manifest: name → the manifest's value."""
    wanted = {
        "manifest_sha256": manifest_sha256,
        "federation": manifest.federation,
        "party": manifest.party,
        "ledger_head": manifest.ledger_head,
    }
    return {name: value for name, value in wanted.items() if getattr(receipt, name) != value}


def check_receipt(
    data: bytes, manifest: Manifest, manifest_sha256: str, server_keys: Iterable[PublicKey], origin: str = RECEIPT
) -> Receipt:
    """Return a receipt for this very manifest, signed by one of these server keys.

    Args:
        data: What came back.
        manifest: What was sent.
        manifest_sha256: `manifest_hash` of the `signature.json` that was sent.
        server_keys: Whom the site believes.
        origin: Opens every refusal.

    Raises:
        DpmergeError: DPM-404.
    """
    receipt, sealed = parse_receipt(data, origin)
    if not any(sealed.is_signed_by(key) for key in server_keys):
        problem = f"{origin} is not signed by a server key that the site believes (key {sealed.key_id[:16]}…)"
        raise DpmergeError("DPM-404", problem, "compare the server's key with the one given to you otherwise")
    for name, value in differences(receipt, manifest, manifest_sha256).items():
        raise DpmergeError("DPM-404", f"{origin} is for {name} = {getattr(receipt, name)}, not {value}", _AGAIN)
    return receipt
