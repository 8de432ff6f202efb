"""When a step's routes are refused, on counts alone."""

import numpy as np

from operators.training.replay.counts import LayerCounts
from operators.training.replay.health import LEAST_ROWS, LEAST_TOKENS, NOT_REPLAYED, Evidence, judge
from pipeline.rl.mismatch import Mismatch

ENOUGH = LEAST_TOKENS
FLOOR = 0.25
"""Of these tests; the default is lower."""


def evidence(agreeing=90, kl=0.0, native=None, tokens=ENOUGH, samples=None, layers=(1, 3)):
    counts = {layer: LayerCounts(100, 3, 5, agreeing) for layer in layers}
    replayed = Mismatch(tokens, kl * tokens, 0)
    native = None if native is None else Mismatch(tokens, native * tokens, 0)
    return Evidence(counts, samples or {}, replayed, native)


def parts(prompt=(0, 0), response=(0, 0)):
    """Replayed and agreeing rows of a sample's prompt and response."""
    return np.array([prompt, response], np.int64)


def test_right_routes_are_healthy():
    health = judge([evidence(samples={"a": parts(response=(80, 79))})], FLOOR)
    assert health.findings == ()
    assert health.metrics == {
        "replay/unhealthy": 0,
        "replay/agreement_layer_min": 0.9,
        "replay/agreement_sample_min": 79 / 80,
    }


def test_a_layer_below_the_floor():
    """Rows of all ranks count together: 24 of 100 and 26 of 100 are the floor."""
    low, high = evidence(24, layers=(3,)), evidence(26, layers=(3,))
    health = judge([evidence(layers=(1,)), low], FLOOR)
    assert health.findings == ("agreement of 1 of 2 layers: layer 3 24.0%",)
    assert judge([low, high], FLOOR).findings == ()


def test_too_few_tokens_are_no_verdict():
    few = judge([evidence(0, kl=9.0, native=0.0, tokens=ENOUGH - 1)], FLOOR)
    assert (few.findings, few.judged) == ((), False)
    assert few.metrics["replay/unhealthy"] is None
    halves = [evidence(0, tokens=ENOUGH // 2, layers=(layer,)) for layer in (1, 3)]
    assert judge(halves, FLOOR).findings


def test_kl_with_replay_far_above_the_native_one():
    def says(kl, native):
        return judge([evidence(kl=kl, native=native)], FLOOR).findings

    assert says(1e-3, 0.0) == says(0.19, 0.019) == says(1.2, None) == ()
    [found] = says(1.2, 1.1e-4)
    assert found.startswith("KL between engine and trainer 1.2 with replay, 0.00011 without")
    assert says(2.1e-3, 1e-4)
    assert says(float("nan"), 1e-4)


ROWS = 2 * LEAST_ROWS
"""In two layers, as a sample's verdict needs."""


def of_samples(samples):
    return judge([evidence(samples=samples)], FLOOR)


def test_one_sample_among_many():
    """The lowest of prompt, response and both counts; few rows are no verdict."""
    samples = {f"right {i}": parts((ROWS, ROWS), (ROWS, ROWS)) for i in range(100)}
    samples["other response"] = parts((ROWS, ROWS), (ROWS, 3))
    samples["short"] = parts((ROWS // 2, ROWS // 2), (ROWS // 2 - 1, 0))
    health = of_samples(samples)
    said = f"agreement of 1 samples: other response {3 / ROWS:.1%} (expected at least 50.0%"
    assert [finding.startswith(said) for finding in health.findings] == [True]
    assert health.sample == 3 / ROWS
    of_both = of_samples({"both": parts((ROWS // 2, 0), (ROWS // 2, 0))})
    assert "both 0.0%" in of_both.findings[0]


def test_a_sample_is_compared_with_the_others_of_its_step():
    """Another policy lowers the agreement of all; other routes lower that of one."""

    def low(median, least):
        samples = {str(i): parts(response=(100 * ROWS, median * ROWS)) for i in range(9)}
        return len(
            of_samples(samples | {"one": parts(response=(100 * ROWS, least * ROWS))}).findings
        )

    assert (low(98, 28), low(81, 27), low(73, 24)) == (1, 1, 1)
    assert (low(98, 95), low(81, 66), low(73, 56), low(50, 30)) == (0, 0, 0, 0)
    assert (low(30, 24), low(30, 26)) == (1, 0)  # never below the floor


def test_a_sample_lies_on_several_ranks():
    """Each pipeline stage counts its own layers, each slice of a sequence its own rows."""
    half = parts(response=(LEAST_ROWS, 0))
    one = judge([evidence(samples={"a": half}), evidence(layers=())], FLOOR)
    both = judge([evidence(samples={"a": half}), evidence(samples={"a": half})], FLOOR)
    assert one.findings == ()
    assert "a 0.0%" in both.findings[0]


def test_a_run_without_replay_has_the_metrics_too():
    assert NOT_REPLAYED.metrics == dict.fromkeys(judge([evidence()], FLOOR).metrics)
