"""The HTML page: self-contained, escaped, complete, and a function of results.json alone."""

import re
from html.parser import HTMLParser

import pytest

from dpmerge.common.config.federation import load_federation
from dpmerge.common.errors import DpmergeError
from dpmerge.simulations.reporting.charts import SERIES, accuracy_chart
from dpmerge.simulations.reporting.report import render, write_report
from dpmerge.simulations.reporting.results import Accuracies, PartyResult, Results, write_results

HOSTILE = "<script>alert('x')</script> & $\\frac{1}$ \"{{ 7 * 7 }}"
VOID = {"meta", "br", "img", "hr", "link", "input"}


def row(name, **changes):
    defaults = {
        "task": "movie",
        "epsilon": 2.0,
        "delta": 1e-5,
        "noise_multiplier": 1.1,
        "num_test": 700,
        "accuracy": Accuracies(base=0.70, own=0.80, merged=0.78),
        "accuracy_se": Accuracies(base=0.02, own=0.02, merged=0.02),
        "accuracy_by_adapter": {"cinema": 0.8, "shop": 0.71},
        "drift": 3.0,
        "noise_share": 0.4,
        "sentence": f"What {name} promises.",
    }
    return PartyResult(party=name, **(defaults | changes))


def results(*parties, **changes):
    merge = {
        "method": "average",
        "coefficient": 0.5,
        "parties": ["cinema", "shop"],
        "norms": [3.125, 4.5],
        "overlap": [[1.0, 0.25], [0.25, 1.0]],
        "absent": [],
    }
    facts = {"config": {"base": {"model": "minilm-l6"}}, "versions": {"dpmerge": "0.1.0"}, "seconds": {"train": 61.0}}
    return Results(**(facts | {"merge": merge} | changes), parties=parties or (row("cinema"), row("shop")))


class Page(HTMLParser):
    """Checks that tags nest, and gathers text and attributes."""

    def __init__(self, text):
        super().__init__()
        self.open, self.words, self.tags, self.references = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.references += [value for key, value in attributes if key in ("src", "href", "xlink:href", "srcset")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def test_the_page_shows_what_was_found():
    page = Page(render(results()))
    for words in (
        "cinema",
        "80.0 ±2.0",
        "What shop promises.",
        "minilm-l6",
        "cinema 1 0.25",
        "norms cinema 3.125 shop 4.5",
        "absent –",
        "0:01:01",
        "mean",
        "40.0",
    ):
        assert words in page.text
    assert "svg" in page.tags


def test_the_page_needs_nothing_from_outside():
    text = render(results())
    page = Page(text)
    assert all(reference.startswith("#") for reference in page.references)
    assert not {"script", "link", "iframe", "img", "object"} & set(page.tags)
    assert set(re.findall(r"https?://[^\"'<\s]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert "url(" not in text.replace("url(#", "")


def test_hostile_text_stays_text_everywhere():
    everywhere = row(
        HOSTILE,
        task=HOSTILE,
        sentence=HOSTILE,
        accuracy_by_adapter={HOSTILE: 0.5},
        accuracy=Accuracies(base=0.1, own=0.2, merged=0.3),
    )
    failed = PartyResult(party="f", task="t", status="failed", reason=HOSTILE)
    nasty = {HOSTILE: HOSTILE, "list": [HOSTILE], "deep": {HOSTILE: {HOSTILE: HOSTILE}}}
    text = render(results(everywhere, failed, config=nasty, merge=nasty, versions={HOSTILE: HOSTILE}))
    page = Page(text)
    assert "script" not in page.tags
    assert "<script" not in text
    assert "alert('x')" in page.text
    assert "49" not in page.text


def test_stamps_say_what_must_not_be_missed():
    private = Page(render(results())).text
    for words in ("Not private:", "Reduced run.", "failed", "regression."):
        assert words not in private
    open_row = row("network", private=False, epsilon=None, noise_multiplier=None)
    failed = PartyResult(party="news", task="t", status="failed", reason="DPM-599: not told")
    worse = row("shop", accuracy=Accuracies(base=0.8, own=0.8, merged=0.5))
    late = PartyResult(party="bank", task="t", status="late", reason="no release by the deadline")
    text = Page(render(results(open_row, failed, late, worse, reduced=True, not_merged="1 of 4 releases"))).text
    for words in ("Not private: network", "Reduced run.", "news failed", "DPM-599: not told", "shop: regression."):
        assert words in text
    few = row("few", num_train=2, num_dropped=3, dropped=("3 x no label (first: line 4)",))
    told = Page(render(results(few))).text
    assert "Warning. few: 2 of 5 records can be used" in told
    assert "3 x no label (first: line 4)" in told
    for words in ("Nothing was merged. 1 of 4 releases", "bank late : not in the merged model. no release by the"):
        assert words in text


@pytest.mark.parametrize(
    "found",
    [
        results(PartyResult(party="x", task="t", status="failed", reason="DPM-203: no"), merge={}),
        results(PartyResult(party="x", task="t"), seconds={}, config={}, versions={}),
        results(row("x", accuracy=Accuracies(base=0.5, merged=0.4), drift=None, noise_share=None, sentence="")),
        results(row("x", drift=0.0, noise_share=0.0, epsilon=1e-9)),
    ],
    ids=["all failed", "nothing known", "no own", "zeros"],
)
def test_missing_numbers_are_dashes(found):
    assert "–" in Page(render(found)).text or found.parties[0].drift == 0.0


def test_the_report_is_made_from_the_stored_results_alone(tmp_path):
    write_results(tmp_path, results())
    path = write_report(tmp_path)
    assert path == tmp_path / "report.html"
    first = path.read_bytes()
    assert first.decode() == render(results())
    path.unlink()
    assert write_report(tmp_path).read_bytes() == first
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html", "results.csv", "results.json"]


def test_without_results_there_is_no_report(tmp_path):
    with pytest.raises(DpmergeError, match="DPM-303"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_whole_federation_fits_on_the_page(pytestconfig):
    federation = load_federation(pytestconfig.rootpath / "examples" / "five-organisations.toml")
    text = Page(render(results(config=federation.to_dict()))).text
    for words in ("learning_rate", "label-text", "newspaper", "editorial"):
        assert words in text


def test_the_chart_takes_ink_and_font_from_the_page():
    chart = accuracy_chart(results())
    assert "currentColor" in chart
    assert "#010203" not in chart
    assert "DejaVu" not in chart
    assert "<style" not in chart
    assert accuracy_chart(results()) == chart
    assert accuracy_chart(results(PartyResult(party="x", task="t"))) == ""


def test_the_chart_has_a_bar_for_every_number():
    for parties, groups in (([row("cinema")], 1), ([row("cinema"), row("shop")], 3)):  # the mean joins from two on
        chart = accuracy_chart(results(*parties))
        for colour in SERIES.values():
            assert chart.count(f"fill: {colour}") == groups + 1  # and one in the legend


def test_the_chart_shows_uncertainty():
    sure = results(row("cinema", accuracy_se=Accuracies(base=0.0, own=0.0, merged=0.0)))
    assert len(_upright_lines(accuracy_chart(results(row("cinema"))))) == 3
    assert _upright_lines(accuracy_chart(sure)) == set()


def _upright_lines(chart):
    """The error bars: strokes that go up or down by more than nothing."""
    pairs = re.findall(r'd="M ([\d.]+) ([\d.]+) \nL \1 ([\d.]+) \n" clip-path', chart)
    return {(x, low, high) for x, low, high in pairs if low != high}
