"""The verdict on a step's recorded routes, from given counts and without a model."""

import numpy as np

from operators.training.replay.counts import LayerCounts
from operators.training.replay.health import NOT_REPLAYED, Evidence, judge
from pipeline.rl.mismatch import Mismatch

ENOUGH = 512
"""Minimum number of response tokens for a verdict on a step."""
LEAST_ROWS = 32
"""Minimum number of rows for a verdict on a sample."""
FLOOR = 0.25
"""Minimum agreement in these tests; the default is lower."""


def evidence(agreeing=90, kl=0.0, native=None, tokens=ENOUGH, samples=None, layers=(1, 3)):
    counts = {layer: LayerCounts(100, 3, 5, agreeing) for layer in layers}
    replayed = Mismatch(tokens, kl * tokens, 0)
    native = None if native is None else Mismatch(tokens, native * tokens, 0)
    return Evidence(counts, samples or {}, replayed, native)


def parts(prompt=(0, 0), response=(0, 0)):
    """Return the (replayed, agreeing) rows of a sample's prompt and response."""
    return np.array([prompt, response], np.int64)


def test_routes_that_fit_the_model_are_healthy():
    health = judge([evidence(samples={"a": parts(response=(80, 79))})], FLOOR)
    assert health.findings == ()
    assert health.metrics == {
        "replay/unhealthy": 0,
        "replay/agreement_layer_min": 0.9,
        "replay/agreement_sample_min": 79 / 80,
    }


def test_a_layer_below_the_minimum_agreement_is_a_finding():
    """The rows of all ranks are added: 24 and 26 of 100 rows together just reach the minimum."""
    low, high = evidence(24, layers=(3,)), evidence(26, layers=(3,))
    health = judge([evidence(layers=(1,)), low], FLOOR)
    assert health.findings == ("agreement too low in 1 of 2 layers: layer 3 24.0%",)
    assert judge([low, high], FLOOR).findings == ()


def test_a_step_with_few_tokens_gets_no_verdict():
    few = judge([evidence(0, kl=9.0, native=0.0, tokens=ENOUGH - 1)], FLOOR)
    assert (few.findings, few.judged) == ((), False)
    assert few.metrics["replay/unhealthy"] is None
    halves = [evidence(0, tokens=ENOUGH // 2, layers=(layer,)) for layer in (1, 3)]
    assert judge(halves, FLOOR).findings


def test_kl_with_replay_far_above_the_native_kl_is_a_finding():
    def findings(kl, native):
        return judge([evidence(kl=kl, native=native)], FLOOR).findings

    assert findings(1e-3, 0.0) == findings(0.19, 0.019) == findings(1.2, None) == ()
    [found] = findings(1.2, 1.1e-4)
    assert found.startswith("KL between engine and trainer is 1.2 with replay, 0.00011 without")
    assert findings(2.1e-3, 1e-4)
    assert findings(float("nan"), 1e-4)


ROWS = 2 * LEAST_ROWS
"""Number of rows over two layers that a verdict on a sample requires."""


def of_samples(samples):
    return judge([evidence(samples=samples)], FLOOR)


def test_one_sample_with_wrong_routes_among_many_is_found():
    """A sample's agreement is the lowest of three: over its prompt, over its response, and over
    both. Parts with too few rows are left out."""
    samples = {f"right {i}": parts((ROWS, ROWS), (ROWS, ROWS)) for i in range(100)}
    samples["other response"] = parts((ROWS, ROWS), (ROWS, 3))
    samples["short"] = parts((ROWS // 2, ROWS // 2), (ROWS // 2 - 1, 0))
    health = of_samples(samples)
    said = f"agreement too low in 1 of 101 samples: other response {3 / ROWS:.1%} (median "
    assert [finding.startswith(said) for finding in health.findings] == [True]
    assert health.findings[0].endswith(", expected at least 50.0%)")
    assert health.sample == 3 / ROWS
    of_both = of_samples({"both": parts((ROWS // 2, 0), (ROWS // 2, 0))})
    assert "both 0.0%" in of_both.findings[0]


def test_a_sample_is_compared_with_the_others_of_its_step():
    """A different policy lowers the agreement of all samples, but wrong routes lower only one
    sample's."""

    def low(median, least):
        samples = {str(i): parts(response=(100 * ROWS, median * ROWS)) for i in range(9)}
        return len(
            of_samples(samples | {"one": parts(response=(100 * ROWS, least * ROWS))}).findings
        )

    assert (low(98, 28), low(81, 27), low(73, 24)) == (1, 1, 1)
    assert (low(98, 95), low(81, 66), low(73, 56), low(50, 30)) == (0, 0, 0, 0)
    assert (low(30, 24), low(30, 26)) == (1, 0)  # the limit is never below the floor


def test_the_rows_of_a_sample_are_added_over_ranks():
    """A pipeline stage counts only its own layers, and a rank with a slice counts only its own
    rows."""
    half = parts(response=(LEAST_ROWS, 0))
    one = judge([evidence(samples={"a": half}), evidence(layers=())], FLOOR)
    both = judge([evidence(samples={"a": half}), evidence(samples={"a": half})], FLOOR)
    assert one.findings == ()
    assert "a 0.0%" in both.findings[0]


def test_a_step_without_replay_has_the_same_metrics():
    assert NOT_REPLAYED.metrics == dict.fromkeys(judge([evidence()], FLOOR).metrics)
