"""docs/release-format.md states the bounds, the keys and the reasons that the code has."""

import re
from pathlib import Path

import pytest

from dpmerge.common.release import format as release_format
from dpmerge.common.release.signing import MAX_SEALED_BYTES
from dpmerge.common.untrusted.parsing import MAX_HEADER_BYTES, MAX_JSON_BYTES, MAX_JSON_DEPTH, REASONS
from dpmerge.common.untrusted.reading import MAX_FOLDER_BYTES
from dpmerge.server.intake.validation import CHECKED, ReleaseSpec
from dpmerge.server.merging.adapters.lazy_tensors import MAX_ADAPTER_BYTES, MAX_TENSOR_BYTES
from dpmerge.server.merging.merge import RECORDED

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "release-format.md").read_text(encoding="utf-8")


def size(number):
    """Write bytes as the page does."""
    unit = next(unit for unit in (30, 20, 10) if number >= 1 << unit)
    return f"{number >> unit} {'KMG'[unit // 10 - 1]}iB"


def section(title):
    return re.split(r"^#+ ", PAGE.split(f"# {title}\n")[1], flags=re.MULTILINE)[0]


def rows(title):
    lines = [line for line in section(title).splitlines() if line.startswith("|")][2:]
    return {cells[0]: cells[1:] for cells in ([cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines)}


@pytest.mark.parametrize("name", sorted(CHECKED))
def test_a_file_that_intake_takes_has_its_bound_on_the_page(name):
    bounds = {
        release_format.SIGNATURE: size(MAX_SEALED_BYTES),
        release_format.README: size(release_format.MAX_CARD_BYTES),
        release_format.ADAPTER: f"header {size(MAX_HEADER_BYTES)}",
        release_format.HEAD: f"header {size(MAX_HEADER_BYTES)}",
    }
    assert rows("What intake accepts")[name][0] == bounds.get(name, size(MAX_JSON_BYTES))


def test_the_page_names_no_other_file_of_an_upload_and_the_bound_on_all():
    stated = rows("What intake accepts")
    assert stated.keys() - CHECKED == {"all files together"}
    defaults = ReleaseSpec.__dataclass_fields__
    assert stated["all files together"][0] == size(defaults["max_bytes"].default)
    assert f"at most {defaults['max_delta_norm'].default:g}" in stated[release_format.ADAPTER][2]
    assert f"at most {defaults['max_head_norm'].default:g}" in stated[release_format.HEAD][2]


def test_the_limits_are_those_of_the_code():
    limits = rows("Limits")
    assert limits["explain.svg"] == [size(release_format.MAX_PICTURE_BYTES)]
    assert limits["JSON"][0].startswith(f"{MAX_JSON_DEPTH} levels")
    tensors = limits["tensors of a folder that is read"][0]
    assert re.findall(r"\d+ [KMG]iB", tensors) == [
        size(bound) for bound in (MAX_FOLDER_BYTES, MAX_ADAPTER_BYTES, MAX_TENSOR_BYTES)
    ]


def test_the_page_has_every_key_of_a_merge_record():
    keys = {key for cell in rows("A merged model") for key in re.findall(r"\w+", cell)}
    assert keys == {*RECORDED, "schema", "inputs", "base_sha256", "versions", "validation"}


def test_the_order_of_refusals_uses_words_of_the_code_alone():
    protocol = (DOCS / "protocol.md").read_text(encoding="utf-8")
    steps = protocol.split("## What intake refuses")[1].split("One party's refusal")[0].split("\n1. ")[1]
    words = set(re.findall(r"`([a-z-]+)`", steps))
    assert len(words) > 15
    assert words <= REASONS.keys()
