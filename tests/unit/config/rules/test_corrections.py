"""Corrections are parsed, presets are expanded, and the error for each contradiction names a
fix."""

import pytest

from pipeline.rl.corrections.forms import PRESETS, Bounds, Correction, Rejection
from tests.unit.config.settings import ACTOR, REPLAY, ROLLOUT, load, load_error, notes, problems

KEY = "algorithm.rollout_correction"


def written(**settings: object) -> list[str]:
    return [f"{KEY}.{name}={value}" for name, value in settings.items()]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_sets_all_its_settings_and_contradicts_none(tmp_path, preset):
    config = load(tmp_path, *written(preset=preset)).config
    found = config.algorithm.rollout_correction
    assert {name: getattr(found, name) for name in PRESETS[preset]} == PRESETS[preset]
    assert problems(tmp_path, *written(preset=preset)) == []
    assert found.corrects == (preset != "disabled")
    again = type(config).model_validate(config.model_dump(mode="json"))
    assert again == config  # run.json contains the preset and its settings


def test_thresholds_of_a_preset_may_be_set(tmp_path):
    settings = written(preset="decoupled_seq_is_rs", rollout_is_threshold=3, rollout_rs_threshold=4)
    assert problems(tmp_path, *settings) == []
    correction = load(tmp_path, *settings).config.algorithm.rollout_correction.correction
    assert correction.bounds == Bounds(None, 3.0)
    assert correction.rejections[0].bounds.upper == pytest.approx(1.3862943611)


def test_settings_in_verls_notation_are_parsed(tmp_path):
    """The notation allows one number, two numbers in one string, comma-separated criteria and
    thresholds, and null for unused settings."""
    settings = written(
        rollout_is="token",
        rollout_is_threshold="0.5_5.0",
        rollout_rs='"token_k2,seq_mean_k3"',
        rollout_rs_threshold='"0.5,0.01"',
    )
    found = load(tmp_path, *settings).config.algorithm.rollout_correction.correction
    assert found == Correction(
        "token",
        Bounds(0.5, 5.0),
        rejections=(
            Rejection("token_k2", Bounds(None, 0.5)),
            Rejection("seq_mean_k3", Bounds(None, 0.01)),
        ),
    )
    nothing = written(
        rollout_is="null",
        rollout_is_threshold="null",
        rollout_rs="null",
        rollout_rs_threshold="null",
    )
    assert problems(tmp_path, *nothing) == []
    assert load(tmp_path, *nothing).config.algorithm.rollout_correction.correction == Correction()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"preset": "decoupled_seq_rs"}, "preset: found 'decoupled_seq_rs', expected one of dis"),
        ({"preset": "bypass_ppo_clip", "bypass_mode": False}, "bypass_mode: found False, but"),
        ({"preset": "decoupled_token_is", "rollout_is": "null"}, "rollout_is: found null, but"),
        ({"rollout_is_threshold": "a_b"}, "rollout_is_threshold: found 'a_b', expected a number"),
        ({"rollout_is": "token", "rollout_is_threshold": 0.55}, "rollout_is_threshold: found 0.55"),
        ({"rollout_is": "token", "rollout_is_threshold": "2.0_5.0"}, "rollout_is_threshold: found"),
        ({"rollout_is": "token", "rollout_is_threshold": "null"}, "rollout_is_threshold: found n"),
        ({"rollout_rs": "geometric", "rollout_rs_threshold": 2}, "rollout_rs: found 'geometric'"),
        ({"rollout_rs": "token_k1"}, "rollout_rs_threshold: found null, but"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.5_2.0"}, "rollout_rs_threshold: f"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "1.1_2.0"}, "rollout_rs_threshold: f"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": 0.5}, "rollout_rs_threshold: found 0"),
        ({"rollout_rs_threshold": 2.0}, "rollout_rs_threshold: found 2.0, but nothing is rejected"),
        ({"rollout_is_batch_normalize": True}, "rollout_is_batch_normalize: found True, but no w"),
        ({"loss_type": "reinforce"}, "loss_type: found reinforce, but this loss requires bypass"),
        ({"bypass_mode": True, "rollout_is": "token"}, "rollout_is: found token, but with bypass"),
        (
            {"preset": "bypass_pg_is", "rollout_is_batch_normalize": True},
            "rollout_is_batch_normalize: found True, but with bypass_mode",
        ),
    ],
)
def test_contradictions_are_refused(tmp_path, settings, expected):
    (problem,) = problems(tmp_path, *written(**settings))
    assert problem.startswith(f"{KEY}.{expected}")
    assert any(word in problem for word in ("write", "correct", "leave", "did you mean", "default"))


def test_a_name_unlike_all_others_has_no_nearest(tmp_path):
    (problem,) = problems(tmp_path, *written(preset="strict"))
    assert problem.endswith("bypass_pg_geo_rs_token_tis; write one of these")


def test_names_from_older_versions_of_verl_are_known(tmp_path):
    (problem,) = problems(tmp_path, *written(rollout_rs="geometric", rollout_rs_threshold=1.01))
    assert problem.endswith("did you mean seq_mean_k1?")
    for old, now in (("ppo_is_bypass", "bypass_ppo_clip"), ("bypass_pg_rs", "bypass_pg_geo_rs")):
        (problem,) = problems(tmp_path, *written(preset=old))
        assert problem.endswith(f"did you mean {now}?")
    (problem,) = load_error(tmp_path, *written(rollout_rs_threshold_lower=0.5))
    assert "give both bounds in rollout_rs_threshold, such as 0.5_2.0" in problem


@pytest.mark.parametrize("threshold", ["0", "1", "-1"])
def test_a_veto_threshold_is_a_small_ratio(tmp_path, threshold):
    (problem,) = load_error(tmp_path, *written(rollout_token_veto_threshold=threshold))
    assert "expected a number > 0 and < 1 or null" in problem


def test_bypass_is_refused_with_r2_which_needs_the_skipped_pass(tmp_path):
    bypass = written(preset="bypass_ppo_clip")
    (problem,) = problems(tmp_path, *bypass, f"{REPLAY}.mode=R2")
    assert problem.startswith(f"{KEY}.bypass_mode: found True, but")
    assert "write R3 or disabled" in problem


def test_reinforce_replaces_the_policy_loss(tmp_path):
    gspo = f"{ACTOR}.policy_loss.loss_mode=gspo"
    assert problems(tmp_path, gspo, *written(preset="bypass_ppo_clip")) == []
    (problem,) = problems(tmp_path, gspo, *written(preset="bypass_pg_is"))
    assert problem.startswith(f"{ACTOR}.policy_loss.loss_mode: found gspo, but")


@pytest.mark.parametrize(
    ("settings", "noted"),
    [
        ({"rollout_is_threshold": 3.0}, True),
        ({"preset": "decoupled_k3_rs", "rollout_is_threshold": 3.0}, True),
        ({"rollout_is_threshold": 2.0}, False),
        ({"rollout_is_threshold": "null"}, False),
        ({"rollout_is_threshold": 3.0, "rollout_is": "token"}, False),
    ],
)
def test_a_threshold_without_weights_is_noted(tmp_path, settings, noted):
    key = f"{KEY}.rollout_is_threshold"
    found = [note for note in notes(tmp_path, *written(**settings)) if note.startswith(key)]
    assert found == [f"{key}: 3.0 has no effect without {KEY}.rollout_is"] * noted


class TestStaleness:
    """Samples from an older policy require a correction, unless a setting waives this."""

    STALE = "trainer.max_staleness=1"

    def test_staleness_without_a_correction_is_refused(self, tmp_path):
        for nothing in ([], written(preset="disabled")):
            (problem,) = problems(tmp_path, self.STALE, *nothing)
            assert problem.startswith("trainer.max_staleness: found 1, but nothing corrects")
            assert f"{KEY}.uncorrected_staleness=True" in problem

    @pytest.mark.parametrize(
        ("settings", "loss", "why", "fix"),
        [
            ({"bypass_mode": True, "loss_type": "reinforce"}, "vanilla",
             "loss_type=reinforce has no weights", "rollout_is=token (or rollout_rs), or"),
            ({"bypass_mode": True}, "gpg", "policy_loss.loss_mode=gpg has no ratio",
             "bypass_mode=False with rollout_is=token, or"),
            ({"rollout_token_veto_threshold": 1e-4}, "vanilla",
             "rejects only sequences with an extreme token", "(or rollout_rs, or bypass_mode), or"),
        ],
    )  # fmt: skip
    def test_the_problem_names_the_setting_that_is_not_enough(
        self, tmp_path, settings, loss, why, fix
    ):
        """The message proposes only settings that the other settings permit."""
        mode = f"{ACTOR}.policy_loss.loss_mode={loss}"
        (problem,) = problems(tmp_path, self.STALE, mode, *written(**settings))
        assert why in problem
        assert fix in problem

    def test_a_veto_alone_corrects_nothing(self, tmp_path):
        """A veto rejects only the few sequences with an extreme token."""
        veto = written(rollout_token_veto_threshold=1e-4)
        for loss in ("vanilla", "gpg"):
            mode = f"{ACTOR}.policy_loss.loss_mode={loss}"
            (problem,) = problems(tmp_path, self.STALE, mode, *veto)
            assert problem.startswith("trainer.max_staleness: found 1, but nothing corrects")
        log_probs = f"{ROLLOUT}.calculate_log_probs=False"
        assert len(load_error(tmp_path, log_probs, *veto)) == 1  # but the veto reads log-probs

    @pytest.mark.parametrize(
        ("settings", "noted"),
        [
            ({}, True),
            ({"rollout_is": "token"}, False),
            ({"bypass_mode": True}, False),
            ({"bypass_mode": True, "loss_type": "reinforce"}, True),
        ],
    )
    def test_rejection_of_stale_samples_without_weights_is_noted(self, tmp_path, settings, noted):
        key = f"{KEY}.rollout_rs"
        rejection = written(rollout_rs="seq_mean_k3", rollout_rs_threshold=0.01, **settings)
        found = [n for n in notes(tmp_path, self.STALE, *rejection) if n.startswith(f"{key}: ")]
        assert [f"without weights ({KEY}.rollout_is)" in note for note in found] == [True] * noted
        fresh = notes(tmp_path, *rejection)
        assert not any(note.startswith(f"{key}: ") for note in fresh)

    def test_weights_correct_a_loss_without_a_ratio(self, tmp_path):
        gpg = f"{ACTOR}.policy_loss.loss_mode=gpg"
        assert problems(tmp_path, self.STALE, gpg, *written(rollout_is="token")) == []

    @pytest.mark.parametrize(
        "settings",
        [
            {"rollout_is": "token"},
            {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01},
            {"bypass_mode": True},
            {"uncorrected_staleness": True},
        ],
    )
    def test_staleness_with_a_correction_or_permission_is_accepted(self, tmp_path, settings):
        assert problems(tmp_path, self.STALE, *written(**settings)) == []

    @pytest.mark.parametrize(
        ("settings", "noted"),
        [
            ([], "True has no effect without trainer.max_staleness=1"),
            (
                [STALE, f"{KEY}.rollout_is=token"],
                "True has no effect, because samples of an",
            ),
            ([STALE], None),
            ([STALE, f"{KEY}.rollout_token_veto_threshold=1e-4"], None),
        ],
    )
    def test_a_permission_without_effect_is_noted(self, tmp_path, settings, noted):
        stated = f"{KEY}.uncorrected_staleness"
        found = [n for n in notes(tmp_path, f"{stated}=True", *settings) if n.startswith(stated)]
        assert [note.startswith(f"{stated}: {noted}") for note in found] == [True] * bool(noted)
