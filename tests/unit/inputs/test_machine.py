"""The check that a machine is large enough for a run."""

import shutil
from dataclasses import replace

import pytest

import retrace
from pipeline import device
from pipeline.device import TorchFindings
from pipeline.inputs import machine, space
from pipeline.inputs.machine import Machine, machine_notes, machine_problems, this_machine
from pipeline.inputs.sizes import verdict
from pipeline.inputs.sizes.verdict import missing
from pipeline.inputs.writes import estimate
from tests.unit.inputs.small_inputs import load

SMALL = Machine(cores=2, gpus=0, memory=8 << 30, device="cpu")
NODE = Machine(cores=96, gpus=8, memory=1 << 40, device="cuda")
ONE = Machine(cores=8, gpus=1, memory=1 << 40, device="cuda")
RANKS = "trainer.n_gpus_per_node=48"


def test_too_many_processes_per_core_are_refused(settings):
    [ranks, workers] = machine_problems(
        load(settings, RANKS, "launch.rollout_workers=9"), None, SMALL
    )
    assert ranks.startswith("trainer.n_gpus_per_node: found 48 training ranks, but")
    assert workers.startswith("launch.rollout_workers: found 9 rollout workers, but")
    eight = load(settings, "trainer.n_gpus_per_node=8")
    assert machine_problems(eight, None, SMALL) == []
    [note] = machine_notes(eight, SMALL)
    assert note.startswith("cores of this machine: 2; the run needs 8")
    assert machine_notes(load(settings), SMALL) == []


def test_settings_that_require_cuda_are_refused_where_auto_means_the_cpu(settings):
    aware = "optim.use_precision_aware_optimizer=true"
    gae = "algorithm.adv_estimator=gae"
    for group in ("actor_rollout_ref.actor", "critic"):
        [problem, *_] = machine_problems(load(settings, gae, f"{group}.{aware}"), None, SMALL)
        assert problem.startswith(f"{group}.optim.use_precision_aware_optimizer: found True, but")


def test_a_model_larger_than_memory_is_refused(settings):
    """30 billion weights take 16 bytes each in bfloat16 training, and 2 in the engine."""
    config = load(settings)
    writes = estimate(config, None, 30_000_000_000, prompt_tokens=10)
    [problem] = machine_problems(config, writes, SMALL)
    assert "need at least 540.0 GB (" in problem
    assert "has 8.6 GB of memory and no GPU" in problem
    with_critic = load(settings, "algorithm.adv_estimator=gae")
    writes = estimate(with_critic, None, 30_000_000_000, prompt_tokens=10)
    [problem] = machine_problems(with_critic, writes, SMALL)
    assert "need at least 1.0 TB (" in problem
    small = estimate(config, None, 400_000_000, prompt_tokens=10)
    assert machine_problems(config, small, SMALL) == []


def test_too_few_gpus_are_refused(settings):
    three = "trainer.n_gpus_per_node=3"
    tp = "actor_rollout_ref.rollout.tensor_model_parallel_size=2"
    for more in (["launch.rollout_workers=5"], ["launch.rollout_workers=2", tp]):
        config = load(settings, three, *more)
        assert machine_problems(config, None, NODE) == machine_notes(config, NODE) == []
    shared = load(settings, three, "launch.rollout_workers=3", tp)
    [problem] = machine_problems(shared, None, NODE)
    assert "GPUs on this machine: 8 " in problem
    assert "the run needs 9: " in problem
    assert machine_problems(shared, None, replace(NODE, device="cpu")) == []
    shared = load(settings, "launch.rollout_workers=2")
    assert machine_problems(shared, None, ONE) == [], "training and the engines share the GPU"
    assert "share it" in machine_notes(shared, ONE)[0]
    [problem] = machine_problems(load(settings, tp), None, ONE)
    assert problem.startswith("GPUs on this machine: 1 ")


@pytest.mark.parametrize(
    ("small", "message"),
    [(SMALL, "found 48 training ranks"), (NODE, "GPUs on this machine: 8 .* needs 49")],
)
def test_a_run_is_refused_on_a_machine_that_is_too_small(settings, monkeypatch, small, message):
    """The refused start creates nothing in the store."""
    monkeypatch.setattr(machine, "this_machine", lambda _: small)
    ready = retrace.check(settings, [RANKS, "actor_rollout_ref.rollout.n=48"])
    with pytest.raises(retrace.InputError, match=message):
        ready.run()
    assert not (settings.parent / "store").exists()


def test_gpus_that_cannot_be_used_are_refused(settings, monkeypatch):
    """The only problem names the reason, even if the run also needs more GPUs than there are."""
    monkeypatch.setattr(device, "gpu_pool", lambda: ("0",))
    monkeypatch.setattr(device, "probe_torch", lambda: TorchFindings("2.13.0+cpu", None, 0, None))
    config = load(settings, RANKS)
    [problem] = machine_problems(config, None, this_machine(config))
    assert problem.startswith("trainer.device: found auto, and this machine has 1 GPU, but torch")


def test_what_a_machine_lacks_is_found_from_config_json_alone(settings, model, monkeypatch):
    monkeypatch.setattr(verdict, "this_machine", lambda config: SMALL)
    only = settings.parent / "only"
    only.mkdir()
    shutil.copy(model / "config.json", only)
    path = f"actor_rollout_ref.model.path={only}"
    assert missing(load(settings, path)) == []
    monkeypatch.setattr(space, "free_bytes", lambda uri: 1000)
    monkeypatch.setattr(verdict, "this_machine", lambda config: replace(SMALL, memory=1000))
    memory, disk = missing(load(settings, path))
    assert memory.startswith("actor_rollout_ref.model.path: training and rollout of this model")
    assert disk.startswith("store.uri: ")
    monkeypatch.setattr(verdict, "least_gpu_memory", lambda: 1 << 30)
    few = replace(NODE, gpus=1, memory=1000)
    monkeypatch.setattr(verdict, "this_machine", lambda config: few)
    gpus, gpu_memory, _ = missing(load(settings, path, "trainer.n_gpus_per_node=4"))
    assert gpus.startswith("GPUs on this machine: 1")
    assert gpu_memory.startswith("trainer: the fullest GPU needs about 4.0 GiB, but has 1.0 GiB")
    none = replace(NODE, gpus=0, unusable=("trainer.device: found cuda, but there is no GPU",))
    monkeypatch.setattr(verdict, "this_machine", lambda config: none)
    [gpus] = missing(load(settings, path))
    assert gpus.startswith("GPUs on this machine: 0")
