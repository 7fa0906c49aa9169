"""How many releases one intake takes per second, in how much memory, and whether it loses any.

    python benchmarks/intake.py [--quick] [--format json]

200 parties with keys of their own send releases of the demo's size (r = 8 on the last two layers of minilm-l6) to one
server: sizes, signature, hashes, every tensor, the head and the statement are checked, the files and the receipt
fsynced. Releases are made in another process, lie on disk and are read one at a time. `releases_per_second` counts them
one after the other, wall time; `processor_seconds_per_release` is what a machine that does other things as well can
tell. A statement costs most, since ε and its witnesses are computed anew, once per mechanism: 40 of them in the full
run, one with `--quick`, which shows what everything else costs. `lost` counts receipts whose release is not in the
spool, byte for byte, when it is opened anew, and resends that get another receipt. `peak_rss_mib` is of the server's
process, base model and libraries included, `growth_mib` what 200 releases add to it.
"""

import argparse
import json
import multiprocessing
import platform
import resource
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

from dpmerge.common.config.federation import PartyPlan, parse_federation, party_plan
from dpmerge.common.encoder.base_model import load_base
from dpmerge.common.public.terms import label_descriptions, noise_origin, public_settings, task_name
from dpmerge.common.release.format import Release, release_files, to_files, write_files
from dpmerge.common.release.key_list import KeyList
from dpmerge.common.release.receipt import parse_receipt
from dpmerge.common.release.signing import SigningKey
from dpmerge.server.intake.receipts import Receipts
from dpmerge.server.intake.reception import Reception
from dpmerge.server.intake.release_spec import release_spec_of
from dpmerge.server.intake.spool import Spool
from dpmerge.server.intake.validation import ReleaseSpec

NUM_RELEASES = 200
FEDERATION = "benchmark-5f0c"
SHARED = '[base]\nmodel = "minilm-l6"\n[lora]\nlayers = "last:2"\nrank = 8\n[merge]\nmethod = "average"\n'


def federation(num_mechanisms: int) -> tuple[list[PartyPlan], ReleaseSpec]:
    """Return the parties' plans, which state so many different epsilons, and what the server expects of them."""
    parties = [
        f'[[party]]\nname = "p{i:03}"\ntask = "product"\nepsilon = {1 + 7 * (i % num_mechanisms) / num_mechanisms}\n'
        for i in range(NUM_RELEASES)
    ]
    parsed = parse_federation(SHARED + "".join(parties), "benchmark.toml")
    plans = [party_plan(parsed, party.name) for party in parsed.parties]
    return plans, release_spec_of(load_base("minilm-l6"), plans)


def make_release(plan: PartyPlan, release_spec: ReleaseSpec, key: SigningKey) -> dict[str, bytes]:
    """Return a signed release that says what was agreed; its weights are random, which intake cannot tell."""
    from dpmerge.client.party.calibration import make_mechanism  # here: a server imports nothing of a client
    from dpmerge.client.party.signed_release import sign_release
    from dpmerge.common.privacy.accounting import cross_check
    from dpmerge.common.statement.statement import build_statement

    generator = torch.Generator().manual_seed(int(plan.party[1:]))
    adapter = {
        name: release_spec.shared_a.get(name, torch.randn(shape, generator=generator) * 1e-3)
        for name, shape in release_spec.shapes.items()
    }
    num_coordinates = sum(adapter[name].numel() for name in adapter.keys() - release_spec.shared_a.keys())
    mechanism = make_mechanism(plan.privacy, plan.training, num_coordinates)
    told = build_statement(
        mechanism,
        cross_check(mechanism),
        party=plan.party,
        task=task_name(plan.party, plan.source),
        labels=tuple(label_descriptions(plan.source)),
        base_sha256=release_spec.base_sha256,
        tuning_disclosure=plan.privacy.tuning,
        training=public_settings(plan),
        noise_seed=noise_origin(plan.privacy),
        subspace=None,
    )
    heads = {plan.party: release_spec.parties[plan.party].head}
    release = Release(plan.party, adapter, dict(release_spec.adapter_config), heads, told)
    return sign_release(to_files(release), federation=FEDERATION, ledger_head="ab" * 32, key=key)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    arguments = parser.parse_args()
    num_mechanisms = 1 if arguments.quick else 40
    with tempfile.TemporaryDirectory() as folder:
        parties = multiprocessing.get_context("spawn").Process(target=send, args=(Path(folder, "sent"), num_mechanisms))
        parties.start()  # what making releases takes and remembers is not the server's
        parties.join()
        sent = {place.name: place for place in sorted(Path(folder, "sent").iterdir())}
        size = sum(map(len, release_files(sent["p000"]).values()))
        print(f"{len(sent)} releases of {size} bytes", file=sys.stderr)
        _, release_spec = federation(num_mechanisms)
        figures = measure(Path(folder), sent, release_spec, KeyList({party: (key_of(party).public,) for party in sent}))
    environment = {"python": platform.python_version(), "torch": version("torch"), "machine": platform.machine()}
    if arguments.format == "json":
        print(json.dumps({"benchmark": "intake", "figures": figures, "environment": environment}))
    else:
        print("\n".join(f"{name:24} {value:.4g}" for name, value in figures.items()))


def send(folder: Path, num_mechanisms: int) -> None:
    """Write every party's release into a folder of its own."""
    torch.set_num_threads(1)
    plans, release_spec = federation(num_mechanisms)
    for plan in plans:
        write_files(folder / plan.party, make_release(plan, release_spec, key_of(plan.party)))


def key_of(party: str) -> SigningKey:
    """Return a key that both processes know."""
    return SigningKey(bytes([*int(party[1:]).to_bytes(2, "big"), *bytes(30)]))


def measure(folder: Path, sent: dict[str, Path], release_spec: ReleaseSpec, keys: KeyList) -> dict[str, float]:
    """Receive every release once, timed, and again from a second opening of the same folders, compared."""

    def opened() -> Reception:
        spool, receipts = Spool(folder / "spool"), Receipts(folder / "receipts")
        server = SigningKey(bytes([255]) * 32)
        return Reception(
            federation=FEDERATION, release_spec=release_spec, keys=keys, key=server, spool=spool, receipts=receipts
        )

    reception, before = opened(), peak_rss_mib()
    start, work = time.monotonic(), time.process_time()
    receipts = {
        party: reception.receive(party, release_files(place), datetime.now(UTC)).receipt
        for party, place in sent.items()
    }
    seconds, work, after = time.monotonic() - start, time.process_time() - work, peak_rss_mib()
    again = opened()
    names = again.spool.hashes()
    lost = sum(
        again.spool.release(party) != release_files(place)
        or names[party] != parse_receipt(receipts[party], party)[0].spool_sha256
        or again.receipts.find(party) != receipts[party]
        for party, place in sent.items()
    )
    resent = [party for party in list(sent)[:10]]
    lost += sum(
        again.receive(party, release_files(sent[party]), datetime.now(UTC)).receipt != receipts[party]
        for party in resent
    )
    return {
        "releases_per_second": len(sent) / seconds,
        "processor_seconds_per_release": work / len(sent),
        "peak_rss_mib": after,
        "growth_mib": after - before,
        "lost": lost,
    }


def peak_rss_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
