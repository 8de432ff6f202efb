"""plan.json: the samples that rollout workers generate for a step or a validation.

The flow publishes each plan once. `planning` makes plans from settings.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Annotated, Any

import msgspec

from pipeline.model.limits import MOST_SAMPLES, MOST_SHARDS
from pipeline.run import keys
from pipeline.run.commit import (
    CorruptObjectError,
    commit,
    find_commit,
    find_commit_of,
    new_write_id,
    parsing,
    read_commit,
)
from pipeline.run.parse import Count, convert
from pipeline.store.base import Store

_Some = Annotated[int, msgspec.Meta(ge=1)]
_OPTIONAL = ("sub_plan", "baseline")
"""Fields that are stored only if their value differs from the default."""


@dataclass(frozen=True)
class PlannedPrompt:
    """A prompt in a plan. Example: PlannedPrompt(row=17, epoch=2)."""

    row: Count
    """Row in the staged prompt table."""
    epoch: Count
    """Epoch of the prompt table; 0 in a validation."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a plan. Example: Sampling(1.0, 1.0, -1, 512)."""

    temperature: Annotated[float, msgspec.Meta(ge=0)]
    """0 for greedy sampling."""
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)]
    top_k: Annotated[int, msgspec.Meta(ge=-1)]
    """-1 for no limit."""
    max_tokens: Count
    """Maximum response length."""


@dataclass(frozen=True)
class Plan(ABC):
    """The fields and methods that step plans and validation plans have in common."""

    policy_version: Count
    """The policy version that generates the samples."""
    prompts: tuple[PlannedPrompt, ...]
    n: _Some
    """Samples per prompt."""
    sampling: Sampling
    routes: bool
    """Whether the engine records routes."""
    seed: int
    """The run's sampling seed, from which each sample's own seed is derived."""
    shards: _Some
    """Number of shards; prompt i is in shard i mod shards."""

    def __post_init__(self) -> None:
        """Raise ValueError for duplicate prompts or for too many samples or shards.

        The limits are needed because a few bytes of JSON can contain huge numbers.
        """
        samples = self.group_samples * len(self.prompts)
        if samples > MOST_SAMPLES or self.shards > MOST_SHARDS:
            raise ValueError(
                f"{samples} samples in {self.shards} shards, expected at most {MOST_SAMPLES} "
                f"samples in {MOST_SHARDS} shards"
            )
        if len(set(self.prompts)) != len(self.prompts):
            raise ValueError("a prompt is listed twice")

    @property
    @abstractmethod
    def key(self) -> str:
        """The key of the plan."""

    @abstractmethod
    def shard_key(self, shard: int) -> str:
        """Return the key of the object that commits a shard."""

    @property
    def group_samples(self) -> int:
        """The number of samples per prompt."""
        return self.n

    def number_of(self, shard: int) -> int:
        """Return a shard's number in its step, given its number in the plan."""
        return shard

    def prompts_of(self, shard: int) -> tuple[PlannedPrompt, ...]:
        """Return the prompts of a shard, in the plan's order."""
        return self.prompts[shard :: self.shards]


@dataclass(frozen=True)
class StepPlan(Plan):
    """steps/NNNNNN/plan.json: the samples on which a step is trained.

    With dynamic sampling, a step can have several plans, which are called its sub-plans: plan.json,
    plan.00001.json and so on. All sub-plans have the same number of shards. Shards are numbered
    across sub-plans: the shards of sub-plan 1 follow those of sub-plan 0.
    """

    step: int
    sub_plan: int = 0
    """The plan's number among the sub-plans of its step."""
    baseline: bool = False
    """Whether each prompt has an additional last sample, which is generated greedily and not
    trained on (ReMax)."""

    def __post_init__(self) -> None:
        """Raise ValueError as `Plan` does, or if the step would have too many shards."""
        super().__post_init__()
        shards = (self.sub_plan + 1) * self.shards
        if shards > MOST_SHARDS:
            raise ValueError(
                f"{shards} shards in sub-plans 0 to {self.sub_plan}, expected at most "
                f"{MOST_SHARDS} in a step"
            )

    @property
    def key(self) -> str:
        """steps/NNNNNN/plan.json, or steps/NNNNNN/plan.KKKKK.json for sub-plan K >= 1."""
        return keys.sub_plan(self.step, self.sub_plan)

    @property
    def group_samples(self) -> int:
        """The number of samples per prompt: n, plus 1 with a baseline."""
        return self.n + self.baseline

    def number_of(self, shard: int) -> int:
        """Return a shard's number in its step, given its number in the plan."""
        return self.sub_plan * self.shards + shard

    def shard_key(self, shard: int) -> str:
        """Return steps/NNNNNN/rollout/SSSSS.json."""
        return keys.rollout(self.step, self.number_of(shard))


@dataclass(frozen=True)
class Window:
    """The prompts that a step owns, and the number of groups on which the step is trained."""

    plans: tuple[StepPlan, ...]
    """The step's sub-plans, in order of publication; a single plan if dynamic sampling is off."""
    groups: int
    """Number of groups on which the step is trained."""

    def made(self, groups: int) -> tuple[StepPlan, ...]:
        """Return the sub-plans published by the time `groups` groups are accepted or rejected.

        The result contains the first sub-plans, but only as many as are needed for a total of at
        least `groups` prompts. If the window contains fewer prompts, all sub-plans are returned.
        """
        sizes = list(accumulate(len(plan.prompts) for plan in self.plans))
        return self.plans[: bisect_left(sizes, groups) + 1]


@dataclass(frozen=True)
class ValidationPlan(Plan):
    """validations/NNNNNN/plan.json: the samples that validate a policy version."""

    @property
    def key(self) -> str:
        """validations/NNNNNN/plan.json."""
        return keys.validation_plan(self.policy_version)

    def shard_key(self, shard: int) -> str:
        """Return validations/NNNNNN/SSSSS.json."""
        return keys.validation(self.policy_version, shard)


@dataclass(frozen=True)
class ValidationCounts:
    """The counts and reward sums in a committed shard of a validation."""

    count: int
    """Samples with a reward."""
    without_reward: int
    """Samples without a reward."""
    reward_sum: float
    sources: Mapping[str, Mapping[str, tuple[float, int]]]
    """A sum and a sample count for each value, keyed by data source, then by the value's name.

    The values are the reward and the other numbers that the reward function returned. The count is
    the number of samples that have the value."""


def find_counts(store: Store, plan: Plan, shard: int) -> ValidationCounts | None:
    """Read the reward counts of a validation shard.

    Args:
        store: The run.
        plan: The plan of the validation.
        shard: The shard's number in the plan.

    Returns:
        The counts; None if the shard is not committed.

    Raises:
        CorruptObjectError: The commit is damaged or invalid.
    """
    place = {"version": plan.policy_version, "shard": shard}
    body = find_commit_of(store, plan.shard_key(shard), place)
    if body is None:
        return None
    with parsing(store, plan.shard_key(shard)):
        return parse_counts(body)


def parse_counts(body: Mapping[str, Any]) -> ValidationCounts:
    """Parse the reward counts in the commit of a validation shard. Raises ValueError."""
    found = convert(body, _StoredCounts)
    return ValidationCounts(found.count, found.masked, found.reward_sum, found.maker.sources)


class _StoredMaker(msgspec.Struct):
    sources: dict[str, dict[str, tuple[float, Count]]] = {}


class _StoredCounts(msgspec.Struct):
    count: Count
    masked: Count
    reward_sum: float
    maker: _StoredMaker = msgspec.field(default_factory=_StoredMaker)


def publish_plan(store: Store, plan: Plan) -> Plan:
    """Create a plan, or read the one that an earlier attempt published.

    Returns the stored plan. Raises StoreError and CorruptObjectError.
    """
    body = commit(store, plan.key, plan_json(plan), new_write_id()).body
    return parse_plan(body, plan.key, store.uri)


def publish_step_plan(store: Store, plan: StepPlan) -> StepPlan:
    """Create the plan of a step, or read the one that an earlier attempt published."""
    found = publish_plan(store, plan)
    assert isinstance(found, StepPlan)  # the key determines the type
    return found


def find_step_plans(store: Store, step: int) -> list[StepPlan]:
    """Return the published sub-plans of a step, in order; the list may be empty.

    Raises CorruptObjectError if a sub-plan is damaged, or is missing although a later one exists.
    """
    prefix = keys.step_prefix(step) + "plan."
    found = [keys.sub_plan_number(info.key) for info in store.list(prefix)]
    numbers = sorted(number for number in found if number is not None)
    if numbers != list(range(len(numbers))):
        missing = next(number for number in range(len(numbers)) if number not in numbers)
        raise CorruptObjectError(
            f"{keys.sub_plan(step, missing)} in {store.uri}: no such object, but "
            f"{keys.sub_plan(step, numbers[-1])} exists; restore the object"
        )
    plans = [read_plan(store, keys.sub_plan(step, number)) for number in numbers]
    return [plan for plan in plans if isinstance(plan, StepPlan)]


def read_plan(store: Store, key: str) -> Plan:
    """Read the plan under a key. Raises ObjectMissingError and CorruptObjectError."""
    return parse_plan(read_commit(store, key), key, store.uri)


def find_plan(store: Store, key: str) -> Plan | None:
    """Read the plan under a key; return None if it does not exist yet.

    Raises CorruptObjectError.
    """
    body = find_commit(store, key)
    return None if body is None else parse_plan(body, key, store.uri)


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return the stored form of a plan."""
    body = {
        **asdict(plan),
        "prompts": [asdict(prompt) for prompt in plan.prompts],
        # The plan of a validation repeats its policy version under this key.
        "step": plan.step if isinstance(plan, StepPlan) else plan.policy_version,
    }
    # A plan that does not use the optional fields is stored as it was before these fields existed.
    return {name: body[name] for name in body if name not in _OPTIONAL or body[name]}


def parse_plan(body: Mapping[str, Any], key: str, uri: str) -> Plan:
    """Parse a stored plan.

    Args:
        body: The stored object.
        key: Its key, which determines the step and sub-plan, or the policy version.
        uri: The store's URI, for error messages.

    Raises:
        CorruptObjectError: A field is missing, is invalid or contradicts the key.
        ValueError: `key` is not the key of a plan.
    """
    folder, sub_plan = keys.folder_number(key), keys.sub_plan_number(key)
    if folder is None or (sub_plan is None and key != keys.validation_plan(folder)):
        raise ValueError(f"{key}: not the key of a plan")
    try:
        kind = ValidationPlan if sub_plan is None else StepPlan
        place = {"step": folder}
        if sub_plan is None:
            place["policy_version"] = folder
        elif sub_plan:
            place["sub_plan"] = sub_plan
        if (found := {name: body.get(name) for name in place}) != place:
            raise ValueError(f"found {found}, expected {place}")
        return convert(body, kind)
    except ValueError as error:
        raise CorruptObjectError(
            f"{key} in {uri}: not the plan that belongs to this key: {error}; restore the object"
        ) from error
