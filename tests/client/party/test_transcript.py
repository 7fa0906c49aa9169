"""Private records reach the release through the mechanism only, in every form of training."""

import json

import pytest

from .transcripts import FORMS, NEIGHBOURS, record, released_through_the_mechanism_only, replay

OFTEN = ("none", "sat", "sat-momentum", "sam", "sat-subspace-quantile")


@pytest.mark.parametrize(
    "form", [form if form in OFTEN else pytest.param(form, marks=pytest.mark.slow) for form in FORMS]
)
def test_records_reach_the_release_through_the_mechanism_only(tmp_path, form):
    first = record(tmp_path, form)
    for neighbour in NEIGHBOURS:
        released_through_the_mechanism_only(first, replay(tmp_path, form, neighbour, first))
    num_clip_queries = int("quantile" in form)
    points = first.points[num_clip_queries:]
    assert len(points) == (8 if "sam" in form else 4)
    thetas = [state[0] for state in first.states]
    assert len(set(thetas)) == 5  # θ moved at every step
    descents = points[1::2] if "sam" in form else points
    is_perturbed = [point != theta for point, theta in zip(descents, thetas[:4], strict=True)]
    assert is_perturbed == [form.startswith("sam"), *[form != "none"] * 3]  # sat knows no direction at first
    if num_clip_queries:
        told = json.loads(first.release["statement.json"])
        assert (told["num_clip_queries"], told["l2_clip_norm"] == told["subspace"]["clip_middle"]) == (1, False)
    bases = [state[-1] for state in first.states]
    if form.endswith("refreshed"):  # after two of the four steps
        assert len(set(bases)) == 2
