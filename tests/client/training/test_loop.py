"""The loop that `run_party` runs is the mechanism that is charged; defects planted in its source are caught."""

import pytest

from ..party.transcripts import record, released_through_the_mechanism_only, replay
from .loop import checks, defects, observe, report

CAUGHT_BY = {
    "noise x0.5": {"noise_is_gaussian", "answers_are_clipped_sums_with_noise"},
    "clipping off": {"noise_knows_no_direction", "answers_are_clipped_sums_with_noise"},
    "noise per physical batch": {"noise_is_gaussian", "what_was_charged_was_drawn"},
    "empty batch not noised": {"noise_is_gaussian", "what_was_charged_was_drawn"},
    "realised-batch normaliser": {"noise_is_gaussian", "answers_are_clipped_sums_with_noise"},
    "shuffled batches": {"samples_are_poisson"},
    "reused seed": {"keys_are_the_operating_systems", "runs_are_independent"},
    "ascent from the raw gradient": {"answers_are_clipped_sums_with_noise", "what_was_charged_was_drawn"},
    "non-private teacher": {"rows_are_the_records_own"},
    "norm over some layers only": {"answers_are_clipped_sums_with_noise"},
    "ascent's noise again for the descent": {"streams_are_independent", "what_was_charged_was_drawn"},
    "one key for sampler and noise": {"streams_are_independent", "keys_are_the_operating_systems"},
    "empty samples skipped": {"what_was_charged_was_drawn"},  # and in half of all runs by the samples' frequencies
    "sampler at 2q": {"samples_are_poisson"},
    "no noise at all": {"noise_is_gaussian", "what_was_charged_was_drawn"},
    "reused seed, every step": {"streams_are_independent", "keys_are_the_operating_systems"},
    "noise x0.98": {"noise_is_gaussian"},
    "noise x1.02": {"noise_is_gaussian"},
    "ascent's noise x0.98": {"answers_are_clipped_sums_with_noise"},
    "half the ascent's noise": {"noise_is_gaussian", "answers_are_clipped_sums_with_noise"},
    "clipped as a physical batch": {"noise_knows_no_direction", "answers_are_clipped_sums_with_noise"},
    "one step more than charged": {"what_was_charged_was_drawn"},
    "two samples charged as one": {"samples_are_poisson"},
    "a sample for several steps": {"samples_are_poisson"},
    "raw gradient in the step": {"noise_is_gaussian", "answers_are_clipped_sums_with_noise"},
    "weights that drift": {"weights_move_by_answers_alone"},
    "noise before the charge": {"what_was_charged_was_drawn"},
}
"""All checks run on every defect; these must be among those that raise an alarm."""

OFTEN = (*defects.PLANTED, "noise x0.98", "noise x1.02", "ascent's noise x0.98")
IN_TRANSCRIPTS = {
    "ascent from the raw gradient": "sam",
    "non-private teacher": "sat",
    "basis from private gradients": "sat-subspace",
    "clip norm from raw norms": "sat-subspace-quantile",
}


def test_the_real_loop_passes_every_check(tmp_path):
    found = checks.findings_of(report.loops(observe.FORMS, tmp_path))
    assert checks.alarms(found) == {}
    assert set(found) == {*checks.CHECKS, "runs_are_independent"}
    assert all(found.values())


@pytest.mark.parametrize(
    "defect", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in CAUGHT_BY]
)
def test_a_defect_in_the_loop_is_caught(defect, tmp_path):
    caught_by = report.caught_by(defect, tmp_path)
    assert set(caught_by) >= CAUGHT_BY[defect], caught_by


def test_fifteen_defects_are_planted_and_all_are_looked_for():
    assert len(defects.PLANTED) == 15
    assert set(CAUGHT_BY) == set(defects.ALL) - {defect.name for defect in defects.OF_SUBSPACES}
    raised = set.union(*CAUGHT_BY.values())
    assert raised == {*checks.CHECKS, "runs_are_independent"}  # no check that nothing ever fails


@pytest.mark.parametrize("defect", IN_TRANSCRIPTS)
def test_what_bypasses_the_mechanism_shows_in_the_transcript(defect, tmp_path):
    form = IN_TRANSCRIPTS[defect]
    with defects.planted(defect):
        first = record(tmp_path, form)
        second = replay(tmp_path, form, "replaced", first)
    with pytest.raises(AssertionError):
        released_through_the_mechanism_only(first, second)


@pytest.mark.slow
def test_a_clip_norm_that_the_query_did_not_name_is_caught(tmp_path):
    with defects.planted("clip norm from raw norms"):
        loops = report.loops(["subspace with a clip query"], tmp_path)
    assert "answers_are_clipped_sums_with_noise" in checks.alarms(checks.findings_of(loops))


def test_a_defect_whose_place_has_moved_is_not_left_unplanted(monkeypatch):
    gone = defects.Defect("gone", "training.train", "code that is not there", "")
    twice = defects.Defect("twice", "training.train", "sampler.sample()", "")
    monkeypatch.setattr(defects, "ALL", {"gone": gone, "twice": twice})
    for name in ("gone", "twice"):
        with pytest.raises(ValueError, match=r"once in client/training/train\.py"), defects.planted(name):
            pass


def test_planting_leaves_nothing_behind():
    from dpmerge.client.party import party
    from dpmerge.client.training import train

    before = [dict(vars(module)) for module in (party, train)]
    with defects.planted("sampler at 2q"):
        assert party.run_party is not before[0]["run_party"]
    assert [dict(vars(module)) for module in (party, train)] == before


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_false_alarms_are_rare_with_fresh_keys(real_keys):
    found = report.false_alarms(200)
    print(found)
    assert found["false_alarms"] == 0
