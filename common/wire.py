"""Flower records ↔ our bytes. Together with the two app shells, all that knows Flower's types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flwr.app import ConfigRecord, RecordDict

TERMS = "terms"
"""Name of the record that the server sends down: what every party must agree with."""
OUTCOME = "outcome"
RELEASE = "release"


@dataclass(frozen=True)
class Outcome:
    """What a party answers: its release's files, or a code and a sentence that says nothing about its records."""

    party: str
    files: Mapping[str, bytes]
    code: str = ""
    reason: str = ""


def pack_terms(shared_terms: str) -> RecordDict:
    """Return the message down: the hash of the shared terms."""
    return RecordDict({TERMS: ConfigRecord({"sha256": shared_terms})})


def unpack_terms(content: RecordDict) -> str:
    """Return the hash of the shared terms that the server works with."""
    return str(content[TERMS]["sha256"])


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
