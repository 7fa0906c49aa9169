"""A policy that says less than it must, or twice what it may, is refused when it is read."""

import pytest

from dpmerge.client.budget.policy_file import load_policy
from dpmerge.common.errors import DpmergeError

from .test_policy import BASE, POLICY


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("schema = 1", "schema = 2", "DPM-103"),
        ("schema = 1", "schema = 1\ncap = 1", "DPM-102"),
        ("schema = 1", "schema = ", "DPM-101"),
        ("[dataset.reviews]", "[dataset.'../x']", "DPM-103"),
        ("epsilon_cap = 2.0", "epsilon_cap = inf", "DPM-103"),
        ("epsilon_cap = 2.0", "epsilon_cap = nan", "DPM-103"),
        ("epsilon_cap = 2.0", "epsilon_cap = true", "DPM-103"),
        ("epsilon_cap = 2.0", "", "DPM-103"),
        ("epsilon_cap = 2.0", "epsilon = 2.0", "DPM-102"),
        ("delta = 1e-5", "delta = 0", "DPM-103"),
        ("delta = 1e-5", "delta = 1e-5\nunit = 'family'", "DPM-103"),
        ('task = "trec6"', 'data = "./reviews.csv"', "DPM-103"),  # one file, two ledgers
        ('task = "trec6"', 'data = "reviews.csv/.."', "DPM-103"),  # a folder and a file in it
        ('task = "trec6"', 'data = "reviews.csv/part.csv"', "DPM-103"),
        ('task = "trec6"', 'task = "trec6"\ndata = "x.csv"', "DPM-103"),
        ('task = "trec6"', "", "DPM-103"),
        ('task = "trec6"', 'data = "hard.csv"', "DPM-103"),  # one file under two names
        ('task = "trec6"', 'data = "linked"', "DPM-103"),  # a folder with a link to the file
        ('task = "trec6"', 'data = "folder::train"', "DPM-103"),
        ('data = "reviews.csv"', 'data = "reviews.csv::x::train"', "DPM-103"),
        ('state = "state"', "", "DPM-103"),
        ('state = "state"', 'state = "~/dpmerge"', "DPM-103"),
        (f'base_models = ["{BASE}"]', "", "DPM-103"),
        (f'base_models = ["{BASE}"]', "base_models = []", "DPM-103"),
        (f'server_keys = ["ed25519:{"a" * 64}"]', "", "DPM-103"),
        (f'server_keys = ["ed25519:{"a" * 64}"]', "server_keys = []", "DPM-103"),
        ("public_texts = [", "public_texts = ['public.txt', ", "DPM-103"),
        ("delta = 1e-5", "delta = 1e-5\nunit = 'user'", "DPM-103"),
        ("delta = 1e-5", "delta = 1e-5\nuser = 'author'", "DPM-103"),
        ('task = "trec6"', "task = \"trec6\"\nunit = 'user'\nuser = 'author'", "DPM-103"),
        ("delta = 1e-5", "delta = 1e-5\ntext = 3", "DPM-103"),
        ("delta = 1e-5", "delta = 1e-5\npopulation = 0", "DPM-103"),
        ("delta = 1e-5", "delta = 1e-5\npopulation = true", "DPM-103"),
        ('state = "state"', "state = 1", "DPM-103"),
        ("schema = 1", "schema = true", "DPM-103"),
        ("schema = 1", "schema = " + "[" * 100_000, "DPM-101"),
        ('state = "state"', 'noise = "none"', "DPM-103"),
        (BASE, "short", "DPM-103"),
        ("ed25519:", "", "DPM-205"),
    ],
)
def test_a_policy_that_is_not_understood_is_refused(tmp_path, old, new, code):
    path = tmp_path / "policy.toml"
    (tmp_path / "linked").mkdir()
    if "/" not in new:
        (tmp_path / "reviews.csv").touch()
        (tmp_path / "hard.csv").hardlink_to(tmp_path / "reviews.csv")
        (tmp_path / "linked" / "part.csv").symlink_to(tmp_path / "reviews.csv")
    assert old in POLICY
    path.write_text(POLICY.replace(old, new, 1))
    with pytest.raises(DpmergeError, match=code):
        load_policy(path)


def test_the_state_folder_is_the_same_from_wherever_and_for_whomever(tmp_path, monkeypatch):
    (tmp_path / "policy.toml").write_text(POLICY)
    states = set()
    for folder, path in ((tmp_path, "policy.toml"), (tmp_path.parent, f"{tmp_path.name}/policy.toml")):
        monkeypatch.chdir(folder)
        for variable in ("HOME", "XDG_STATE_HOME", "DPMERGE_STATE"):
            monkeypatch.setenv(variable, str(folder / "another"))
        states.add(load_policy(type(tmp_path)(path)).state)
    assert states == {tmp_path.resolve() / "state"}
