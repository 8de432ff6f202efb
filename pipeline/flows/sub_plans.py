"""The groups of a step, generated one sub-plan after another until enough groups are accepted.

    publish sub-plan 0 ─► shards ─► enough groups with variance? ─► seal
                 ▲                            │ no
                 └── publish the next one ◄───┘ the window is used up: InputError

Without dynamic sampling, a step has one plan, and all its groups are accepted.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.config.tree import RunConfig
from pipeline.errors import InputError
from pipeline.flows.group_values import group_values
from pipeline.inputs.stage import StagedRun
from pipeline.rl.group_filter import ChosenGroups, choose
from pipeline.run.commit import CorruptObjectError
from pipeline.run.plan import Plan, StepPlan, publish_step_plan
from pipeline.run.planning import make_plan, most_sub_plans, sub_plan_prompts
from pipeline.traces import baseline_ids, shard_ids

_FILTERS = "algorithm.filter_groups"
_REASONS_SHOWN = 4


@dataclass(frozen=True)
class MadeGroups:
    """The groups that workers have generated for a step, both accepted and rejected."""

    plans: tuple[StepPlan, ...]
    """The step's sub-plans, with all shards committed."""
    rejected: Mapping[str, str]
    """The reason for each rejection, keyed by group."""

    @property
    def policy_version(self) -> int:
        """Return the policy version that generated the groups."""
        return self.plans[0].policy_version

    @property
    def shards(self) -> int:
        """Return the number of shards in the step."""
        return len(self.plans) * self.plans[0].shards

    @property
    def baselines(self) -> list[str]:
        """Return the ids of the greedy samples."""
        return [id for plan in self.plans for id in baseline_ids(plan)]

    def ids_of_shard(self, shard: int) -> list[str]:
        """Return the ids of a shard's accepted samples; `shard` is its number in the step."""
        sub_plan, own = divmod(shard, self.plans[0].shards)
        ids = shard_ids(self.plans[sub_plan], own)
        return [id for id in ids if id.rpartition("/")[0] not in self.rejected]


def make_groups(
    config: RunConfig,
    run: StagedRun,
    step: int,
    shards: int,
    await_shards: Callable[[str, Plan], None],
) -> MadeGroups:
    """Publish plans and wait for their shards until enough groups are accepted.

    The flow publishes another sub-plan as soon as the earlier ones could not fill the step even if
    all of their outstanding groups were accepted. This rule does not depend on timing, so a restart
    leads to the same sub-plans.

    Args:
        config: The settings that apply to the attempt.
        run: The staged run.
        step: The step.
        shards: Shards per sub-plan. If an earlier attempt published the first sub-plan with a
            different number, all sub-plans use that number.
        await_shards: Waits for the shards of a plan. Its first argument is a text that shows users
            what the flow is waiting for.

    Raises:
        InputError: The prompts of the step's window are used up.
        CorruptObjectError: An existing sub-plan does not belong to the step.
    """
    name, filters = f"step {step}", config.algorithm.filter_groups
    plans = [publish_step_plan(run.store, make_plan(config, run, step, shards))]
    if not filters.enable:
        await_shards(name, plans[0])
        return MadeGroups(tuple(plans), {})
    assert filters.metric is not None  # ensured by check_settings
    values: dict[str, list[float | None]] = {}
    choice = ChosenGroups((), {})
    done, wanted, most = 0, config.data.train_batch_size, most_sub_plans(config)
    while len(choice.accepted) < wanted:
        outstanding = sum(len(plan.prompts) for plan in plans[done:])
        if len(choice.accepted) + outstanding < wanted and len(plans) < most:
            plans.append(_further(config, run, plans))
            continue
        if done == len(plans):
            raise InputError([_not_full(config, step, choice)])
        found = f"{len(choice.accepted)} of {wanted} groups accepted" if done else ""
        await_shards(f"{name}, {found}" if found else name, plans[done])
        values |= group_values(run.store, plans[done], filters.metric)
        choice = choose(values, filters.metric, wanted)
        done += 1
    return MadeGroups(tuple(plans), choice.rejected)


def _further(config: RunConfig, run: StagedRun, plans: Sequence[StepPlan]) -> StepPlan:
    """Publish the next sub-plan; raise CorruptObjectError if a different one already exists."""
    ours = make_plan(config, run, plans[0].step, plans[0].shards, len(plans))
    if publish_step_plan(run.store, ours) != ours:
        raise CorruptObjectError(
            f"{ours.key} in {run.store.uri}: found a different plan than expected from the run's "
            f"settings and {plans[0].key}; restore the object"
        )
    return ours


def _not_full(config: RunConfig, step: int, choice: ChosenGroups) -> str:
    most = most_sub_plans(config)
    reasons = Counter(choice.rejected.values()).most_common(_REASONS_SHOWN)
    why = ", ".join(f"{count} where {reason}" for reason, count in reasons)
    return (
        f"{_FILTERS}.max_num_gen_batches: found {len(choice.accepted)} groups with variance in "
        f"step {step} after {most} batches of {sub_plan_prompts(config)} prompts, expected "
        f"data.train_batch_size={config.data.train_batch_size}; rejected groups: {why}. Start a "
        "new run (a different trainer.experiment_name) from the newest policy "
        f"(actor_rollout_ref.model.path) with more than {most} batches, with prompts of medium "
        f"difficulty, with a larger actor_rollout_ref.rollout.n, or with {_FILTERS}.enable=False"
    )
