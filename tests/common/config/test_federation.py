"""Federation files: what is accepted, what is refused in which words, and what a plan resolves to."""

import json
import pickle
import tomllib
from dataclasses import fields, replace
from pathlib import Path

import pytest

from dpmerge.common.config.federation import (
    SECTIONS,
    FileSource,
    LoraSettings,
    PrivacySettings,
    TaskSource,
    load_federation,
    parse_federation,
    party_plan,
    plan_from_dict,
)
from dpmerge.common.config.template import TEMPLATE, json_schema
from dpmerge.common.errors import DpmergeError

BASE = '[base]\nmodel = "minilm-l6"\n'
PARTY = """
[[party]]
name = "shop"
data = "reviews.csv"
population = 3000
labels = { "1" = "a bad product", "5" = "a great product" }
"""
EPSILON = "[privacy]\nepsilon = 1\n"
EXAMPLE = Path(__file__).parents[3] / "examples" / "five-organisations.toml"
SUBSPACE = (
    BASE
    + EPSILON
    + "[training]\nsubspace = {{ {} }}\n"
    + PARTY.replace("{", "{{").replace("}", "}}")
    + 'test = "tests.csv"\n[[party]]\nname = "cinema"\ntask = "movie"\n'
)


def parse(text: str):
    return parse_federation(text, "f.toml")


def plan(text: str, name: str = "shop"):
    return party_plan(parse(text), name)


REFUSALS = {
    "not TOML": ("[base", "DPM-101", "f.toml is not TOML"),
    "unbounded work per user": (
        BASE + "[privacy]\nunit = 'user'\nmax_records_per_user = 4097\n",
        "DPM-103",
        "privacy.max_records_per_user = 4097",
    ),
    "not TOML, nested": ("x = " + "[" * 100_000, "DPM-101", "f.toml is not TOML"),
    "not TOML, digits": ("x = " + "9" * 5000, "DPM-101", "f.toml is not TOML"),
    "not TOML, line": (BASE + "x = .2", "DPM-101", "line 3"),
    "no party": (BASE, "DPM-103", "party in f.toml is missing"),
    "one bracket": (BASE + '[party]\nname = "x"', "DPM-103", "[[party]]"),
    "no base": (EPSILON + PARTY, "DPM-103", "base.model in f.toml is missing"),
    "unknown section": (BASE + "[lorra]\n", "DPM-102", "(closest: lora)"),
    "unknown key": (BASE + "[lora]\nrnak = 3\n" + PARTY, "DPM-102", "(closest: rank)"),
    "unknown party key": (BASE + EPSILON + PARTY + "epsilonn = 2", "DPM-102", "party[0].epsilonn"),
    "unknown override": (BASE + EPSILON + PARTY + "[party.training]\nnum_stps = 3", "DPM-102", "(closest: num_steps)"),
    "section not a table": ("lora = 3\n" + BASE + PARTY, "DPM-103", "lora = 3 in f.toml is not a table"),
    "rank 0": (BASE + "[lora]\nrank = 0\n" + PARTY, "DPM-103", "lora.rank = 0 in f.toml is not a whole number"),
    "bool for number": (BASE + "[lora]\nrank = true\n" + PARTY, "DPM-103", "lora.rank = true"),
    "bool for real": (BASE + "[lora]\nalpha = true\n" + PARTY, "DPM-103", "lora.alpha = true"),
    "number for bool": (BASE + "[lora]\ntrain_a = 0\n" + PARTY, "DPM-103", "true or false"),
    "text for number": (BASE + '[lora]\nrank = "8"\n' + PARTY, "DPM-103", 'lora.rank = "8"'),
    "no layers": (BASE + "[lora]\nlayers = []\n" + PARTY, "DPM-103", "lora.layers = []"),
    "last:0": (BASE + '[lora]\nlayers = "last:0"\n' + PARTY, "DPM-103", 'lora.layers = "last:0"'),
    "layer twice": (BASE + "[lora]\nlayers = [4, 4]\n" + PARTY, "DPM-103", "lora.layers = [4, 4]"),
    "targets word": (BASE + '[lora]\ntargets = "query"\n' + PARTY, "DPM-103", "list of module names"),
    "optimizer": (BASE + '[training]\noptimizer = "lion"\n' + PARTY, "DPM-103", "adam, adamw, sgd, momentum"),
    "negative rho": (BASE + "[training]\nrho = -0.1\n" + PARTY, "DPM-103", "at least 0"),
    "subspace k 0": (SUBSPACE.format('k = 0, public = "sms"'), "DPM-103", "training.subspace.k = 0 in f.toml is not"),
    "subspace key": (SUBSPACE.format('k = 4, publik = "sms"'), "DPM-102", "training.subspace.publik"),
    "subspace, no source": (SUBSPACE.format("k = 4"), "DPM-103", "training.subspace.public in f.toml is missing"),
    "subspace k": (SUBSPACE.format('k = 9, public = "sms", num_public = 8'), "DPM-103", "num_public = 8"),
    "subspace k, a word": (SUBSPACE.format('k = "many", public = "sms"'), "DPM-103", 'at most 1048576, or "auto"'),
    "subspace k, nothing to choose by": (
        SUBSPACE.format('k = "auto", public = "none"'),
        "DPM-103",
        'training.subspace.k = "auto" in f.toml is chosen by gradients of public texts',
    ),
    "subspace, own task": (SUBSPACE.format('k = 4, public = "movie"'), "DPM-103", "is the data of party cinema"),
    "subspace, own file": (SUBSPACE.format('k = 4, public = "./reviews.csv"'), "DPM-103", "is the data of party shop"),
    "subspace, own test": (SUBSPACE.format('k = 4, public = "tests.csv"'), "DPM-103", "is the data of party shop"),
    "subspace, random energy": (
        SUBSPACE.format('k = 4, public = "none", allocation = "public"'),
        "DPM-103",
        "training.subspace.allocation",
    ),
    "subspace, no schedule": (
        SUBSPACE.format('k = 4, public = "sms", allocation = "history"'),
        "DPM-103",
        "refresh_every_steps",
    ),
    "subspace, linear head": (
        SUBSPACE.format('k = 4, public = "sms" }\nhead = "linear" #'),
        "DPM-103",
        "a linear head starts at zero",
    ),
    "subspace, dp-adam": (
        SUBSPACE.format('k = 4, public = "sms", allocation = "public" }\noptimizer = "dp-adam" #'),
        "DPM-103",
        "training.optimizer",
    ),
    "nan": (BASE + "[training]\nlearning_rate = nan\n" + PARTY, "DPM-103", "finite"),
    "epsilon 0": (BASE + PARTY + "epsilon = 0", "DPM-103", "party[0].epsilon = 0"),
    "epsilon inf": (BASE + PARTY + "epsilon = inf", "DPM-103", "private = false"),
    "no epsilon": (BASE + PARTY, "DPM-103", "party[0].epsilon in f.toml is missing"),
    "epsilon not private": (BASE + PARTY + "epsilon = 1\nprivate = false", "DPM-103", "contradicts private = false"),
    "default not private": (BASE + EPSILON + "private = false\n" + PARTY, "DPM-103", "privacy.epsilon = 1.0"),
    "epsilon twice": (BASE + PARTY + "epsilon = 1\n[party.privacy]\nepsilon = 2", "DPM-103", "[party.privacy] as well"),
    "delta 0": (BASE + EPSILON + "delta = 0\n" + PARTY, "DPM-103", "privacy.delta = 0"),
    "delta 1": (BASE + EPSILON + "delta = 1.0\n" + PARTY, "DPM-103", "at least 1e-12 and below 1"),
    "party delta": (BASE + EPSILON + PARTY + "[party.privacy]\ndelta = 2", "DPM-103", "party[0].privacy.delta = 2"),
    "seeded secure noise": (BASE + EPSILON + "noise_seed = 3\n" + PARTY, "DPM-103", 'noise = "fast"'),
    "unknown unit": (BASE + EPSILON + 'unit = "person"\n' + PARTY, "DPM-103", "choose one of record, user"),
    "unit without users": (BASE + EPSILON + 'unit = "user"\n' + PARTY, "DPM-103", "party[0].user in f.toml is missing"),
    "users without unit": (BASE + EPSILON + PARTY + 'user = "author"', "DPM-103", 'privacy.unit is "record"'),
    "own unit without users": (BASE + EPSILON + PARTY + '[party.privacy]\nunit = "user"', "DPM-103", "party[0].user"),
    "users of a task": (
        BASE + EPSILON + 'unit = "user"\n[[party]]\nname = "x"\ntask = "trec6"',
        "DPM-103",
        'party[0].task = "trec6" in f.toml tells no users',
    ),
    "user column of a task": (
        BASE + EPSILON + '[[party]]\nname = "x"\ntask = "trec6"\nuser = "author"',
        "DPM-103",
        "belongs to own data",
    ),
    "two samples without sam": (
        BASE + EPSILON + '[training]\nascent_sampling = "separate"\n' + PARTY,
        "DPM-103",
        'training.ascent_sampling = "separate" in f.toml is allowed only with sharpness = "sam"',
    ),
    "big batch": (BASE + EPSILON + "[training]\nexpected_batch_size = 4000\n" + PARTY, "DPM-103", "population 3000"),
    "big party batch": (
        BASE + EPSILON + PARTY + "[party.training]\nexpected_batch_size = 4000",
        "DPM-103",
        "party[0].training.expected_batch_size = 4000",
    ),
    "no population": (BASE + EPSILON + PARTY.replace("population = 3000\n", ""), "DPM-103", "never read off the file"),
    "no labels": (BASE + EPSILON + PARTY.rpartition("labels")[0], "DPM-103", "party[0].labels"),
    "one label": (BASE + EPSILON + PARTY.replace(', "5" = "a great product"', ""), "DPM-103", "at least two labels"),
    "task and data": (BASE + EPSILON + PARTY + 'task = "trec6"', "DPM-103", "beside data"),
    "neither": (BASE + EPSILON + '[[party]]\nname = "x"', "DPM-103", "and so is data"),
    "text of a task": (BASE + EPSILON + '[[party]]\nname = "x"\ntask = "trec6"\ntext = "t"', "DPM-103", "own data"),
    "unknown task": (BASE + EPSILON + '[[party]]\nname = "x"\ntask = "trec7"', "DPM-104", "(closest: trec6)"),
    "quorum of none": (BASE + EPSILON + "[intake]\nmin_parties = 0\n" + PARTY, "DPM-103", "at least 1"),
    "quorum": (
        BASE + EPSILON + "[intake]\nmin_parties = 2\n" + PARTY,
        "DPM-103",
        "intake.min_parties = 2 in f.toml is",
    ),
    "deadline": (BASE + "[intake]\ndeadline_minutes = -1\n" + PARTY, "DPM-103", "intake.deadline_minutes = -1"),
    "far deadline": (BASE + "[intake]\ndeadline_minutes = 1e300\n" + PARTY, "DPM-103", "at most 1e+07"),
    "late": (BASE + '[intake]\ndeadline_minutes = 9\nlate = "drop"\n' + PARTY, "DPM-103", "keep, refuse"),
    "late without deadline": (BASE + '[intake]\nlate = "refuse"\n' + PARTY, "DPM-103", "needs a deadline"),
    "name with slash": (BASE + EPSILON + PARTY.replace('"shop"', '"../shop"'), "DPM-103", "lower-case letters"),
    "name of 64 letters": (BASE + EPSILON + PARTY.replace("shop", "x" * 64), "DPM-103", "lower-case letters"),
    "name twice": (BASE + EPSILON + PARTY + PARTY, "DPM-103", "party[1].name"),
}


@pytest.mark.parametrize(("text", "code", "words"), REFUSALS.values(), ids=REFUSALS)
def test_a_bad_file_is_refused_in_one_line_that_says_why(text, code, words):
    with pytest.raises(DpmergeError) as refusal:
        parse(text)
    message = str(refusal.value)
    assert refusal.value.code == code
    assert words in message
    assert "f.toml" in message
    assert "\n" not in message


def test_hostile_values_are_shown_short_and_on_one_line():
    with pytest.raises(DpmergeError) as refusal:
        parse(BASE + EPSILON + PARTY.replace('"shop"', '"a\\nb' + "x" * 500 + '"'))
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 400


def test_settings_made_in_python_are_checked_as_well():
    with pytest.raises(DpmergeError, match=r"lora\.rank = 0 is not a whole number of at least 1"):
        LoraSettings(rank=0)
    with pytest.raises(DpmergeError, match="private = false"):
        PrivacySettings(private=False, epsilon=1.0)


def test_a_refusal_survives_the_trip_between_processes():
    with pytest.raises(DpmergeError) as refusal:
        LoraSettings(rank=0)
    assert str(pickle.loads(pickle.dumps(refusal.value))) == str(refusal.value)


def test_a_party_overrides_single_keys_and_inherits_the_rest():
    text = BASE + "[training]\nnum_steps = 50\nrho = 0.3\n[privacy]\nepsilon = 1\ndelta = 1e-6\n" + PARTY
    own = plan(text + "epsilon = 2\n[party.training]\nnum_steps = 9\n[party.privacy]\nl2_clip_norm = 0.5")
    assert (own.training.num_steps, own.training.rho) == (9, 0.3)
    assert (own.privacy.epsilon, own.privacy.delta, own.privacy.l2_clip_norm) == (2.0, 1e-6, 0.5)


@pytest.mark.parametrize(
    ("default", "own", "private", "epsilon"),
    [
        ("epsilon = 3", "", True, 3.0),
        ("epsilon = 3", "epsilon = 2", True, 2.0),
        ("epsilon = 3", "private = false", False, None),
        ("private = false", "", False, None),
        ("private = false", "epsilon = 2", True, 2.0),
        ("private = false", "[party.privacy]\nepsilon = 2", True, 2.0),
    ],
)
def test_what_the_party_says_about_privacy_wins(default, own, private, epsilon):
    privacy = plan(BASE + f"[privacy]\n{default}\n" + PARTY + own).privacy
    assert (privacy.private, privacy.epsilon) == (private, epsilon)


def test_a_party_that_asks_for_privacy_without_a_budget_is_refused():
    with pytest.raises(DpmergeError, match=r"party\[0\]\.epsilon in f\.toml is missing"):
        parse(BASE + "[privacy]\nprivate = false\n" + PARTY + "private = true")


def test_the_population_is_the_partys_then_the_registrys_then_the_default():
    task = BASE + EPSILON + 'population = 500\n[[party]]\nname = "x"\ntask = "trec6"\n'
    assert plan(task, "x").privacy.population == 2800
    assert plan(task + "population = 700", "x").privacy.population == 700
    undeclared = PARTY.replace("population = 3000\n", "")
    assert plan(BASE + EPSILON + "population = 500\n" + undeclared).privacy.population == 500


def test_sources_say_where_the_records_are(tmp_path):
    federation = parse_federation(
        BASE + EPSILON + PARTY + 'test = "public.csv"\n' + '[[party]]\nname = "x"\ntask = "trec6"',
        "f.toml",
        folder=tmp_path,
    )
    labels = {"1": "a bad product", "5": "a great product"}
    own = FileSource(
        path=str(tmp_path / "reviews.csv"), text="text", label="label", labels=labels, test=str(tmp_path / "public.csv")
    )
    assert party_plan(federation, "shop").source == own
    assert party_plan(federation, "x").source == TaskSource(task="trec6")


def test_private_data_is_no_test_file_under_any_path(tmp_path):
    (tmp_path / "reviews.csv").write_text("text,label\n")
    (tmp_path / "link.csv").symlink_to(tmp_path / "reviews.csv")
    for test in ("reviews.csv", "./reviews.csv", "link.csv"):
        with pytest.raises(DpmergeError, match=r"DPM-103: party\[0\]\.test = .* is the private data itself"):
            parse_federation(BASE + EPSILON + PARTY + f'test = "{test}"\n', "f.toml", folder=tmp_path)


def test_users_are_named_by_the_party_and_protected_by_the_plan():
    own = plan(BASE + EPSILON + 'unit = "user"\n' + PARTY + 'user = "author"')
    assert (own.privacy.unit, own.source.user) == ("user", "author")
    alone = plan(BASE + EPSILON + PARTY + 'user = "author"\n[party.privacy]\nunit = "user"')
    assert alone == own
    assert plan_from_dict(own.to_dict()) == own
    assert "user" not in plan(BASE + EPSILON + PARTY).to_dict()["source"]


def test_an_unknown_party_is_refused():
    with pytest.raises(DpmergeError, match="closest: shop"):
        plan(BASE + EPSILON + PARTY, "shopp")


def test_a_plan_survives_json_with_its_fingerprint():
    for own in ("", '[lora]\nlayers = [4, 5]\ntargets = ["query"]\n'):
        sent = plan(BASE + EPSILON + own + PARTY)
        received = plan_from_dict(json.loads(json.dumps(sent.to_dict())))
        assert received == sent
        assert received.fingerprint() == sent.fingerprint()


def test_a_tampered_plan_is_refused():
    tables = plan(BASE + EPSILON + PARTY).to_dict()
    tables["privacy"]["epsilon"] = -1
    with pytest.raises(DpmergeError, match=r"privacy\.epsilon = -1 in the party's plan"):
        plan_from_dict(tables)


@pytest.mark.parametrize("public", ["own", "test"])
def test_no_plan_calls_its_own_data_public_however_it_was_made(public):
    tables = plan(BASE + EPSILON + PARTY + 'test = "open.csv"\n').to_dict()
    paths = {"own": tables["source"]["path"] + "::train", "test": tables["source"]["test"]}
    tables["training"]["subspace"] = {"k": 4, "public": paths[public]}
    with pytest.raises(DpmergeError, match=r"subspace\.public = .* is the data of party shop"):
        plan_from_dict(tables)
    tables["source"], tables["training"]["subspace"]["public"] = {"task": "sms"}, "sms"
    with pytest.raises(DpmergeError, match=r"subspace\.public = .* is the data of party shop"):
        plan_from_dict(tables)


def test_the_fingerprint_depends_on_every_setting_and_on_nothing_else():
    first = plan(BASE + EPSILON + PARTY)
    assert plan("[lora]\nalpha = 16\n[run]\nseed = 7\n" + BASE + EPSILON + PARTY).fingerprint() == first.fingerprint()
    changed = [
        replace(first, party="other"),
        replace(first, seed=8),
        replace(first, source=TaskSource(task="trec6")),
        replace(first, base=replace(first.base, max_length=33)),
        replace(first, lora=replace(first.lora, rank=4)),
        replace(first, training=replace(first.training, rho=0.2)),
        replace(first, privacy=replace(first.privacy, epsilon=1.5)),
    ]
    assert len({other.fingerprint() for other in [first, *changed]}) == len(changed) + 1


@pytest.mark.parametrize(
    ("party", "fingerprint"),
    [
        ("library", "0af4fc20b37c590b3a4d5b1df60cd7eb1c808e257fe70f733288b1b078deec4f"),
        ("cinema", "dbab817bcd0a141ec9a3397f13d229f98058e90cfa94bb1636f23db2b88a7a62"),
    ],
)
def test_the_fingerprint_of_a_task_is_what_earlier_versions_computed(party, fingerprint):
    assert party_plan(parse_federation(TEMPLATE, "template"), party).fingerprint() == fingerprint


def test_the_fingerprint_of_own_data_with_a_subspace_is_what_earlier_versions_computed():
    text = BASE + '[training]\nexpected_batch_size = 100\nsubspace = { k = 64, public = "none" }\n'
    text += '[privacy]\nunit = "user"\n' + PARTY.replace("reviews.csv", "/nowhere/reviews.csv")
    made = party_plan(parse_federation(text + 'user = "author"\nepsilon = 2\n', "text"), "shop")
    assert made.fingerprint() == "ac0e6e91eca25678550a9f91c65970f612b65c0c2c0d5aa3857df7e0c42b8286"


def test_a_federation_written_as_tables_reads_back_equal():
    federation = load_federation(EXAMPLE)
    parsed = parse_federation(_as_toml(federation.to_dict()), "again", folder=EXAMPLE.parent)
    assert parsed == federation


def _as_toml(tables: dict) -> str:
    """JSON is nearly TOML; enough of it to write the example back."""
    lines = []
    for name, table in tables.items():
        for row in table if isinstance(table, list) else [table]:
            lines.append(f"[[{name}]]" if isinstance(table, list) else f"[{name}]")
            lines += [f"{key} = {_inline(value)}" for key, value in row.items()]
    return "\n".join(lines)


def _inline(value: object) -> str:
    if not isinstance(value, dict):
        return json.dumps(value)
    return "{" + ", ".join(f"{key} = {json.dumps(item)}" for key, item in value.items()) + "}"


def test_files_are_looked_for_when_the_federation_is_loaded(tmp_path):
    path = tmp_path / "f.toml"
    path.write_text(BASE + EPSILON + PARTY)
    with pytest.raises(DpmergeError, match=r"DPM-203: party\[0\]\.data = \"reviews\.csv\""):
        load_federation(path)
    (tmp_path / "reviews.csv").write_text("text,label\n")
    assert party_plan(load_federation(path), "shop").source.path == str(tmp_path / "reviews.csv")
    path.write_text(BASE + EPSILON + PARTY.replace("reviews.csv", "folder::train"))
    (tmp_path / "folder").mkdir()
    assert party_plan(load_federation(path), "shop").source.path.endswith("folder::train")


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_an_unreadable_file_is_refused(tmp_path, content):
    path = tmp_path / "f.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DpmergeError, match="DPM-101"):
        load_federation(path)
    with pytest.raises(DpmergeError, match="DPM-101"):
        load_federation(tmp_path)


def test_the_template_states_every_default():
    tables = tomllib.loads(TEMPLATE)
    parse_federation(TEMPLATE, "template")
    for name, cls in SECTIONS.items():
        stated = {key.name for key in fields(cls) if key.default is not None and key.name != "parameters"}
        assert set(tables[name]) == stated
        assert cls(**tables[name]) == (cls(model="minilm-l6") if name == "base" else cls())


def test_the_schema_accepts_what_the_reader_accepts_and_refuses_typos():
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(json.dumps(json_schema()))
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    for text in (TEMPLATE, EXAMPLE.read_text(encoding="utf-8"), BASE + EPSILON + PARTY):
        assert list(validator.iter_errors(tomllib.loads(text))) == []
    for name in ("unknown key", "unknown override", "rank 0", "delta 1", "optimizer", "last:0", "one label", "late"):
        assert list(validator.iter_errors(tomllib.loads(REFUSALS[name][0]))), name


def test_the_example_gives_each_party_its_own_budget():
    federation = load_federation(EXAMPLE)
    plans = [party_plan(federation, party.name) for party in federation.parties]
    assert [(p.source.task, p.privacy.epsilon) for p in plans] == [
        ("trec6", 1.0),
        ("movie", 2.0),
        ("product", 3.0),
        ("editorial", 4.0),
        ("tweet", 8.0),
    ]
    assert {p.privacy.delta for p in plans} == {1e-5}
    assert {p.privacy.noise for p in plans} == {"secure"}


def test_settings_say_what_they_are_for():
    for cls in SECTIONS.values():
        assert all(key.metadata["about"].endswith(".") for key in fields(cls))


def test_a_merge_methods_parameters_are_plain_values_that_somebody_else_checks():
    text = BASE + EPSILON + '[merge]\nmethod = "some-day"\nwidth = 3\nmode = "odd"\ncore = true\n' + PARTY
    federation = parse(text)
    assert federation.merge.parameters == {"width": 3, "mode": "odd"}
    assert federation.to_dict()["merge"] == {
        "method": "some-day",
        "width": 3,
        "mode": "odd",
        "core": True,
        "denoise": False,
    }
    many = "".join(f"key{index} = 1\n" for index in range(40))
    for lines, code, words in (
        ("width = [1, 2]", "DPM-103", "merge.width = [1, 2] in f.toml is not a finite number or a short word"),
        ("layer_scale = { query = 2 }", "DPM-103", "(closest: layer_scales)"),
        ("width = inf", "DPM-103", "merge.width = inf"),
        (f'mode = "{"x" * 300}"', "DPM-103", "merge.mode"),
        ('mode = "a\\nb"', "DPM-103", "merge.mode"),
        (f"{'k' * 300} = 1", "DPM-102", "is not a known key"),
        (many, "DPM-102", "is not a known key"),
    ):
        with pytest.raises(DpmergeError) as refusal:
            parse(BASE + EPSILON + f"[merge]\n{lines}\n" + PARTY)
        assert refusal.value.code == code
        assert words in str(refusal.value)
        assert "\n" not in str(refusal.value)
        assert len(str(refusal.value)) < 500


def test_a_party_leaves_the_federations_subspace():
    text = SUBSPACE.format('k = 4, public = "open.txt"') + "[party.training]\nsubspace = false\n"
    federation = parse(text)
    alone = party_plan(federation, "cinema")
    assert alone.training.subspace is None
    assert party_plan(federation, "shop").training.subspace.k == 4
    never = BASE + EPSILON + PARTY + 'test = "tests.csv"\n[[party]]\nname = "cinema"\ntask = "movie"\n'
    assert alone.fingerprint() == plan(never, "cinema").fingerprint()
    assert federation.to_dict()["party"][1]["training"] == {"subspace": False}
    assert federation.files == (
        Path("reviews.csv").absolute(),
        Path("tests.csv").absolute(),
        Path("open.txt").absolute(),
    )
    with pytest.raises(DpmergeError, match=r"party\[1\].training.subspace = true in f.toml is not a table, or false"):
        parse(text.replace("false", "true"))


def test_a_subspace_survives_the_way_to_a_party_and_names_its_file_from_the_folder(tmp_path):
    (tmp_path / "reviews.csv").write_text("text,label\n")
    (tmp_path / "tests.csv").write_text("text,label\n")
    file = tmp_path / "f.toml"
    file.write_text(SUBSPACE.format('k = 4, public = "open.txt"'))
    with pytest.raises(DpmergeError, match=r"DPM-203: training.subspace.public = \"open.txt\" .* does not exist"):
        load_federation(file)
    (tmp_path / "open.txt").write_text("good day\n")
    federation = load_federation(file)
    assert tmp_path / "open.txt" in federation.files
    plan = party_plan(federation, "shop")
    assert plan.training.subspace.public == str(tmp_path / "open.txt")
    assert plan_from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    without = replace(plan, training=replace(plan.training, subspace=None))
    assert "subspace" not in without.to_dict()["training"]  # so that fingerprints of the full space are what they were
    other = SUBSPACE.format('k = 4, public = "sms"') + '[party.training]\nsubspace = { k = 0, public = "none" }'
    with pytest.raises(DpmergeError, match=r"party\[1\].training.subspace.k = 0"):
        parse(other)
