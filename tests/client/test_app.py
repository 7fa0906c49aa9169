"""What crosses the boundary when a party fails: a code and a sentence about the configuration, never a record."""

from dataclasses import replace

import pytest

from dpmerge.client import app
from dpmerge.client.app import answer
from dpmerge.client.party import party
from dpmerge.client.party.preparation import append_log
from dpmerge.common.config.federation import parse_federation, party_plan
from dpmerge.common.encoder.base_model import load_base
from dpmerge.common.encoder.split_encoder import SplitEncoder
from dpmerge.common.errors import CODES, DpmergeError
from dpmerge.common.public.terms import terms_hash
from dpmerge.common.release.wire import Terms
from dpmerge.simulations.flower import SimulatedSite
from tests.signed_releases import FEDERATION, KEY, SERVER_KEY

SECRET = "I am John Smith"


@pytest.fixture(scope="module")
def terms():
    return load_base("minilm-l3").sha256


def asked(where, base_sha256):
    return Terms(terms_hash(where.plan, base_sha256), where.federation)


def site(tmp_path, data):
    text = f"""
    [base]
    model = "minilm-l3"
    max_length = 16
    [training]
    expected_batch_size = 2
    [[party]]
    name = "shop"
    data = "{data}"
    text = "body"
    label = "stars"
    labels = {{ "1" = "bad", "5" = "good" }}
    population = 4
    epsilon = 1.0
    """
    key_file = tmp_path / "shop.pem"
    key_file.touch(mode=0o600)
    key_file.write_bytes(KEY.pem())
    return SimulatedSite(
        plan=party_plan(parse_federation(text, "t.toml"), "shop"),
        folder=tmp_path / "shop",
        num_threads=1,
        federation=FEDERATION,
        key_file=key_file,
        server_keys=(SERVER_KEY.public,),
    )


def test_a_file_without_header_does_not_send_its_first_record(tmp_path, terms):
    (tmp_path / "d.csv").write_text(f"{SECRET},1\nanother,5\n")
    where = site(tmp_path, tmp_path / "d.csv")
    outcome = answer(where, asked(where, terms))
    assert (outcome.code, outcome.reason) == (app.FAILED, app.FAILED_IN_WORDS)
    assert SECRET in (where.folder / "party.log").read_text()
    assert (where.folder / "party.log").stat().st_mode & 0o077 == 0


def test_an_unforeseen_failure_sends_a_fixed_sentence(tmp_path, terms, monkeypatch):
    (tmp_path / "d.csv").write_text("body,stars\nx,1\n")
    where = site(tmp_path, tmp_path / "d.csv")

    def fail(*_args, **_kwargs):
        raise KeyError(SECRET)

    monkeypatch.setattr(app, "run_party", fail)
    outcome = answer(where, asked(where, terms))
    assert (outcome.code, outcome.files) == ("DPM-599", {})
    assert SECRET not in outcome.reason


@pytest.mark.parametrize("code", sorted(CODES))
def test_only_refusals_about_the_configuration_are_sent_in_words(tmp_path, terms, monkeypatch, code):
    (tmp_path / "d.csv").write_text("body,stars\nx,1\n")
    where = site(tmp_path, tmp_path / "d.csv")

    def refuse(*_args, **_kwargs):
        raise DpmergeError(code, SECRET, "do something")

    monkeypatch.setattr(app, "run_party", refuse)
    outcome = answer(where, asked(where, terms))
    assert outcome.code == code
    assert (SECRET in outcome.reason) == (code in app.PUBLIC_CODES)
    assert {"DPM-203", "DPM-302", "DPM-502", "DPM-503", "DPM-504", "DPM-599"}.isdisjoint(app.PUBLIC_CODES)


class Panic(BaseException):
    """Stands for pyo3's, which a tokenizer may raise."""


@pytest.mark.parametrize("code", sorted(CODES))
def test_after_the_first_record_every_refusal_is_one_reply(tmp_path, terms, monkeypatch, code):
    refusal = DpmergeError(code, SECRET, "do something")
    assert failed_after_reading(tmp_path, terms, monkeypatch, refusal) == (app.FAILED, app.FAILED_IN_WORDS, {})
    assert (tmp_path / "shop" / "failure.txt").read_text() == str(refusal)
    assert (tmp_path / "shop" / "failure.txt").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "error", [MemoryError(), OSError(28, SECRET), UnicodeError(SECRET), RecursionError(), Panic(SECRET)]
)
def test_after_the_first_record_every_failure_is_one_reply(tmp_path, terms, monkeypatch, error):
    assert failed_after_reading(tmp_path, terms, monkeypatch, error) == (app.FAILED, app.FAILED_IN_WORDS, {})


def test_a_log_that_cannot_be_written_changes_no_reply(tmp_path, terms, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(app, "append_log", full)
    monkeypatch.setattr(app, "replace_file", full)
    assert failed_after_reading(tmp_path, terms, monkeypatch, KeyError(SECRET)) == (app.FAILED, app.FAILED_IN_WORDS, {})


def failed_after_reading(tmp_path, base_sha256, monkeypatch, error):
    (tmp_path / "d.csv").write_text("body,stars\nx,1\n")
    where = site(tmp_path, tmp_path / "d.csv")

    def fail(*_args, before_records, **_kwargs):
        before_records()
        raise error

    monkeypatch.setattr(app, "run_party", fail)
    outcome = answer(where, asked(where, base_sha256))
    return outcome.code, outcome.reason, outcome.files


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("d.csv", b"body,stars,stars\nx,1,1\n"),
        ("d.csv", b"stars\n1\n"),
        ("d.parquet", b"PAR1"),
        ("d.json", b"[" * 10**6),
        ("d.jsonl", b""),
    ],
)
def test_nothing_is_read_before_it_is_said_so(tmp_path, terms, monkeypatch, name, content):
    """The party's file is opened after the public part only, so whatever is in it has one reply, or a release."""
    (tmp_path / name).write_bytes(content)
    where = site(tmp_path, tmp_path / name)
    opened = []
    read, begin = party.read_training, []

    def noted(plan):
        opened.append(bool(begin))
        return read(plan)

    run = app.run_party

    def noting(*args, before_records, **kwargs):
        return run(*args, before_records=lambda: (begin.append(True), before_records()), **kwargs)

    monkeypatch.setattr(party, "read_training", noted)
    monkeypatch.setattr(app, "run_party", noting)
    outcome = answer(where, asked(where, terms))
    assert opened == [True]
    assert (outcome.code, outcome.reason) in {("", ""), (app.FAILED, app.FAILED_IN_WORDS)}


@pytest.mark.parametrize("data", ["missing.csv", "d.xlsx", "d.csv::train"])
def test_a_path_that_is_no_data_is_refused_before_any_record(tmp_path, terms, monkeypatch, data):
    (tmp_path / "d.csv").write_text("body,stars\nx,1\n")
    (tmp_path / "d.xlsx").write_text("x")
    monkeypatch.setattr(party, "read_training", lambda _plan: pytest.fail("records were read"))
    where = site(tmp_path, tmp_path / data)
    outcome = answer(where, asked(where, terms))
    assert outcome.code == "DPM-203"
    assert str(tmp_path) not in outcome.reason


@pytest.mark.parametrize("other", [{"sha256": "0" * 64}, {"federation": "another-1f"}])
def test_a_server_with_other_terms_gets_no_training(tmp_path, terms, other):
    (tmp_path / "d.csv").write_text("body,stars\nx,1\n")
    where = site(tmp_path, tmp_path / "d.csv")
    assert answer(where, replace(asked(where, terms), **other)).code == "DPM-204"
    assert not (where.folder / "ledger.jsonl").exists()


def test_memory_that_a_long_record_takes_is_asked_for_before_any_record(tmp_path, terms, monkeypatch):
    (tmp_path / "d.csv").write_text("body,stars\n" + "a long text " * 9 + ",1\n")
    where = site(tmp_path, tmp_path / "d.csv")
    own = SplitEncoder.trunk

    def trunk(self, ids, mask):
        if ids.numel() > 16 * 40:  # a machine with too little for 48 of the longest
            raise RuntimeError("not enough memory")
        return own(self, ids, mask)

    monkeypatch.setattr(SplitEncoder, "trunk", trunk)
    outcome = answer(where, asked(where, terms))
    assert (outcome.code, outcome.files) == ("DPM-204", {})
    assert "stops (RuntimeError) at 16 tokens" in outcome.reason


def test_a_log_is_not_written_through_a_link(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "party.log").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="symbolic link"):
        append_log(tmp_path, "a line\n")
    assert (tmp_path / "mine").read_text() == "mine"
