"""docs/statement.md names every key of a statement, and no other; docs/subspace.md those of its subspace."""

import re
from pathlib import Path

from dpmerge.common.statement import subspace_part
from tests.signed_releases import statement

SUBSPACE = (Path(__file__).parents[1] / "docs" / "subspace.md").read_text(encoding="utf-8")
PAGE = (Path(__file__).parents[1] / "docs" / "statement.md").read_text(encoding="utf-8")


def test_the_page_lists_exactly_the_keys_of_a_statement():
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    named = [key for row in rows for key in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert len(named) == len(set(named))
    assert set(named) == set(statement()) | {"subspace", "num_clip_queries"}


def test_the_page_of_subspaces_lists_exactly_the_keys_of_the_stated_one():
    stated = SUBSPACE.split("## What is stated")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in stated.splitlines() if line.startswith("| `")]
    named = [key for cell in rows for key in re.findall(r"`(\w+)`", cell)]
    assert sorted(named) == sorted([*subspace_part._KINDS, *subspace_part._OPTIONAL_KINDS])
