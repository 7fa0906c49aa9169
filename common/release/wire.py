"""Flower records ↔ our bytes. Together with the two app shells, all that knows Flower's types.

server ── Call ───▶ node          who are you?
server ◀─ signed ── party         its answer to this call, signed; who has no listed key is asked nothing more
server ── Terms ──▶ party         train on this
server ◀─ Outcome ─ party         the release, or why there is none
server ── Verdict ▶ party         the receipt, or why the release was refused; best effort, see docs/protocol.md
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from dpmerge.common.errors import CODES
from dpmerge.common.printable import shown
from dpmerge.common.release.introduction import MAX_REASON, Call

TERMS = "terms"
"""Name of the record that the server sends down: what every party must agree with."""
OUTCOME = "outcome"
RELEASE = "release"
VERDICT = "verdict"
HELLO = "hello"
MAX_NAME = 63
MAX_TOLD = 4096


@dataclass(frozen=True)
class Terms:
    """What the server works with: the hash of the shared terms, and the federation's own id.

    The challenge is the run's and no part of what is agreed: a report of failure has to repeat it.
    """

    sha256: str
    federation: str
    challenge: str = field(default="", compare=False)


@dataclass(frozen=True)
class Outcome:
    """What a party answers: its release's files, or a code and a sentence that says nothing about its records."""

    party: str
    files: Mapping[str, bytes]
    code: str = ""
    reason: str = ""
    signed: bytes = b""
    """The same code and reason, sealed by the party: without it they count for nobody."""


@dataclass(frozen=True)
class Verdict:
    """What became of a release: the server's signed receipt, or a code and the reason for the refusal."""

    receipt: bytes = b""
    code: str = ""
    reason: str = ""


def pack_terms(terms: Terms) -> RecordDict:
    """Return the message down."""
    told = {"sha256": terms.sha256, "federation": terms.federation, "challenge": terms.challenge}
    return RecordDict({TERMS: ConfigRecord(told)})


def unpack_terms(content: RecordDict) -> Terms:
    """Return what the server works with."""
    record = content[TERMS]
    return Terms(*(_text(record, key) for key in ("sha256", "federation", "challenge")))


def pack_call(call: Call) -> RecordDict:
    """Return the question who a node is."""
    return RecordDict({HELLO: ConfigRecord({"federation": call.federation, "challenge": call.challenge})})


def unpack_call(content: RecordDict) -> Call:
    """Return what a server wants signed."""
    return Call(_text(content[HELLO], "federation"), _text(content[HELLO], "challenge"))


def pack_hello(signed: bytes) -> RecordDict:
    """Return the answer to a call; empty from who does not want to say."""
    return RecordDict({HELLO: ConfigRecord({"signed": signed})})


def unpack_hello(content: RecordDict) -> bytes:
    """Return a node's answer; empty if it is none."""
    signed = content[HELLO].get("signed") if HELLO in content else None
    return signed if isinstance(signed, bytes) else b""


def pack_outcome(outcome: Outcome) -> RecordDict:
    """Return the message up."""
    return RecordDict(
        {
            OUTCOME: ConfigRecord(
                {"party": outcome.party, "code": outcome.code, "reason": outcome.reason, "signed": outcome.signed}
            ),
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
        signed = outcome["signed"]
        if len(files) != len(release) or not isinstance(signed, bytes):
            raise ValueError("Expected every file of a release as bytes.")
        code = _text(outcome, "code")
        if code and code not in CODES:
            raise ValueError("Expected a code of dpmerge's.")
        told = shown(_text(outcome, "reason")[: 2 * MAX_REASON], MAX_REASON)
        return Outcome(_text(outcome, "party")[:MAX_NAME], files, code, told, signed)
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"Expected a reply with the records {OUTCOME!r} and {RELEASE!r}.") from None


def pack_verdict(verdict: Verdict) -> RecordDict:
    """Return the second message down."""
    record = {"receipt": verdict.receipt, "code": verdict.code, "reason": verdict.reason}
    return RecordDict({VERDICT: ConfigRecord(record)})


def unpack_verdict(content: RecordDict) -> Verdict:
    """Return what became of the release."""
    record = content[VERDICT]
    receipt = record["receipt"]
    code, reason = (shown(_text(record, key)[:MAX_TOLD], MAX_TOLD) for key in ("code", "reason"))
    return Verdict(receipt if isinstance(receipt, bytes) else b"", code, reason)


def _text(record: Any, key: str) -> str:
    value = record[key]
    if not isinstance(value, str):
        raise TypeError(f"Expected {key} of a message to be a text.")
    return value
