"""A party's signed answers that are no release: who it is, and why it has none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dpmerge.common.errors import DpmergeError
from dpmerge.common.release.introduction import Call, is_call, sign_failure, sign_hello
from dpmerge.common.release.signing import SigningKey
from dpmerge.common.release.wire import Outcome


def hello(party: str, federation: str, call: Call, load: Callable[[], SigningKey]) -> bytes:
    """Return the answer to a call of the party's own federation; empty for any other, and without a key.

    Args:
        party: The site's.
        federation: The site's.
        call: What the server wants signed.
        load: Reads the site's key.
    """
    if call.federation != federation or not is_call(call):
        return b""
    try:
        return sign_hello(party, call, load())
    except DpmergeError:  # the key; training would refuse for the same reason
        return b""


def with_report(outcome: Outcome, federation: str, challenge: str, load: Callable[[], SigningKey]) -> Outcome:
    """Return an outcome whose failure, if it is one, is signed: what is unsigned counts for nobody."""
    call = Call(federation, challenge)
    if not outcome.code or not is_call(call):
        return outcome
    try:
        signed = sign_failure(outcome.party, call, outcome.code, outcome.reason, load())
    except DpmergeError:
        return outcome
    return replace(outcome, signed=signed)
