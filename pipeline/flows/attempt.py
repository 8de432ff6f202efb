"""One start of a run: its operational settings in the store, and the object that ends it."""

from collections.abc import Callable
from typing import Any

from pipeline.config.attempt import Attempt
from pipeline.config.errors import InputError
from pipeline.config.tree import RunConfig
from pipeline.store import Store, keys
from pipeline.store.commit import commit, new_attempt, read_commit


def begin_attempt(store: Store, config: RunConfig) -> Attempt:
    """Write attempts/NNN.json under the next free number. The attempt ends with its process."""
    number = _attempts(store)
    while (attempt := _take(store, config, number, None)) is None:
        number += 1
    return attempt


def continue_attempt(
    owner: str, is_over: Callable[[str], bool], store: Store, config: RunConfig
) -> Attempt:
    """The attempt of a flow run that comes back, or a new one, which `owner` may attach to.

    An attempt of another flow run that `is_over` is ended first. Raises InputError while that one
    is not over: a run has one flow at a time.
    """
    while True:
        newest = _attempts(store) - 1
        if newest >= 0 and store.size(keys.stop(newest)) is None:
            body = read_commit(store, keys.attempt(newest))
            attempt = Attempt.of_body(body)
            other = body.get("owner")
            if other == owner:
                return attempt
            if other is not None:
                if not is_over(other):
                    raise InputError([_at_work(config, other)])
                end_attempt(store, attempt, "cancelled", f"flow run {other} is over")
        taken = _take(store, config, newest + 1, owner)
        if taken is not None:
            return taken
        # Another flow run was faster: it is at work now, if not over already.


def _take(store: Store, config: RunConfig, number: int, owner: str | None) -> Attempt | None:
    """The attempt of this number; None: somebody else has it."""
    attempt = attempt_of(config, number)
    body = attempt.body() | {"owner": owner}
    return attempt if commit(store, keys.attempt(number), body, new_attempt()).ours else None


def _at_work(config: RunConfig, flow_run: str) -> str:
    return (
        f"trainer.experiment_name: the run {config.trainer.experiment_name!r} is at work in flow "
        f"run {flow_run}; wait for it, cancel it, or choose another name"
    )


def _attempts(store: Store) -> int:
    return sum(1 for info in store.list(keys.attempts()) if not info.key.endswith(".stop.json"))


def attempt_of(config: RunConfig, number: int) -> Attempt:
    """The operational settings that a config asks for."""
    launch, trainer = config.launch, config.trainer
    replayed = config.actor_rollout_ref.actor.router_replay.replay_file is not None
    workers = launch.rollout_workers
    if workers is None:
        workers = 0 if replayed else 1
    return Attempt(
        number=number,
        rollout_workers=workers,
        rollout_shards=launch.rollout_shards or max(1, workers),
        training_ranks=trainer.nnodes * trainer.n_gpus_per_node,
        total_training_steps=trainer.total_training_steps,
        save_freq=trainer.save_freq,
        validations=validations_of(config),
        start_timeout_s=launch.start_timeout_s,
        step_timeout_s=launch.step_timeout_s,
        gpu_memory_utilization=config.actor_rollout_ref.rollout.gpu_memory_utilization,
        cpu_kv_cache_gib=config.actor_rollout_ref.rollout.cpu_kv_cache_gib,
        trace_buffer_mib=config.actor_rollout_ref.rollout.trace_buffer_mib,
    )


def validations_of(config: RunConfig) -> tuple[int, ...]:
    """Versions to validate: 0 (val_before_train), every test_freq-th, and the last."""
    trainer = config.trainer
    if config.data.val_files is None:
        return ()
    last = trainer.total_training_steps
    versions = {last}
    if trainer.val_before_train:
        versions.add(0)
    if trainer.test_freq > 0:
        versions.update(range(trainer.test_freq, last, trainer.test_freq))
    return tuple(sorted(versions))


def end_attempt(store: Store, attempt: Attempt, reason: str, message: str) -> dict[str, Any]:
    """Tell the attempt's workers to exit: reason is 'finished', 'failed' or 'cancelled'."""
    body = {"reason": reason, "message": message}
    return commit(store, keys.stop(attempt.number), body, new_attempt()).body
