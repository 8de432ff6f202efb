"""Engine mismatch and staleness are measured separately, and the measurement changes no weight."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.run import keys
from pipeline.run.commit import read_commit
from pipeline.traces import Sample
from tests.attempts import make_attempt
from tests.exhaustive import sample_or_all
from tests.integration.training_replay.sealed import STALE, config_of, make_run
from tests.integration.training_replay.test_training_loop import metrics_of, train

pytestmark = pytest.mark.integration

APART = 0.8
"""How much lower the engine's log-probs are than those of its weights; e^0.8 is above 2."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2-vpp2": {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
    },
    "tp2-bf16": {"tensor_model_parallel_size": 2, "dtype": "bfloat16"},
    "dp2-bf16": {"dtype": "bfloat16"},
}


def lowered(_: int, samples: list[Sample]) -> list[Sample]:
    """Return samples whose log-probs from the engine are lower by a known amount."""
    return [replace(one, logprobs_G=one.logprobs_G - np.float32(APART)) for one in samples]


@pytest.mark.parametrize("layout", sample_or_all(["tp2-bf16"], list(LAYOUTS)))
def test_two_known_distances_are_measured_separately(tmp_path: Path, tiny_model: Path, layout: str):
    """The engine mismatch is the known amount, and staleness is the effect of one training step.

    A second run provides the expected staleness. There, the engine's log-probs are exactly those of
    policy 0, so the native KL in step 1 is the staleness. Its settings do not allow staleness, so
    it has no additional pass. Both runs train the same weights: the older weights leave no trace.
    """
    settings = {"router_replay": {"mode": "R3", "native_every": 1}, "megatron": LAYOUTS[layout]}
    plain = make_run(tmp_path / "plain", tiny_model, config_of(**settings), 2)
    config = config_of(**settings, **STALE)
    stale = make_run(tmp_path / "stale", tiny_model, config, 2, change=lowered)
    for store in (plain, stale):
        make_attempt(store, 0, steps=2, on_unhealthy="warn")
        train(store, ranks=2)
    expected, found = metrics_of(plain, 1), metrics_of(stale, 1)
    loose = {"rel": 0.05} if layout.endswith("bf16") else {"rel": 1e-3}
    assert found["mismatch/kl_engine"] == pytest.approx(np.exp(APART) - APART - 1, **loose)
    assert found["mismatch/extreme_share_engine"] == 1
    assert found["mismatch/kl_staleness"] == pytest.approx(expected["mismatch/kl_native"], **loose)
    share = expected["mismatch/extreme_share_native"]
    assert found["mismatch/extreme_share_staleness"] == pytest.approx(share, abs=0.02)
    assert found["mismatch/kl_staleness"] > 1e-6
    assert found["mismatch/kl_native"] > 10 * found["mismatch/kl_staleness"]
    assert found["timing_s/older_log_prob"] > 0
    for metrics in (metrics_of(stale, 0), *(metrics_of(plain, step) for step in range(2))):
        names = ("kl_engine", "kl_staleness", "extreme_share_engine", "extreme_share_staleness")
        assert {metrics[f"mismatch/{name}"] for name in names} == {None}
        assert metrics["timing_s/older_log_prob"] is None
    for version in (1, 2):
        weights = [read_commit(s, keys.policy(version))["weights_sha256"] for s in (plain, stale)]
        assert weights[0] == weights[1]
