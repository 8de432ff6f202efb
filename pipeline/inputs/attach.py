"""Attaching to an existing run, which must be the same run, or one that may still be amended.

pipeline.config.identity defines what may not change; the inputs' content is compared with the
staged files. What differs may be amended as long as no commit of the run has used it.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config.identity import differing, input_of
from pipeline.config.keys import value_at
from pipeline.config.stored import with_former_values
from pipeline.config.tree import RunConfig
from pipeline.errors import InputError
from pipeline.inputs.checked import CheckedInputs
from pipeline.inputs.new_run import new_run
from pipeline.inputs.prompts import PromptTable
from pipeline.inputs.weight_files import digest_of
from pipeline.rl.custom import CUSTOM
from pipeline.run import keys
from pipeline.run.amendments import find_description, read_amendments
from pipeline.run.commit import DataFile, read_data
from pipeline.run.description import RunDescription, StagedInputs
from pipeline.run.plan import Plan, StepPlan, read_plan
from pipeline.run.planning import make_plan, make_validation_plan
from pipeline.run.run_config import config_of
from pipeline.run.uses import first_use, outdated_shards, outdated_text
from pipeline.store import Store, StoreError, open_store
from pipeline.store.schemes import place_in
from pipeline.traces.format.manifest import sealed_steps

_REWARD = "custom_reward_function"
_INPUTS = {
    "reward": ("the reward function", f"{_REWARD}.path", "it has scored no sample yet"),
    "prompts": ("the training prompts", "data.train_files", "no sample was made of them yet"),
    "val_prompts": ("the validation prompts", "data.val_files", "no validation is committed yet"),
    "model": ("the model", "actor_rollout_ref.model.path", "nothing was made of it yet"),
    "functions": ("an estimator or loss", "", "no step was trained with it yet"),
}
"""Of each input: its name, the setting with its path (functions have several), and why it may be
amended."""


@dataclass(frozen=True)
class Mended:
    """What a run is to be amended with: inputs that no commit has used yet, and their settings."""

    number: int
    """Of the amendment."""
    inputs: tuple[str, ...]
    """As StagedInputs names them."""
    settings: Mapping[str, Any]
    """By dotted key."""
    reason: str
    """What changes, and why it may; one line."""


def settings_of_older_run(
    config: RunConfig,
) -> tuple[RunConfig, Mapping[str, Any] | None, tuple[str, ...]]:
    """Settings for a run that may be there already, and be older than some of them.

    Returns them, the run's own if it is there, and notes. What the user did not write has the value
    that the run had, so that a new default changes no old run. A store or run that cannot be read
    changes nothing here: `check_inputs` and `attach_problems` refuse it.
    """
    try:
        run = find_description(open_store(config.run_uri))
    except StoreError:
        return config, None, ()
    if run is None:
        return config, None, ()
    config, taken = with_former_values(config, run.settings)
    notes = tuple(
        f"{key}: {value!r}, as before this setting existed: the run is older"
        for key, value in taken.items()
    )
    return config, run.settings, notes


def attach(inputs: CheckedInputs) -> Mended | None:
    """Compare inputs with the run of the same name; None: it goes on unchanged, or is new.

    Raises InputError, with the ways to go on, when these inputs cannot continue the run.
    """
    where = f"trainer.experiment_name: the run {inputs.config.trainer.run_name!r}"
    where += f" in {inputs.store.uri}"
    try:
        run = find_description(inputs.store)
        if run is None:
            return None
        amendments = read_amendments(inputs.store)
        for key, one in outdated_shards(inputs.store, amendments, sealed_steps(inputs.store)):
            raise InputError([f"{where}: {key}: {outdated_text(one)}; {new_run(inputs)}"])
        settings = differing(_config_of(run, where), inputs.config)
        texts = _by_input(inputs, run, settings)
        refused = [*texts.pop(None, ()), *_refused(inputs, run, texts)]
        if refused:
            lines = [f"{where} was made with other settings or inputs:", *refused]
            raise InputError(
                ["\n  ".join(lines) + "\ngo back to the old values, or " + new_run(inputs)]
            )
    except (StoreError, pa.ArrowException) as error:
        raise InputError([f"{where} cannot be read: {error}; or choose another name"]) from error
    if not texts:
        return None
    names = tuple(name for name in _INPUTS if name in texts)
    reason = "; ".join(
        f"{_INPUTS[name][0]} ({'; '.join(texts[name])}), as {_INPUTS[name][2]}" for name in names
    )
    return Mended(len(amendments), names, _settings(inputs.config, run, names, settings), reason)


def _config_of(run: RunDescription, where: str) -> RunConfig:
    try:
        return config_of(run)
    except InputError as error:
        found = "\n  ".join(error.problems)
        raise InputError(
            [f"{where} was made by another version; choose another name:\n  {found}"]
        ) from error


def _by_input(
    inputs: CheckedInputs, run: RunDescription, settings: Mapping[str, tuple[Any, Any]]
) -> dict[str | None, list[str]]:
    """All differences in words, by the input they belong to; None: to none."""
    texts: dict[str | None, list[str]] = {}
    for name, text in _changed_inputs(inputs, run.inputs):
        where = f"{_INPUTS[name][1]}: " if _INPUTS[name][1] else ""
        texts.setdefault(name, []).append(f"{where}{text}")
    for key, (was, now) in settings.items():
        texts.setdefault(input_of(key), []).append(f"{key}: it has {was!r}, now {now!r}")
    return texts


def _settings(
    config: RunConfig,
    run: RunDescription,
    names: tuple[str, ...],
    changed: Mapping[str, tuple[Any, Any]],
) -> dict[str, Any]:
    """The new values of settings, with the paths of inputs."""
    found = {key: now for key, (_, now) in changed.items() if not key.startswith(f"{_REWARD}.")}
    new = config.model_dump(mode="json")
    if "reward" in names and new[_REWARD] != run.setting(_REWARD):
        found[_REWARD] = new[_REWARD]  # as a whole: a run may have none
    paths = {_INPUTS[name][1] for name in names if name not in ("reward", "functions")}
    paths |= set(CUSTOM) if "functions" in names else set()
    for key in sorted(paths):
        if value_at(config, key) != run.setting(key):
            found[key] = value_at(config, key)
    return found


def _refused(
    inputs: CheckedInputs, run: RunDescription, texts: Mapping[str | None, list[str]]
) -> Iterator[str]:
    """Yield the differences that are no amendment any more, each with what has used the input."""
    store = inputs.store
    names = [name for name in _INPUTS if name in texts]
    for name in names:
        why = None
        if key := first_use(store, name):
            why = f"but {key} was made with the earlier one"
        elif key := _planned_otherwise(inputs, name):
            why = f"but {key} was planned with the earlier one"
        if why is not None:
            yield from (f"{text}, {why}" for text in texts[name])
            if name == "reward" and run.inputs.reward is not None:
                place = place_in(store, run.inputs.reward.key)
                yield f"(the earlier reward file is kept as {place})"
        elif name == "model" and inputs.geometry != run.geometry:
            yield from texts[name]
            yield f"(a model of other experts: {run.geometry}, now {inputs.geometry})"


def _planned_otherwise(inputs: CheckedInputs, name: str) -> str | None:
    """The key of a published plan, which is never changed, that these prompts do not fit."""
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
    """Yield each input whose content differs, with how."""
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
        return f"it has {'prompts' if staged else 'none'}, now {'prompts' if table else 'none'}"
    content = table.to_parquet()
    if hashlib.sha256(content).hexdigest() == staged.sha256:
        return None
    # Another version of the Parquet writer makes other bytes of the same table.
    old = pq.read_table(pa.BufferReader(read_data(store, staged)))
    if old.equals(table.table):
        return None
    return (
        f"it has {old.num_rows} prompts, now {table.table.num_rows}, with other content or tokens"
    )


def _changed_model(inputs: CheckedInputs, staged: Mapping[str, DataFile]) -> Iterator[str]:
    model = inputs.model
    names = {*model.small_files, *model.weight_files}
    if names != set(staged):
        yield f"it has the files {', '.join(sorted(staged))}, now {', '.join(sorted(names))}"
        return
    # A remote model's weights may not be here yet; its index and config are.
    here = sorted(names) if model.remote is None else sorted(model.small_files)
    for name in here:
        now = digest_of(model.folder / name)
        if now != staged[name].sha256:
            yield f"{name}: {_digests(staged[name].sha256, now)}"


def _digests(was: str | None, now: str | None) -> str:
    def short(digest: str | None) -> str:
        return "none" if digest is None else f"SHA-256 {digest[:16]}..."

    return f"it has {short(was)}, now {short(now)}"
