"""A trainer that comes back: whatever commit it was interrupted at, the step is finished."""

import shutil
from pathlib import Path

import pytest

from pipeline.store import Store, keys, open_store
from pipeline.store.commit import read_commit
from tests.attempts import make_attempt
from tests.integration.torchrun import run_ranks
from tests.integration.training_replay.sealed import config_of, make_run

pytestmark = pytest.mark.integration
PROGRAM = "operators.training"
END_OF_STEP = (keys.training(1, 0, 0), keys.policy(2), keys.checkpoint(2), keys.metrics(1))
"""The commits at the end of the last step, in the order in which they are made."""


def train(store: Store, attempt: int) -> str:
    """Run an attempt to its end, in one rank; it has two steps and saves after each."""
    make_attempt(store, attempt, steps=2, save_freq=1)
    return run_ranks(PROGRAM, 1, "--run-uri", store.uri, "--attempt", str(attempt))


@pytest.fixture(scope="module")
def finished(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished R2 run of two steps, to be copied."""
    folder = tmp_path_factory.mktemp("finished")
    train(make_run(folder, tiny_model, config_of(router_replay={"mode": "R2"}), steps=2), 0)
    return folder


@pytest.mark.parametrize("made", range(len(END_OF_STEP)))
def test_an_interrupted_end_of_a_step_is_made_up_for(finished: Path, tmp_path: Path, made: int):
    """The trainer stopped after `made` of the commits that end a step. The next attempt makes the
    others, the same again; those that were there stay. Above all the metrics are there: a
    checkpoint alone does not finish its step.
    """
    shutil.copytree(finished, tmp_path / "run")
    store = open_store(str(tmp_path / "run"))
    before = {key: read_commit(store, key) for key in END_OF_STEP}
    for key in END_OF_STEP[made:]:
        store.delete(key)
    output = train(store, 1)
    assert "continue from the checkpoint of policy 1" in output
    after = {key: read_commit(store, key) for key in END_OF_STEP}
    assert all(after[key] == before[key] for key in END_OF_STEP[:made])
    policy, metrics = keys.policy(2), keys.metrics(1)
    assert after[policy]["sha256"] == before[policy]["sha256"]
    assert after[metrics]["metrics"]["grad_norm"] == before[metrics]["metrics"]["grad_norm"]
    assert after[metrics]["metrics"]["resume/policy_drift"] == 0
