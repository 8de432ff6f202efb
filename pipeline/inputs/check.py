"""Checks of a run's inputs: settings, model, prompts, users' files, store and recorded sets.

The checks do not write into the run and do not start anything. Every input is checked even if
another one has problems, so that all problems are shown together.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pipeline.config.rules.algorithms.critics import schedule_problems
from pipeline.config.rules.check import config_notes, config_problems, positions_of, rank_notes
from pipeline.config.rules.pods import InstalledGpus
from pipeline.config.tree import RunConfig
from pipeline.errors import InputError
from pipeline.extras import EXTRAS, need
from pipeline.inputs.attach import Mended, attach, stored_settings
from pipeline.inputs.checked import CheckedInputs
from pipeline.inputs.custom_files import CustomFiles, check_custom_files
from pipeline.inputs.fetch import greet_servers
from pipeline.inputs.machine import check_prefect, override_notes, override_problems
from pipeline.inputs.model_folder import (
    ModelFolder,
    find_model,
    found_config,
    found_folder,
    weight_problems,
)
from pipeline.inputs.prompts.token_table import (
    PromptTable,
    Tokenising,
    filter_notes,
    prompt_table,
    staged_table,
    vocabulary_problems,
)
from pipeline.inputs.run_length import with_run_length
from pipeline.inputs.space import (
    check_policy_cache,
    check_prefect_home,
    check_scratch,
    probe,
    space_notes,
    space_problems,
    writes_of,
)
from pipeline.inputs.tokenizer import template_notes
from pipeline.inputs.weight_files import weights_of_local
from pipeline.model.families import moe_geometry
from pipeline.policies.versions import weights_of
from pipeline.recorded import Expected, check_replay, names_weights
from pipeline.run import keys
from pipeline.run.description import find_description
from pipeline.run.plan import StepPlan, find_plan
from pipeline.run.planning import make_plan, make_window
from pipeline.store import ObjectMissingError, Store, StoreError, is_remote, open_store
from pipeline.traces import TraceError

_T = TypeVar("_T")
_REPLAY = "actor_rollout_ref.actor.router_replay"


def check_inputs(config: RunConfig, on_cluster: InstalledGpus | None = None) -> CheckedInputs:
    """Check everything that a run needs, before anything starts.

    `on_cluster` describes the installation's GPUs per pod; it is None if the workers run on this
    machine. Raises InputError, which lists all problems.
    """
    problems: list[str] = []
    greet_servers(config)
    stored = stored_settings(config)
    model, prompts, val_prompts, custom, store = _parts(config, on_cluster, problems)
    if problems or model is None or prompts is None or custom is None or store is None:
        raise InputError(problems)
    config, length_notes = with_run_length(config, prompts.rows, stored)
    if wrong := list(schedule_problems(config)):
        raise InputError(wrong)
    geometry = moe_geometry(model.config)
    inputs = CheckedInputs(
        config=config,
        store=store,
        prompts=prompts,
        val_prompts=val_prompts,
        reward=custom.reward,
        functions=custom.functions,
        model=model,
        geometry=geometry,
        writes=writes_of(config, model, geometry, prompts),
        notes=(
            *length_notes,
            *config_notes(config),
            *override_notes(config, on_cluster is not None),
            *(rank_notes(config) if on_cluster is None else ()),
            *filter_notes(config.data.truncation, prompts, val_prompts),
            *dict.fromkeys((*prompts.notes, *(val_prompts.notes if val_prompts else ()))),
            *custom.notes,
            *template_notes(model.folder, config.data.apply_chat_template_kwargs),
        ),
    )
    mended = _try(problems, partial(attach, inputs))
    problems += _record_problems(inputs)
    problems += _replay_problems(inputs, mended)
    problems += space_problems(config, inputs.writes)
    if problems:
        raise InputError(problems)
    change = () if mended is None else (f"the run will change: {mended.reason}",)
    space = space_notes(config, inputs.writes) if on_cluster is None else ()
    return replace(inputs, notes=(*inputs.notes, *change, *_replay_notes(inputs), *space))


def part_problems(config: RunConfig) -> list[str]:
    """Return the problems with the settings, model, prompts, users' files and store.

    Use this function for settings with errors, which cannot be compared with an existing run. It
    assumes that the workers run on this machine.
    """
    problems: list[str] = []
    greet_servers(config)
    _parts(config, None, problems)
    return problems


def _parts(
    config: RunConfig, on_cluster: InstalledGpus | None, problems: list[str]
) -> tuple[
    ModelFolder | None, PromptTable | None, PromptTable | None, CustomFiles | None, Store | None
]:
    """Check and return the model, prompts, validation prompts, users' files and store.

    For a part with a problem, the result contains None, and the problem is added to `problems`.
    """
    path = config.actor_rollout_ref.model.path
    model = _try(problems, lambda: find_model(path))
    # The config and the tokenizer of a model can be checked even if its weights are missing.
    folder = model.folder if model else found_folder(path)
    hf_config = model.config if model else found_config(path)
    if model and (unfit := weight_problems(model)):
        problems += unfit
        hf_config = None  # it does not describe these weights, so checks that use it would mislead
    wrong = config_problems(config, hf_config, on_cluster)
    if on_cluster is None:
        whole = folder if hf_config is not None and not wrong else None
        wrong += _try(problems, partial(override_problems, config, whole)) or []
    problems += dict.fromkeys(wrong)
    prompts, val_prompts = _check_prompts(config, folder, hf_config, problems)
    custom = _try(problems, partial(check_custom_files, config))
    store = _try(problems, partial(_check_store, config))
    _try(problems, partial(_check_local_folder, config))
    if on_cluster is None:
        _try(problems, partial(check_policy_cache, config))
        _try(problems, partial(check_scratch, config))
        for check in (check_prefect_home, check_prefect):
            _try(problems, check)
    for name in {*config.trainer.logger} & {*EXTRAS}:
        _try(problems, partial(need, name, f"trainer.logger={name}"))
    if problems:  # if there are none, every step of the recorded set is compared later
        problems += _absent_set_problems(config)
    return model, prompts, val_prompts, custom, store


def _check_prompts(
    config: RunConfig,
    folder: Path | None,
    hf_config: Mapping[str, Any] | None,
    problems: list[str],
) -> tuple[PromptTable | None, PromptTable | None]:
    # The prompt files are read even without a model, so that all problems are shown together.
    positions = None if hf_config is None else positions_of(hf_config)
    tokenising = (
        _try(problems, partial(Tokenising.of, config, folder, positions)) if folder else None
    )
    tables: list[PromptTable | None] = []
    earlier = _staged_tables(config)
    for key, files in (
        ("data.train_files", config.data.train_files),
        ("data.val_files", config.data.val_files),
    ):
        names = [files] if isinstance(files, str) else files or []
        made = partial(prompt_table, key, names, config, tokenising, earlier.get(key))
        table = _try(problems, made) if names else None
        if table is not None and hf_config is not None:
            problems += vocabulary_problems(key, table, hf_config)
        tables.append(table)
    prompts, val_prompts = tables
    if prompts is not None and prompts.rows < config.data.train_batch_size:
        dropped = prompts.origin.dropped
        problems.append(
            f"data.train_batch_size: found {config.data.train_batch_size}, but data.train_files "
            f"has {prompts.rows} prompts"
            + (f" ({dropped} overlong ones were dropped)" if dropped else "")
            + f"; set it to at most {prompts.rows}, or add prompts"
        )
    return prompts, val_prompts


def _staged_tables(config: RunConfig) -> dict[str, PromptTable | None]:
    """Return the tables of prompts that the run uses, keyed by the setting that names the files.

    If the run cannot be read, the result is empty, because `attach` will refuse the run.
    """
    try:
        store = open_store(config.run_uri)
        run = find_description(store)
    except StoreError:
        return {}
    if run is None:
        return {}
    return {
        "data.train_files": staged_table(store, run.inputs.prompts),
        "data.val_files": staged_table(store, run.inputs.val_prompts),
    }


def _check_store(config: RunConfig) -> Store:
    """Check that objects can be created in the run's store, and return it."""
    probe("store.uri", config.store.uri)
    store = open_store(config.run_uri)
    if store.size(keys.removal()) is not None:
        raise InputError(
            [
                f"trainer.experiment_name: the removal of the run at {config.run_uri} was "
                f"interrupted; complete it with `retrace runs rm {config.run_uri}`, or choose "
                "a different name"
            ]
        )
    return store


def _check_local_folder(config: RunConfig) -> None:
    key, place = "trainer.default_local_dir", config.trainer.default_local_dir
    if "://" in place:
        raise InputError([f"{key}: found {place}, expected a folder on this machine"])
    probe(key, place)


def _record_problems(inputs: CheckedInputs) -> list[str]:
    place = inputs.config.actor_rollout_ref.actor.router_replay.record_file
    if place is None:
        return []
    key = f"{_REPLAY}.record_file"
    try:
        probe(key, place)
    except InputError as error:
        return list(error.problems)
    taken = next(open_store(place).list(keys.steps()), None)
    if taken is None or inputs.store.size(keys.run_json()) is not None:
        return []
    return [
        f"{key}: {place} already contains a recorded set ({taken.key}), but this run is new; "
        "choose a different place, or remove the set"
    ]


def _absent_set_problems(config: RunConfig) -> list[str]:
    """Return a problem if a local recorded set is missing.

    A remote set is not checked, because its server may be slow.
    """
    place = config.actor_rollout_ref.actor.router_replay.replay_file
    if place is None or is_remote(place):
        return []
    key = f"{_REPLAY}.replay_file"
    try:
        if next(open_store(place).list(keys.steps()), None) is not None:
            return []
    except StoreError as error:
        return [f"{key}: {error}"]
    return [
        f"{key}: {place} contains no recorded set (from {Path.cwd()}); set it to the place of a "
        "complete set"
    ]


def _replay_problems(inputs: CheckedInputs, mended: Mended | None) -> list[str]:
    """Compare the steps of the replayed set with the samples that this run would plan.

    `mended` is what this start is about to change in the run.
    """
    place = inputs.config.actor_rollout_ref.actor.router_replay.replay_file
    if place is None:
        return []
    key = f"{_REPLAY}.replay_file"
    total = inputs.config.trainer.total_training_steps
    step = 0
    try:
        source = open_store(place)
        weights = _weights(inputs, mended, source)
        for step in range(total):
            if inputs.store.size(keys.manifest(step)) is None:
                check_replay(source, step, _expected(inputs, step, weights))
                _check_sampling(inputs, source, step)
    except ObjectMissingError as error:
        fewer = f"lower trainer.total_training_steps to {step}, or " if step else ""
        return [
            f"{key}: {place} lacks objects for step {step}, but trainer.total_training_steps is "
            f"{total}: {error}; {fewer}set it to the place of a complete set"
        ]
    except (TraceError, StoreError) as error:
        return [f"{key}: {error}"]
    return []


def _weights(inputs: CheckedInputs, mended: Mended | None, source: Store) -> str | None:
    """Return the weights digest of this run's policy 0, or None if it must not be compared.

    The digest is not compared if the run allows different weights or has sealed step 0, if the
    recorded set does not name its weights, or if this run's weights are not on this machine yet.
    """
    trained = inputs.store.size(keys.manifest(0)) is not None
    if _other_weights(inputs) or trained or not names_weights(source, 0):
        return None
    model = inputs.model
    if model.remote is None:
        return weights_of_local(model.folder / name for name in model.weight_files)
    staged = inputs.store.size(keys.policy(0)) is not None
    if not staged or (mended is not None and "model" in mended.inputs):
        return None  # staging fetches the model, and the seal of step 0 compares the digest
    return weights_of(inputs.store, 0)


def _other_weights(inputs: CheckedInputs) -> bool:
    return inputs.config.actor_rollout_ref.actor.router_replay.replay_other_weights


def _check_sampling(inputs: CheckedInputs, source: Store, step: int) -> None:
    """Refuse samples from a distribution that differs from this run's.

    The log-probs of such samples cannot be compared with this run's.
    """
    plan = find_plan(source, keys.plan(step))
    if plan is None:
        return
    theirs, ours = asdict(plan.sampling), asdict(_plan(inputs, step).sampling)
    for name in ("temperature", "top_p", "top_k"):
        if theirs[name] != ours[name]:
            raise TraceError(
                f"{source.uri}, step {step}: sampled with {name} {theirs[name]}, but this run uses "
                f"{ours[name]}; set actor_rollout_ref.rollout.{name}={theirs[name]}"
            )


def _replay_notes(inputs: CheckedInputs) -> Iterator[str]:
    """Yield notes on a recorded set whose sampling or weights cannot be compared with this run."""
    place = inputs.config.actor_rollout_ref.actor.router_replay.replay_file
    if place is None:
        return
    source, total = open_store(place), inputs.config.trainer.total_training_steps
    unknown = [step for step in range(total) if source.size(keys.plan(step)) is None]
    if unknown:
        yield (
            f"{_REPLAY}.replay_file: {place} contains no plan.json for {len(unknown)} of {total} "
            "steps; their temperature, top_p and top_k are assumed to be this run's"
        )
    if not _other_weights(inputs) and not names_weights(source, 0):
        yield (
            f"{_REPLAY}.replay_file: {place} does not name the weights of its policy 0, so they "
            "are not compared with this run's"
        )


def _expected(inputs: CheckedInputs, step: int, weights: str | None) -> Expected:
    mode = inputs.config.actor_rollout_ref.actor.router_replay.mode
    return Expected(
        prompts=inputs.prompts.prompts,
        window=make_window(inputs.config, inputs, step),
        geometry=None if mode == "disabled" else inputs.geometry,
        kind=None if mode == "disabled" else mode,
        weights=weights,
    )


def _plan(inputs: CheckedInputs, step: int) -> StepPlan:
    """Return the plan that this run would publish; its number of shards does not matter here."""
    return make_plan(inputs.config, inputs, step, shards=1)


def _try(problems: list[str], check: Callable[[], _T]) -> _T | None:
    """Return the result of a check; if it fails, add its problems to `problems` and return None."""
    try:
        return check()
    except InputError as error:
        problems += error.problems
        return None
