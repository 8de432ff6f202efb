"""How a trainer ends, and how it comes back: whatever commit it was interrupted at, the step is
finished.
"""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from pipeline.run import keys
from pipeline.run.commit import commit, new_write_id, read_commit
from pipeline.store import Store, open_store
from pipeline.traces import (
    NewTrainingSet,
    read_manifest,
    read_routes,
    seal_training_set,
    used_routes,
    write_training_routes,
)
from tests.attempts import make_attempt
from tests.integration.torchrun import run_ranks, start_ranks
from tests.integration.training_replay.sealed import config_of, make_run
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.integration
PROGRAM = "operators.training"
END_OF_STEP = (keys.training_set(1), keys.policy(2), keys.checkpoint(2), keys.metrics(1))
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
    assert after[policy]["weights_sha256"] == before[policy]["weights_sha256"]
    assert (
        after[metrics]["metrics"]["actor/grad_norm"]
        == before[metrics]["metrics"]["actor/grad_norm"]
    )
    for drift in ("policy", "routes"):
        assert before[metrics]["metrics"][f"resume/{drift}_drift"] == 0
        assert after[metrics]["metrics"][f"resume/{drift}_drift"] == 0


def test_other_routes_in_the_store_are_counted(finished: Path, tmp_path: Path):
    """The trainer stopped after R2's routes, and records others when it comes back (kernels that
    are not deterministic): those of the store stay, and the metrics and the log say so."""
    shutil.copytree(finished, tmp_path / "run")
    store = open_store(str(tmp_path / "run"))
    used = used_routes(store, 1)
    routes = read_routes(store, used, used.ids)
    for id in used.ids[:3]:
        last_K = routes[id].sets_TLK[-1, -1]
        last_K[:] = np.sort((last_K + 1) % used.geometry.experts)
    for key in END_OF_STEP:
        store.delete(key)
    new = NewTrainingSet(read_manifest(store, 1), used.provenance)
    write_training_routes(store, new, 0, 0, routes, used.geometry)
    changed = seal_training_set(store, new, used.geometry)
    output = train(store, 1)
    assert read_commit(store, END_OF_STEP[0]) == changed.body
    drift = read_commit(store, keys.metrics(1))["metrics"]["resume/routes_drift"]
    assert drift == 3
    assert f"the store has other routes of {drift} samples" in output


def test_a_known_error_is_a_line_of_the_log(tiny_model: Path, tmp_path: Path):
    """R3 on a step that has no routes: the cause is one line, which the launcher can find among
    those that torchrun writes (its own traceback among them)."""
    config = config_of(router_replay={"mode": "R3"})
    store = make_run(tmp_path / "run", tiny_model, config, steps=1, routes=False)
    make_attempt(store, 0, steps=1)
    process = start_ranks(PROGRAM, 1, "--run-uri", store.uri, "--attempt", "0")
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    line = (
        r"\d{4}-\d\d-\d\d [\d:,]+ ERROR operators.training: rank 0 failed: ReplayError: step 0: "
        "the manifest has"
    )
    assert len(re.findall(f"^{line}", output, re.MULTILINE)) == 1
    assert "operators/training/" not in output  # of our files' frames
    assert store.size(keys.metrics(0)) is None


def test_a_stop_wins_over_a_manifest(finished: Path, tmp_path: Path):
    """An attempt that was stopped trains no other step, although one is sealed."""
    shutil.copytree(finished, tmp_path / "run")
    store = open_store(str(tmp_path / "run"))
    store.delete(keys.metrics(1))
    commit(store, keys.stop(1), {"reason": "cancelled", "message": ""}, new_write_id())
    assert "step 1 is not trained" in train(store, 1)
    assert store.size(keys.metrics(1)) is None
