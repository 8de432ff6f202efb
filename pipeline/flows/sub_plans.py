"""The groups of a step: made plan by plan, until enough are accepted.

    publish sub-plan 0 ─► shards ─► enough groups with variance? ─► seal
                 ▲                            │ no
                 └── publish the next one ◄───┘ the window is used up: InputError

Without dynamic sampling a step has one plan, and all of its groups are accepted.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.config.tree import RunConfig
from pipeline.errors import InputError
from pipeline.inputs.stage import StagedRun
from pipeline.rl.group_filter import ChosenGroups, choose
from pipeline.run.commit import CorruptObjectError
from pipeline.run.plan import Plan, StepPlan, publish_step_plan
from pipeline.run.planning import make_plan, most_sub_plans, sub_plan_prompts
from pipeline.traces import baseline_ids, group_values, shard_ids

_FILTERS = "algorithm.filter_groups"
_REASONS_SHOWN = 4


@dataclass(frozen=True)
class MadeGroups:
    """What workers have made of a step."""

    plans: tuple[StepPlan, ...]
    """Its sub-plans, of which all shards are committed."""
    rejected: Mapping[str, str]
    """The reason of each group that is not accepted."""

    @property
    def policy_version(self) -> int:
        """The policy that has made them."""
        return self.plans[0].policy_version

    @property
    def shards(self) -> int:
        """How many shards the step has."""
        return len(self.plans) * self.plans[0].shards

    @property
    def baselines(self) -> list[str]:
        """The ids of greedy samples."""
        return [id for plan in self.plans for id in baseline_ids(plan)]

    def ids_of_shard(self, shard: int) -> list[str]:
        """The ids that a shard, by its number in the step, adds to the step."""
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
    """Publish plans and await their shards until enough groups are accepted.

    `await_shards` is told what is waited for, for people. A sub-plan is published as soon as those
    before it cannot fill the step any more, whatever comes of them: so the same ones are published
    however often the flow is ended and started again. All have the shards of the first, which an
    earlier attempt may have published. Raises InputError when the window is used up,
    CorruptObjectError when a sub-plan is there that is not the step's.
    """
    name, filters = f"step {step}", config.algorithm.filter_groups
    plans = [publish_step_plan(run.store, make_plan(config, run, step, shards))]
    if not filters.enable:
        await_shards(name, plans[0])
        return MadeGroups(tuple(plans), {})
    assert filters.metric is not None  # check_settings sees to it
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
    """Publish the sub-plan after some. An earlier attempt can only have published the same."""
    ours = make_plan(config, run, plans[0].step, plans[0].shards, len(plans))
    if publish_step_plan(run.store, ours) != ours:
        raise CorruptObjectError(
            f"{ours.key} in {run.store.uri}: it plans something else than the run's settings and "
            f"{plans[0].key}; restore the object"
        )
    return ours


def _not_full(config: RunConfig, step: int, choice: ChosenGroups) -> str:
    most = most_sub_plans(config)
    reasons = Counter(choice.rejected.values()).most_common(_REASONS_SHOWN)
    why = ", ".join(f"{count} where {reason}" for reason, count in reasons)
    return (
        f"{_FILTERS}.max_num_gen_batches: step {step} has {len(choice.accepted)} groups with "
        f"variance of data.train_batch_size={config.data.train_batch_size}, after {most} "
        f"batches of {sub_plan_prompts(config)} prompts; rejected were {why}. Start a new run "
        "(another trainer.experiment_name) from the newest policy (actor_rollout_ref.model.path) "
        f"with more than {most}, with prompts that are neither too easy nor too hard, with a "
        f"larger actor_rollout_ref.rollout.n, or with {_FILTERS}.enable=False"
    )
