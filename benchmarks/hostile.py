"""What strangers' bytes do to intake, `verify` and `merge`: mutated releases, and statements made to cost.

    python benchmarks/hostile.py [--quick] [--format json] [--mutations N]

A good release of the demo's form (one that `release_spec_of` accepts, labels and training settings included) is broken
at random, its manifest signed again in nine of ten cases, as its party could, and received by a real reception. What
is accepted may have other weights, another card, and other words where a party chooses them (`FREE`); whatever else
differs, in content or in form, is an unexpected acceptance. Whatever raises other than a refusal with a reason is a
crash. Then hostile statements go through `verify` and `merge`, each in a
process of its own, whose time and memory are measured.
"""

import argparse
import hashlib
import json
import math
import platform
import random
import resource
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from power_cuts import all_faults

from dpmerge.client.party.calibration import make_mechanism
from dpmerge.client.party.signed_release import sign_release
from dpmerge.common.config.federation import PartyPlan, parse_federation, party_plan
from dpmerge.common.encoder.base_model import load_base
from dpmerge.common.privacy.accounting import cross_check
from dpmerge.common.public.terms import label_descriptions, noise_origin, public_settings, task_name
from dpmerge.common.release.format import CONFIG, README, SIGNATURE, STATEMENT, Release, release_from_files, to_files
from dpmerge.common.release.key_list import KeyList
from dpmerge.common.release.manifest import KIND
from dpmerge.common.release.signing import SigningKey, seal
from dpmerge.common.statement.statement import build_statement
from dpmerge.common.untrusted.kinds import same
from dpmerge.common.untrusted.parsing import ReleaseRefused
from dpmerge.server.intake.receipts import Receipts
from dpmerge.server.intake.reception import Reception
from dpmerge.server.intake.release_spec import release_spec_of
from dpmerge.server.intake.spool import Spool
from dpmerge.server.intake.validation import ReleaseSpec, validate

FEDERATION, HEAD = "hostile-5f0c", "ab" * 32
TEXT = """
[base]
model = "minilm-l3"
[lora]
layers = "last:1"
rank = 1
targets = ["query"]
[merge]
method = "average"
[[party]]
name = "shop"
task = "product"
epsilon = 2.0
"""
KEY, SERVER_KEY = SigningKey(bytes([1]) * 32), SigningKey(bytes([2]) * 32)
TOKENS = (
    b"NaN",
    b"1e999",
    b"-0",
    b"9" * 400,
    b"null",
    b"true",
    b"1.0",
    b'"\\ud800"',
    b"[" * 40,
    b"{}",
    b"\x00",
    b"\xff\xfe",
    b"F16",
    b"BOOL",
)
KINDS: tuple[Any, ...] = (True, False, 0, 1, 1.0, 2.0, -1, "", "1", None, [], {}, 1e300, 10**12, "\x1b[2J", "=1+1")
Files = dict[str, bytes]
PEFT_DEFAULTS = LoraConfig().to_dict()


def production() -> tuple[Files, ReleaseSpec]:
    """Return a release as a party of the demo's form writes it, and what its server expects."""
    plan: PartyPlan = party_plan(parse_federation(TEXT, "hostile.toml"), "shop")
    release_spec = release_spec_of(load_base(plan.base.model), [plan])
    generator = torch.Generator().manual_seed(0)
    adapter = {
        name: release_spec.shared_a.get(name, torch.randn(shape, generator=generator) * 1e-3)
        for name, shape in release_spec.shapes.items()
    }
    num_coordinates = sum(adapter[name].numel() for name in adapter.keys() - release_spec.shared_a.keys())
    mechanism = make_mechanism(plan.privacy, plan.training, num_coordinates)
    statement = build_statement(
        mechanism,
        cross_check(mechanism),
        party="shop",
        task=task_name(plan.party, plan.source),
        labels=tuple(label_descriptions(plan.source)),
        base_sha256=release_spec.base_sha256,
        tuning_disclosure=plan.privacy.tuning,
        training=public_settings(plan),
        noise_seed=noise_origin(plan.privacy),
    )
    heads = {"shop": release_spec.parties["shop"].head}
    release = Release("shop", adapter, dict(release_spec.adapter_config), heads, statement)
    return sign_release(to_files(release), federation=FEDERATION, ledger_head=HEAD, key=KEY), release_spec


def sign_again(files: Files) -> Files:
    """Return the files signed as whatever they are now; the manifest says what it must to reach the contents."""
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in files.items() if name != SIGNATURE}
    sealed = json.loads(GOOD[SIGNATURE])["manifest"]
    body = sealed | {"files": dict(sorted(hashes.items())), "statement_sha256": hashes.get(STATEMENT, "0" * 64)}
    return files | {SIGNATURE: seal(KEY, KIND, body)}


def broken(source: random.Random) -> Files:
    """Return the good release with one file damaged in its bytes, or with one JSON value of another kind."""
    if source.random() < 0.4:
        return revalued(source)
    name = source.choice(sorted(GOOD))
    data = bytearray(GOOD[name])
    for _ in range(source.choice((1, 1, 1, 2, 8))):
        place, end = sorted(source.randrange(len(data) + 1) for _ in range(2))
        match source.randrange(8):
            case 0 if place < len(data):
                data[place] ^= 1 << source.randrange(8)
            case 1:
                del data[place:end]
            case 2:
                data[place:place] = source.randbytes(source.randrange(1, 40))
            case 3:
                data[place:place] = data[place : min(end, place + 4096)]
            case 4:
                data[place : place + source.randrange(4)] = source.choice(TOKENS)
            case 5:
                data[:8] = struct.pack("<Q", source.choice((0, 1, len(data), 1 << 20, 1 << 40, (1 << 64) - 1)))
            case 6:
                data[:] = GOOD[source.choice(sorted(GOOD))]
            case _:
                odd = source.choice(("../" + name, name + ".pt", name.upper(), "." + name, ""))
                return {key: value for key, value in GOOD.items() if key != name} | {odd: bytes(data)}
    return GOOD | {name: bytes(data)}


def revalued(source: random.Random) -> Files:
    """Return the good release with one value of its statement, settings or signature replaced, kept or moved."""
    name = source.choice((STATEMENT, STATEMENT, CONFIG, SIGNATURE))
    value = json.loads(GOOD[name])
    table, key = source.choice(list(places(value)))
    if source.random() < 0.1:
        table[f"{key}_"] = table.pop(key)
    elif source.random() < 0.3 and isinstance(table[key], int | float):
        table[key] = source.choice((float(table[key]), bool(table[key]), str(table[key]), [table[key]]))
    else:
        table[key] = source.choice(KINDS)
    written = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    if name == SIGNATURE:
        written = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return GOOD | {name: written.encode("utf-8", "surrogatepass")}


def places(value: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield every object and key of a JSON value."""
    for key, item in value.items():
        yield value, key
        if isinstance(item, dict):
            yield from places(item)


def mutate(num_mutations: int, release_spec: ReleaseSpec) -> dict[str, float]:
    """Try mutated releases on a reception that has accepted nothing; only the good one may be accepted."""
    source, seen, unexpected, crashes = random.Random(1), Counter[str](), 0, 0
    keys = KeyList({"shop": (KEY.public,), "server": (SERVER_KEY.public,)})
    validate("shop", GOOD, release_spec)  # what is set up once is not growth
    before = peak_rss_mib()
    for _ in range(num_mutations):
        files = broken(source)
        if source.random() < 0.9 and files.get(SIGNATURE) == GOOD[SIGNATURE]:
            files = sign_again(files)
        with tempfile.TemporaryDirectory() as folder:
            try:
                open_reception(Path(folder), release_spec, keys).receive("shop", files, datetime.now(UTC))
            except ReleaseRefused as refusal:
                seen[refusal.reason] += 1
                continue
            except Exception as error:  # any other ending is what is looked for
                print(f"crash: {error!r}", file=sys.stderr)
                crashes += 1
                continue
        seen["accepted"] += 1
        if problem := not_agreed(files):
            unexpected += 1
            print(f"accepted: {problem}", file=sys.stderr)
    print(dict(seen.most_common()), file=sys.stderr)
    return {
        "mutated_releases": num_mutations,
        "unexpected_acceptances": unexpected,
        "crashes": crashes,
        "reasons_reached": len(seen),
        "growth_mib": peak_rss_mib() - before,
    }


def open_reception(folder: Path, release_spec: ReleaseSpec, keys: KeyList) -> Reception:
    spool, receipts = Spool(folder / "spool"), Receipts(folder / "receipts")
    return Reception(
        federation=FEDERATION, release_spec=release_spec, keys=keys, key=SERVER_KEY, spool=spool, receipts=receipts
    )


FREE = frozenset({"tuning_disclosure", "accountant", "peft_version"})
"""What a party says in its own words: how it chose its settings, and the versions that it ran."""


def not_agreed(files: Files) -> str:
    """Return how an accepted release differs from the good one where it must not; nothing if it does not."""
    release = release_from_files(files, "shop")
    if any(files[name] != data for name, data in to_files(release).items()):
        return "another form"
    good = release_from_files(GOOD, "shop")
    for name in (CONFIG, STATEMENT):
        told, wanted = json.loads(files[name]), json.loads(GOOD[name])
        if name == CONFIG:  # PEFT, which opens it, takes its defaults for settings that are absent
            told = {key: value for key, value in PEFT_DEFAULTS.items() if key in wanted} | told
        if differing := [key for key in {**told, **wanted} if key not in FREE and not near(told, wanted, key)]:
            return f"{name}: {differing[0]} = {told.get(differing[0])!r}"
    head, expected = release.heads["shop"], good.heads["shop"]
    if not torch.allclose(head.weight, expected.weight, rtol=1e-2, atol=1e-2) or head.labels != expected.labels:
        return "another head"
    return "" if release.adapter.keys() == good.adapter.keys() else "other tensors"


def near(told: Any, wanted: Any, key: str) -> bool:
    """Whether both have the key, with values of one kind that are equal, or floats equal to a thousandth."""
    if key not in told or key not in wanted:
        return False
    one, other = told[key], wanted[key]
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(near(one, other, name) for name in one)
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=2e-3)
    return same(one, other)


STATEMENTS: dict[str, dict[str, Any]] = {
    "1e12 steps": {"num_steps": 10**12},
    "as many steps as are looked at": {"num_steps": 10**5},
    "… with little noise": {"num_steps": 10**5, "noise_multiplier": 0.07},
    "… with much noise": {"num_steps": 10**5, "noise_multiplier": 100.0, "epsilon": 1.0},
    "tiny q": {"population": 10**10, "expected_batch_size": 1, "sampling_prob": 1e-10, "num_steps": 10**5},
    "whole batch": {"population": 128, "sampling_prob": 1.0, "num_steps": 10_000, "noise_multiplier": 100.0},
    "1e12 coordinates": {"num_coordinates": 10**12},
    "1e12 records": {"population": 10**12},
    "tiny delta": {"target_delta": 1e-300},
    "huge noise": {"noise_multiplier": 1e9},
    "least noise": {"noise_multiplier": 0.0625, "num_steps": 100},
    "sam, separate": {
        "sharpness": "sam",
        "ascent_sampling": "separate",
        "ascent_noise_multiplier": 1e9,
        "noise_multiplier": 0.0625,
        "num_steps": 10**5,
    },
    "1e12 directions": {"subspace": {"k": 10**12}},
}


def statements(chosen: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Send hostile statements through both commands, each in its own process; return the worst time and memory."""
    worst: tuple[float, ...] = (0.0, 0.0, 0.0)
    with tempfile.TemporaryDirectory() as scratch:
        for number, (name, changes) in enumerate(chosen.items()):
            folder = Path(scratch) / f"r{number}"
            folder.mkdir()
            told = json.loads(GOOD[STATEMENT]) | changes
            text = json.dumps(told, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
            for file, data in (GOOD | {STATEMENT: text.encode()}).items():
                if file not in (SIGNATURE, README):
                    (folder / file).write_bytes(data)
            out = str(Path(scratch) / f"m{number}")
            for arguments in (["verify", str(folder)], ["merge", str(folder), "--out", out]):
                found = run(arguments)
                print(f"{name}: {arguments[0]} {found[0]:.1f} s, {found[2]:.0f} MiB", file=sys.stderr)
                worst = tuple(map(max, worst, found))
    names = ("statement_seconds_max", "statement_processor_seconds_max", "statement_rss_mib_max")
    return {"statements": len(chosen), **dict(zip(names, worst, strict=True))}


MEASURED = """
import resource, subprocess, sys, time
start = time.monotonic()
try:
    subprocess.run(sys.argv[1:], capture_output=True, timeout=120)
finally:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(time.monotonic() - start, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)
"""


def faults(kills: Iterator[int | None]) -> dict[str, float]:
    """Cut the power, or fill the disk, at every step of an exchange (`power_cuts.py`); print what was not kept."""
    good = release_from_files({name: data for name, data in GOOD.items() if name != SIGNATURE})
    release = replace(good, statement=dict(good.statement) | {"base_sha256": "c" * 64})
    with tempfile.TemporaryDirectory() as folder:
        num_faults, not_kept = all_faults(Path(folder), release, kills)
    print("\n".join(not_kept), file=sys.stderr)
    return {"faults_injected": num_faults, "promises_broken": len(not_kept)}


def run(arguments: list[str]) -> tuple[float, float, float]:
    """Return seconds, processor seconds and peak MiB of one command; one that takes two minutes is ended."""
    command = [str(Path(sys.executable).parent / "dpmerge"), *arguments]
    done = subprocess.run([sys.executable, "-c", MEASURED, *command], capture_output=True, text=True, check=False)
    took, worked, used = map(float, done.stdout.split())
    return took, worked, used


def peak_rss_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--mutations", type=int, default=None)
    parser.add_argument("--format", choices=("text", "json"), default="text")
    arguments = parser.parse_args()
    start = time.monotonic()
    figures = mutate(arguments.mutations or (1_000 if arguments.quick else 100_000), EXPECTATION)
    few = ("1e12 steps", "1e12 coordinates", "… with much noise")
    figures |= statements({name: STATEMENTS[name] for name in few} if arguments.quick else STATEMENTS)
    figures |= faults(iter([None] if arguments.quick else [None, *range(3, 120, 12)]))
    figures["seconds"] = time.monotonic() - start
    environment = {"python": platform.python_version(), "torch": version("torch"), "machine": platform.machine()}
    if arguments.format == "json":
        print(json.dumps({"benchmark": "hostile", "figures": figures, "environment": environment}))
    else:
        print("\n".join(f"{name:24} {value:.4g}" for name, value in figures.items()))


if __name__ == "__main__":
    GOOD, EXPECTATION = production()
    main()
