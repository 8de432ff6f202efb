"""Rules of dynamic sampling: which groups a step accepts, and from how many prompts."""

from collections.abc import Iterator

from pipeline.config.tree import RunConfig
from pipeline.model.limits import MOST_SAMPLES, MOST_SHARDS

_FILTERS = "algorithm.filter_groups"


def sampled_at_once(config: RunConfig) -> tuple[str, int]:
    """How many prompts a plan has, and the setting that says so."""
    data = config.data
    if config.algorithm.filter_groups.enable and data.gen_batch_size is not None:
        return "data.gen_batch_size", data.gen_batch_size
    return "data.train_batch_size", data.train_batch_size


def group_problems(config: RunConfig) -> Iterator[str]:
    """Yield contradictions between dynamic sampling and other settings."""
    filters, data = config.algorithm.filter_groups, config.data
    name, size = sampled_at_once(config)
    if not filters.enable:
        if data.gen_batch_size not in (None, data.train_batch_size):
            yield (
                f"data.gen_batch_size: found {data.gen_batch_size}, but without {_FILTERS}.enable "
                f"a step has data.train_batch_size={data.train_batch_size} prompts; write that"
            )
        return
    if not filters.metric:
        yield (
            f"{_FILTERS}.metric: found {filters.metric!r}, but {_FILTERS}.enable needs one; write "
            "seq_reward, acc, or another entry of the reward function's dict"
        )
    if filters.metric == "seq_final_reward" and config.algorithm.use_kl_in_reward:
        yield (
            f"{_FILTERS}.metric: found seq_final_reward, which includes the KL of "
            "algorithm.use_kl_in_reward, but groups are chosen before there are log-probs; write "
            "seq_reward"
        )
    if (most := filters.max_num_gen_batches) < 1:
        yield (
            f"{_FILTERS}.max_num_gen_batches: found {most}, which is no limit in verl, expected 1 "
            "or more: each step owns a window of prompts, so that a restart samples the same; "
            "write how many batches a step may sample, such as 10"
        )
    elif most * size < data.train_batch_size:
        needed = -(-data.train_batch_size // size)
        yield (
            f"{_FILTERS}.max_num_gen_batches: found {most}, but so many batches of {name}={size} "
            f"prompts never fill data.train_batch_size={data.train_batch_size}; write {needed} or "
            "more"
        )
    if (samples := size * config.actor_rollout_ref.rollout.n) > MOST_SAMPLES:
        yield (
            f"{name}: found {size}, with actor_rollout_ref.rollout.n="
            f"{config.actor_rollout_ref.rollout.n} that is {samples} samples at once, expected at "
            f"most {MOST_SAMPLES}"
        )
    shards = config.launch.rollout_shards or config.launch.rollout_workers or 1
    if most * shards > MOST_SHARDS:
        yield (
            f"{_FILTERS}.max_num_gen_batches: found {most}, in {shards} shards each that is "
            f"{most * shards}, expected at most {MOST_SHARDS} shards in a step; write "
            f"{MOST_SHARDS // shards} or fewer"
        )
    if config.actor_rollout_ref.rollout.n == 1:
        yield (
            f"actor_rollout_ref.rollout.n: found 1, but with {_FILTERS}.enable a group of one "
            "sample has no variance and is never accepted; write 2 or more"
        )
    if not data.shuffle:
        yield (
            f"data.shuffle: found False, but with {_FILTERS}.enable a step passes over what it "
            "does not need of its window, and in the file's order these would be the same prompts "
            "in each epoch; write True"
        )
