import dataclasses
import doctest
import math

import pytest

from dpmerge.common.errors import DpmergeError
from dpmerge.common.privacy import mechanism as module
from dpmerge.common.privacy.mechanism import Mechanism, mechanism_of, stated_values

BASE = {
    "noise_multiplier": 1.0,
    "l2_clip_norm": 1.0,
    "population": 2800,
    "expected_batch_size": 128,
    "num_steps": 40,
    "target_delta": 1e-5,
    "noise": "fast",
}


def make(**changes):
    return Mechanism(**{**BASE, **changes})


def test_docstring_examples():
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"population": 0}, "population = 0"),
        ({"population": 10**13}, "population"),
        ({"expected_batch_size": 2.5}, "expected_batch_size = 2.5"),
        ({"num_steps": True}, "num_steps = True"),
        ({"num_steps": 0}, "num_steps = 0"),
        ({"num_coordinates": -1}, "num_coordinates = -1"),
        ({"target_delta": 0.0}, "target_delta = 0.0"),
        ({"target_delta": 1}, "target_delta = 1"),
        ({"target_delta": math.nan}, "target_delta = nan"),
        ({"l2_clip_norm": 0.0}, "l2_clip_norm = 0.0"),
        ({"l2_clip_norm": math.inf}, "l2_clip_norm = inf"),
        ({"l2_clip_norm": None}, "l2_clip_norm = None"),
        ({"noise_multiplier": -1.0}, "noise_multiplier = -1.0"),
        ({"noise_multiplier": 10**400}, "noise_multiplier"),
        ({"noise_multiplier": "1"}, "noise_multiplier = '1'"),
        ({"noise_multiplier": 1.0, "private": False}, "noise_multiplier = 1.0"),
        ({"sharpness": "flat"}, "sharpness = 'flat'"),
        ({"sharpness": ["sam"]}, "sharpness"),
        ({"sharpness": "sam"}, "ascent_noise_multiplier = None"),
        ({"ascent_noise_multiplier": 1.0}, "ascent_noise_multiplier = 1.0"),
        ({"ascent_sampling": "separate"}, "ascent_sampling = 'separate'"),
        ({"privacy_unit": "row"}, "privacy_unit = 'row'"),
        ({"num_clip_queries": 2}, "num_clip_queries = 2"),
        ({"num_clip_queries": True}, "num_clip_queries = True"),
        ({"num_clip_queries": 1, "private": False, "noise_multiplier": 0}, "num_clip_queries = 1"),
        ({"noise": "secure"}, "num_coordinates = 0"),
        ({"noise": "secure", "num_coordinates": 1, "noise_multiplier": 0.06}, "noise_multiplier = 0.06"),
    ],
)
def test_a_refused_value_is_named(changes, named):
    with pytest.raises(DpmergeError, match="DPM-103") as refusal:
        make(**changes)
    assert named in refusal.value.problem


def test_batch_above_population_is_refused_with_both_numbers():
    with pytest.raises(DpmergeError, match=r"expected_batch_size = 200 is larger than population = 100"):
        make(population=100, expected_batch_size=200)


def test_no_noise_must_be_declared():
    with pytest.raises(DpmergeError, match="DPM-502"):
        make(noise_multiplier=0)
    open_training = make(noise_multiplier=0, private=False, l2_clip_norm=None)
    assert not open_training.private
    sam = make(noise_multiplier=0, private=False, sharpness="sam", ascent_noise_multiplier=0.0)
    assert sam.queries == ((0, 40),)


def test_sam_is_one_query_when_paired_and_two_when_separate():
    sam = {"sharpness": "sam", "noise_multiplier": 3.0, "ascent_noise_multiplier": 4.0}
    paired, separate = make(**sam), make(**sam, ascent_sampling="separate")
    assert paired.queries == ((pytest.approx(2.4), 40),)
    assert separate.queries == ((3.0, 40), (4.0, 40))
    assert make(**{**sam, "ascent_noise_multiplier": 3.0}, ascent_sampling="separate").queries == ((3.0, 80),)


def test_a_clip_query_is_one_more_of_the_descents_noise():
    assert make(num_clip_queries=1).queries == ((1.0, 41),)
    sam = {"sharpness": "sam", "noise_multiplier": 3.0, "ascent_noise_multiplier": 4.0, "num_clip_queries": 1}
    assert make(**sam).queries == ((pytest.approx(2.4), 40), (3.0, 1))
    assert make(**sam, ascent_sampling="separate").queries == ((3.0, 41), (4.0, 40))
    assert make(num_coordinates=7, num_clip_queries=1).num_noise_values == 287


def test_it_comes_back_from_what_is_stated_and_from_what_was_stated_before_there_were_clip_queries():
    plain, asks = make(), make(num_clip_queries=1)
    assert stated_values(asks) == {**stated_values(plain), "num_clip_queries": 1}
    assert mechanism_of(stated_values(plain)) == plain
    assert mechanism_of(stated_values(asks)) == asks
    with pytest.raises(KeyError):
        mechanism_of({})


def test_every_noise_value_is_counted():
    assert make(num_coordinates=7).num_noise_values == 280
    assert make(num_coordinates=7, sharpness="sam", ascent_noise_multiplier=1.0).num_noise_values == 560


def test_it_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().num_steps = 1
