"""One start of a run: its operational settings in the store, and the object that ends it."""

from typing import Any

from pipeline.config.attempt import Attempt
from pipeline.config.tree import RunConfig
from pipeline.store import Store, keys
from pipeline.store.commit import commit, new_attempt


def begin_attempt(store: Store, config: RunConfig) -> Attempt:
    """Write attempts/NNN.json under the next free number."""
    number = sum(1 for info in store.list(keys.attempts()) if not info.key.endswith(".stop.json"))
    while True:
        attempt = attempt_of(config, number)
        if commit(store, keys.attempt(number), attempt.body(), new_attempt()).ours:
            return attempt
        number += 1  # another flow of the same run took the number


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
