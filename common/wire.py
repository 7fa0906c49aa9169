"""Flower records ↔ our bytes. Together with the two app shells, all that knows Flower's types.

server ── Terms ──▶ party         train on this
server ◀─ Outcome ─ party         the release, or why there is none
server ── Verdict ▶ party         the receipt, or why the release was refused; best effort, see docs/protocol.md
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flwr.app import ConfigRecord, RecordDict

TERMS = "terms"
"""Name of the record that the server sends down: what every party must agree with."""
OUTCOME = "outcome"
RELEASE = "release"
VERDICT = "verdict"


@dataclass(frozen=True)
class Terms:
    """What the server works with: the hash of the shared terms, and the federation's own id."""

    sha256: str
    federation: str


@dataclass(frozen=True)
class Outcome:
    """What a party answers: its release's files, or a code and a sentence that says nothing about its records."""

    party: str
    files: Mapping[str, bytes]
    code: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Verdict:
    """What became of a release: the server's signed receipt, or a code and the reason for the refusal."""

    receipt: bytes = b""
    code: str = ""
    reason: str = ""


def pack_terms(terms: Terms) -> RecordDict:
    """Return the message down."""
    return RecordDict({TERMS: ConfigRecord({"sha256": terms.sha256, "federation": terms.federation})})


def unpack_terms(content: RecordDict) -> Terms:
    """Return what the server works with."""
    record = content[TERMS]
    return Terms(str(record["sha256"]), str(record["federation"]))


def pack_outcome(outcome: Outcome) -> RecordDict:
    """Return the message up."""
    return RecordDict(
        {
            OUTCOME: ConfigRecord({"party": outcome.party, "code": outcome.code, "reason": outcome.reason}),
            RELEASE: ConfigRecord(dict(outcome.files)),
        }
    )


def unpack_outcome(content: RecordDict) -> Outcome:
    """Return a party's outcome.

    Raises:
        ValueError: If the message is not of this form; the sender is then unknown.
    """
    try:
        outcome, release = content[OUTCOME], content[RELEASE]
        files = {str(name): value for name, value in release.items() if isinstance(value, bytes)}
        if len(files) != len(release):
            raise ValueError("Expected every file of a release as bytes.")
        return Outcome(str(outcome["party"]), files, str(outcome["code"]), str(outcome["reason"]))
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"Expected a reply with the records {OUTCOME!r} and {RELEASE!r}; {error!r} is missing."
        ) from error


def pack_verdict(verdict: Verdict) -> RecordDict:
    """Return the second message down."""
    record = {"receipt": verdict.receipt, "code": verdict.code, "reason": verdict.reason}
    return RecordDict({VERDICT: ConfigRecord(record)})


def unpack_verdict(content: RecordDict) -> Verdict:
    """Return what became of the release."""
    record = content[VERDICT]
    receipt = record["receipt"]
    return Verdict(receipt if isinstance(receipt, bytes) else b"", str(record["code"]), str(record["reason"]))
