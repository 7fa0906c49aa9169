"""Public texts: which are taken, in which order, and what a party learns of an overlap."""

import hashlib
import os

import pytest

from dpmerge.common.config.federation import SubspaceSettings
from dpmerge.common.data.tasks import load_task
from dpmerge.common.errors import DpmergeError
from dpmerge.common.public.corpus import listed_hash, overlaps, public_corpus, public_name


def settings(path, k=2, **options):
    return SubspaceSettings(k=k, public=str(path), **options)


def test_a_file_gives_the_same_texts_in_any_order_and_kind(tmp_path):
    texts = ["good day", "see you", "so  so", "good day ", "", "no thanks"]
    (tmp_path / "a.txt").write_text("\n".join(texts))
    (tmp_path / "b.csv").write_text("body\n" + "\n".join(reversed(texts)))
    lines = public_corpus(settings(tmp_path / "a.txt"))
    assert sorted(lines.texts) == ["good day", "no thanks", "see you", "so so"]
    assert public_corpus(settings(tmp_path / "b.csv", text="body")) == lines
    some = public_corpus(settings(tmp_path / "a.txt", num_public=3))
    assert some.texts == lines.texts[:3]
    assert some.sha256 != lines.sha256
    assert public_name(settings(tmp_path / "a.txt")) == "a.txt"


def test_a_task_gives_its_training_half():
    corpus = public_corpus(settings("sms", num_public=50))
    assert len(corpus.texts) == 50
    assert set(corpus.texts) <= set(load_task("sms").train.texts)
    assert public_corpus(settings("none")) is None
    assert public_name(settings("sms")) == "sms"


def test_what_cannot_be_read_or_is_too_little_is_refused(tmp_path):
    for name in ("absent.txt", "absent.csv"):
        with pytest.raises(DpmergeError, match="DPM-203"):
            public_corpus(settings(tmp_path / name))
    (tmp_path / "few.txt").write_text("good day\ngood day")
    with pytest.raises(DpmergeError, match=r"DPM-505: subspace.k = 2 .* the 1 public texts of few.txt"):
        public_corpus(settings(tmp_path / "few.txt"))
    (tmp_path / "table.csv").write_text("body\nx")
    with pytest.raises(DpmergeError, match=r"DPM-203: .* no column 'text'"):
        public_corpus(settings(tmp_path / "table.csv"))


def test_a_k_that_is_chosen_needs_two_texts_for_each_of_eight_directions(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(f"text {number}" for number in range(20)))
    assert len(public_corpus(settings(tmp_path / "a.txt", k="auto", num_public=16)).texts) == 16
    with pytest.raises(DpmergeError, match=r'DPM-505: subspace.k = "auto" needs 16 public texts, and 15 are used of a'):
        public_corpus(settings(tmp_path / "a.txt", k="auto", num_public=15))


def test_an_overlap_is_found_whatever_the_white_space(tmp_path):
    (tmp_path / "a.txt").write_text("good  day\nsee you")
    corpus = public_corpus(settings(tmp_path / "a.txt"))
    assert overlaps(corpus, ["bad", " good day"])
    assert not overlaps(corpus, ["Good day", "good"])


def test_only_tasks_and_listed_files_are_answered_for(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("good day\nsee you")
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    assert listed_hash(str(path)) == sha256
    assert public_corpus(settings("sms")).is_listed
    assert public_corpus(settings(path), {sha256}).is_listed
    for listed in ((), {"0" * 64}, {public_corpus(settings(path)).sha256}):
        assert not public_corpus(settings(path), listed).is_listed
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path, tmp_path / "pipe", "/dev/zero", tmp_path / "absent", f"{path}::train", "x" * 5000, "a\0b"):
        assert listed_hash(str(other)) is None
