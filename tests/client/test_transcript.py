"""Private records reach the release through the mechanism only, in every form of training."""

import pytest

from .transcripts import NEIGHBOURS, record, released_through_the_mechanism_only, replay


@pytest.mark.parametrize("sharpness", ["none", "sat", "sat-momentum", "sam"])
def test_records_reach_the_release_through_the_mechanism_only(tmp_path, sharpness):
    first = record(tmp_path, sharpness)
    for neighbour in NEIGHBOURS:
        released_through_the_mechanism_only(first, replay(tmp_path, sharpness, neighbour, first))
    assert len(set(first.answers)) == len(first.points) == (8 if sharpness == "sam" else 4)
    assert first.states[0][0] != first.states[-1][0]  # θ moved
    unperturbed = [state[0] for state in first.states[:4]]
    asked_at = first.points[1::2] if sharpness == "sam" else first.points
    assert [one == two for one, two in zip(asked_at, unperturbed, strict=True)] == {
        "none": [True, True, True, True],
        "sat": [True, False, False, False],  # no direction is known before the first answer
        "sat-momentum": [True, False, False, False],
        "sam": [False, False, False, False],
    }[sharpness]
