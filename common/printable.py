r"""Text that somebody else wrote, as it may be printed and stored: nothing in it acts on what shows it.

Terminals obey escape sequences, editors reorder text at bidirectional marks, spreadsheets compute cells that begin with
"=", Markdown and HTML have links. What is not printable becomes its own visible escape, and all is cut to a length.

>>> shown("ok\x1b[2K\rPASS"), shown("a\u202eb"), shown("two\nlines"), shown("x" * 9, 4)
('ok\\x1b[2K\\rPASS', 'a\\u202eb', 'two\\nlines', 'xxx…')
"""

import json
import re
from typing import Any

MAX_TEXT = 2000
MAX_NAME = 200
"""Characters of a text and of a name; whatever is longer is cut, visibly."""

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>|#~&@]|(?i:(?<=www)\.|:(?=//)|(?<=mailto):))")
"""What marks text up, and the one character without which a bare address is no link."""


def shown(text: object, most: int = MAX_NAME) -> str:
    """Return foreign text for a person: no control or formatting character, no line break, at most so long."""
    raw = str(text)
    if raw.isprintable() and len(raw) <= most:
        return raw
    pieces: list[str] = []
    length = 0
    for character in raw[: most + 1]:
        piece = character if character.isprintable() else _escape(character)
        length += len(piece)
        if length > most:
            return "".join(pieces)[: most - 1] + "…"
        pieces.append(piece)
    return "".join(pieces)


def lines(text: object, most: int = MAX_TEXT) -> str:
    r"""Return foreign text of several lines; each line as `shown`.

    >>> lines("one\ntwo\x07")
    'one\ntwo\\x07'
    """
    return "\n".join(shown(line, most) for line in str(text)[:most].split("\n"))


def cell(value: object) -> object:
    """Return a value for a spreadsheet: a text that would be a formula is led by an apostrophe.

    >>> cell("=1+1"), cell(-1.5), cell("fine")
    ("'=1+1", -1.5, 'fine')
    """
    if not isinstance(value, str):
        return value
    safe = shown(value, MAX_TEXT)
    return f"'{safe}" if value.lstrip(" ").startswith(_FORMULA) else safe


def markdown(text: object, most: int = MAX_TEXT) -> str:
    r"""Return foreign text for a Markdown document, where it is a text and nothing else: no HTML, link, image, table.

    >>> markdown("a|b <i>"), markdown("![x](http://y)")
    ('a\\|b \\<i\\>', '!\\[x\\](http\\://y)')
    """
    return _MARKDOWN.sub(r"\\\1", shown(" ".join(str(text).split()), most))


def code(text: object, most: int = MAX_NAME) -> str:
    """Return foreign text as a code span of Markdown, in which no backtick can end it.

    >>> code("a`b")
    "`a'b`"
    """
    return f"`{shown(text, most).replace('`', chr(39)).replace('|', '¦')}`"


def json_text(value: Any) -> str:
    r"""Return readable JSON that loses nothing and can be printed: what is not printable is written as \uXXXX.

    >>> json_text({"σ": "\x9b2J\u202e"})
    '{\n  "σ": "\\u009b2J\\u202e"\n}'

    Raises:
        ValueError: If a number is NaN or infinite, which JSON does not have.
    """
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    if all(line.isprintable() for line in text.split("\n")):
        return text
    return "".join(c if c == "\n" or c.isprintable() else json.dumps(c)[1:-1] for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode() if ord(character) != 0x20 else " "
