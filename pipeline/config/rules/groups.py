"""Rules for dynamic sampling: the groups that a step accepts, and the number of its prompts."""

from collections.abc import Iterator

from pipeline.config.tree import RunConfig
from pipeline.errors import shown
from pipeline.model.limits import MOST_SAMPLES, MOST_SHARDS

_FILTERS = "algorithm.filter_groups"


def sampled_at_once(config: RunConfig) -> tuple[str, int]:
    """Return the name and value of the setting that determines how many prompts a plan has."""
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
                f"a step samples data.train_batch_size={data.train_batch_size} prompts; write that "
                "number, or null"
            )
        return
    if not filters.metric:
        yield (
            f"{_FILTERS}.metric: found {shown(filters.metric)}, but {_FILTERS}.enable requires a "
            "metric; write seq_reward, acc, or another entry of the reward function's dict"
        )
    if filters.metric == "seq_final_reward" and config.algorithm.use_kl_in_reward:
        yield (
            f"{_FILTERS}.metric: found seq_final_reward, which includes the KL of "
            "algorithm.use_kl_in_reward, but groups are chosen before log-probs exist; write "
            "seq_reward"
        )
    if (most := filters.max_num_gen_batches) < 1:
        yield (
            f"{_FILTERS}.max_num_gen_batches: found {most}, which in verl means no limit, expected "
            "1 or more; each step owns a limited window of prompts, so that a restart samples the "
            "same prompts; write the maximum number of batches that a step may sample, such as 10"
        )
    elif most * size < data.train_batch_size:
        needed = -(-data.train_batch_size // size)
        yield (
            f"{_FILTERS}.max_num_gen_batches: found {most}, but {most} batches of {name}={size} "
            f"prompts cannot fill data.train_batch_size={data.train_batch_size}; write {needed} or "
            "more"
        )
    if (samples := size * config.actor_rollout_ref.rollout.n) > MOST_SAMPLES:
        yield (
            f"{name}: found {size}, which with actor_rollout_ref.rollout.n="
            f"{config.actor_rollout_ref.rollout.n} gives {samples} samples per plan, expected at "
            f"most {MOST_SAMPLES}"
        )
    shards = config.launch.rollout_shards or config.launch.rollout_workers or 1
    if most * shards > MOST_SHARDS:
        yield (
            f"{_FILTERS}.max_num_gen_batches: found {most}, which with {shards} shards per batch "
            f"gives {most * shards} shards per step, expected at most {MOST_SHARDS}; write "
            f"{MOST_SHARDS // shards} or fewer"
        )
    if config.actor_rollout_ref.rollout.n == 1:
        yield (
            f"actor_rollout_ref.rollout.n: found 1, but with {_FILTERS}.enable a group of one "
            "sample has no variance and is never accepted; write 2 or more"
        )
    if not data.shuffle:
        yield (
            f"data.shuffle: found False, but with {_FILTERS}.enable a step skips the prompts of "
            "its window that it does not need, and without shuffling it would skip the same "
            "prompts in each epoch; write True"
        )
