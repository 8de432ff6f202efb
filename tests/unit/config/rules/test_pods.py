"""A pod's number of GPUs must match the worker in the pod."""

import pytest

from pipeline.config.rules.check import config_problems
from pipeline.config.rules.pods import InstalledGpus
from tests.unit.config.settings import ROLLOUT, load

ON_S3 = "store.uri=s3://runs/retrace"
NO_NUMBERS = InstalledGpus()
USED = ("trainer.n_gpus_per_node=8", f"{ROLLOUT}.tensor_model_parallel_size=4")


def found(folder, *settings, installed=NO_NUMBERS, on_cluster=True):
    config = load(folder, ON_S3, *settings).config
    return config_problems(config, None, installed if on_cluster else None)


@pytest.mark.parametrize("training", ["null", "0", "8"])
@pytest.mark.parametrize("rollout", ["null", "0", "4"])
def test_zero_null_and_the_matching_number_are_accepted(tmp_path, training, rollout):
    pods = (
        f"launch.kubernetes.training.gpus={training}",
        f"launch.kubernetes.rollout.gpus={rollout}",
    )
    assert found(tmp_path, *USED, *pods) == []
    installed = InstalledGpus(*(None if n == "null" else int(n) for n in (rollout, training)))
    assert found(tmp_path, *USED, installed=installed) == []


@pytest.mark.parametrize("gpus", [1, 7, 16])
def test_a_different_number_set_by_the_run_is_refused(tmp_path, gpus):
    pods = (f"launch.kubernetes.training.gpus={gpus}", f"launch.kubernetes.rollout.gpus={gpus}")
    training, rollout = found(tmp_path, *USED, *pods)
    assert training == (
        f"launch.kubernetes.training.gpus: found {gpus} (from the run or the installation), "
        "expected 8, the same as trainer.n_gpus_per_node, or 0 for a run on CPU; write "
        f"launch.kubernetes.training.gpus=8, or trainer.n_gpus_per_node={gpus}"
    )
    assert rollout.startswith(
        f"launch.kubernetes.rollout.gpus: found {gpus} (from the run or the installation), "
        f"expected 4, the same as {ROLLOUT}.tensor_model_parallel_size, or 0"
    )


def test_a_different_number_set_by_the_installation_is_refused(tmp_path):
    """A number that the run sets replaces the installation's number."""
    [problem] = found(tmp_path, *USED, installed=InstalledGpus(rollout=4, training=4))
    assert problem.startswith("launch.kubernetes.training.gpus: found 4 ")
    right = "launch.kubernetes.training.gpus=8"
    assert found(tmp_path, *USED, right, installed=InstalledGpus(training=4)) == []


def test_the_number_does_not_matter_without_pods(tmp_path):
    assert found(tmp_path, *USED, "launch.kubernetes.training.gpus=1", on_cluster=False) == []


def test_pods_must_match_the_device(tmp_path):
    none = InstalledGpus(rollout=0, training=0)
    on_gpus = found(tmp_path, *USED, "trainer.device=cuda", installed=none)
    assert [problem.partition(":")[0] for problem in on_gpus] == [
        "launch.kubernetes.training.gpus",
        "launch.kubernetes.rollout.gpus",
    ]
    assert on_gpus[0].endswith(
        "but trainer.device is cuda; write more than 0, or trainer.device=auto"
    )
    idle = "launch.kubernetes.training.gpus=8"
    [problem] = found(tmp_path, *USED, "trainer.device=cpu", idle)
    assert problem.endswith("but trainer.device is cpu; write 0, or trainer.device=auto")
    assert found(tmp_path, *USED, "trainer.device=cpu", installed=none) == []
