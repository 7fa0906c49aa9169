"""A party under its site's policy: one ledger whatever the folder, a cap before training, a signed release on top."""

import hashlib
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from dpmerge.client.app import Site, client_app, settle
from dpmerge.client.budget.composition import Cap
from dpmerge.client.budget.ledger import Ledger
from dpmerge.client.budget.ledger_checks import check_against_release
from dpmerge.client.budget.policy import DataSet, Policy, create_ledger
from dpmerge.client.party import party as party_module
from dpmerge.client.party.outbox import Signer
from dpmerge.client.party.party import run_party
from dpmerge.client.party.signed_release import sign_release
from dpmerge.client.subspace import basis_cache
from dpmerge.common.config.federation import SubspaceSettings
from dpmerge.common.encoder.base_model import load_base
from dpmerge.common.errors import DpmergeError
from dpmerge.common.public.corpus import public_corpus
from dpmerge.common.release.format import SIGNATURE, release_from_files, release_hash
from dpmerge.common.release.manifest import manifest_hash, manifest_of, parse_signature
from dpmerge.common.release.wire import Verdict, pack_verdict
from dpmerge.common.statement.verify import Trust, check_release, verdict
from dpmerge.server.intake.receipts import make_receipt
from dpmerge.simulations.flower import sites_of
from dpmerge.simulations.keys import create_federation
from tests.signed_releases import FEDERATION, KEY, KEYS, SERVER_KEY, STRANGER

from .test_party import make_plan


def train(plan, folder, policy):
    return run_party(plan, load_base(plan.base.model), folder, policy=policy)


@pytest.fixture
def plan(product_files):
    return make_plan(product_files[0], privacy={"noise": "secure", "noise_seed": None, "epsilon": 1.0})


@pytest.fixture
def policy(product_files, tmp_path):
    dataset = DataSet(id="reviews", source=product_files[0].resolve(), cap=Cap(epsilon=1.2, delta=1e-5))
    models, keys = frozenset({load_base("minilm-l3").sha256}), (SERVER_KEY.public,)
    site = Policy(state=tmp_path / "state", datasets=(dataset,), base_models=models, server_keys=keys)
    create_ledger(site, dataset)
    return site


def test_a_second_training_beyond_the_cap_never_starts(plan, policy, tmp_path, monkeypatch):
    files = train(plan, tmp_path / "a", policy)
    ledger = Ledger(tmp_path / "state" / "ledgers" / "reviews.jsonl")
    assert [entry["kind"] for entry in ledger.entries()] == ["bound", "reserve", "released"]
    assert not (tmp_path / "a" / "ledger.jsonl").exists()
    assert train(plan, tmp_path / "a", policy) == files  # the same folder: nothing more
    before = ledger.head()
    monkeypatch.setattr(party_module, "train", lambda *_args, **_kwargs: pytest.fail("trained beyond the cap"))
    with pytest.raises(
        DpmergeError, match=r"DPM-506: data set 'reviews': requested epsilon = 1, spent 1, together 1\."
    ):
        train(plan, tmp_path / "b", policy)
    assert ledger.head() == before

    signed = sign_release(files, federation=FEDERATION, ledger_head=before, key=KEY)
    assert verdict(check_release(signed, Trust(datetime.now(UTC), key_list=KEYS))) == "WARN"  # tuning: not disclosed
    manifest = manifest_of(parse_signature(signed[SIGNATURE], "shop"), "shop")
    statement = release_from_files(signed).statement
    checks = check_against_release(ledger.lines(), manifest.ledger_head, statement, release_hash(files))
    assert verdict(checks) == "PASS"


def test_what_the_cap_leaves_no_room_for_reads_no_record(plan, policy, tmp_path, monkeypatch):
    monkeypatch.setattr(party_module, "read_training", lambda _plan: pytest.fail("records were read"))
    dearer = replace(plan, privacy=replace(plan.privacy, epsilon=1.5))
    with pytest.raises(DpmergeError, match=r"DPM-506: data set 'reviews': requested epsilon = 1\.5"):
        train(dearer, tmp_path / "a", policy)
    assert [entry["kind"] for entry in policy.ledger_of(policy.datasets[0]).entries()] == ["bound"]


def forbidden(plan, policy, what, folder):
    if what == "base model":
        return plan, replace(policy, base_models=frozenset({"0" * 64}))
    if what == "ledger":
        policy.ledger_of(policy.datasets[0]).path.unlink()
        return plan, policy
    if what == "delta":
        return replace(plan, privacy=replace(plan.privacy, delta=1e-4)), policy
    if what == "public texts":
        public = folder / "copy.csv"
        public.write_bytes(Path(plan.source.path).read_bytes())
        subspace = SubspaceSettings(k=8, public=str(public), text="body")
        return replace(plan, training=replace(plan.training, subspace=subspace)), policy
    users = replace(policy.datasets[0], cap=replace(policy.datasets[0].cap, privacy_unit="user"), user="author")
    other = replace(plan, privacy=replace(plan.privacy, unit="user"), source=replace(plan.source, user="stars"))
    return other, replace(policy, datasets=(users,))


@pytest.mark.parametrize("what", ["base model", "ledger", "delta", "public texts", "user column"])
def test_what_the_policy_forbids_reads_no_record(plan, policy, tmp_path, monkeypatch, what):
    monkeypatch.setattr(party_module, "read_training", lambda _plan: pytest.fail("records were read"))
    monkeypatch.setattr("dpmerge.common.public.corpus.read_texts", lambda *_, **__: pytest.fail("texts were read"))
    other, rules = forbidden(plan, policy, what, tmp_path)
    with pytest.raises(DpmergeError, match="DPM-504" if what == "ledger" else "DPM-507"):
        train(other, tmp_path / "a", rules)
    assert not (tmp_path / "a" / "reservation").exists()


def test_a_statement_names_listed_texts_by_their_hash_and_others_not_at_all(plan, policy, tmp_path, monkeypatch):
    monkeypatch.setattr(basis_cache, "cache_root", lambda: tmp_path / "cache")
    public = tmp_path / "public.txt"
    public.write_text("\n".join(f"public text number {number}" for number in range(12)))
    subspace = SubspaceSettings(k=8, public=str(public))
    other = replace(plan, training=replace(plan.training, subspace=subspace))
    sha256 = hashlib.sha256(public.read_bytes()).hexdigest()
    files = train(other, tmp_path / "a", replace(policy, public_texts=frozenset({sha256})))
    listed = release_from_files(files).statement["subspace"]
    unlisted = release_from_files(train(other, tmp_path / "b", None)).statement["subspace"]
    assert listed["texts_sha256"] == public_corpus(subspace).sha256
    assert (
        (unlisted["public"], unlisted["num_public"]) == (listed["public"], listed["num_public"]) == ("public.txt", 12)
    )
    differing = {key for key in listed if listed[key] != unlisted[key]}
    assert differing == {"texts_sha256", "basis_sha256"}
    assert unlisted["texts_sha256"] is unlisted["basis_sha256"] is None


def site(plan, policy, folder, server_keys=(SERVER_KEY.public,)):
    place = {"folder": folder, "key_file": folder / "shop.pem"}
    return Site(plan=plan, num_threads=1, federation=FEDERATION, server_keys=server_keys, policy=policy, **place)


def test_a_receipt_is_believed_by_a_key_that_policy_and_agreement_name(plan, policy, tmp_path):
    both = replace(policy, server_keys=(SERVER_KEY.public, KEY.public))
    agreed = (STRANGER.public, SERVER_KEY.public)
    assert site(plan, both, tmp_path, agreed).receipt_keys == (SERVER_KEY.public,)
    for keys in ((), (STRANGER.public,)):
        with pytest.raises(DpmergeError, match="DPM-507: none of the server's keys"):
            site(plan, policy, tmp_path, keys)


def test_no_site_is_deployed_without_a_policy(plan, policy, tmp_path, monkeypatch):
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    with pytest.raises(DpmergeError, match="DPM-507: a site without a policy"):
        site(plan, None, tmp_path)
    with pytest.raises(TypeError, match="policy"):
        Site(plan=plan, folder=tmp_path, num_threads=1, federation="f", key_file=tmp_path, server_keys=())
    one = site(plan, policy, tmp_path)
    assert one.rules is policy
    (simulated,) = sites_of([plan], create_federation(tmp_path / "run", [plan.party]), tmp_path, num_threads=1)
    assert simulated.rules is None
    asked = Message(pack_verdict(Verdict(code="DPM-401", reason="no")), dst_node_id=1, message_type="query")
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    with pytest.raises(TypeError, match="Expected a Site"):
        client_app(lambda _context: simulated)(asked, context)
    assert not simulated.folder.exists()
    client_app(lambda _context: one)(asked, context)
    assert "the server refused" in (one.folder / "party.log").read_text()


def test_a_receipt_of_the_agreements_key_alone_is_not_taken(plan, policy, tmp_path):
    folder = tmp_path / "a"
    files = run_party(plan, load_base(plan.base.model), folder, policy=policy, signer=Signer(FEDERATION, KEY))
    manifest = manifest_of(parse_signature(files[SIGNATURE], "shop"), "shop")
    told = {"manifest_sha256": manifest_hash(files[SIGNATURE]), "spool_sha256": "e" * 64, "time": datetime.now(UTC)}
    where = site(plan, policy, folder, (SERVER_KEY.public, STRANGER.public))
    assert not settle(where, Verdict(receipt=make_receipt(manifest, **told, key=STRANGER)))
    assert settle(where, Verdict(receipt=make_receipt(manifest, **told, key=SERVER_KEY)))
