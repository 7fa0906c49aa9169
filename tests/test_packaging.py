"""The explicit package list of pyproject.toml is the folders that hold code, and each ships its type marker."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PROJECT["tool"]["setuptools"]


def test_the_package_list_equals_the_folders():
    tops = SETUPTOOLS["package-dir"].values()
    folders = {path.parent.relative_to(ROOT) for top in tops for path in (ROOT / top).rglob("*.py")}
    assert sorted(SETUPTOOLS["packages"]) == sorted("dpmerge." + ".".join(folder.parts) for folder in folders)


def test_every_package_has_an_init_and_every_top_a_type_marker():
    for package in SETUPTOOLS["packages"]:
        assert (ROOT.joinpath(*package.split(".")[1:]) / "__init__.py").is_file(), package
    for name, top in SETUPTOOLS["package-dir"].items():
        assert (ROOT / top / "py.typed").is_file()
        assert "py.typed" in SETUPTOOLS["package-data"][name]


def test_data_files_are_declared():
    for name in SETUPTOOLS["packages"]:
        patterns = SETUPTOOLS["package-data"].get(name, [])
        files = [path for path in ROOT.joinpath(*name.split(".")[1:]).iterdir() if path.is_file()]
        stray = [
            path for path in files if path.suffix != ".py" and not any(path.match(pattern) for pattern in patterns)
        ]
        assert stray == []


def test_there_is_no_dpmerge_package_of_its_own():
    assert not (ROOT / "dpmerge").exists()
