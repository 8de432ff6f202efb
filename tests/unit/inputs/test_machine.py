"""Whether a machine is large enough for a run on it."""

import pytest

import retrace
from pipeline.inputs import machine
from pipeline.inputs.machine import Machine, machine_notes, machine_problems, this_machine
from pipeline.inputs.writes import estimate
from tests.unit.inputs.small_inputs import load

SMALL = Machine(cores=2, gpus=0, memory=8 << 30)
NODE = Machine(cores=96, gpus=8, memory=1 << 40)
RANKS = "trainer.n_gpus_per_node=48"


def test_more_processes_than_cores_can_bear(settings):
    [ranks, workers] = machine_problems(
        load(settings, RANKS, "launch.rollout_workers=9"), None, SMALL
    )
    assert ranks == (
        "trainer.n_gpus_per_node: 48 training ranks are asked for, but this machine has 2 cores "
        "and no GPU; use at most 8 (four for each core), or a larger machine"
    )
    assert workers.startswith("launch.rollout_workers: 9 rollout workers are asked for")
    eight = load(settings, "trainer.n_gpus_per_node=8")
    assert machine_problems(eight, None, SMALL) == []
    [note] = machine_notes(eight, SMALL)
    assert note == (
        "cores of this machine: 2; the run wants 8 (training ranks: 8; rollout workers: 1, of TP1)"
    )
    assert machine_notes(load(settings), SMALL) == []


def test_a_model_larger_than_memory(settings):
    """30 billion weights: 16 bytes each in bfloat16 training, and 2 in the engine."""
    config = load(settings)
    writes = estimate(config, None, 30_000_000_000, prompt_tokens=10)
    [problem] = machine_problems(config, writes, SMALL)
    assert "hold 540.0 GB at least" in problem
    assert "has 8.6 GB of memory and no GPU" in problem
    small = estimate(config, None, 400_000_000, prompt_tokens=10)
    assert machine_problems(config, small, SMALL) == []


def test_too_few_gpus(settings):
    three = "trainer.n_gpus_per_node=3"
    tp = "actor_rollout_ref.rollout.tensor_model_parallel_size=2"
    for more in (["launch.rollout_workers=5"], ["launch.rollout_workers=2", tp]):
        config = load(settings, three, *more)
        assert machine_problems(config, None, NODE) == machine_notes(config, NODE) == []
    shared = load(settings, three, "launch.rollout_workers=3", tp)
    assert machine_problems(shared, None, NODE) == []
    assert machine_notes(shared, NODE) == [
        "GPUs of this machine: 8; the run wants 9 (training ranks: 3; rollout workers: 3, of "
        "TP2), so rollout workers share GPUs with others: lower "
        "actor_rollout_ref.rollout.gpu_memory_utilization until both fit"
    ]
    assert machine_problems(load(settings, "trainer.n_gpus_per_node=9"), None, NODE) == [
        "trainer.n_gpus_per_node: the training ranks want 9 GPUs, but this machine has 8 (those of "
        "CUDA_VISIBLE_DEVICES, where it is set); lower it, or use a larger machine"
    ]
    engine = load(settings, tp)
    [problem] = machine_problems(engine, None, Machine(cores=8, gpus=1, memory=1 << 40))
    assert problem.startswith(
        "actor_rollout_ref.rollout.tensor_model_parallel_size: the processes of an engine want 2"
    )


@pytest.mark.parametrize(
    ("small", "message"),
    [(SMALL, "48 training ranks are asked for"), (NODE, "the training ranks want 48 GPUs")],
)
def test_a_run_is_refused_where_it_cannot_be(settings, monkeypatch, small, message):
    """Nothing was started, nothing is in the store."""
    monkeypatch.setattr(machine, "this_machine", lambda: small)
    ready = retrace.check(settings, [RANKS, "actor_rollout_ref.rollout.n=48"])
    with pytest.raises(retrace.InputError, match=message):
        ready.run()
    assert not (settings.parent / "store").exists()


def test_this_machine():
    found = this_machine()
    assert found.cores >= 1
    assert found.memory > 1 << 28
