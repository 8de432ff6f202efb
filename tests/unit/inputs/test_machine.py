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


def test_gpus(settings):
    """What they hold is not known, so too few of them are a note."""
    assert machine_problems(load(settings, RANKS), None, NODE) == []
    [note] = machine_notes(load(settings, RANKS), NODE)
    assert note.startswith("GPUs of this machine: 8; the run wants 49 (training ranks: 48; ")
    assert machine_notes(load(settings, "trainer.n_gpus_per_node=7"), NODE) == []


def test_a_run_is_refused_where_it_cannot_be(settings, monkeypatch):
    """Nothing was started, nothing is in the store."""
    monkeypatch.setattr(machine, "this_machine", lambda: SMALL)
    ready = retrace.check(settings, [RANKS, "actor_rollout_ref.rollout.n=48"])
    with pytest.raises(retrace.InputError, match="48 training ranks are asked for"):
        ready.run()
    assert not (settings.parent / "store").exists()


def test_this_machine():
    found = this_machine()
    assert found.cores >= 1
    assert found.memory > 1 << 28
