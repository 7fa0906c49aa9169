import json
import random
import resource
from datetime import UTC, datetime, timedelta
from functools import lru_cache

import pytest
import rfc8785
from hypothesis import given, settings
from hypothesis import strategies as st

from dpmerge.common.release.format import (
    FILES,
    MERGE,
    MODULES,
    PICTURE,
    README,
    SIGNATURE,
    release_from_files,
    release_hash,
)
from dpmerge.common.release.key_list import KeyList
from dpmerge.common.release.manifest import check_signed, make_manifest, manifest_hash, manifest_of, parse_signature
from dpmerge.common.release.signing import seal
from dpmerge.common.untrusted.parsing import ReleaseRefused
from tests.signed_releases import FEDERATION, HEAD, KEY, KEYS, STRANGER, signed_files, statement

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


def check(files, **changes):
    return check_signed(files, **{"party": "shop", "federation": FEDERATION, "keys": KEYS, "at": NOW, **changes})


def reason(files, **changes):
    with pytest.raises(ReleaseRefused) as refusal:
        check(files, **changes)
    return refusal.value.reason


def test_a_signed_release_is_whole_and_always_the_same_bytes():
    files = signed_files()
    manifest = check(files)
    assert signed_files() == files
    assert manifest.files.keys() == files.keys() - {SIGNATURE}
    assert (manifest.party, manifest.federation, manifest.ledger_head) == ("shop", FEDERATION, HEAD)
    assert release_hash(files) == release_hash({n: d for n, d in files.items() if n not in (README, SIGNATURE)})
    assert release_from_files(files).party == "shop"


@pytest.mark.parametrize("name", sorted(FILES - {MERGE, MODULES, PICTURE}))
def test_one_changed_byte_of_any_file_is_caught(name):
    files = signed_files()
    for place in range(0, len(files[name]), max(1, len(files[name]) // 40)):
        data = bytearray(files[name])
        data[place] ^= 1
        assert reason(files | {name: bytes(data)}) in (
            {"signature", "key", "json"} if name == SIGNATURE else {"manifest"}
        )


def test_a_file_more_or_less_is_caught():
    files = signed_files()
    assert reason({name: data for name, data in files.items() if name != README}) == "manifest"
    assert reason(files | {"explain.svg": b""}) == "manifest"
    assert reason({name: data for name, data in files.items() if name != SIGNATURE}) == "unsigned"


def test_who_signed_and_for_whom_is_checked():
    files = signed_files()
    assert reason(files, federation="another-2026") == "federation"
    assert reason(files, party="cinema") == "key"
    assert reason(signed_files(key=STRANGER)) == "key"
    assert reason(signed_files(told=statement("cinema"))) == "party-mismatch"
    forged = json.loads(files[SIGNATURE]) | {"key_id": STRANGER.public.id}
    assert reason(files | {SIGNATURE: rfc8785.dumps(forged)}, party="cinema") == "signature"


def test_a_revoked_key_is_refused_from_then_on():
    revoked = KeyList(KEYS.keys, {KEY.public.id: NOW})
    assert reason(signed_files(), keys=revoked) == "revoked"
    assert check(signed_files(), keys=revoked, at=NOW - timedelta(minutes=1))


@pytest.mark.parametrize(
    "change",
    [
        {"party": 3},
        {"files": {}},
        {"files": {"../x": "a" * 64}},
        {"files": []},
        {"federation": "../x"},
        {"ledger_head": "A" * 64},
        {"statement_sha256": "0" * 64},
        {"extra": 1},
    ],
)
def test_what_is_no_manifest_is_refused_even_if_signed(change):
    files = signed_files()
    body = make_manifest(files, federation=FEDERATION, ledger_head=HEAD).to_dict() | change
    assert reason(files | {SIGNATURE: seal(KEY, "manifest", body)}) == "manifest"


def test_a_receipt_is_no_manifest_and_another_form_is_no_signature():
    files = signed_files()
    value = json.loads(files[SIGNATURE])
    assert reason(files | {SIGNATURE: seal(KEY, "receipt", value["manifest"])}) == "signature"
    receipt = json.loads(seal(KEY, "receipt", value["manifest"]))
    renamed = {("manifest" if key == "receipt" else key): item for key, item in receipt.items()}
    assert reason(files | {SIGNATURE: rfc8785.dumps(renamed)}) == "signature"
    assert reason(files | {SIGNATURE: json.dumps(value, indent=1).encode()}) == "signature"
    assert reason(files | {SIGNATURE: b" " * (1 << 17)}) == "size"
    assert reason(files | {SIGNATURE: rfc8785.dumps(value | {"schema": 2})}) == "signature"


def test_another_release_has_another_manifest():
    assert manifest_hash(signed_files()[SIGNATURE]) != manifest_hash(signed_files(ledger_head="0" * 64)[SIGNATURE])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**54), 2**54) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@lru_cache
def _signature():
    return signed_files()[SIGNATURE]


@st.composite
def near_signatures(draw):
    """A signature file with a few values replaced, then a few bytes."""
    value = json.loads(_signature())
    for _ in range(draw(st.integers(0, 2))):
        table = draw(st.sampled_from([value, value["manifest"], value["manifest"].get("files")]))
        if isinstance(table, dict) and table is not value:
            table[draw(st.sampled_from([*table, "new"]))] = draw(JSON)
    data = bytearray(
        json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
    )
    for _ in range(draw(st.integers(0, 3))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data)


def _survives(data):
    try:
        manifest_of(parse_signature(data, "fuzz"), "fuzz")
    except ReleaseRefused:
        return


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=64) | JSON.map(lambda value: json.dumps(value).encode()) | near_signatures())
def test_no_bytes_make_the_parser_fail_otherwise_than_by_refusing(data):
    _survives(data)


@pytest.mark.slow
def test_a_hundred_thousand_damaged_signatures_are_refused_in_bounded_memory():
    chance, whole = random.Random(6), _signature()
    pieces = [b"{", b"[", b'"', b"}", b",", b":", b"null", b"1e999", b"9" * 5000, b"[" * 40, b'"\\ud800"', b"\xff"]
    before = 0
    for turn in range(100_000):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            start = chance.randrange(len(data) + 1)
            end = start + chance.choice([0, 1, 1, 2, 64, len(data)])
            data[start:end] = chance.choice([bytes([chance.randrange(256)]), chance.choice(pieces), b""])
        _survives(bytes(data))
        if turn == 1000:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB
