"""The reject matrix: what arrives in a party's name and is wrong is refused for its reason, and nothing else happens.

Every row has a good release of another party in the spool and the sender's own, good one in its outbox. After the
refusal the sender's ledger and outbox are what they were, and so is every byte that the server keeps; the merge of
the spool is the same; and the sender's good release is still taken.
"""

import hashlib
import json
import math
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from dpmerge.client.app import settle
from dpmerge.client.budget.ledger import Ledger, reservation_id
from dpmerge.client.party.outbox import Signer, outbox_files, put
from dpmerge.common.config.federation import parse_federation, party_plan
from dpmerge.common.release.format import ADAPTER, CONFIG, README, SIGNATURE, STATEMENT, release_hash, to_files
from dpmerge.common.release.key_list import KeyList
from dpmerge.common.release.manifest import KIND, Manifest, sign_manifest
from dpmerge.common.release.receipt import RECEIPT
from dpmerge.common.release.signing import SigningKey, seal
from dpmerge.common.release.wire import Verdict
from dpmerge.common.untrusted.parsing import ReleaseRefused
from dpmerge.server.intake.receipts import Receipts
from dpmerge.server.intake.reception import Reception
from dpmerge.server.intake.spool import Spool
from dpmerge.server.intake.validation import PartyTerms, ReleaseSpec
from dpmerge.server.merging.adapters.deltas import adapter_from_files
from dpmerge.server.merging.merge import as_release, merge
from dpmerge.server.merging.spec.spec import spec_of
from dpmerge.simulations.flower import SimulatedSite
from tests.release_changes import Files, edit, scaled
from tests.release_changes import put as put_tensor
from tests.signed_releases import (
    ADAPTER_CONFIG,
    FEDERATION,
    HEAD,
    KEY,
    KEYS,
    SERVER_KEY,
    STRANGER,
    release,
    signed_files,
    statement,
)

NOW = datetime(2026, 3, 1, 12, 30, tzinfo=UTC)
HOUR = timedelta(hours=1)
SHOP = MappingProxyType(signed_files())
CINEMA = signed_files(told=statement("cinema"), key=STRANGER)
SECOND_KEY = SigningKey(bytes([9]) * 32)
TWO_KEYS = KeyList({**KEYS.keys, "shop": (KEY.public, SECOND_KEY.public)})
A, B = release().adapter
AGREED = (
    *("population", "expected_batch_size", "num_steps", "l2_clip_norm", "target_delta", "noise", "noise_seed"),
    *("labels", "training", "privacy_unit"),
)
MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Row:
    """What arrives, and why it is refused.

    Attributes:
        reason: The word.
        files: What arrives.
        party: In whose name.
        after_first: Whether the party's good release was received before.
        server: What is different about the reception.
    """

    reason: str
    files: Mapping[str, bytes]
    party: str = "shop"
    after_first: bool = False
    server: Mapping[str, Any] = field(default_factory=dict)


def signed(*changes: Callable[[Files], Files], key: SigningKey = KEY, base: str = "c" * 64, **claims: Any) -> Files:
    """Return the release as a party's own software would sign it after changing it, whatever it has become."""
    files = dict(SHOP)
    for change in changes:
        files = change(files)
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items()) if name != SIGNATURE}
    manifest = Manifest(
        federation=FEDERATION,
        party="shop",
        base_sha256=base,
        statement_sha256=hashes[STATEMENT],
        ledger_head=HEAD,
        files=hashes,
    )
    return files | {SIGNATURE: seal(key, KIND, manifest.to_dict() | claims) if claims else sign_manifest(manifest, key)}


def holding(name: str, data: bytes) -> Callable[[Files], Files]:
    return lambda files: files | {name: data}


def header(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


def sealed_as(schema: str) -> Files:
    """Return the good release with another spelling of its signature's schema, which needs no key."""
    return {**SHOP, SIGNATURE: SHOP[SIGNATURE].replace(b'"schema":1', f'"schema":{schema}'.encode())}


def compact(name: str) -> Callable[[Files], Files]:
    return lambda files: files | {name: json.dumps(json.loads(files[name]), sort_keys=True).encode()}


def with_metadata(files: Files) -> Files:
    return files | {ADAPTER: save(load(files[ADAPTER]), {"format": "pt", "note": "x"})}


def witnesses(**changes: float) -> dict[str, float]:
    return statement()["cross_check"] | changes


MATRIX: dict[str, dict[str, Row]] = {
    "not finite": {
        "NaN": Row("non-finite", signed(put_tensor(B, torch.full((8, 2), math.nan)))),
        "infinity": Row("non-finite", signed(put_tensor(B, torch.full((8, 2), -math.inf)))),
    },
    "claimed weight": {
        "huge, in the configuration": Row("config", signed(edit(CONFIG, num_examples=10**12))),
        "negative, in the configuration": Row("config", signed(edit(CONFIG, weight=-9.0))),
        "huge, in the statement": Row("statement-inconsistent", signed(edit(STATEMENT, num_examples=10**12))),
        "negative, in the statement": Row("statement-inconsistent", signed(edit(STATEMENT, weight=-9.0))),
        "in the manifest": Row("manifest", signed(num_examples=10**12)),
        "as a file": Row("manifest", {**SHOP, "merge.json": b'{"weight": 10}'}),
    },
    "shape": {
        "broadcastable": Row("shape", signed(put_tensor(B, torch.ones(1, 2)))),
        "another rank": Row("shape", signed(put_tensor(B, torch.ones(8, 3)))),
        "unknown tensor": Row("unknown-key", signed(put_tensor(B.replace("query", "value"), torch.ones(8, 2)))),
    },
    "adapter settings": {
        "rank": Row("config", signed(edit(CONFIG, r=4))),
        "alpha": Row("config", signed(edit(CONFIG, lora_alpha=400))),
        "targets": Row("config", signed(edit(CONFIG, target_modules=["query", "value"]))),
    },
    "base model or tokenizer": {  # one hash covers both
        "by the statement": Row("base-mismatch", signed(edit(STATEMENT, base_sha256="d" * 64))),
        "by the manifest": Row("base-mismatch", signed(base="d" * 64)),
        "by name": Row("config", signed(edit(CONFIG, base_model_name_or_path="bert"))),
        "its shared A": Row("shared-a", signed(scaled(A, 1.0000001))),
    },
    "replay": {
        "of another federation's release": Row("federation", signed_files(federation="another-1f")),
        "of another party's release": Row("key", CINEMA),
        "in another party's name": Row("key", SHOP, party="cinema"),
    },
    "keys": {
        "nobody's": Row("key", signed_files(key=SigningKey(bytes([8]) * 32))),
        "the party's second, not listed": Row("key", signed_files(key=SECOND_KEY)),
        "the party's second, listed": Row(
            "second-release", signed_files(key=SECOND_KEY), after_first=True, server={"keys": TWO_KEYS}
        ),
        "no signature": Row("unsigned", {name: data for name, data in SHOP.items() if name != SIGNATURE}),
    },
    "cut off": {
        "before it was signed": Row("truncated", signed(holding(ADAPTER, SHOP[ADAPTER][:-1]))),
        "on the way": Row("manifest", {**SHOP, ADAPTER: SHOP[ADAPTER][:-1]}),
        "its signature": Row("json", {**SHOP, SIGNATURE: SHOP[SIGNATURE][:-1]}),
    },
    "bombs": {
        "header of 100 MB": Row("header-too-large", signed(holding(ADAPTER, (100 << 20).to_bytes(8, "little") + b"{"))),
        "nested header": Row("json", signed(holding(ADAPTER, header(b'{"a":' * 500 + b"1" + b"}" * 500)))),
        "nested statement": Row("json", signed(holding(STATEMENT, b'{"a":' * 500 + b"1" + b"}" * 500))),
        "nested signature": Row("json", {**SHOP, SIGNATURE: b'{"a":' * 500}),
        "large signature": Row("size", {**SHOP, SIGNATURE: b" " * (1 << 17)}),
        "large file": Row("size", {**SHOP, ADAPTER: bytes(2 * MAX_BYTES)}),
        "large card": Row("size", signed(holding(README, b"#" * (1 << 17)))),
    },
    "norm": {"a hundred times": Row("norm", signed(scaled(B, 100)))},
    "epsilon": {
        "forged": Row("statement-inconsistent", signed(edit(STATEMENT, epsilon=0.01))),
        "forged by its noise": Row("statement-inconsistent", signed(edit(STATEMENT, noise_multiplier=1.0))),
        "above the plan": Row("epsilon-above-plan", signed(edit(STATEMENT, epsilon=1.01))),
        "none": Row("epsilon-above-plan", signed(edit(STATEMENT, epsilon=None))),
    },
    "kinds of JSON": {
        "schema of the signature, true": Row("signature", sealed_as("true")),
        "schema of the signature, 1.0": Row("signature", sealed_as("1.0")),
        "schema of the statement, true": Row("statement-inconsistent", signed(edit(STATEMENT, schema=True))),
        "schema of the statement, 1.0": Row("statement-inconsistent", signed(edit(STATEMENT, schema=1.0))),
        "steps, 10.0": Row("statement-inconsistent", signed(edit(STATEMENT, num_steps=10.0))),
        "private, 1": Row("statement-inconsistent", signed(edit(STATEMENT, private=1))),
        "clip norm, 1": Row("statement-inconsistent", signed(edit(STATEMENT, l2_clip_norm=1))),
        "a label, 1": Row("statement-inconsistent", signed(edit(STATEMENT, labels=["good", 1]))),
        "compact statement": Row("form", signed(compact(STATEMENT))),
        "compact settings": Row("form", signed(compact(CONFIG))),
        "metadata of the adapter": Row("form", signed(with_metadata)),
    },
    "numbers that cost": {
        "steps": Row("statement-inconsistent", signed(edit(STATEMENT, num_steps=10**12))),
        "coordinates": Row("statement-inconsistent", signed(edit(STATEMENT, num_coordinates=10**12))),
        "population": Row("statement-inconsistent", signed(edit(STATEMENT, population=10**12))),
    },
    "foreign text": {
        "escape sequences in the task": Row("statement-inconsistent", signed(edit(STATEMENT, task="a\x1b[2K"))),
        "marks that reorder": Row("statement-inconsistent", signed(edit(STATEMENT, tuning_disclosure="a\u202eb"))),
        "a label of a megabyte": Row("statement-inconsistent", signed(edit(STATEMENT, labels=["a" * 10**5, "b"]))),
    },
    "what the server computes": {
        "labels of others": Row("statement-terms", signed(edit(STATEMENT, labels=["bad", "good"]))),
        "training settings of others": Row("statement-terms", signed(edit(STATEMENT, training={}))),
        "another accountant's figure": Row(
            "statement-inconsistent", signed(edit(STATEMENT, cross_check=witnesses(epsilon_prv=0.5)))
        ),
        "the sampler's part of delta": Row("statement-inconsistent", signed(edit(STATEMENT, sampler_delta=0.0))),
    },
    "pickle": {
        "by name": Row("pickle", {**SHOP, "adapter_model.bin": pickle.dumps([0.5] * 9)}),
        "in a safetensors file": Row("header-too-large", signed(holding(ADAPTER, pickle.dumps([0.5] * 9)))),
    },
    "path": {
        "of a file": Row("path", {**SHOP, "../../spool/parties/shop": b"{}"}),
        "absolute": Row("path", {**SHOP, "/etc/passwd.json": b"{}"}),
        "of a party": Row("unknown-party", SHOP, party="../cinema"),
    },
    "second release": {
        "other content": Row("second-release", signed_files(told=statement() | {"task": "other"}), after_first=True),
        "another ledger": Row("second-release", signed_files(ledger_head="cd" * 32), after_first=True),
        "changed on the way": Row("manifest", {**SHOP, README: SHOP[README] + b" "}, after_first=True),
    },
    "clocks": {
        "a time that the sender states": Row("manifest", signed(time="2026-02-01T00:00Z")),
        "revoked by the server's clock": Row(
            "revoked", SHOP, server={"keys": KeyList(KEYS.keys, {KEY.public.id: NOW})}
        ),
        "late by the server's clock": Row("late", SHOP, server={"deadline": NOW - HOUR, "late": "refuse"}),
        "a second one, late": Row(
            "late",
            signed_files(ledger_head="cd" * 32),
            after_first=True,
            server={"deadline": NOW - HOUR, "late": "refuse"},
        ),
    },
}
ROWS = {f"{entry}: {case}": row for entry, rows in MATRIX.items() for case, row in rows.items()}


def open_reception(folder: Path, changes: Mapping[str, Any]) -> Reception:
    told = statement()
    terms = PartyTerms(
        head=release().heads["shop"], mechanism={name: told[name] for name in AGREED} | {"private": True}, epsilon=1.0
    )
    release_spec = ReleaseSpec(
        parties={"shop": terms, "cinema": terms},
        base_sha256="c" * 64,
        adapter_config=ADAPTER_CONFIG,
        shapes={A: (2, 4), B: (8, 2)},
        shared_a={A: release().adapter[A]},
        max_bytes=MAX_BYTES,
    )
    settings: dict[str, Any] = {"federation": FEDERATION, "release_spec": release_spec, "keys": KEYS, "key": SERVER_KEY}
    places = {"spool": Spool(folder / "spool"), "receipts": Receipts(folder / "receipts")}
    return Reception(**settings | places | dict(changes))


def make_site(folder: Path) -> SimulatedSite:
    """Return the shop's own place: charged, released, its good release in the outbox."""
    text = '[base]\nmodel = "minilm-l6"\n[[party]]\nname = "shop"\ntask = "product"\nepsilon = 1\n'
    site = SimulatedSite(
        plan=party_plan(parse_federation(text, "matrix"), "shop"),
        folder=folder,
        num_threads=1,
        federation=FEDERATION,
        key_file=folder / "unused.pem",
        server_keys=(SERVER_KEY.public,),
    )
    folder.mkdir()
    ledger = Ledger(folder / "ledger.jsonl").create()
    reserved = ledger.reserve(dataset="reviews", binding="b", charge={}, reservation=reservation_id(folder))
    put(folder, release(), HEAD, Signer(FEDERATION, KEY))
    ledger.released(reserved, release_hash(SHOP))
    return site


def deliver(
    files: Mapping[str, bytes], site: SimulatedSite, reception: Reception, *, party: str = "shop", at: datetime
) -> str:
    """Send files in a party's name and the answer back to the site; return why they were refused, or "accepted"."""
    try:
        verdict, outcome = Verdict(receipt=reception.receive(party, files, at).receipt), "accepted"
    except ReleaseRefused as refusal:
        verdict, outcome = Verdict(code=refusal.code, reason=refusal.problem), refusal.reason
    assert settle(site, verdict) == (outcome == "accepted")
    return outcome


def merged(spool: Spool) -> Files:
    adapters = [adapter_from_files(files, party) for party, files in spool.releases().items()]
    return to_files(as_release(merge(adapters, spec_of("average", seed=7)), adapters))


def contents(folder: Path) -> Files:
    """Return every file below a folder but the party's log."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "party.log"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def ledger_of(site: SimulatedSite) -> list[str]:
    return [json.loads(line)["kind"] for line in (site.folder / "ledger.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", ROWS)
def test_what_is_wrong_is_refused_for_its_reason_and_nothing_else_happens(name: str, tmp_path: Path) -> None:
    row, server, site = ROWS[name], tmp_path / "server", make_site(tmp_path / "shop")
    reception = open_reception(server, row.server)
    early = NOW - 2 * HOUR
    reception.receive("cinema", CINEMA, early)
    if row.after_first:
        assert deliver(SHOP, site, reception, at=early) == "accepted"
    kept, model, own = contents(server), merged(reception.spool), contents(site.folder)

    assert deliver(row.files, site, reception, party=row.party, at=NOW) == row.reason

    assert ledger_of(site) == ["reserve", "released", *(["receipt"] if row.after_first else [])]
    assert (site.folder / RECEIPT).exists() == row.after_first
    assert contents(site.folder) == own
    assert f"[{row.reason}]" in (site.folder / "party.log").read_text()
    assert contents(server) == kept
    assert merged(reception.spool) == model

    resent = deliver(outbox_files(site.folder, Signer(FEDERATION, KEY)), site, reception, at=NOW)
    if row.files is SHOP and row.party == "shop":  # what was refused is the good release itself, for its time
        assert (resent, ledger_of(site)) == (row.reason, ["reserve", "released"])
    else:
        assert (resent, ledger_of(site)) == ("accepted", ["reserve", "released", "receipt"])
        assert merged(reception.spool) != model or row.after_first


@pytest.mark.parametrize("skew", [timedelta(days=-400), timedelta(days=400)])
def test_a_clock_that_is_wrong_refuses_nothing_and_changes_no_receipt(skew: timedelta, tmp_path: Path) -> None:
    reception = open_reception(tmp_path / "server", {})
    first = reception.receive("shop", SHOP, NOW + skew)
    assert reception.receive("shop", SHOP, NOW) == first


def test_a_release_far_above_the_others_is_warned_of_or_refused(tmp_path: Path) -> None:
    norms = {"a": 5.0, "b": 6.0, "c": 7.0}
    for loud, expected in (("warn", "accepted"), ("refuse", "norm")):
        reception = open_reception(tmp_path / loud, {"loud": loud, "norms": dict(norms)})
        try:
            outcome, words = "accepted", reception.receive("shop", SHOP, NOW).warning
        except ReleaseRefused as refusal:
            outcome, words = refusal.reason, refusal.problem
        assert outcome == expected
        assert words.startswith("shop: weight change of norm ")
        assert "up to 18;" in words
    usual = open_reception(tmp_path / "usual", {"norms": dict.fromkeys("abc", 100.0)})
    assert usual.receive("shop", SHOP, NOW).warning == ""
