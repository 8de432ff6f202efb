"""plan.json: what the rollout workers make for a step or for the validation of a policy version.

The flow publishes a plan once. `planning` makes plans from settings.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from pipeline.model.limits import MOST_SAMPLES, MOST_SHARDS
from pipeline.run import keys
from pipeline.run.commit import (
    CorruptObjectError,
    commit,
    find_commit,
    new_write_id,
    parsing,
    read_commit,
)
from pipeline.run.parse import field, flag, integer, items, mapping, number, real
from pipeline.store.base import Store

_OPTIONAL = ("sub_plan", "baseline")
"""Stored where they say something."""


@dataclass(frozen=True)
class PlannedPrompt:
    """A prompt of a plan. Example: PlannedPrompt(row=17, epoch=2)."""

    row: int
    """Row of the staged prompt table."""
    epoch: int
    """0 in a validation."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a plan. Example: Sampling(1.0, 1.0, -1, 512)."""

    temperature: float
    """0: greedy."""
    top_p: float
    top_k: int
    """-1: off."""
    max_tokens: int
    """Maximum response length."""


@dataclass(frozen=True)
class Plan(ABC):
    """The common part of a step's plan and a validation's plan."""

    policy_version: int
    """The policy that makes the samples."""
    prompts: tuple[PlannedPrompt, ...]
    n: int
    """Samples per prompt."""
    sampling: Sampling
    routes: bool
    """Whether the engine's routes are recorded."""
    seed: int
    """The run's sampling seed, from which each sample's own seed is made."""
    shards: int
    """Number of shards; prompt i is in shard i mod shards."""

    def __post_init__(self) -> None:
        """Raise ValueError for more than a step can be, as a few bytes can claim; for doubles."""
        samples = self.group_samples * len(self.prompts)
        if samples > MOST_SAMPLES or self.shards > MOST_SHARDS:
            raise ValueError(
                f"{samples} samples in {self.shards} shards, at most {MOST_SAMPLES} in "
                f"{MOST_SHARDS} can be planned"
            )
        if len(set(self.prompts)) != len(self.prompts):
            raise ValueError("a prompt stands there twice")

    @property
    @abstractmethod
    def key(self) -> str:
        """The key of the plan."""

    @abstractmethod
    def shard_key(self, shard: int) -> str:
        """The key of the object that commits a shard."""

    @property
    def group_samples(self) -> int:
        """All samples of a prompt."""
        return self.n

    def number_of(self, shard: int) -> int:
        """The number that a shard of the plan has among all shards of its step."""
        return shard

    def prompts_of(self, shard: int) -> tuple[PlannedPrompt, ...]:
        """The prompts of a shard, in the plan's order."""
        return self.prompts[shard :: self.shards]


@dataclass(frozen=True)
class StepPlan(Plan):
    """steps/NNNNNN/plan.json: the samples that a step is trained on.

    With dynamic sampling there are more of a step, plan.00001.json and so on: its sub-plans. All
    have as many shards, which are numbered through: those of sub-plan 1 follow those of sub-plan 0.
    """

    step: int
    sub_plan: int = 0
    """The plan's number among the sub-plans of its step."""
    baseline: bool = False
    """Each prompt has one sample more, its last: greedy, and not trained on (ReMax)."""

    def __post_init__(self) -> None:
        """Raise ValueError as every plan does, and for more shards than a step can have."""
        super().__post_init__()
        if (self.sub_plan + 1) * self.shards > MOST_SHARDS:
            raise ValueError(
                f"sub-plan {self.sub_plan} of {self.shards} shards, at most {MOST_SHARDS} shards "
                "can be planned for a step"
            )

    @property
    def key(self) -> str:
        """steps/NNNNNN/plan.json."""
        return keys.sub_plan(self.step, self.sub_plan)

    @property
    def group_samples(self) -> int:
        """All samples of a prompt: n, and its baseline."""
        return self.n + self.baseline

    def number_of(self, shard: int) -> int:
        """The number that a shard of the plan has among all shards of its step."""
        return self.sub_plan * self.shards + shard

    def shard_key(self, shard: int) -> str:
        """steps/NNNNNN/rollout/SSSSS.json."""
        return keys.rollout(self.step, self.number_of(shard))


@dataclass(frozen=True)
class Window:
    """The prompts that a step owns, and how many groups it is trained on."""

    plans: tuple[StepPlan, ...]
    """Its sub-plans, in the order in which they are made; without dynamic sampling one."""
    groups: int

    def made(self, groups: int) -> tuple[StepPlan, ...]:
        """The first sub-plans, which together have so many groups or more; all, if they have less.

        So many were made when `groups` were accepted or rejected.
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
        """validations/NNNNNN/SSSSS.json."""
        return keys.validation(self.policy_version, shard)


@dataclass(frozen=True)
class ValidationCounts:
    """What a committed shard of a validation came to."""

    count: int
    """Samples with a reward."""
    without_reward: int
    """Samples without one."""
    reward_sum: float
    sources: Mapping[str, Mapping[str, tuple[float, int]]]
    """By data source and name: the sum of the rewards, or of another number that the reward
    function returned, and how many samples have it; {}: an older worker stored none."""


def find_counts(store: Store, plan: Plan, shard: int) -> ValidationCounts | None:
    """Read a shard of a validation; None if it is not committed. Raises CorruptObjectError."""
    body = find_commit(store, plan.shard_key(shard))
    if body is None:
        return None
    with parsing(store, plan.shard_key(shard)):
        return parse_counts(body)


def parse_counts(body: Mapping[str, Any]) -> ValidationCounts:
    """Parse what the commit of a validation's shard says of its rewards. Raises ValueError."""
    return ValidationCounts(
        field(body, "count", number),
        field(body, "masked", number),
        field(body, "reward_sum", real),
        field(body, "maker", _sources) if "maker" in body else {},
    )


def _sources(value: Any) -> dict[str, dict[str, tuple[float, int]]]:
    by_source = mapping(mapping(value).get("sources", {}))
    return {
        source: {name: _sum(numbers) for name, numbers in mapping(by_source[source]).items()}
        for source in by_source
    }


def _sum(value: Any) -> tuple[float, int]:
    pair = items(value)
    if len(pair) != 2:
        raise ValueError(f"{value!r} is no sum with its number of samples")
    return real(pair[0]), number(pair[1])


def publish_plan(store: Store, plan: Plan) -> Plan:
    """Create a plan, or read the one that an earlier attempt published.

    Returns the stored plan. Raises StoreError, CorruptObjectError.
    """
    body = commit(store, plan.key, plan_json(plan), new_write_id()).body
    return parse_plan(body, plan.key, store.uri)


def publish_step_plan(store: Store, plan: StepPlan) -> StepPlan:
    """The same, of a step."""
    found = publish_plan(store, plan)
    assert isinstance(found, StepPlan)  # by its key
    return found


def find_step_plans(store: Store, step: int) -> list[StepPlan]:
    """The sub-plans of a step that are published, in order; [] for none.

    Raises CorruptObjectError, also when one is missing that stands before another.
    """
    prefix = keys.step_prefix(step) + "plan."
    found = [keys.sub_plan_number(info.key) for info in store.list(prefix)]
    numbers = sorted(number for number in found if number is not None)
    if numbers != list(range(len(numbers))):
        missing = next(number for number in range(len(numbers)) if number not in numbers)
        raise CorruptObjectError(
            f"{keys.sub_plan(step, missing)} in {store.uri}: no such object, but "
            f"{keys.sub_plan(step, numbers[-1])} is there; restore the object"
        )
    plans = [read_plan(store, keys.sub_plan(step, number)) for number in numbers]
    return [plan for plan in plans if isinstance(plan, StepPlan)]


def read_plan(store: Store, key: str) -> Plan:
    """Read the plan under a key. Raises ObjectMissingError, CorruptObjectError."""
    return parse_plan(read_commit(store, key), key, store.uri)


def find_plan(store: Store, key: str) -> Plan | None:
    """Read the plan under a key; None if it does not exist yet. Raises CorruptObjectError."""
    body = find_commit(store, key)
    return None if body is None else parse_plan(body, key, store.uri)


def plan_json(plan: Plan) -> dict[str, Any]:
    """The stored form of a plan."""
    body = {
        **asdict(plan),
        "prompts": [asdict(prompt) for prompt in plan.prompts],
        # A validation's plan repeats its policy version under this key.
        "step": plan.step if isinstance(plan, StepPlan) else plan.policy_version,
    }
    # Plans without them are stored as they were before there were any.
    return {name: body[name] for name in body if name not in _OPTIONAL or body[name]}


def parse_plan(body: Mapping[str, Any], key: str, uri: str) -> Plan:
    """Parse the stored plan under `key` in the store `uri`.

    Raises CorruptObjectError, naming the object and what is missing or wrong; ValueError when no
    plan can have this key.
    """
    folder, sub_plan = keys.folder_number(key), keys.sub_plan_number(key)
    if folder is None or (sub_plan is None and key != keys.validation_plan(folder)):
        raise ValueError(f"{key}: no plan has this key")
    try:
        common: dict[str, Any] = {
            "policy_version": field(body, "policy_version", number),
            "prompts": field(body, "prompts", _prompts),
            "n": field(body, "n", _some),
            "sampling": field(body, "sampling", _sampling),
            "routes": field(body, "routes", flag),
            "seed": field(body, "seed", integer),
            "shards": field(body, "shards", _some),
        }
        _expect("step", field(body, "step", number), folder)
        if sub_plan is not None:
            said = field(body, "sub_plan", number) if "sub_plan" in body else 0
            _expect("sub_plan", said, sub_plan)
            baseline = "baseline" in body and field(body, "baseline", flag)
            return StepPlan(**common, step=folder, sub_plan=sub_plan, baseline=baseline)
        _expect("policy_version", common["policy_version"], folder)
        for prompt in common["prompts"]:
            _expect("epoch", prompt.epoch, 0)
        return ValidationPlan(**common)
    except ValueError as error:
        raise CorruptObjectError(
            f"{key} in {uri}: not the plan that it should be: {error}; restore the object"
        ) from error


def _expect(name: str, found: int, expected: int) -> None:
    if found != expected:
        raise ValueError(f"{name} {found}, expected {expected}")


def _some(value: Any) -> int:
    if number(value) == 0:
        raise ValueError("0, expected at least 1")
    return number(value)


def _prompts(value: Any) -> tuple[PlannedPrompt, ...]:
    return tuple(
        PlannedPrompt(field(mapping(one), "row", number), field(mapping(one), "epoch", number))
        for one in items(value)
    )


def _sampling(value: Any) -> Sampling:
    body = mapping(value)
    found = Sampling(
        temperature=field(body, "temperature", real),
        top_p=field(body, "top_p", real),
        top_k=field(body, "top_k", integer),
        max_tokens=field(body, "max_tokens", number),
    )
    if found.temperature < 0 or not 0 < found.top_p <= 1 or found.top_k < -1:
        raise ValueError(
            f"{found}, expected a temperature of at least 0, top_p above 0 and at most 1, and "
            "top_k of at least -1"
        )
    return found
