"""Pure functions that plan the prompts, policy version and sampling of a step.

A plan depends only on the settings, the number of prompts and the step. The same samples are
therefore planned when a run is attached again, and when a run replays another run's recorded set.
"""

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pipeline.config.tree import RunConfig
from pipeline.rl.estimator_table import needs_baseline
from pipeline.run.plan import PlannedPrompt, Sampling, StepPlan, ValidationPlan, Window

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class PromptCounts(Protocol):
    """The properties of a run's inputs that planning needs."""

    @property
    def prompt_count(self) -> int:
        """Number of rows in the staged prompt table."""

    @property
    def val_prompt_count(self) -> int:
        """Number of rows in the staged validation table; 0 if the run does not have that table."""


def make_plan(
    config: RunConfig, run: PromptCounts, step: int, shards: int, sub_plan: int = 0
) -> StepPlan:
    """Make the plan of a step or, with dynamic sampling, of one of its sub-plans.

    A step owns a window of prompts, which is large enough for all its possible sub-plans. Sub-plans
    take their prompts from the window in order.

    Args:
        config: The run's settings.
        run: The prompt counts of the run's inputs.
        step: The step.
        shards: Number of shards. This number may differ between attempts, but all sub-plans of a
            step use the number of shards of its first sub-plan. Any number will do for a plan that
            is used only for comparison.
        sub_plan: Number of the sub-plan.

    Raises:
        ValueError: The sub-plan is beyond the window.
    """
    data, rollout = config.data, config.actor_rollout_ref.rollout
    most = most_sub_plans(config)
    if not 0 <= sub_plan < most:
        raise ValueError(f"step {step}: sub-plan {sub_plan}, expected a number below {most}")
    size = sub_plan_prompts(config)
    first = (step * most + sub_plan) * size
    positions = range(first, first + size)
    prompts = _prompts_at(step, positions, run.prompt_count, data.shuffle, data.seed)
    return StepPlan(
        step=step,
        sub_plan=sub_plan,
        baseline=needs_baseline(config.algorithm.adv_estimator),
        policy_version=policy_version(step, config.trainer.max_staleness),
        prompts=tuple(PlannedPrompt(row, epoch) for row, epoch in prompts),
        n=rollout.n,
        sampling=Sampling(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            max_tokens=data.max_response_length,
        ),
        routes=rollout.enable_rollout_routing_replay,
        seed=config.trainer.seed,
        shards=shards,
    )


def most_sub_plans(config: RunConfig) -> int:
    """Return the maximum number of sub-plans in a step; 1 if dynamic sampling is off."""
    filters = config.algorithm.filter_groups
    return filters.max_num_gen_batches if filters.enable else 1


def sub_plan_prompts(config: RunConfig) -> int:
    """Return the number of prompts in each sub-plan."""
    data = config.data
    if not config.algorithm.filter_groups.enable:
        return data.train_batch_size
    return data.gen_batch_size or data.train_batch_size


def make_window(config: RunConfig, run: PromptCounts, step: int) -> Window:
    """Return the plans that a step may publish, for comparison with the published plans.

    Args:
        config: The run's settings.
        run: The prompt counts of the run's inputs.
        step: The step.

    Returns:
        The window. Its plans use 1 as a placeholder for the number of shards.
    """
    numbers = range(most_sub_plans(config))
    plans = tuple(make_plan(config, run, step, 1, number) for number in numbers)
    return Window(plans, config.data.train_batch_size)


def make_validation_plan(
    config: RunConfig, run: PromptCounts, version: int, shards: int
) -> ValidationPlan:
    """Make the plan for validating a policy version.

    Args:
        config: The run's settings.
        run: The prompt counts of the run's inputs.
        version: The policy version.
        shards: Number of shards.
    """
    sampling = config.actor_rollout_ref.rollout.val_kwargs
    return ValidationPlan(
        policy_version=version,
        prompts=tuple(PlannedPrompt(row, 0) for row in range(run.val_prompt_count)),
        n=sampling.n,
        sampling=Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=config.data.max_response_length,
        ),
        routes=False,
        seed=config.trainer.seed,
        shards=shards,
    )


def policy_version(step: int, max_staleness: int) -> int:
    """Return the policy version that a step's rollouts use."""
    return max(0, step - max_staleness)


def _prompts_at(
    step: int, positions: Iterable[int], n_prompts: int, shuffle: bool, seed: int
) -> list[tuple[int, int]]:
    """Return the row and epoch at each given position in the endless sequence of epochs."""
    if n_prompts < 1:
        raise ValueError(f"step {step}: the prompt table is empty")
    chosen = []
    for position in positions:
        epoch, place = divmod(position, n_prompts)
        row = int(_order(n_prompts, seed, epoch)[place]) if shuffle else place
        chosen.append((row, epoch))
    return chosen


@lru_cache(maxsize=4)
def _order(n_prompts: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Return the rows of an epoch, ordered by a hash of (seed, epoch, row).

    The hash is SplitMix64 (Steele et al. 2014). numpy's generator is not used, because its output
    may change between versions of numpy, and a restart with a different version must plan the same
    steps.
    """
    salt = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
    z = (np.arange(1, n_prompts + 1, dtype=np.uint64) * _GOLDEN) + np.frombuffer(salt, "<u8")[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(z ^ (z >> np.uint64(31)), kind="stable")
