"""The GPUs that the workers of a run get on this machine."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.config.tree import RunConfig
from pipeline.flows import local
from pipeline.launch.base import Stage
from pipeline.run.attempts import attempt_of


@pytest.mark.parametrize(
    ("device", "pool", "training", "rollout"),
    [
        ("cuda", ("7", "6", "5", "4", "3", "2", "1"), ("7,6",), ("5,4", "3,2")),
        ("cpu", ("0", "1"), (), ()),
        ("cpu", (), (), ()),
    ],
)
def test_training_gets_the_first_gpus_and_each_engine_the_next_ones(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    pool: tuple[str, ...],
    training: tuple[str, ...],
    rollout: tuple[str, ...],
):
    started: dict[str, Stage] = {}

    @contextlib.contextmanager
    def start(folder: Any, stages: list[Stage], *_: Any) -> Iterator[None]:
        started.update({stage.name: stage for stage in stages})
        yield

    config = RunConfig.model_validate(
        {
            "data": {"train_files": "t.parquet"},
            "actor_rollout_ref": {
                "model": {"path": "m"},
                "rollout": {"tensor_model_parallel_size": 2},
            },
            "trainer": {"experiment_name": "test", "n_gpus_per_node": 2},
            "launch": {"rollout_workers": 2},
            "store": {"uri": "memory://"},
        }
    )
    monkeypatch.setattr(local, "local_workers", start)
    monkeypatch.setattr(local, "gpu_pool", lambda: pool)
    monkeypatch.setattr(local, "choose_device", lambda wanted: device)
    display: Any = SimpleNamespace(phase=lambda *_: None, line=print, progress_folder=None)
    run: Any = SimpleNamespace(uri="memory://test")
    with local._workers(display, 2048, config, run, attempt_of(config, 0)):
        assert started["training"].devices == training
        assert started["rollout"].devices == rollout
