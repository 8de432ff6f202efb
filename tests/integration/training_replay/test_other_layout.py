"""A run continues from its last checkpoint in a different layout."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.run import keys
from pipeline.run.commit import read_commit
from pipeline.store import open_store
from tests.attempts import make_attempt
from tests.exhaustive import sample_or_all
from tests.integration.training_replay.sealed import config_of, make_run
from tests.integration.training_replay.test_training_loop import (
    MEGATRON,
    loaded,
    metrics_of,
    train,
)

pytestmark = pytest.mark.integration

LR = 1e-3
LAYOUTS: list[tuple[str, int, dict[str, Any]]] = [
    ("fewer", 1, {}),
    ("tp2", 2, {"tensor_model_parallel_size": 2}),
    ("pp2", 2, {"pipeline_model_parallel_size": 2}),
    ("ep2", 2, {"expert_model_parallel_size": 2}),
    ("more", 4, {"tensor_model_parallel_size": 2}),
]


@pytest.fixture(scope="module")
def half(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two of three steps with two ranks and a critic, and all three steps in a copy."""
    folder = tmp_path_factory.mktemp("half")
    config = config_of(
        router_replay={"mode": "R3"},
        algorithm={"adv_estimator": "gae", "lam": 0.95},
        optim={"lr": LR},
    )
    store = make_run(folder / "run", tiny_model, config, steps=3)
    make_attempt(store, 0, steps=2, save_freq=2)
    train(store, ranks=2)
    shutil.copytree(folder / "run", folder / "same")
    same = open_store(str(folder / "same"))
    make_attempt(same, 1, steps=3)
    train(same, ranks=2, attempt=1)
    return folder


@pytest.mark.parametrize(
    ("name", "ranks", "sizes"), sample_or_all(LAYOUTS[:2], LAYOUTS), ids=lambda x: str(x)[:5]
)
def test_the_next_step_equals_that_of_the_old_layout(
    half: Path, tmp_path: Path, name: str, ranks: int, sizes: dict[str, int]
):
    """In a different layout, the policy, the critic and the optimizer state continue unchanged.

    After the step, the weights match a run in the old layout, up to float32 summation order. A
    new optimizer state would change each weight by about the learning rate. The last checkpoint
    uses the new layout.
    """
    shutil.copytree(half / "run", tmp_path / "run")
    store = open_store(str(tmp_path / "run"))
    changes = {f"{MEGATRON}.{size}": value for size, value in sizes.items()}
    changes["trainer.n_gpus_per_node"] = ranks
    make_attempt(store, 1, steps=3, changes=changes)
    output = train(store, ranks, attempt=1)
    assert "continue from the checkpoint of policy 2" in output
    same = open_store(str(half / "same"))
    ours, theirs, before = (
        loaded(one, version, tmp_path / folder)
        for one, version, folder in ((store, 3, "ours"), (same, 3, "theirs"), (same, 2, "before"))
    )
    moved = max(float((theirs[key] - before[key]).abs().max()) for key in theirs)
    apart = max(float((theirs[key] - ours[key]).abs().max()) for key in theirs)
    assert moved > 0.3 * LR
    assert apart < 0.1 * LR
    for metric in ("critic/vf_loss", "critic/values/mean", "actor/grad_norm"):
        assert metrics_of(store, 2)[metric] == pytest.approx(metrics_of(same, 2)[metric], rel=1e-3)
    layout = read_commit(store, keys.checkpoint(3))["layout"]
    assert layout["tensor"] == sizes.get("tensor_model_parallel_size", 1)
