"""The comparison of a flow's settings and inputs with the existing run to which it attaches.

The settings and inputs must match those of the run. pipeline.config.identity lists the settings
that may not change. The content of inputs is compared with the staged files. An input may be staged
again as long as no commit depends on it. The parallel layout may change at any start, because a
trainer starts from a checkpoint, which can be loaded in every layout (`_layout_refused` describes
an exception).
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.config.identity import LAYOUT, differing, input_of
from pipeline.config.keys import value_at
from pipeline.config.tree import RunConfig
from pipeline.errors import InputError
from pipeline.inputs.checked import CheckedInputs
from pipeline.inputs.new_run import new_run
from pipeline.inputs.prompts.token_table import PromptTable
from pipeline.inputs.weight_files import digest_of
from pipeline.rl.custom import CUSTOM
from pipeline.run import keys
from pipeline.run.attempts import config_of
from pipeline.run.commit import DataFile
from pipeline.run.description import RunDescription, StagedInputs, find_description
from pipeline.run.plan import Plan, StepPlan, read_plan
from pipeline.run.planning import make_plan, make_validation_plan
from pipeline.run.prompt_table import StoredPrompts
from pipeline.run.restarts import restarts
from pipeline.run.uses import first_use
from pipeline.store import Store, StoreError, open_store
from pipeline.store.schemes import place_in

_REWARD = "custom_reward_function"
_MEGATRON = "actor_rollout_ref.actor.megatron"
_INPUTS = {
    "reward": ("the reward function", f"{_REWARD}.path"),
    "prompts": ("the training prompts", "data.train_files"),
    "val_prompts": ("the validation prompts", "data.val_files"),
    "model": ("the model", "actor_rollout_ref.model.path"),
    "functions": ("an estimator or loss", ""),
}
"""For each input: its name in messages, and the setting that contains its path (empty for
functions, whose paths are in several settings)."""


@dataclass(frozen=True)
class Mended:
    """What a start is about to change in a run: inputs to stage again, and settings."""

    inputs: tuple[str, ...]
    """Names of the inputs, as in StagedInputs."""
    settings: Mapping[str, Any]
    """New values of settings, keyed by the settings' dotted keys."""
    reason: str
    """The changes, and why they are allowed, as one line."""


def stored_settings(config: RunConfig) -> Mapping[str, Any] | None:
    """Return the stored settings of the run that these settings name.

    Returns None if there is no such run, or if it cannot be read, because `check_inputs` or
    `attach` will refuse it.
    """
    try:
        run = find_description(open_store(config.run_uri))
    except StoreError:
        return None
    return None if run is None else run.settings


def attach(inputs: CheckedInputs) -> Mended | None:
    """Compare inputs with the run of the same name, and return what this start changes.

    Returns None if the run is new or continues unchanged. Raises InputError, which lists the ways
    to continue, if the run cannot continue with these inputs.
    """
    where = f"trainer.experiment_name: the run {inputs.config.trainer.run_name!r}"
    where += f" in {inputs.store.uri}"
    try:
        run = find_description(inputs.store)
        if run is None:
            return None
        settings = differing(_config_of(run, where), inputs.config)
        texts = _by_input(inputs, run, settings)
        refused = [*texts.pop(None, ()), *_refused(inputs, run, texts)]
        refused += _layout_refused(inputs, settings)
        if refused:
            lines = [f"{where} has different settings or inputs:", *refused]
            raise InputError(
                ["\n  ".join(lines) + "\nrestore the old values, or " + new_run(inputs)]
            )
    except StoreError as error:
        raise InputError(
            [f"{where} cannot be read: {error}; or choose a different name"]
        ) from error
    if not texts:
        return None
    names = tuple(name for name in _INPUTS if name in texts)
    reasons = [
        f"{_INPUTS[name][0]} ({'; '.join(texts[name])}), because no commit depends on it yet"
        for name in names
    ]
    if LAYOUT in texts:
        reasons.append(f"the parallel layout ({'; '.join(texts[LAYOUT])}), {_from(inputs.store)}")
    reason = "; ".join(reasons)
    return Mended(names, _settings(inputs.config, run, names, settings), reason)


def _config_of(run: RunDescription, where: str) -> RunConfig:
    try:
        return config_of(run)
    except InputError as error:
        found = "\n  ".join(error.problems)
        raise InputError(
            [f"{where} was created by a different release; choose a different name:\n  {found}"]
        ) from error


def _by_input(
    inputs: CheckedInputs, run: RunDescription, settings: Mapping[str, tuple[Any, Any]]
) -> dict[str | None, list[str]]:
    """Return all differences as texts, keyed by the affected input, or by LAYOUT.

    The differences that affect neither an input nor the layout are under the key None.
    """
    texts: dict[str | None, list[str]] = {}
    for name, text in _changed_inputs(inputs, run.inputs):
        where = f"{_INPUTS[name][1]}: " if _INPUTS[name][1] else ""
        texts.setdefault(name, []).append(f"{where}{text}")
    for key, (was, now) in settings.items():
        texts.setdefault(input_of(key, was, now), []).append(f"{key}: was {was!r}, now {now!r}")
    return texts


def _settings(
    config: RunConfig,
    run: RunDescription,
    names: tuple[str, ...],
    changed: Mapping[str, tuple[Any, Any]],
) -> dict[str, Any]:
    """Return the new values of the settings that change, including inputs' paths."""
    found = {key: now for key, (_, now) in changed.items() if not key.startswith(f"{_REWARD}.")}
    new = config.model_dump(mode="json")
    if "reward" in names and new[_REWARD] != run.setting(_REWARD):
        found[_REWARD] = new[_REWARD]  # the whole section, because a run may lack it
    paths = {_INPUTS[name][1] for name in names if name not in ("reward", "functions")}
    paths |= set(CUSTOM) if "functions" in names else set()
    for key in sorted(paths):
        if value_at(config, key) != run.setting(key):
            found[key] = value_at(config, key)
    return found


def _refused(
    inputs: CheckedInputs, run: RunDescription, texts: Mapping[str | None, list[str]]
) -> Iterator[str]:
    """Yield the differences in inputs that this start may no longer make, with the reason."""
    store = inputs.store
    names = [name for name in _INPUTS if name in texts]
    for name in names:
        why = None
        if key := first_use(store, name):
            why = f"but {key} depends on the earlier one"
        elif key := _planned_otherwise(inputs, name):
            why = f"but {key} was planned with the earlier one"
        if why is not None:
            yield from (f"{text}, {why}" for text in texts[name])
            if name == "reward" and run.inputs.reward is not None:
                place = place_in(store, run.inputs.reward.key)
                yield f"(the earlier reward file is kept as {place})"
        elif name == "model" and inputs.geometry != run.geometry:
            yield from texts[name]
            yield f"(a model with different experts: was {run.geometry}, now {inputs.geometry})"


def _layout_refused(
    inputs: CheckedInputs, settings: Mapping[str, tuple[Any, Any]]
) -> Iterator[str]:
    """Yield a problem if the newest checkpoint cannot be loaded in the new layout.

    Without the distributed optimizer, a checkpoint depends on the expert-parallel size.
    """
    key = f"{_MEGATRON}.expert_model_parallel_size"
    sharded = inputs.config.actor_rollout_ref.actor.megatron.use_distributed_optimizer
    if key in settings and not sharded and restarts(inputs.store):
        was, now = settings[key]
        yield (
            f"{key}: was {was!r}, now {now!r}, but without "
            f"{_MEGATRON}.use_distributed_optimizer a checkpoint depends on it"
        )


def _from(store: Store) -> str:
    """Return a text that names the policy from which training continues in a new layout."""
    version = max(restarts(store), default=0)
    return f"from {f'the checkpoint of policy {version}' if version else 'policy 0'} on"


def _planned_otherwise(inputs: CheckedInputs, name: str) -> str | None:
    """Return the key of a published plan that does not fit these prompts; None if all plans fit.

    Published plans cannot change.
    """
    if name not in ("prompts", "val_prompts"):
        return None
    store = inputs.store
    prefixes = [keys.validations()] if inputs.val_prompts is not None else []
    if name == "prompts":
        prefixes.append(keys.steps())
    for prefix in prefixes:
        for info in store.list(prefix):
            number = keys.number_of(info.key)
            is_plan = keys.sub_plan_number(info.key) is not None
            if number is None or not (is_plan or info.key == keys.validation_plan(number)):
                continue
            plan = read_plan(store, info.key)
            if _plan_now(inputs, plan) != plan:
                return info.key
    return None


def _plan_now(inputs: CheckedInputs, plan: Plan) -> Plan:
    if isinstance(plan, StepPlan):
        return make_plan(inputs.config, inputs, plan.step, plan.shards, plan.sub_plan)
    return make_validation_plan(inputs.config, inputs, plan.policy_version, plan.shards)


def _changed_inputs(inputs: CheckedInputs, staged: StagedInputs) -> Iterator[tuple[str, str]]:
    """Yield the name of each input whose content differs, and a text that describes how."""
    for name, file, table in (
        ("prompts", staged.prompts, inputs.prompts),
        ("val_prompts", staged.val_prompts, inputs.val_prompts),
    ):
        change = _changed_table(inputs.store, file, table)
        if change:
            yield name, change
    now = None if inputs.reward is None else hashlib.sha256(inputs.reward).hexdigest()
    was = None if staged.reward is None else staged.reward.sha256
    if now != was:
        yield "reward", _digests(was, now)
    for change in _changed_model(inputs, staged.model):
        yield "model", change
    for key in sorted({*inputs.functions, *staged.functions}):
        content = inputs.functions.get(key)
        now = None if content is None else hashlib.sha256(content).hexdigest()
        was = staged.functions[key].sha256 if key in staged.functions else None
        if now != was:
            yield "functions", f"{key}: {_digests(was, now)}"


def _changed_table(store: Store, staged: DataFile | None, table: PromptTable | None) -> str | None:
    if staged is None or table is None:
        if staged is None and table is None:
            return None
        return f"had {'prompts' if staged else 'none'}, now {'prompts' if table else 'none'}"
    if staged == table.file:
        return None
    old = StoredPrompts.of(store, staged)
    counts = f"had {old.rows} prompts, now {table.rows}"
    was = old.origin
    if (old.rows_sha256() if was is None else was.rows_sha256) != table.origin.rows_sha256:
        return f"{counts}, with different content"
    if was is None or was.same_prompts(table.origin):
        return None
    now = table.origin.recipe
    changed = sorted(key for key in {*was.recipe, *now} if was.recipe.get(key) != now.get(key))
    return f"{counts}, with different tokens because of {', '.join(changed)}"


def _changed_model(inputs: CheckedInputs, staged: Mapping[str, DataFile]) -> Iterator[str]:
    model = inputs.model
    names = {*model.small_files, *model.weight_files}
    if names != set(staged):
        yield f"had the files {', '.join(sorted(staged))}, now {', '.join(sorted(names))}"
        return
    # The weights of a remote model may not be on this machine yet, but its index and config are.
    here = sorted(names) if model.remote is None else sorted(model.small_files)
    for name in here:
        now = digest_of(model.folder / name)
        if now != staged[name].sha256:
            yield f"{name}: {_digests(staged[name].sha256, now)}"


def _digests(was: str | None, now: str | None) -> str:
    def short(digest: str | None) -> str:
        return "none" if digest is None else f"SHA-256 {digest[:16]}..."

    return f"was {short(was)}, now {short(now)}"
