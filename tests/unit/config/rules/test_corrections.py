"""Corrections are read, presets expand, and contradictions are refused with what to write."""

import json

import pytest

from pipeline.config.keys import value_at
from pipeline.config.stored import read_stored
from pipeline.rl.corrections.forms import Bounds, Correction, Rejection
from pipeline.rl.corrections.presets import PRESETS
from tests.paths import ROOT
from tests.unit.config.settings import ACTOR, REPLAY, load, load_error, problems

KEY = "algorithm.rollout_correction"


def written(**settings: object) -> list[str]:
    return [f"{KEY}.{name}={value}" for name, value in settings.items()]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_sets_all_it_means_and_contradicts_nothing(tmp_path, preset):
    config = load(tmp_path, *written(preset=preset)).config
    found = config.algorithm.rollout_correction
    assert {name: getattr(found, name) for name in PRESETS[preset]} == PRESETS[preset]
    assert problems(tmp_path, *written(preset=preset)) == []
    assert found.corrects == (preset != "disabled")
    again = type(config).model_validate(config.model_dump(mode="json"))
    assert again == config  # run.json holds the preset and what it means


def test_thresholds_of_a_preset_may_be_written(tmp_path):
    settings = written(preset="decoupled_seq_is_rs", rollout_is_threshold=3, rollout_rs_threshold=4)
    assert problems(tmp_path, *settings) == []
    correction = load(tmp_path, *settings).config.algorithm.rollout_correction.correction
    assert correction.bounds == Bounds(None, 3.0)
    assert correction.rejections[0].bounds.upper == pytest.approx(1.3862943611)


def test_settings_as_verl_writes_them(tmp_path):
    """A lone number, two in one text, forms and thresholds between commas; null where unused."""
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
        ({"rollout_is": "token", "rollout_is_threshold": "0.5_5"}, "rollout_is_threshold: found 0"),
        ({"rollout_is": "token", "rollout_is_threshold": "2.0_5.0"}, "rollout_is_threshold: found"),
        ({"rollout_is": "token", "rollout_is_threshold": "null"}, "rollout_is_threshold: found n"),
        ({"rollout_rs": "geometric", "rollout_rs_threshold": 2}, "rollout_rs: found 'geometric'"),
        ({"rollout_rs": "token_k1"}, "rollout_rs_threshold: found null, but"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.5_2.0"}, "rollout_rs_threshold: f"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "1.1_2.0"}, "rollout_rs_threshold: f"),
        ({"rollout_rs_threshold": 2.0}, "rollout_rs_threshold: found 2.0, but nothing is rejected"),
        ({"rollout_is_batch_normalize": True}, "rollout_is_batch_normalize: found True, but there"),
        ({"loss_type": "reinforce"}, "loss_type: found reinforce, but it belongs to bypass_mode"),
        ({"bypass_mode": True, "rollout_is": "token"}, "rollout_is: found token, but with bypass"),
        (
            {"preset": "bypass_pg_is", "rollout_is_batch_normalize": True},
            "rollout_is_batch_normalize: found True, but with bypass_mode",
        ),
    ],
)
def test_contradictions(tmp_path, settings, expected):
    (problem,) = problems(tmp_path, *written(**settings))
    assert problem.startswith(f"{KEY}.{expected}")
    assert any(word in problem for word in ("write", "correct", "leave", "did you mean", "default"))


def test_names_of_older_versions_of_verl_are_known(tmp_path):
    (problem,) = problems(tmp_path, *written(rollout_rs="geometric", rollout_rs_threshold=1.01))
    assert problem.endswith("did you mean seq_mean_k1?")
    for old, now in (("ppo_is_bypass", "bypass_ppo_clip"), ("bypass_pg_rs", "bypass_pg_geo_rs")):
        (problem,) = problems(tmp_path, *written(preset=old))
        assert problem.endswith(f"did you mean {now}?")
    (problem,) = load_error(tmp_path, *written(rollout_rs_threshold_lower=0.5))
    assert "write both in rollout_rs_threshold, such as 0.5_2.0" in problem


@pytest.mark.parametrize("threshold", ["0", "1", "-1"])
def test_a_veto_is_a_small_ratio(tmp_path, threshold):
    (problem,) = load_error(tmp_path, *written(rollout_token_veto_threshold=threshold))
    assert "expected a number > 0 and < 1 or null" in problem


def test_bypass_has_no_pass_that_r2_could_record(tmp_path):
    bypass = written(preset="bypass_ppo_clip")
    (problem,) = problems(tmp_path, *bypass, f"{REPLAY}.mode=R2")
    assert problem.startswith(f"{KEY}.bypass_mode: found True, but")
    assert "write R3 or disabled" in problem


def test_reinforce_is_a_loss_of_its_own(tmp_path):
    gspo = f"{ACTOR}.policy_loss.loss_mode=gspo"
    assert problems(tmp_path, gspo, *written(preset="bypass_ppo_clip")) == []
    (problem,) = problems(tmp_path, gspo, *written(preset="bypass_pg_is"))
    assert problem.startswith(f"{ACTOR}.policy_loss.loss_mode: found gspo, but")


class TestStaleness:
    """Samples of an older policy are not trained on as if they were the policy's own, unless a
    setting says so."""

    STALE = "trainer.max_staleness=1"

    def test_without_a_correction_it_is_refused(self, tmp_path):
        for nothing in ([], written(preset="disabled")):
            (problem,) = problems(tmp_path, self.STALE, *nothing)
            assert problem.startswith("trainer.max_staleness: found 1, but nothing corrects")
            assert f"{KEY}.uncorrected_staleness=True" in problem

    def test_reinforce_without_weights_corrects_nothing(self, tmp_path):
        settings = written(bypass_mode=True, loss_type="reinforce")
        (problem,) = problems(tmp_path, self.STALE, *settings)
        assert problem.startswith("trainer.max_staleness")

    def test_a_loss_without_a_ratio_gains_nothing_by_bypass(self, tmp_path):
        gpg = f"{ACTOR}.policy_loss.loss_mode=gpg"
        (problem,) = problems(tmp_path, self.STALE, gpg, *written(bypass_mode=True))
        assert problem.startswith("trainer.max_staleness")
        assert problems(tmp_path, self.STALE, gpg, *written(rollout_is="token")) == []

    @pytest.mark.parametrize(
        "settings",
        [
            {"rollout_is": "token"},
            {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01},
            {"rollout_token_veto_threshold": 1e-4},
            {"bypass_mode": True},
            {"uncorrected_staleness": True},
        ],
    )
    def test_with_one_or_stated_it_is_not(self, tmp_path, settings):
        assert problems(tmp_path, self.STALE, *written(**settings)) == []

    def test_runs_that_were_there_before_go_on(self):
        run = json.loads((ROOT / "tests/data/quickstart-0.1.0/run.json").read_text())
        old = read_stored(run["config"], "run.json")
        assert value_at(old, f"{KEY}.uncorrected_staleness") is True
