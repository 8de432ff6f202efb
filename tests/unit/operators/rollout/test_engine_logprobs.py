"""The log-probs that the engine returns with a response."""

from types import SimpleNamespace

import numpy as np
import pytest

from operators.exits import exit_code
from operators.rollout.engine import _logprobs
from operators.rollout.types import RolloutError
from pipeline.exits import CONFIGURATION_ERROR


def flat(tokens: list[int], logprobs: list[float]) -> SimpleNamespace:
    """Return the fields of vLLM's FlatLogprobs that are read."""
    return SimpleNamespace(token_ids=tokens, logprobs=logprobs)


def test_logprobs_of_the_sampled_tokens_are_returned():
    values_G = _logprobs(flat([5, 7], [-1.5, -0.25]), [5, 7], "000000/0/0")
    assert values_G.dtype == np.float32
    assert values_G.tolist() == [-1.5, -0.25]
    with pytest.raises(RolloutError, match="000000/0/0"):
        _logprobs(flat([5, 8], [-1.5, -0.25]), [5, 7], "000000/0/0")


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
def test_a_policy_without_finite_logprobs_is_not_started_again(value):
    """The same weights and seeds would fail again after a restart."""
    with pytest.raises(RolloutError, match=r"000000/0/1.* token 1 is ") as caught:
        _logprobs(flat([5, 7], [-1.5, value]), [5, 7], "000000/0/1")
    assert exit_code(caught.value) == CONFIGURATION_ERROR
