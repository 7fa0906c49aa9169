"""Public texts that directions are taken from: a task of the registry that nobody trains on, or a file."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from dpmerge.common.config.subspace import AUTO, RANDOM, SubspaceSettings
from dpmerge.common.data.archives import sha256_of
from dpmerge.common.data.data_path import SPLIT_MARK, data_path
from dpmerge.common.data.records import read_texts
from dpmerge.common.data.tasks import MAX_CHARACTERS, TASKS, load_task
from dpmerge.common.errors import DpmergeError
from dpmerge.common.privacy.sizing import CANDIDATES, EXAMPLES_PER_DIRECTION


@dataclass(frozen=True)
class PublicCorpus:
    """Texts that anybody may see.

    Attributes:
        texts: Without repeats, in the order of their SHA-256.
        is_listed: Whether somebody answers for their being public: they are a registry task's, or a file on the list of
            the site's policy. Only then may a statement publish hashes of them, against which guesses can be tried.
    """

    texts: tuple[str, ...]
    is_listed: bool = False

    @property
    def sha256(self) -> str:
        """Hash of the texts, which names a listed corpus in a statement."""
        return hashlib.sha256("\n".join(self.texts).encode()).hexdigest()


def public_name(settings: SubspaceSettings) -> str:
    """Return what a statement calls the source: a task, or a file without the folders that lead to it."""
    return settings.public if settings.public in TASKS else data_path(settings.public).place.name


def listed_hash(path: str) -> str | None:
    """Return by which SHA-256 a policy lists a file, that of its bytes; None for what is no single, regular file.

    Anyone can compute it: `sha256sum FILE`.
    """
    try:
        if SPLIT_MARK in path or not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would be waited for, for ever
            return None
        return sha256_of(Path(path))
    except (OSError, ValueError):
        return None


def public_corpus(settings: SubspaceSettings, listed: Collection[str] = ()) -> PublicCorpus | None:
    """Read the public texts; None where the directions are random.

    At most `num_public` of them, by SHA-256, so that the order in a file does not matter.

    Args:
        settings: What they are, and how many.
        listed: SHA-256 of the files that somebody answers for; the others are read too, and marked as not listed.

    Raises:
        DpmergeError: DPM-201 or DPM-202 for a task whose asset is missing or corrupted; DPM-203 for a file that
            cannot be read or holds no text; DPM-505 if there are fewer texts than directions, or than two for each of
            the fewest that "auto" may choose.
    """
    if settings.public == RANDOM:
        return None
    is_listed = settings.public in TASKS or (bool(listed) and listed_hash(settings.public) in listed)
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
    return PublicCorpus(used, is_listed)


def overlaps(corpus: PublicCorpus, private_texts: Iterable[str]) -> bool:
    """Tell whether a public text is also a private one, white space aside: for the party's own eyes.

    >>> overlaps(PublicCorpus(("good day",)), ["bad", "good  day "])
    True
    """
    return not set(corpus.texts).isdisjoint(map(normal, private_texts))


def normal(text: str) -> str:
    """Collapse white space and cut, as the tasks of the registry do."""
    return " ".join(text.split())[:MAX_CHARACTERS].rstrip()
