"""Public texts that directions are taken from: a task of the registry that nobody trains on, or a file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dpmerge.common.config_subspace import AUTO, RANDOM, SubspaceSettings
from dpmerge.common.errors import DpmergeError
from dpmerge.common.records import read_texts
from dpmerge.common.sizing import CANDIDATES, EXAMPLES_PER_DIRECTION
from dpmerge.common.tasks import MAX_CHARACTERS, TASKS, load_task


@dataclass(frozen=True)
class PublicCorpus:
    """Texts that anybody may see.

    Attributes:
        texts: Without repeats, in the order of their SHA-256.
    """

    texts: tuple[str, ...]

    @property
    def sha256(self) -> str:
        """Hash of the texts, which names the corpus in a statement."""
        return hashlib.sha256("\n".join(self.texts).encode()).hexdigest()


def public_name(settings: SubspaceSettings) -> str:
    """Return what a statement calls the source: a task, or a file without the folders that lead to it."""
    return settings.public if settings.public in TASKS else Path(settings.public.partition("::")[0]).name


def public_corpus(settings: SubspaceSettings) -> PublicCorpus | None:
    """Read the public texts; None where the directions are random.

    At most `num_public` of them, by SHA-256, so that the order in a file does not matter.

    Raises:
        DpmergeError: DPM-201 or DPM-202 for a task whose asset is missing or corrupted; DPM-203 for a file that
            cannot be read or holds no text; DPM-505 if there are fewer texts than directions, or than two for each of
            the fewest that "auto" may choose.
    """
    if settings.public == RANDOM:
        return None
    if settings.public in TASKS:
        texts = load_task(settings.public).train.texts
    else:
        texts = read_texts(settings.public, text=settings.text)
    unique = sorted(set(map(normal, texts)), key=lambda text: hashlib.sha256(text.encode()).digest())
    used = tuple(unique[: settings.num_public])
    if isinstance(settings.k, int) and len(used) < settings.k:
        raise DpmergeError(
            "DPM-505",
            f"subspace.k = {settings.k} directions are asked of the {len(used)} public texts of "
            f"{public_name(settings)}",
            "lower k, or give more public texts",
        )
    least = EXAMPLES_PER_DIRECTION * min(CANDIDATES)
    if settings.k == AUTO and len(used) < least:
        raise DpmergeError(
            "DPM-505",
            f'subspace.k = "auto" needs {least} public texts, and {len(used)} are used of {public_name(settings)}',
            "give more public texts, raise num_public, or state k",
        )
    return PublicCorpus(used)


def overlaps(corpus: PublicCorpus, private_texts: Iterable[str]) -> bool:
    """Tell whether a public text is also a private one, white space aside: for the party's own eyes.

    >>> overlaps(PublicCorpus(("good day",)), ["bad", "good  day "])
    True
    """
    return not set(corpus.texts).isdisjoint(map(normal, private_texts))


def normal(text: str) -> str:
    """Collapse white space and cut, as the tasks of the registry do."""
    return " ".join(text.split())[:MAX_CHARACTERS].rstrip()
