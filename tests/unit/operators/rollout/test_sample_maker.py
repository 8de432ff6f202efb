"""Samples built from finished responses, without an engine."""

from concurrent.futures import Future

import numpy as np
import pytest

from operators.rollout.prompts import Prompt, Wanted
from operators.rollout.sample_maker import SampleMaker
from operators.rollout.scoring import Scored
from operators.rollout.types import Finished, Generation
from pipeline.traces import VersionSpan
from pipeline.traces.format.domain import check_new

ID = "000003/17/0"
WANTED = Wanted(ID, "000003/17", "17", Prompt((1, 2), "sums", "3", None), 5)


class Engine:
    """A fake engine that returns each response unchanged."""

    def read(self, finished):
        return Generation(
            finished.tokens_G,
            finished.logprobs_G,
            None,
            finished.finish_reason,
            finished.version_spans,
        )

    def text(self, tokens_G):
        return "3"


class Scorer:
    """A fake scorer that gives every answer the reward 1."""

    def submit(self, wanted, text, length):
        scored = Future()
        scored.set_result(Scored(1.0, None, {}))
        return scored


@pytest.mark.parametrize(
    ("reason", "reward", "trained"),
    [("stop", 1.0, True), ("length", 1.0, True), ("abort", None, False)],
)
def test_aborted_responses_are_not_scored_and_not_trained_on(reason, reward, trained):
    made = []
    maker = SampleMaker(Engine(), Scorer(), [WANTED], made.append, routes=False)
    tokens_G, logprobs_G = np.ones(3, np.uint32), np.zeros(3, np.float32)
    spans = (VersionSpan(3, 0, 3),)
    maker(maker.score(Finished(WANTED.request, tokens_G, logprobs_G, None, reason, spans)))
    (sample,) = made
    check_new(sample, 3)
    assert (sample.reward, sample.finish_reason) == (reward, reason)
    assert sample.loss_mask_G.tolist() == [trained] * 3
    assert (maker.masked, sample.reward_error is None) == (int(not trained), trained)
