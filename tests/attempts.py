"""attempts/NNN.json as tests of one worker write it."""

from collections.abc import Sequence

from pipeline.config.attempt import Attempt
from pipeline.store import Store, keys
from pipeline.store.commit import commit, new_attempt


def make_attempt(
    store: Store, number: int, steps: int, save_freq: int = 10, validations: Sequence[int] = ()
) -> Attempt:
    """Publish the operational settings of a start."""
    attempt = Attempt(
        number=number,
        rollout_workers=1,
        rollout_shards=1,
        training_ranks=1,
        total_training_steps=steps,
        save_freq=save_freq,
        validations=tuple(validations),
        start_timeout_s=120.0,
        step_timeout_s=120.0,
        gpu_memory_utilization=0.8,
        cpu_kv_cache_gib=1,
        trace_buffer_mib=64,
    )
    commit(store, keys.attempt(number), attempt.body(), new_attempt())
    return attempt
