"""Every error code has its paragraph in docs/errors.md, under its own title, and the code base uses no other."""

import re
from pathlib import Path

import pytest

from dpmerge.common.errors import CODES, DpmergeError

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
SECTIONS = re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]


def test_the_page_has_the_codes_with_their_titles_in_order():
    assert [section.partition("\n")[0] for section in SECTIONS] == [f"{code}: {title}" for code, title in CODES.items()]


@pytest.mark.parametrize("section", SECTIONS, ids=[section[:7] for section in SECTIONS])
def test_each_code_has_a_paragraph_and_an_example(section):
    code, paragraph, example = section[:7], *section.partition("\n    ")[::2]
    assert len(paragraph.split()) > 25
    assert example.startswith(f"{code}: ")


def test_the_code_base_raises_no_other_code():
    folders = ("common", "client", "server", "simulations", "cli")
    used = {
        code
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        for code in re.findall(r"DPM-\d{3}", path.read_text(encoding="utf-8"))
    }
    assert used <= set(CODES)


def test_an_unknown_code_is_a_defect():
    with pytest.raises(ValueError, match="DPM-999"):
        DpmergeError("DPM-999", "problem", "fix")
