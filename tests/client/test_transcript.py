"""Private records reach the release through the mechanism only, in every form of training."""

import pytest

from .transcripts import FORMS, NEIGHBOURS, record, released_through_the_mechanism_only, replay

OFTEN = ("none", "sat", "sat-momentum", "sam", "sat-subspace")


@pytest.mark.parametrize(
    "form", [form if form in OFTEN else pytest.param(form, marks=pytest.mark.slow) for form in FORMS]
)
def test_records_reach_the_release_through_the_mechanism_only(tmp_path, form):
    first = record(tmp_path, form)
    for neighbour in NEIGHBOURS:
        released_through_the_mechanism_only(first, replay(tmp_path, form, neighbour, first))
    assert len(first.points) == (8 if "sam" in form else 4)
    thetas = [state[0] for state in first.states]
    assert len(set(thetas)) == 5  # θ moved at every step
    descents = first.points[1::2] if "sam" in form else first.points
    is_perturbed = [point != theta for point, theta in zip(descents, thetas[:4], strict=True)]
    assert is_perturbed == [form.startswith("sam"), *[form != "none"] * 3]  # sat knows no direction at first
    bases = [state[-1] for state in first.states]
    if form.endswith("refreshed"):  # after two of the four steps
        assert len(set(bases)) == 2
