"""`dpmerge report`: the page from stored results, and a folder without any."""

from dpmerge.simulations.reporting.results import Accuracies, PartyResult, Results, write_results

FINE = PartyResult(party="shop", task="movie", epsilon=1.0, accuracy=Accuracies(base=0.5, own=0.7, merged=0.6))


def test_report_rebuilds_the_page(dpmerge, tmp_path):
    write_results(
        tmp_path, Results(config={}, versions={}, merge={"method": "average"}, seconds={"train": 1.0}, parties=(FINE,))
    )
    assert dpmerge("report", tmp_path) == (0, f"{tmp_path / 'report.html'}\n", "")
    assert (tmp_path / "report.html").exists()
    code, out, err = dpmerge("report", tmp_path / "elsewhere")
    assert (code, out) == (2, "")
    assert err.startswith("DPM-303")
