"""What a party says that is no release: who it is, before it takes a slot, and why it has no release. Both are signed.

The server makes up a challenge per node, and both answers repeat it: what was signed for one node, run or federation
says nothing in another.

>>> from dpmerge.common.release.signing import SigningKey
>>> key, now = SigningKey(bytes([1]) * 32), datetime(2026, 3, 1, tzinfo=UTC)
>>> call = Call("reviews-5f0c", "00" * 16)
>>> check_hello(sign_hello("shop", call, key), call, KeyList({"shop": (key.public,)}), now)
'shop'
"""

import re
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime  # noqa: F401 -- UTC is for the example

from dpmerge.common.config.rules import PARTY_NAME
from dpmerge.common.errors import CODES
from dpmerge.common.printable import shown
from dpmerge.common.release.key_list import KeyList
from dpmerge.common.release.signing import Sealed, SigningKey, parse_sealed, seal
from dpmerge.common.untrusted.kinds import Kind, Unfit, exactly, record, text
from dpmerge.common.untrusted.parsing import ReleaseRefused

HELLO, FAILURE = "hello", "failure"
MAX_REASON = 600
"""Characters of a party's reason why it has no release: a sentence and its remedy."""

_CHALLENGE = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True)
class Call:
    """What a server asks a node to sign for: its federation, and bits that it has not used before."""

    federation: str
    challenge: str


def new_call(federation: str) -> Call:
    """Return a call that nobody can have answered before."""
    return Call(federation, secrets.token_hex(16))


def is_call(call: Call) -> bool:
    """Whether a call has the form of one; a party signs nothing else."""
    return _CHALLENGE.fullmatch(call.challenge) is not None


def sign_hello(party: str, call: Call, key: SigningKey) -> bytes:
    """Return a party's signed word that it is there."""
    return seal(key, HELLO, {"federation": call.federation, "challenge": call.challenge, "party": party})


def sign_failure(party: str, call: Call, code: str, reason: str, key: SigningKey) -> bytes:
    """Return a party's signed word that it has no release, and why; the reason is cut to `MAX_REASON`."""
    told = {"party": party, "code": code, "reason": shown(reason, MAX_REASON)}
    return seal(key, FAILURE, {"federation": call.federation, "challenge": call.challenge, **told})


def check_hello(data: bytes, call: Call, keys: KeyList, at: datetime) -> str:
    """Return who answered a call.

    Raises:
        ReleaseRefused: If nobody did whose key is listed, or the answer is to another call.
    """
    sealed = parse_sealed(data, HELLO, "a node's hello")
    return _checked(sealed, call, keys, at, {})["party"]


def check_failure(data: bytes, call: Call, party: str, keys: KeyList, at: datetime) -> tuple[str, str]:
    """Return a party's code and reason.

    Raises:
        ReleaseRefused: If it is not signed by this party, or is about another call.
    """
    sealed = parse_sealed(data, FAILURE, f"{party}: report")
    body = _checked(sealed, call, keys, at, {"code": exactly(*CODES), "reason": text(MAX_REASON)})
    if body["party"] != party:
        raise ReleaseRefused("party-mismatch", f"{party}: the report is of {body['party']!r}", "sign your own report")
    return body["code"], body["reason"]


def _checked(sealed: Sealed, call: Call, keys: KeyList, at: datetime, others: dict[str, Kind]) -> dict[str, str]:
    wanted = {"federation": exactly(call.federation), "challenge": exactly(call.challenge)}
    try:
        record({**wanted, "party": text(63, PARTY_NAME), **others})(sealed.body, sealed.kind)
    except Unfit as error:
        raise ReleaseRefused("signature", str(error), "answer the call that was made") from error
    keys.check(sealed, sealed.body["party"], at, sealed.kind)
    return sealed.body
