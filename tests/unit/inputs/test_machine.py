"""The check that a machine is large enough for a run."""

import json
import shutil
from dataclasses import replace

import pytest

import retrace
from pipeline import device
from pipeline.device import TorchFindings
from pipeline.inputs import machine, space
from pipeline.inputs.machine import (
    Machine,
    machine_notes,
    machine_problems,
    needed_notes,
    this_machine,
)
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
    assert ranks == (
        "trainer.n_gpus_per_node: found 48 training ranks, but this machine has 2 cores and no "
        "GPU; use at most 8 (four per core), or a larger machine"
    )
    assert workers.startswith("launch.rollout_workers: found 9 rollout workers, but")
    eight = load(settings, "trainer.n_gpus_per_node=8")
    assert machine_problems(eight, None, SMALL) == []
    [note] = machine_notes(eight, SMALL)
    assert note == (
        "cores of this machine: 2; the run needs 8 (training ranks: 8; rollout workers: 1, of TP1)"
    )
    assert machine_notes(load(settings), SMALL) == []


def test_a_model_larger_than_memory_is_refused(settings):
    """30 billion weights take 16 bytes each in bfloat16 training, and 2 in the engine. The critic
    has the same number of weights, and is trained in the same way."""
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
    assert machine_problems(shared, None, NODE) == [
        "GPUs on this machine: 8 (those in CUDA_VISIBLE_DEVICES, if it is set); the run needs "
        "9: one for each training rank (3) and each process of an engine (3 rollout workers of "
        "TP2); lower trainer.n_gpus_per_node, launch.rollout_workers or actor_rollout_ref.rollout."
        "tensor_model_parallel_size, or use a larger machine"
    ]
    assert machine_problems(shared, None, replace(NODE, device="cpu")) == []
    [problem] = machine_problems(load(settings, tp), None, ONE)
    assert problem.startswith("GPUs on this machine: 1 ")


def test_one_gpu_is_shared(settings):
    """If training and the engines did not share the GPU, one of them would have none."""
    config = load(settings, "launch.rollout_workers=2")
    assert machine_problems(config, None, ONE) == []
    assert machine_notes(config, ONE) == [
        "GPUs on this machine: 1; the run's workers (training ranks: 1; rollout workers: 2, of "
        "TP1) share it; lower actor_rollout_ref.rollout.gpu_memory_utilization until all fit"
    ]
    two = load(settings, "trainer.n_gpus_per_node=2")
    assert len(machine_problems(two, None, ONE)) == 1


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


def test_the_resources_of_this_machine_are_counted(settings):
    found = this_machine(load(settings, "trainer.device=cpu"))
    assert found.cores >= 1
    assert found.memory > 1 << 28
    assert str(found).endswith("of memory; computes on cpu")


def test_gpus_that_cannot_be_used_are_refused(settings, monkeypatch):
    """The only problem names the reason, even if the run also needs more GPUs than there are."""
    monkeypatch.setattr(device, "gpu_pool", lambda: ("0",))
    monkeypatch.setattr(device, "probe_torch", lambda: TorchFindings("2.13.0+cpu", None, 0, None))
    config = load(settings, RANKS)
    [problem] = machine_problems(config, None, this_machine(config))
    assert problem.startswith("trainer.device: found auto, and this machine has 1 GPU, but torch")


def test_experts_that_this_machine_cannot_compute_are_refused(settings, model):
    """The check reports this if `auto` selects the CPU. For `cpu`, the settings' rules do so."""
    hf_config = json.loads((model / "config.json").read_text())
    narrow = hf_config | {"moe_intermediate_size": 16}
    [problem] = machine_problems(load(settings), None, SMALL, narrow)
    assert "config.json has moe_intermediate_size=16" in problem
    for config, here, found in (
        (load(settings), SMALL, hf_config),
        (load(settings), NODE, narrow),
        (load(settings, "trainer.device=cpu"), SMALL, narrow),
    ):
        assert machine_problems(config, None, here, found) == []


def test_packages_that_settings_require_are_named(settings, monkeypatch):
    """On GPUs, a missing package is a problem: the ranks would end when they build the model."""
    key = "actor_rollout_ref.actor.megatron.override_transformer_config.moe_enable_deepep"
    config = load(settings, f"{key}=True")
    monkeypatch.setattr(machine, "find_spec", lambda module: None)
    assert [text.split()[0] for text in needed_notes(config)] == [f"{key}=True"]
    [problem] = machine_problems(config, None, NODE)
    assert problem.startswith(f"{key}=True requires DeepEP")
    monkeypatch.setattr(machine, "find_spec", lambda module: module)
    assert machine_problems(config, None, NODE) == []
    assert needed_notes(load(settings)) == []


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
