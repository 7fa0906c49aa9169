"""What `dpmerge merge` is told in texts such as `shop=0.5`, read one at a time, each refusal with its remedy."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dpmerge.common.errors import DpmergeError


def numbers(option: str, texts: Iterable[str]) -> dict[str, float]:
    """Read NAME=NUMBER texts.

    Args:
        option: Whose texts they are, for refusals.
        texts: As they were typed.

    >>> numbers("--weights", ["a=1", "b=.5"])
    {'a': 1.0, 'b': 0.5}
    """
    found = {}
    for name, value in pairs(option, texts).items():
        try:
            found[name] = float(value)
        except ValueError:
            raise DpmergeError("DPM-103", f"{option} {name}={value} is no number", "write, say, shop=.5") from None
    return found


def layer_scales(texts: Iterable[str]) -> dict[str, Any]:
    """Sort factors into those on the merged change and those on one party's: `PATTERN=X` and `PARTY:PATTERN=X`.

    No module's name has a colon in it that a pattern needs; a party's name may.

    >>> layer_scales(["query=.5", "shop:value=2"])
    {'layer_scales': {'query': 0.5}, 'party_layer_scales': {'shop': {'value': 2.0}}}
    """
    scales: dict[str, float] = {}
    of_parties: dict[str, dict[str, float]] = {}
    for name, number in numbers("--layer-scale", texts).items():
        party, mark, pattern = name.rpartition(":")
        if mark and pattern and not party.endswith("(?"):
            of_parties.setdefault(party, {})[pattern] = number
        else:
            scales[name] = number
    return {"layer_scales": scales or None, "party_layer_scales": of_parties or None}


def named_folder(text: str) -> tuple[str | None, Path]:
    """Read a folder, or NAME=FOLDER where no such folder exists."""
    name, mark, folder = text.partition("=")
    if not mark or _exists(Path(text)):
        return None, Path(text)
    if not name or not folder:
        raise DpmergeError("DPM-103", f"{text!r} is not of the form NAME=FOLDER", "write, say, shop=path/to/adapter")
    return name, Path(folder)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # no name that a file could have
        return False


def files(option: str, texts: Iterable[str] | None) -> dict[str, Path]:
    """Read PARTY=FILE texts.

    Args:
        option: Whose texts they are, for refusals.
        texts: As they were typed, or None.
    """
    return {party: Path(file) for party, file in pairs(option, texts or ()).items()}


def pairs(option: str, texts: Iterable[str]) -> dict[str, str]:
    """Read NAME=VALUE texts, each name once.

    Args:
        option: Whose texts they are, for refusals.
        texts: As they were typed.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, _, value = (part.strip() for part in text.partition("="))
        if not name or not value:
            raise DpmergeError("DPM-103", f"{option} {text!r} is not of the form NAME=VALUE", "write, say, shop=1")
        if name in found:
            raise DpmergeError("DPM-103", f"{option} names {name} twice", "give each name once")
        found[name] = value
    return found
