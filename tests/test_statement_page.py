"""docs/statement.md names every key of a statement, and no other."""

import re
from pathlib import Path

from tests.signed_releases import statement

PAGE = (Path(__file__).parents[1] / "docs" / "statement.md").read_text(encoding="utf-8")


def test_the_page_lists_exactly_the_keys_of_a_statement():
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    named = [key for row in rows for key in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert len(named) == len(set(named))
    assert set(named) == set(statement()) | {"subspace", "num_clip_queries"}
