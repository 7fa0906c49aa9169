"""The pages can be read and do not name what is gone."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TOPS = ("common", "client", "server", "simulations", "cli")
ROOMS = sorted({path.parent for top in TOPS for path in (ROOT / top).rglob("__init__.py")})


def prose(page: Path) -> list[str]:
    """Return a page's lines outside tables and code."""
    lines, fenced = [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        fenced ^= line.startswith("```")
        if not fenced and not line.startswith(("|", "    ", "```")):
            lines.append(line)
    return lines


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_prose_is_wrapped_at_a_hundred_columns(page):
    assert [line for line in prose(page) if len(line) > 100 and " " in line.strip()[:99]] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_is_there(page):
    named = re.findall(rf"`((?:{'|'.join(TOPS)}|docs|benchmarks|examples|tests)/[\w./-]+)", page.read_text("utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    links = re.findall(r"\]\(([^)#:]+)(?:#[\w-]*)?\)", page.read_text("utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_architecture_shows_every_room():
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    assert [room.name for room in ROOMS if f"{room.name}/" not in page] == []


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(ROOT)))
def test_a_room_says_what_lives_there_and_where_to_start(room):
    text = (room / "__init__.py").read_text("utf-8")
    named = re.findall(r"`([\w./]+\.py)`", text)
    assert "tart at `" in text
    assert named
    assert [name for name in named if not (room / name).resolve().exists()] == []


def test_rooms_are_small():
    tracked = subprocess.run(["git", "ls-files", *TOPS], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    modules = [Path(name) for name in tracked.split() if name.endswith(".py") and not name.endswith("__init__.py")]
    sizes = {str(room.relative_to(ROOT)): sum((ROOT / m).parent == room for m in modules) for room in ROOMS}
    assert {room: size for room, size in sizes.items() if size > 10} == {}


def test_the_page_of_the_release_format_says_what_the_server_takes():
    from dpmerge.common.release.format import FILES
    from dpmerge.server.intake.validation import CHECKED

    page = " ".join((ROOT / "docs" / "release-format.md").read_text("utf-8").split())
    accepts = page.split("**What the server accepts**")[1].split("**The same release")[0]
    assert f"is {['zero', 'one', 'two', 'three', 'four', 'five', 'six'][len(CHECKED)]} of these files" in accepts
    assert set(re.findall(r"`([\w.]+\.(?:json|safetensors|md|svg))`", accepts)) == FILES
    assert all(f"| `{name}` |" in page for name in FILES)
