"""Progress goes to stderr, in the style that fits, and takes messages in any order from any thread."""

import threading

import pytest

from dpmerge.simulations import progress as module
from dpmerge.simulations.progress import Progress


@pytest.mark.parametrize("style", ["bars", "lines", "silent"])
def test_nothing_reaches_stdout(style, capsys):
    with Progress(style) as progress:
        progress.stage("train/shop", "shop: training", total=40)
        progress.update("train/shop", 10)
        progress.note("[bold]as it is[/bold]")
        progress.done("train/shop")
    out, err = capsys.readouterr()
    assert out == ""
    assert ("shop: training" in err) is (style != "silent")
    assert ("[bold]as it is[/bold]" in err) is (style != "silent")


def test_lines_are_few_and_say_how_far(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with Progress("lines") as progress:
        progress.stage("train", "training", total=40)
        for step in range(1, 41):
            now[0] += 1.0
            progress.update("train", step)
        progress.done("train")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "training",
        "training 10/40",
        "training 20/40",
        "training 30/40",
        "training 40/40",
        "training: done in 40.0 s",
    ]


@pytest.mark.parametrize("style", ["bars", "lines", "silent"])
def test_late_and_repeated_messages_are_harmless(style):
    with Progress(style) as progress:
        progress.update("never", 1)
        progress.done("never")
        for _ in range(2):
            progress.stage("again", "again")
            progress.update("again", 3)
            progress.done("again")
            progress.done("again")


def test_many_threads_may_report(capsys):
    def work(name):
        progress.stage(name, name, total=50)
        for step in range(50):
            progress.update(name, step)
        progress.done(name)

    with Progress("lines") as progress:
        threads = [threading.Thread(target=work, args=(f"party {index}",)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert capsys.readouterr().err.count("done in") == 8


def test_no_terminal_means_lines():
    assert Progress()._style == "lines"  # pytest captures stderr
