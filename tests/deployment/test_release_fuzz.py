"""A hundred thousand broken releases: each is refused with a reason or is a release; no crash, no growing memory."""

import json
import random
import resource
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpmerge.common.release.format import README, SIGNATURE, release_from_files, to_files
from dpmerge.common.untrusted.parsing import REASONS, ReleaseRefused
from tests.signed_releases import signed_files

NUM_INPUTS = 100_000
MAX_GROWTH_MIB = 64
TOKENS = (
    b"NaN",
    b"1e999",
    b"-0",
    b"9" * 400,
    b"null",
    b'"\\ud800"',
    b"[" * 40,
    b"{}",
    b"\x00",
    b"\xff\xfe",
    b"F16",
    b"BOOL",
)


def judge(files: dict[str, bytes]) -> str:
    """Return the reason of a refusal, or "accepted" for what is a release, and then becomes files again."""
    try:
        release = release_from_files(files, "shop")
    except ReleaseRefused as refusal:
        return refusal.reason
    to_files(release)
    return "accepted"


def broken(files: dict[str, bytes], random: random.Random) -> dict[str, bytes]:
    name = random.choice(sorted(files))
    data = bytearray(files[name])
    for _ in range(random.choice((1, 1, 1, 2, 8))):
        place, end = sorted(random.randrange(len(data) + 1) for _ in range(2))
        match random.randrange(9):
            case 0 if place < len(data):
                data[place] ^= 1 << random.randrange(8)
            case 1:
                del data[place:end]
            case 2:
                data[place:place] = random.randbytes(random.randrange(1, 40))
            case 3:
                data[place:place] = data[place : min(end, place + 4096)]
            case 4:
                data[place : place + random.randrange(4)] = random.choice(TOKENS)
            case 5:
                data[:8] = struct.pack("<Q", random.choice((0, 1, len(data), 1 << 20, 1 << 40, (1 << 64) - 1)))
            case 6:
                digit = next((i for i in range(place, len(data)) if 48 <= data[i] <= 57), None)
                if digit is not None:
                    data[digit : digit + 1] = random.choice(TOKENS[:6])
            case 7:
                data[:] = files[random.choice(sorted(files))]
            case _:
                return {key: value for key, value in files.items() if key != name} | {
                    random.choice(("../" + name, name + ".pt", name.upper(), "." + name, "")): bytes(data)
                }
    return files | {name: bytes(data)}


@pytest.mark.slow
def test_mutated_releases_are_refused_or_are_releases():
    files = {name: data for name, data in signed_files().items() if name not in (README, SIGNATURE)}
    source, seen = random.Random(1), Counter()
    for _ in range(1000):  # what the parsers set up once is not growth
        judge(broken(files, source))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(NUM_INPUTS):
        seen[judge(broken(files, source))] += 1
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{NUM_INPUTS} inputs, {growth:.1f} MiB more, {dict(seen.most_common())}")
    assert seen.keys() <= REASONS.keys() | {"accepted"}
    assert len(seen) >= 12, "the mutations reach too few of the checks"
    assert seen["accepted"] < NUM_INPUTS / 2
    assert growth <= MAX_GROWTH_MIB


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(sorted(signed_files())), data=st.binary(max_size=300))
def test_bytes_of_any_kind_in_place_of_a_file_are_refused_with_a_reason(name, data):
    assert judge(signed_files() | {name: data}) in REASONS.keys() | (
        {"accepted"} if name in (README, SIGNATURE) else set()
    )


@pytest.mark.slow
def test_production_accepts_nothing_but_what_was_signed():
    script = Path(__file__).parents[2] / "benchmarks" / "hostile.py"
    command = [sys.executable, str(script), "--quick", "--mutations", "10000", "--format", "json"]
    figures = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)["figures"]
    assert (figures["unexpected_acceptances"], figures["crashes"]) == (0, 0)
    assert figures["reasons_reached"] >= 15
    assert figures["growth_mib"] <= MAX_GROWTH_MIB
    assert figures["statement_rss_mib_max"] <= 1024
