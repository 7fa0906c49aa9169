"""One party end to end on real records and a real model, without any network."""

import csv
import json
import re
from dataclasses import replace

import pytest
import torch

from dpmerge.client.budget.composition import charged_mechanism
from dpmerge.client.budget.ledger import Ledger
from dpmerge.client.budget.ledger_checks import check_against_release
from dpmerge.client.party import party as party_module
from dpmerge.client.party import preparation
from dpmerge.client.party.party import read_training, run_party
from dpmerge.client.subspace import basis_cache
from dpmerge.client.training import train as train_module
from dpmerge.client.training.train import Classifier
from dpmerge.common.config.federation import SubspaceSettings, parse_federation, party_plan
from dpmerge.common.encoder.base_model import load_base
from dpmerge.common.errors import DpmergeError
from dpmerge.common.release.format import ADAPTER, STATEMENT, release_from_files, release_hash
from dpmerge.common.statement.statement import check_statement, mechanism_from_statement, sentence
from dpmerge.common.untrusted.parsing import ReleaseRefused
from dpmerge.server.intake.release_spec import release_spec_of
from dpmerge.server.intake.validation import validate


def make_plan(data, **changes):
    text = f"""
    [base]
    model = "minilm-l3"
    max_length = 16
    [lora]
    layers = "last:1"
    rank = 4
    [training]
    num_steps = 5
    expected_batch_size = 48
    learning_rate = 0.01
    sharpness = "sat"
    alignment = 0.05
    [privacy]
    noise = "fast"
    noise_seed = 3
    [[party]]
    name = "shop"
    data = "{data}"
    text = "body"
    label = "stars"
    labels = {{ "1" = "a bad product", "5" = "a great product" }}
    population = 240
    epsilon = 4.0
    """
    plan = party_plan(parse_federation(text, "test.toml"), "shop")
    for section, values in changes.items():
        plan = replace(plan, **{section: replace(getattr(plan, section), **values)})
    return plan


@pytest.fixture
def plan(product_files):
    return make_plan(product_files[0])


def release_of(plan, folder, **kwargs):
    return run_party(plan, load_base(plan.base.model), folder, **kwargs)


class Mixing(Classifier):
    """Every example's scores know the others'."""

    def forward(self, hidden, mask):
        scores = super().forward(hidden, mask)
        return scores + 0.01 * scores.mean(0)


def test_a_model_that_mixes_a_batch_is_refused_before_a_record_is_read(plan, tmp_path, monkeypatch):
    sound = preparation.party_model

    def mixing(base, plan):
        made = sound(base, plan)
        made.classifier.__class__ = Mixing
        return made

    monkeypatch.setattr(preparation, "party_model", mixing)
    monkeypatch.setattr(preparation, "_PASSED", set())
    with pytest.raises(DpmergeError, match=r"DPM-502.*changes with the other examples"):
        release_of(plan, tmp_path / "a", before_records=lambda: pytest.fail("records were read"))
    assert not (tmp_path / "a" / "reservation").exists()


def test_same_seed_same_bytes_and_another_seed_other_noise(plan, tmp_path):
    first, second = release_of(plan, tmp_path / "a"), release_of(plan, tmp_path / "b")
    assert first == second
    other = replace(plan, privacy=replace(plan.privacy, noise_seed=4))
    assert release_of(other, tmp_path / "c")[ADAPTER] != first[ADAPTER]


def test_parties_that_share_a_test_seed_share_no_noise(plan):
    """Equal noise would add up in a merge, where that of different parties averages out."""
    seeds = [party_module._test_seed(plan.privacy.noise_seed, name) for name in ("shop", "library", "shop")]
    assert seeds[0] == seeds[2] != seeds[1]
    assert party_module._test_seed(None, "shop") is None


def test_secure_noise_never_repeats(plan, tmp_path):
    secure = replace(plan, privacy=replace(plan.privacy, noise="secure", noise_seed=None))
    first, second = release_of(secure, tmp_path / "a"), release_of(secure, tmp_path / "b")
    assert first[ADAPTER] != second[ADAPTER]
    statement = json.loads(first[STATEMENT])
    assert (statement["noise"], statement["noise_seed"]) == ("secure", "operating system")


def test_release_states_the_mechanism_that_ran_and_stays_within_the_budget(plan, tmp_path):
    release = release_from_files(release_of(plan, tmp_path / "a"), "shop")
    mechanism = check_statement(release.statement)
    assert release.statement["epsilon"] <= 4.0
    assert (mechanism.population, mechanism.num_steps, mechanism.expected_batch_size) == (240, 5, 48)
    moved = [key for key, value in release.adapter.items() if ".lora_B." in key and value.count_nonzero()]
    assert moved
    entries = Ledger(tmp_path / "a" / "ledger.jsonl").entries()
    assert [entry["kind"] for entry in entries] == ["reserve", "released"]
    assert entries[0]["charge"]["epsilon"] == release.statement["epsilon"]


@pytest.mark.parametrize("sharpness", ["none", "sat", "sat-momentum", "sam"])
@pytest.mark.parametrize("head", ["label-text", "linear"])
def test_every_form_and_head_trains(plan, tmp_path, sharpness, head):
    changed = replace(plan, training=replace(plan.training, sharpness=sharpness, head=head, num_steps=2))
    release = release_from_files(release_of(changed, tmp_path / "a"), "shop")
    assert release.statement["sharpness"] == sharpness
    assert bool(release.heads["shop"].bias is not None and release.heads["shop"].weight.count_nonzero()) == (
        head == "linear"
    )


def test_zero_radius_is_plain_dp_sgd(plan, tmp_path):
    flat = replace(plan, training=replace(plan.training, rho=0.0))
    plain = replace(plan, training=replace(plan.training, sharpness="none"))
    assert release_of(flat, tmp_path / "a")[ADAPTER] == release_of(plain, tmp_path / "b")[ADAPTER]


def test_alignment_keeps_the_adapter_nearer_to_the_start(plan, tmp_path):
    def drift(alignment, name):
        changed = replace(
            plan, training=replace(plan.training, alignment=alignment, optimizer="sgd", learning_rate=0.5)
        )
        adapter = release_from_files(release_of(changed, tmp_path / name), "shop").adapter
        return sum(value.square().sum() for key, value in adapter.items() if ".lora_B." in key)

    assert drift(0.3, "pulled") < drift(0.0, "free")


def test_second_call_gives_the_same_bytes_without_training(plan, tmp_path, monkeypatch):
    first = release_of(plan, tmp_path / "a")
    monkeypatch.setattr(party_module, "train", lambda *_args, **_kwargs: pytest.fail("trained again"))
    assert release_of(plan, tmp_path / "a") == first
    assert len(Ledger(tmp_path / "a" / "ledger.jsonl").entries()) == 2


def test_folder_of_other_settings_is_refused_and_no_key_of_noise_is_left_in_it(plan, tmp_path):
    release_of(plan, tmp_path / "a")
    left = tmp_path / "a" / "checkpoint.safetensors"  # as by a kill between the release and its end
    left.write_bytes(b"a cipher's state")
    with pytest.raises(DpmergeError, match="DPM-302"):
        release_of(replace(plan, seed=8), tmp_path / "a")
    assert not left.exists()


class Killed(BaseException):
    """Stands for SIGKILL: no handler of ours runs on it."""


@pytest.mark.parametrize("noise", ["fast", "secure"])
def test_killed_training_goes_on_under_the_same_charge(plan, tmp_path, monkeypatch, noise):
    monkeypatch.setattr(party_module, "CHECKPOINT_EVERY_STEPS", 2)
    seed = 3 if noise == "fast" else None
    plan = replace(plan, privacy=replace(plan.privacy, noise=noise, noise_seed=seed))

    def kill_at_three(stage, num_done, _total):
        if stage == "training" and num_done == 3:
            raise Killed

    with pytest.raises(Killed):
        release_of(plan, tmp_path / "a", on_progress=kill_at_three)
    steps = []
    resumed = release_of(plan, tmp_path / "a", on_progress=lambda stage, done, _: steps.append((stage, done)))
    assert [done for stage, done in steps if stage == "training"] == [3, 4, 5]
    assert [e["kind"] for e in Ledger(tmp_path / "a" / "ledger.jsonl").entries()] == ["reserve", "released"]
    assert not (tmp_path / "a" / "checkpoint.safetensors").exists()
    if noise == "fast":
        assert resumed == release_of(plan, tmp_path / "b")  # as if it had never been killed


def test_killed_before_the_first_checkpoint_still_goes_on(plan, tmp_path):
    def kill(stage, _done, _total):
        if stage == "training":
            raise Killed

    with pytest.raises(Killed):
        release_of(plan, tmp_path / "a", on_progress=kill)
    assert release_of(plan, tmp_path / "a") == release_of(plan, tmp_path / "b")


def test_interrupted_training_refuses_other_records(plan, tmp_path, product_files):
    def kill(stage, _done, _total):
        if stage == "training":
            raise Killed

    data = tmp_path / "mine.csv"
    data.write_bytes(product_files[0].read_bytes())
    mine = replace(plan, source=replace(plan.source, path=str(data)))
    with pytest.raises(Killed):
        release_of(mine, tmp_path / "a", on_progress=kill)
    lines = data.read_text().splitlines(keepends=True)
    data.write_text("".join(lines[:-1]))
    with pytest.raises(DpmergeError, match="DPM-504"):
        release_of(mine, tmp_path / "a")
    data.write_text("".join(lines))
    (tmp_path / "a" / "checkpoint.safetensors").unlink()
    with pytest.raises(DpmergeError, match="DPM-302"):
        release_of(mine, tmp_path / "a")


def test_a_record_that_overflows_is_neutralised_in_silence(plan, tmp_path, monkeypatch):
    """Trap 7: an example with a non-finite gradient changes nothing that leaves the party."""
    from dpmerge.common.encoder.activations import Activations

    original = Activations.batches

    def poisoned(self, records, capacity):
        for batch in original(self, records, capacity):
            batch.hidden[batch.filled == 5] = float("nan")
            yield batch

    monkeypatch.setattr(Activations, "batches", poisoned)
    release = release_from_files(release_of(plan, tmp_path / "a"), "shop")
    assert all(torch.isfinite(value).all() for value in release.adapter.values())


def with_users(plan, folder, num_users=60):
    """The same records with an author each, and a plan that protects all records of an author together."""
    with open(plan.source.path, newline="") as source, (folder / "authored.csv").open("w", newline="") as target:
        rows = list(csv.reader(source))
        authors = ["author", *(f"author {row % num_users}" for row in range(len(rows) - 1))]
        csv.writer(target).writerows([*row, author] for row, author in zip(rows, authors, strict=True))
    return replace(
        plan,
        source=replace(plan.source, path=str(folder / "authored.csv"), user="author"),
        privacy=replace(plan.privacy, unit="user", population=num_users),
        training=replace(plan.training, expected_batch_size=12),
    )


def test_users_are_protected_as_a_whole(plan, tmp_path):
    protected = with_users(plan, tmp_path)
    sent = release_of(protected, tmp_path / "a")
    terms = release_spec_of(load_base(plan.base.model), [protected])
    release = validate("shop", sent, terms)
    assert (release.statement["privacy_unit"], release.statement["population"]) == ("user", 60)
    assert release.statement["epsilon"] <= 4.0
    assert "any one user" in sentence(release.statement)
    other = replace(protected, privacy=replace(protected.privacy, unit="record"))
    terms = release_spec_of(load_base(plan.base.model), [other])
    with pytest.raises(ReleaseRefused, match="privacy_unit"):
        validate("shop", sent, terms)


def test_who_wrote_what_is_part_of_what_a_reservation_is_bound_to(plan, tmp_path):
    protected = with_users(plan, tmp_path)
    release_of(protected, tmp_path / "a")
    with_users(plan, tmp_path, num_users=30)
    with pytest.raises(DpmergeError, match="DPM-302"):
        release_of(protected, tmp_path / "a")


def test_an_ascent_sample_of_its_own_is_agreed_stated_and_needs_less_noise(plan, tmp_path):
    """Each of two queries is amplified by its own subsampling; on one sample the pair is amplified once."""
    sigmas = {}
    for sampling in ("paired", "separate"):
        training = replace(plan.training, sharpness="sam", ascent_sampling=sampling, num_steps=2)
        changed = replace(plan, training=training)
        sent = release_of(changed, tmp_path / sampling)
        statement = validate("shop", sent, release_spec_of(load_base(plan.base.model), [changed])).statement
        assert statement["ascent_sampling"] == sampling
        assert 3.99 < statement["epsilon"] <= 4.0
        sigmas[sampling] = statement["noise_multiplier"]
    assert sigmas["separate"] < 0.9 * sigmas["paired"]
    paired = replace(changed, training=replace(changed.training, ascent_sampling="paired"))
    terms = release_spec_of(load_base(plan.base.model), [paired])
    with pytest.raises(ReleaseRefused, match="ascent_sampling"):
        validate("shop", sent, terms)


def test_dp_adam_knows_the_noise_that_is_added(plan, tmp_path, monkeypatch):
    made = []
    original = train_module.make_optimizer

    def recorded(*args, **kwargs):
        made.append(original(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(train_module, "make_optimizer", recorded)
    changed = replace(plan, training=replace(plan.training, optimizer="dp-adam"))
    statement = json.loads(release_of(changed, tmp_path / "a")[STATEMENT])
    assert made[0].param_groups[0]["noise_std"] == pytest.approx(statement["noise_multiplier"] * 1.0 / 48)


@pytest.mark.parametrize("sharpness", ["sat", "sam"])
def test_training_without_privacy_says_so(plan, tmp_path, sharpness):
    training = replace(plan.training, sharpness=sharpness, num_steps=2, optimizer="dp-adam")
    changed = replace(plan, privacy=replace(plan.privacy, private=False, epsilon=None), training=training)
    statement = json.loads(release_of(changed, tmp_path / "a")[STATEMENT])
    assert (statement["private"], statement["epsilon"]) == (False, None)


def test_running_the_trunk_anew_gives_the_same_release(plan, tmp_path):
    assert release_of(plan, tmp_path / "a") == release_of(plan, tmp_path / "b", cache_trunk=False)


def test_a_physical_batch_below_the_expected_one_is_said_in_the_partys_log(plan, tmp_path, monkeypatch):
    whole = release_from_files(release_of(plan, tmp_path / "a"), "shop")
    assert "physical batches" not in (tmp_path / "a" / "party.log").read_text()
    monkeypatch.setattr(preparation, "DEFAULT_MEMORY_BUDGET_BYTES", 2 * 4 * 20_000 * 7)
    parts = release_from_files(release_of(plan, tmp_path / "b"), "shop")
    log = tmp_path / "b" / "party.log"
    assert re.match(
        r"physical batches hold \d+ records where 48 are expected: more gradients of \d+ coordinates .*\n",
        log.read_text(),
    )
    assert log.stat().st_mode & 0o077 == 0
    for key, value in whole.adapter.items():
        torch.testing.assert_close(parts.adapter[key], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("content", ["body,stars\n", "body,stars\nfine,9\n", "body,stars\n\ud800,1\n"])
def test_a_party_releases_however_few_of_its_records_are_usable(plan, tmp_path, content):
    """Trap 7: whether the last usable record is there must not show, so none at all is trained on like any other."""
    data = tmp_path / "few.csv"
    data.write_bytes(content.encode("utf-8", errors="surrogatepass"))
    release = release_from_files(
        release_of(replace(plan, source=replace(plan.source, path=str(data))), tmp_path / "a"), "shop"
    )
    assert release.statement["epsilon"] <= 4.0


def test_a_changed_base_model_or_accounting_is_not_gone_on_with(plan, tmp_path, monkeypatch):
    def kill(stage, _done, _total):
        if stage == "training":
            raise Killed

    with pytest.raises(Killed):
        release_of(plan, tmp_path / "a", on_progress=kill)
    other = replace(load_base(plan.base.model), sha256="0" * 64)
    with pytest.raises(DpmergeError, match="DPM-504"):
        run_party(plan, other, tmp_path / "a")
    build = preparation.build_statement
    monkeypatch.setattr(preparation, "build_statement", lambda *a, **k: {**build(*a, **k), "accountant": "another"})
    with pytest.raises(DpmergeError, match="DPM-302"):
        release_of(plan, tmp_path / "a")


def in_subspace(plan, folder, **options):
    """The plan in 8 directions of twelve public texts, one of which is also one of the party's records."""
    own = read_training(plan)[0].texts[0]
    public = folder / "public.txt"
    public.write_text("\n".join([own, *(f"public text number {number}" for number in range(11))]))
    subspace = SubspaceSettings(k=8, public=str(public), **options)
    return replace(plan, training=replace(plan.training, subspace=subspace))


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(basis_cache, "cache_root", lambda: tmp_path / "cache")


def test_a_subspace_is_trained_stated_and_accepted_and_an_overlap_stays_in_the_partys_log(plan, tmp_path, own_cache):
    changed = in_subspace(plan, tmp_path, clip="public", allocation="public")
    sent = release_of(changed, tmp_path / "a")
    release = validate("shop", sent, release_spec_of(load_base(plan.base.model), [changed]))
    told = release.statement["subspace"]
    assert release.statement["num_coordinates"] == told["k"] == 8
    assert (told["public"], told["num_public"]) == ("public.txt", 12)
    assert str(tmp_path) not in json.dumps(release.statement)
    assert release.statement["l2_clip_norm"] != plan.privacy.l2_clip_norm
    assert "public texts of the subspace are also among" in (tmp_path / "a" / "party.log").read_text()
    again = release_of(changed, tmp_path / "b")  # with the basis from the cache
    assert again == sent
    for other in (plan, in_subspace(plan, tmp_path, clip="public", allocation="public", num_public=11)):
        with pytest.raises(ReleaseRefused, match=r"\[statement-terms\]"):
            validate("shop", sent, release_spec_of(load_base(plan.base.model), [other]))


def with_the_rules_k(plan, folder, **options):
    """The plan in as many of 16 directions, of 40 public texts, as the rule chooses."""
    (folder / "public.txt").write_text("\n".join(f"public text number {number} of forty" for number in range(40)))
    subspace = SubspaceSettings(k="auto", public=str(folder / "public.txt"), **options)
    return replace(plan, training=replace(plan.training, subspace=subspace))


def test_the_rules_k_is_trained_stated_and_accepted_and_no_other(plan, tmp_path, own_cache):
    changed = with_the_rules_k(plan, tmp_path)
    sent = release_of(changed, tmp_path / "a")
    release_spec = release_spec_of(load_base(plan.base.model), [changed])
    statement = validate("shop", sent, release_spec).statement
    told = statement["subspace"]
    assert (told["k_origin"], told["k"]) == ("rule", statement["num_coordinates"])
    assert told["k"] == 8
    (stored,) = (tmp_path / "cache" / "subspaces").iterdir()  # the widest basis, whatever was chosen
    free = replace(changed, privacy=replace(plan.privacy, private=False, epsilon=None, noise_seed=None))
    assert json.loads(release_of(free, tmp_path / "b")[STATEMENT])["subspace"]["k"] == 16  # without noise all are best
    assert list((tmp_path / "cache" / "subspaces").iterdir()) == [stored]
    for k in (12, 32):
        other = {"num_coordinates": k, "subspace": told | {"k": k}}
        with pytest.raises(ReleaseRefused, match="statement-"):
            validate("shop", sent | {STATEMENT: json.dumps(statement | other).encode()}, release_spec)
    stated = replace(changed.training, subspace=replace(changed.training.subspace, k=8))
    with pytest.raises(ReleaseRefused, match=r"training = .*\[statement-terms\]"):
        validate("shop", sent, release_spec_of(load_base(plan.base.model), [replace(changed, training=stated)]))


def test_a_clip_norm_by_query_is_charged_before_it_is_known_and_stated_once_it_is(plan, tmp_path):
    subspace = SubspaceSettings(k=16, public="none", clip="quantile")
    changed = replace(plan, training=replace(plan.training, subspace=subspace))
    sent = release_of(changed, tmp_path / "a")
    statement = validate("shop", sent, release_spec_of(load_base(plan.base.model), [changed])).statement
    lines = Ledger(tmp_path / "a" / "ledger.jsonl").lines()
    charge = lines[0].entry["charge"]
    assert charged_mechanism(charge).queries == mechanism_from_statement(statement).queries
    assert charged_mechanism(charge).queries[0][1] == 6
    assert charge["l2_clip_norm"] == statement["subspace"]["clip_middle"] == plan.privacy.l2_clip_norm == 1.0
    assert statement["l2_clip_norm"] < 0.5  # random directions hold little of a gradient's length
    found = check_against_release(lines, None, statement, release_hash(sent))
    assert [check.status for check in found[1:]] == ["PASS", "PASS"]
    elsewhere = replace(changed, privacy=replace(plan.privacy, l2_clip_norm=1.1))
    with pytest.raises(ReleaseRefused, match=r"l2_clip_norm = .*\[statement-terms\]"):
        validate("shop", sent, release_spec_of(load_base(plan.base.model), [elsewhere]))


def test_a_killed_training_in_a_refreshed_subspace_goes_on_as_if_it_had_not_been(
    plan, tmp_path, monkeypatch, own_cache
):
    monkeypatch.setattr(party_module, "CHECKPOINT_EVERY_STEPS", 1)
    changed = with_the_rules_k(plan, tmp_path, allocation="history", refresh_every_steps=2, clip="quantile")

    def kill_at_four(stage, num_done, _total):
        if stage == "training" and num_done == 4:
            raise Killed

    with pytest.raises(Killed):
        release_of(changed, tmp_path / "a", on_progress=kill_at_four)
    assert release_of(changed, tmp_path / "a") == release_of(changed, tmp_path / "b")


def test_public_data_that_give_no_directions_are_refused_before_any_charge(plan, tmp_path, own_cache):
    changed = in_subspace(plan, tmp_path, num_public=8)
    (tmp_path / "public.txt").write_text("one text\nand another")
    with pytest.raises(DpmergeError, match="DPM-505"):
        release_of(changed, tmp_path / "a")
    assert Ledger(tmp_path / "a" / "ledger.jsonl").entries() == []
    entirely = replace(changed.training.subspace, public="none", k=10**6)
    with pytest.raises(DpmergeError, match=r"DPM-505: subspace.k = 1000000 exceeds the"):
        release_of(replace(changed, training=replace(changed.training, subspace=entirely)), tmp_path / "a")
    assert Ledger(tmp_path / "a" / "ledger.jsonl").entries() == []


def test_the_partys_log_is_written_through_no_link(tmp_path):
    (tmp_path / "elsewhere").touch()
    (tmp_path / "party.log").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"party\.log"):
        preparation.append_log(tmp_path, "words")
    assert not (tmp_path / "elsewhere").stat().st_size
