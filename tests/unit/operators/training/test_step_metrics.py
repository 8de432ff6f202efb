"""Metrics of a step over its ranks and passes."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from operators.training.measured import reduced
from operators.training.passes.compared import Compared
from operators.training.passes.update import Updates
from operators.training.replay.counts import LayerCounts
from operators.training.step_metrics import (
    CRITIC,
    RankReport,
    critic_metrics,
    measured_advantages,
    measured_finish_reasons,
    measured_mismatch,
    measured_values,
    mismatch_of,
    policy_metrics,
    replay_metrics,
    total_counts,
)
from pipeline.metrics.metric import layers_of
from pipeline.rl.mismatch import Mismatch
from tests.integration.training_replay.sealed import config_of


def test_counts_of_ranks_add_up_for_each_layer():
    """Passes are counted separately, so that the log-prob pass cannot hide errors in an update."""
    of_ranks = [{1: LayerCounts(3, 1, 2, 3)}, {1: LayerCounts(5, 0, 1, 4)}]
    of_ranks += [{2: LayerCounts(8, 1, 3, 4)}]
    reports = [RankReport(counts={"log-prob pass": c, "update epoch 0": {}}) for c in of_ranks]
    of_passes = total_counts([*reports, RankReport()])
    assert of_passes["update epoch 0"] == {}
    total = of_passes["log-prob pass"]
    assert total == {1: LayerCounts(8, 1, 3, 7), 2: LayerCounts(8, 1, 3, 4)}
    metrics = replay_metrics({f"{CRITIC}values": {1: LayerCounts(1, 1, 0, 0)}, **of_passes})
    assert layers_of(metrics, "replay/agreement") == {1: 7 / 8, 2: 0.5}
    assert metrics["replay/rows"] == 8
    assert metrics["replay/coverage"] == 8 / 9
    assert metrics["replay/agreement"] == 11 / 16
    critics = {f"{CRITIC}values": total}
    assert set(replay_metrics(critics).values()) == {None}


def test_losses_are_means_over_the_tokens_of_all_ranks():
    """A loss is the mean over tokens, averaged over mini-batches; one rank reports nothing."""
    of_ranks: list[list[dict[str, float]]] = [
        [{"tokens": 2.0, "divisor": 2.0, "policy": 4.0}] * 2,
        [],
        [{"tokens": 6.0, "divisor": 6.0, "policy": 0.0}] * 2,
    ]
    metrics = policy_metrics(of_ranks, Updates(grad_norms=[1.0, 3.0], lr=1e-5, skipped=1, empty=2))
    assert metrics["actor/pg_loss"] == 0.5
    assert metrics["actor/grad_norm"] == 2.0
    assert metrics["actor/kl_loss"] is None
    assert (metrics["actor/lr"], metrics["update/skipped"]) == (1e-5, 1)
    assert metrics["update/skipped_empty"] == 2


def test_each_number_of_the_updates_has_its_own_divisor():
    """Losses are divided by the divisor of the policy loss, all others by the number of tokens."""
    sums = {"tokens": 8.0, "divisor": 2.0, "policy": 3.0, "kl": 5.0, "entropy": 6.0}
    sums |= {"clipped": 1.0, "dual_clipped": 4.0, "log_ratio": 2.0, "high": 7.0}
    empty = dict.fromkeys(sums, 0.0)
    metrics = policy_metrics([[sums], [empty]], Updates())
    expected = {
        "actor/pg_loss": 3 / 2,
        "actor/kl_loss": 5 / 2,
        "actor/entropy": 6 / 8,
        "actor/pg_clipfrac": 1 / 8,
        "actor/pg_clipfrac_lower": 4 / 8,
        "actor/ppo_kl": -2 / 8,
        "policy_loss/high": 7 / 8,
        "actor/tokens": 8,
    }
    assert {name: metrics[name] for name in expected} == expected


def test_what_a_users_loss_does_not_report_on_a_rank_counts_as_0():
    """A mini-batch in which no rank reports the number is left out of its mean."""
    high, low = {"tokens": 2.0, "divisor": 2.0, "high": 1.0}, {"tokens": 6.0, "divisor": 6.0}
    metrics = policy_metrics([[high, low], [low, low]], Updates())
    assert metrics["policy_loss/high"] == 1 / 8


def test_the_mismatch_covers_only_tokens_that_count():
    """One token of each sample is excluded from the loss; the log-probs of these tokens differ by 5
    and by 8."""
    samples = {
        "a": SimpleNamespace(
            loss_mask_G=np.array([True, False, True]),
            logprobs_G=np.array([-1.0, -6.0, -2.0], np.float32),
        ),
        "b": SimpleNamespace(
            loss_mask_G=np.array([False, True]), logprobs_G=np.array([-9.0, -1.5], np.float32)
        ),
    }
    logprobs = {
        "a": np.array([-1.0, -1.0, -2.0], np.float32),
        "b": np.array([-1.0, -0.5], np.float32),
    }
    data = SimpleNamespace(samples=samples)
    found = mismatch_of(data, logprobs)
    assert (found.tokens, found.extreme) == (3, 1)
    assert found.kl_sum == pytest.approx(np.e - 2)
    assert mismatch_of(data, logprobs, logprobs) == Mismatch(3, 0.0, 0)


def test_each_distance_has_its_own_kl_and_share():
    """The distances of two ranks add up, and a rank without samples reports none."""

    def numbers(*values: float) -> dict[str, Any]:
        return {"a": np.array(values, np.float32)}

    sample = SimpleNamespace(loss_mask_G=np.array([True, True]), logprobs_G=numbers(-1, -2)["a"])
    data: Any = SimpleNamespace(samples={"a": sample})
    trained, native, older = numbers(-1, -1), numbers(0, -2), numbers(-2, -3)
    of_rank = measured_mismatch(data, trained, native, older)
    metrics = reduced([of_rank, {}, of_rank])
    up, down = np.e - 2, np.exp(-1)
    for name, kl, share in (
        ("", up / 2, 0.5),
        ("_native", up / 2, 0.5),
        ("_engine", down, 1.0),
        ("_staleness", (np.exp(2) - 3 + up) / 2, 1.0),
    ):
        assert metrics[f"mismatch/kl{name}"] == pytest.approx(kl)
        assert metrics[f"mismatch/extreme_share{name}"] == share
    unknown = reduced([measured_mismatch(data, None, None, older)])
    known = {"mismatch/kl_engine", "mismatch/extreme_share_engine"}
    assert {name for name, value in unknown.items() if value is not None} == known
    assert unknown.keys() == metrics.keys()


def test_finish_reasons_add_up_over_ranks():
    of_ranks = [Counter(stop=5, length=2), Counter(length=1, abort=1), Counter()]
    for masked, expected in ((False, 1), (True, 4)):
        config = config_of(algorithm={"mask_truncated_samples": masked})
        metrics = reduced([measured_finish_reasons(reasons, config) for reasons in of_ranks])
        assert metrics["response_length/clip_ratio"] == 3 / 9
        assert metrics["response/aborted_ratio"] == 1 / 9
        assert metrics["response/masked"] == expected


def test_advantages_cover_only_tokens_in_the_loss():
    mask = {"a": np.array([True, False, True]), "b": np.array([False])}
    advantages = {"a": np.array([1, 9, -2], np.float32), "b": np.array([9], np.float32)}
    metrics = reduced([measured_advantages(Compared({}, None, advantages, mask))])
    found = [metrics[f"critic/advantages/{name}"] for name in ("mean", "max", "min")]
    assert found == [-0.5, 1.0, -2.0]


def test_a_step_whose_mini_batches_were_all_skipped_has_no_losses():
    metrics = policy_metrics([[], []], Updates())
    assert (metrics["actor/grad_norm"], metrics["actor/pg_loss"], metrics["actor/tokens"]) == (
        None,
        None,
        0,
    )


def critic_of(values_T: np.ndarray, returns_T: np.ndarray) -> Compared:
    """A rank's sample, in which the loss leaves out an additional last token."""
    values, returns = ({"a": np.append(of_T, 99.0)} for of_T in (values_T, returns_T))
    mask = {"a": np.append(np.ones(len(values_T), bool), False)}
    return Compared({}, None, mask=mask, values=values, returns=returns)


def test_the_critics_values_cover_the_tokens_of_all_ranks():
    """Of four ranks, two have different numbers of tokens, one reports nothing, and one has no
    tokens."""
    values, returns = np.random.default_rng(0).normal(3, 2, (2, 100)).astype(np.float32)
    parts = [slice(30), slice(30, None), slice(0)]
    of_ranks = [measured_values(critic_of(values[part], returns[part])) for part in parts]
    found = reduced([*of_ranks, {}])
    values, returns = values.astype(np.float64), returns.astype(np.float64)
    explained = 1 - (returns - values).var(ddof=1) / (returns.var(ddof=1) + 1e-5)
    assert found["critic/vf_explained_var"] == pytest.approx(explained)
    for name, array in (("values", values), ("returns", returns)):
        for how in ("mean", "max", "min"):
            assert found[f"critic/{name}/{how}"] == pytest.approx(getattr(array, how)())
    nothing = reduced(of_ranks[2:])
    assert nothing == dict.fromkeys(found)


def test_the_critics_losses_are_means_over_mini_batches():
    sums = [
        {"vf_loss": 4.0, "vf_clipped": 1.0, "vpred": 8.0, "tokens": 10.0, "divisor": 2.0},
        {"vf_loss": 9.0, "vf_clipped": 0.0, "vpred": 6.0, "tokens": 10.0, "divisor": 3.0},
    ]
    updates = Updates(grad_norms=[1.0, 3.0], lr=1e-5, skipped=1, empty=2)
    assert critic_metrics([sums, [], sums], updates, {}) == {
        "critic/vf_loss": pytest.approx((8 / 4 + 18 / 6) / 2),
        "critic/vf_clipfrac": pytest.approx((2 / 20 + 0) / 2),
        "critic/vpred_mean": pytest.approx((16 / 20 + 12 / 20) / 2),
        "critic/grad_norm": 2,
        "critic/lr": 1e-5,
        "critic/skipped": 1,
        "critic/skipped_empty": 2,
        "critic/replay/coverage": 0,
        "critic/replay/agreement": None,
    }
    nothing = critic_metrics([[]], Updates(), {})
    assert nothing["critic/vf_loss"] is nothing["critic/grad_norm"] is None


def test_the_critics_replay_metrics_cover_its_first_pass():
    """The metrics cover all layers of this pass, but none of the policy's passes."""
    passes = {
        "log-prob pass": {0: LayerCounts(5, 5, 0, 5)},
        f"{CRITIC}values": {0: LayerCounts(8, 2, 3, 6), 1: LayerCounts(8, 2, 3, 4)},
        f"{CRITIC}epoch 0": {0: LayerCounts(1, 0, 0, 0)},
    }
    found = critic_metrics([], Updates(), passes)
    assert found["critic/replay/coverage"] == 0.8
    assert found["critic/replay/agreement"] == 10 / 16
