"""The pages can be read and do not name what is gone."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
TOPS = ("common", "client", "server", "simulations", "cli")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
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


def test_no_paragraph_of_the_readme_is_longer_than_four_lines():
    blocks = re.split(r"\n\n|\n(?=- )", "\n".join(prose(ROOT / "README.md")))
    assert [block for block in blocks if len(block.strip().splitlines()) > 4] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_is_there(page):
    named = re.findall(
        rf"(?<![\w/.<>-])((?:{'|'.join(TOPS)}|docs|benchmarks|examples|tests)/[\w./-]*\w)",
        page.read_text("utf-8").replace("NAME", "*"),
    )
    assert [name for name in named if not list(ROOT.glob(f"{name}*"))] == []
    assert [name for name in named if name.endswith((".py", ".md", ".toml")) and not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_name_that_a_page_gives_with_its_file_is_in_it(page):
    for name, symbol in re.findall(r"`([\w./-]+\.py):(\w+)`", page.read_text("utf-8")):
        assert re.search(rf"^\s*(?:def |class )?{symbol}\b", (ROOT / name).read_text("utf-8"), re.MULTILINE), symbol


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_module_that_a_page_imports_is_there(page):
    for dotted in re.findall(r"\bdpmerge\.((?:\w+\.)*\w+)", page.read_text("utf-8")):
        module = ROOT / dotted.replace(".", "/")
        assert module.is_dir() or any(place.with_suffix(".py").exists() for place in (module, module.parent)), dotted


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    links = re.findall(r"\]\(([^)#:]*)(?:#([\w-]*))?\)", page.read_text("utf-8"))
    assert [link for link, _ in links if not (page.parent / link).exists()] == []
    assert [
        (link, part) for link, part in links if part and part not in parts(page.parent / link if link else page)
    ] == []


def parts(page: Path) -> set[str]:
    """Return the names by which a page's headings are linked to, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_architecture_has_a_row_for_every_room_and_says_where_to_start():
    lines = [line.split("|")[1:-1] for line in ARCHITECTURE.splitlines() if line.startswith("| `")]
    starts = {room: cells[3] for cells in lines if len(cells) == 4 for room in re.findall(r"`([\w/]+)/`", cells[0])}
    assert starts.keys() >= {str(room.relative_to(ROOT)) for room in ROOMS} - {"common", "client", "server"}
    for room, cell in starts.items():
        places = (ROOT / room, (ROOT / room).parent)
        assert all(any((place / file).exists() for place in places) for file in re.findall(r"`([\w.]+)`", cell)), room


def test_the_picture_of_the_rooms_has_the_order_of_the_import_contracts():
    picture = ARCHITECTURE.split("**The rooms.**")[1].split("`client` and")[0]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    rooms = [contract for contract in contracts if contract["name"].startswith("the rooms of")]
    assert len(rooms) == 4
    for contract in rooms:
        top = contract["containers"][0].rpartition(".")[2]
        heading = f"\n    {top}/" if top in TOPS else f"{top}/:"
        drawn = re.split(r"\n    \w|merging/:", picture.split(heading)[1])[0]
        layers = [re.findall(rf"\b(?:{'|'.join(layer.split(' | '))})\b", drawn) for layer in contract["layers"]]
        found = re.findall(rf"\b(?:{'|'.join(name for layer in layers for name in layer)})\b", drawn)
        assert found == [name for layer in layers for name in layer], top
        assert len(found) >= len(layers), top


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(ROOT)))
def test_a_room_says_what_lives_there_and_where_to_start(room):
    text = (room / "__init__.py").read_text("utf-8")
    named = re.findall(r"`([\w./]+\.py)`", text)
    assert "tart at `" in text
    assert named
    assert [name for name in named if not (room / name).resolve().exists()] == []


def test_the_glossary_defines_each_word_once_and_cites_what_the_code_cites():
    glossary = (ROOT / "docs" / "glossary.md").read_text("utf-8")
    words = [word for line in re.findall(r"^\*\*(.+?)\.?\*\*", glossary, re.MULTILINE) for word in line.split(", ")]
    assert len(words) > 40
    assert len(words) == len(set(words))
    code = "\n".join(path.read_text("utf-8") for top in TOPS for path in (ROOT / top).rglob("*.py"))
    assert [number for number in re.findall(r"\d{4}\.\d{5}", glossary) if number not in code] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_every_page_leads_to_the_words(page):
    assert page.name == "glossary.md" or "glossary.md" in page.read_text("utf-8")


def test_the_chart_of_the_readme_has_the_numbers_of_its_table():
    table = [line.split() for line in (ROOT / "README.md").read_text("utf-8").splitlines() if "±" in line][:6]
    values = [[float(row[i - 1]) for i, cell in enumerate(row) if cell.startswith("±")] for row in table]
    chart = (ROOT / "docs" / "images" / "report.svg").read_text("utf-8")
    ticks = re.findall(r'L [\d.]+ ([\d.]+) \n" clip-path[^>]*stroke-opacity: 0.15', chart)  # lines at 0, 20, …, 100
    bottom, top = float(ticks[0]), float(ticks[5])
    bars = re.findall(r'd="M [\d.]+ ([\d.]+) \nL [\d.]+ \1 \nL [\d.]+ ([\d.]+) \nL [\d. ]+\nz\n" clip', chart)
    heights = [round(100 * (float(foot) - float(head)) / (bottom - top), 1) for foot, head in bars]
    assert heights == [value for column in zip(*values, strict=True) for value in column]


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
