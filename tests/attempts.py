"""A writer of attempts/NNN.json, for tests that start a single worker, and owners of attempts."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipeline.run import keys
from pipeline.run.attempts import Attempt
from pipeline.run.commit import commit, new_write_id
from pipeline.run.owner import Owner, this_owner
from pipeline.scratch import _state_and_start, this_process
from pipeline.store import Store
from tests.patience import PATIENCE_S


def dead_owner(flow_run: str | None = None) -> Owner:
    """Return an owner whose process on this machine has ended."""
    return replace(this_owner(flow_run), process=str(replace(this_process(), started=1)))


def living_owner(flow_run: str | None = None) -> Owner:
    """Return an owner whose process runs on this machine, but is not this process."""
    parent = os.getppid()
    identity = replace(this_process(), pid=parent, started=_state_and_start(parent)[1])
    return replace(this_owner(flow_run), process=str(identity))


def distant_owner(flow_run: str | None = None) -> Owner:
    """Return an owner on another machine."""
    process = str(replace(this_process(), host="0" * 8))
    return replace(this_owner(flow_run), host="elsewhere", process=process)


def make_attempt(
    store: Store,
    number: int,
    steps: int,
    save_freq: int = 10,
    validations: Sequence[int] = (),
    on_unhealthy: str = "fail",
    *,
    differences: bool | None = None,
    changes: Mapping[str, Any] = {},
) -> Attempt:
    """Write the attempt file for one start of a run, with that attempt's operational settings.

    Args:
        store: The run's store.
        number: The attempt's number.
        steps: The number of training steps.
        save_freq: The number of steps between checkpoints.
        validations: Policy versions to validate.
        on_unhealthy: How training reacts to routes that do not fit.
        differences: Whether policy versions are written as differences. If None, the trainer
            decides.
        changes: All that differs from run.json.
    """
    attempt = Attempt(
        number=number,
        rollout_workers=1,
        rollout_shards=1,
        training_ranks=1,
        validations=tuple(validations),
        settings={
            "trainer.total_training_steps": steps,
            "trainer.device": "cpu",
            "store.policy_cache": "disk",
            "trainer.save_freq": save_freq,
            "launch.start_timeout_s": PATIENCE_S,
            "launch.step_timeout_s": PATIENCE_S,
            "actor_rollout_ref.rollout.gpu_memory_utilization": 0.8,
            "actor_rollout_ref.rollout.cpu_kv_cache_gib": 1,
            "actor_rollout_ref.rollout.trace_buffer_mib": 64,
            "actor_rollout_ref.rollout.trace_compression": "zstd",
            "actor_rollout_ref.actor.router_replay.min_agreement": 0.1,
            "actor_rollout_ref.actor.router_replay.on_unhealthy": on_unhealthy,
            "store.policy_buffer_mib": 64,
            "store.policy_deltas.enable": differences,
            "store.policy_deltas.every": 16,
            "reward.timeout_s": PATIENCE_S,
            "reward.num_workers": 2,
        },
        changes=changes,
    )
    commit(store, keys.attempt(number), attempt.body(), new_write_id())
    return attempt
