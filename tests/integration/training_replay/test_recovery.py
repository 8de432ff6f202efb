"""A trainer that is interrupted at any commit finishes the step in its next attempt."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from pipeline.run import keys
from pipeline.run.commit import commit, new_write_id, read_commit
from pipeline.store import Store, open_store
from pipeline.traces import (
    NewTrainerRoutes,
    read_manifest,
    read_routes,
    seal_trainer_routes,
    used_routes,
    write_trainer_routes,
)
from tests.attempts import make_attempt
from tests.integration.torchrun import run_ranks, start_ranks
from tests.integration.training_replay.sealed import STALE, config_of, make_run
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.integration
PROGRAM = "operators.training"
END_OF_STEP = (keys.trainer_routes(1), keys.policy(2), keys.metrics(1), keys.checkpoint(2))
"""The commits at the end of the last step, in order."""
KINDS = ("_native", "_engine", "_staleness")


def train(store: Store, attempt: int) -> str:
    """Run an attempt of two steps to completion with one rank and a checkpoint after each step."""
    make_attempt(store, attempt, steps=2, save_freq=1)
    return run_ranks(PROGRAM, 1, "--run-uri", store.uri, "--attempt", str(attempt))


@pytest.fixture(scope="module")
def finished(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train an R2 run of two steps to completion; tests copy it.

    Step 1 trains samples of policy 0, and measures engine mismatch and staleness separately.
    """
    folder = tmp_path_factory.mktemp("finished")
    config = config_of(router_replay={"mode": "R2", "native_every": 1}, **STALE)
    train(make_run(folder, tiny_model, config, steps=2), 0)
    return folder


@pytest.mark.parametrize("made", range(len(END_OF_STEP)))
def test_an_interrupted_end_of_a_step_is_completed(finished: Path, tmp_path: Path, made: int):
    """The trainer stops after `made` of the commits that end a step.

    The next attempt writes the other commits with the same contents, and keeps the existing ones.
    Its first step has no copy of the older weights, so it does not measure staleness. The weights
    after the step do not depend on this measurement.
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
    distances = {of: before[metrics]["metrics"][f"mismatch/kl{of}"] for of in KINDS}
    assert distances["_engine"] < 1e-9
    assert distances["_staleness"] > 1e-6
    assert distances["_staleness"] == pytest.approx(distances["_native"], rel=1e-3)
    if made < END_OF_STEP.index(metrics):
        assert after[metrics]["metrics"]["mismatch/kl_staleness"] is None
    for drift in ("policy", "routes"):
        assert before[metrics]["metrics"][f"resume/{drift}_drift"] == 0
        assert after[metrics]["metrics"][f"resume/{drift}_drift"] == 0


def test_different_routes_in_the_store_are_counted(finished: Path, tmp_path: Path):
    """If the trainer records different routes after a restart, the stored routes stay.

    The trainer stopped after storing R2's routes, and its kernels are not deterministic. The
    metrics and the log report the number of samples with different routes.
    """
    shutil.copytree(finished, tmp_path / "run")
    store = open_store(str(tmp_path / "run"))
    used = used_routes(store, 1)
    routes = read_routes(store, used, used.ids)
    for id in used.ids[:3]:
        last_K = routes[id].sets_TLK[-1, -1]
        last_K[:] = np.sort((last_K + 1) % used.geometry.experts)
    for key in END_OF_STEP:
        store.delete(key)
    new = NewTrainerRoutes(read_manifest(store, 1), used.provenance)
    file = write_trainer_routes(store, new, 0, 0, routes, used.geometry)
    changed = seal_trainer_routes(store, new, [file], used.geometry)
    output = train(store, 1)
    assert read_commit(store, END_OF_STEP[0]) == changed.body
    drift = read_commit(store, keys.metrics(1))["metrics"]["resume/routes_drift"]
    assert drift == 3
    assert f"the stored routes of {drift} samples" in output


def test_a_known_error_is_logged_in_one_line(tiny_model: Path, tmp_path: Path):
    """R3 on a step without routes fails with one line, which the launcher can find.

    torchrun's output also contains its own traceback.
    """
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
    assert "operators/training/" not in output  # no frames from our files
    assert store.size(keys.metrics(0)) is None


def test_a_stop_takes_precedence_over_a_manifest(finished: Path, tmp_path: Path):
    """A stopped attempt does not train another step, although one is sealed."""
    shutil.copytree(finished, tmp_path / "run")
    store = open_store(str(tmp_path / "run"))
    store.delete(keys.metrics(1))
    commit(store, keys.stop(1), {"reason": "cancelled", "message": ""}, new_write_id())
    assert "step 1 is not trained" in train(store, 1)
    assert store.size(keys.metrics(1)) is None
