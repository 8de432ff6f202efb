"""Checking a run's inputs: settings, model, prompts, users' files, store, recorded sets.

Nothing is written into the run, and nothing is started. Every part is checked even if another one
failed, so that all problems are shown together.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pipeline.config.rules.algorithms.critics import schedule_problems
from pipeline.config.rules.check import config_notes, config_problems, positions_of, rank_notes
from pipeline.config.rules.pods import InstalledGpus
from pipeline.config.tree import RunConfig
from pipeline.errors import InputError
from pipeline.extras import EXTRAS, need
from pipeline.inputs.attach import Mended, attach, settings_of_older_run
from pipeline.inputs.checked import CheckedInputs
from pipeline.inputs.custom_files import CustomFiles, check_custom_files, unscored_problems
from pipeline.inputs.model_folder import (
    ModelFolder,
    find_model,
    found_config,
    found_folder,
    weight_problems,
)
from pipeline.inputs.prompts import (
    PromptTable,
    filter_notes,
    read_rows,
    tokenise_rows,
    vocabulary_problems,
)
from pipeline.inputs.run_length import with_run_length
from pipeline.inputs.space import probe, space_problems, writes_of
from pipeline.inputs.tokenizer import ChatTokenizer
from pipeline.inputs.weight_files import weights_of_local
from pipeline.model.families import moe_geometry
from pipeline.run import keys
from pipeline.run.plan import StepPlan, find_plan
from pipeline.run.planning import make_plan, make_window
from pipeline.run.policy import weights_of
from pipeline.store import ObjectMissingError, Store, StoreError, is_remote, open_store
from pipeline.traces import Expected, TraceError, check_replay, names_weights

_T = TypeVar("_T")
_REPLAY = "actor_rollout_ref.actor.router_replay"


def check_inputs(config: RunConfig, on_cluster: InstalledGpus | None = None) -> CheckedInputs:
    """Check everything that a run needs before anything starts; `on_cluster`: its workers are pods.

    Raises InputError with all problems.
    """
    problems: list[str] = []
    config, stored, former_notes = settings_of_older_run(config)
    model, prompts, val_prompts, custom, store = _parts(config, on_cluster, problems)
    if problems or model is None or prompts is None or custom is None or store is None:
        raise InputError(problems)
    config, length_notes = with_run_length(config, prompts.table.num_rows, stored)
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
            *former_notes,
            *length_notes,
            *config_notes(config),
            *(rank_notes(config) if on_cluster is None else ()),
            *filter_notes(config.data.truncation, prompts, val_prompts),
            *custom.notes,
        ),
    )
    mended = _try(problems, partial(attach, inputs))
    problems += _record_problems(inputs)
    problems += _replay_problems(inputs, mended)
    problems += [] if problems else space_problems(inputs)
    if problems:
        raise InputError(problems)
    amendment = () if mended is None else (f"the run will be amended: {mended.reason}",)
    return replace(inputs, notes=(*inputs.notes, *amendment, *_replay_notes(inputs)))


def part_problems(config: RunConfig) -> list[str]:
    """Problems of settings, model, prompts, reward file and places, for workers on this machine.

    For settings of which some are wrong, so that no run can be made of them or compared with them.
    """
    problems: list[str] = []
    _parts(config, None, problems)
    return problems


def _parts(
    config: RunConfig, on_cluster: InstalledGpus | None, problems: list[str]
) -> tuple[
    ModelFolder | None, PromptTable | None, PromptTable | None, CustomFiles | None, Store | None
]:
    """Model, prompts, validation prompts, users' files and store; None: there is a problem."""
    path = config.actor_rollout_ref.model.path
    model = _try(problems, lambda: find_model(path))
    # A model without weights has a config and a tokenizer that can be checked.
    folder = model.folder if model else found_folder(path)
    hf_config = model.config if model else found_config(path)
    if model and (unfit := weight_problems(model)):
        problems += unfit
        hf_config = None  # another model's: what follows from it would lead astray
    problems += config_problems(config, hf_config, on_cluster)
    prompts, val_prompts = _check_prompts(config, folder, hf_config, problems)
    custom = _try(problems, partial(check_custom_files, config))
    store = _try(problems, partial(_check_store, config))
    _try(problems, partial(_check_local_folder, config))
    for name in {*config.trainer.logger} & {*EXTRAS}:
        _try(problems, partial(need, name, f"trainer.logger={name}"))
    if problems:  # otherwise every step of the set is compared
        problems += _absent_set_problems(config)
    return model, prompts, val_prompts, custom, store


def _check_prompts(
    config: RunConfig,
    folder: Path | None,
    hf_config: Mapping[str, Any] | None,
    problems: list[str],
) -> tuple[PromptTable | None, PromptTable | None]:
    # Read the files without a model too, so that all their problems are shown at once.
    tokenizer = _try(problems, partial(ChatTokenizer, folder)) if folder else None
    positions = None if hf_config is None else positions_of(hf_config)
    tables: list[PromptTable | None] = []
    for key, files in (
        ("data.train_files", config.data.train_files),
        ("data.val_files", config.data.val_files),
    ):
        rows = _try(problems, partial(read_rows, key, files, config.data)) if files else None
        if rows is not None:
            problems += unscored_problems(config, key, rows)
        table = None
        if rows is not None and tokenizer is not None:
            made = partial(tokenise_rows, key, rows, config.data, tokenizer, positions)
            table = _try(problems, made)
        if table is not None and hf_config is not None:
            problems += vocabulary_problems(key, table, hf_config)
        tables.append(table)
    prompts, val_prompts = tables
    if prompts is not None and prompts.table.num_rows < config.data.train_batch_size:
        problems.append(
            f"data.train_batch_size: found {config.data.train_batch_size}, but data.train_files "
            f"has {prompts.table.num_rows} prompts"
            + (f" ({prompts.dropped} too long ones were dropped)" if prompts.dropped else "")
            + f"; write at most {prompts.table.num_rows}, or add prompts"
        )
    return prompts, val_prompts


def _check_store(config: RunConfig) -> Store:
    """The run's store, after checking that objects can be created in it."""
    probe("store.uri", config.store.uri)
    store = open_store(config.run_uri)
    if store.size(keys.removal()) is not None:
        raise InputError(
            [
                f"trainer.experiment_name: the removal of the run at {config.run_uri} was begun "
                f"and did not end; complete it with `retrace runs rm {config.run_uri}`, or choose "
                "another name"
            ]
        )
    return store


def _check_local_folder(config: RunConfig) -> None:
    key, place = "trainer.default_local_dir", config.trainer.default_local_dir
    if "://" in place:
        raise InputError([f"{key}: found {place}, expected a folder of this machine"])
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
        f"{key}: {place} already holds a set ({taken.key}), but this run is new; choose another "
        "place, or remove the set"
    ]


def _absent_set_problems(config: RunConfig) -> list[str]:
    """Look for a replay file on this machine; a server might have to be waited for."""
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
        f"{key}: {place} holds no recorded set (from {Path.cwd()}); write the place of a complete "
        "set"
    ]


def _replay_problems(inputs: CheckedInputs, mended: Mended | None) -> list[str]:
    """Compare every step of the replay file with what this run would have sampled.

    `mended` is what the run is to be amended with.
    """
    place = inputs.config.actor_rollout_ref.actor.router_replay.replay_file
    if place is None:
        return []
    key = f"{_REPLAY}.replay_file"
    total = inputs.config.trainer.total_training_steps
    tokens = _tokens_by_row(inputs)
    step = 0
    try:
        source = open_store(place)
        weights = _weights(inputs, mended, source)
        for step in range(total):
            if inputs.store.size(keys.manifest(step)) is None:
                check_replay(source, step, _expected(inputs, tokens, step, weights))
                _check_sampling(inputs, source, step)
    except ObjectMissingError as error:
        fewer = f"write {step} steps, or " if step else "write "
        return [
            f"{key}: {place} lacks objects of step {step}, but trainer.total_training_steps is "
            f"{total}: {error}; {fewer}the place of a complete set"
        ]
    except (TraceError, StoreError) as error:
        return [f"{key}: {error}"]
    return []


def _weights(inputs: CheckedInputs, mended: Mended | None, source: Store) -> str | None:
    """The weights digest of this run's policy 0; None: not here, or nothing to compare it with."""
    trained = inputs.store.size(keys.manifest(0)) is not None
    if _other_weights(inputs) or trained or not names_weights(source, 0):
        return None
    model = inputs.model
    if model.remote is None:
        return weights_of_local(model.folder / name for name in model.weight_files)
    staged = inputs.store.size(keys.policy(0)) is not None
    if not staged or (mended is not None and "model" in mended.inputs):
        return None  # fetched when it is staged: the seal of step 0 compares it
    return weights_of(inputs.store, 0)


def _other_weights(inputs: CheckedInputs) -> bool:
    return inputs.config.actor_rollout_ref.actor.router_replay.replay_other_weights


def _check_sampling(inputs: CheckedInputs, source: Store, step: int) -> None:
    """Refuse samples of another distribution: their log-probs are compared with the trainer's."""
    plan = find_plan(source, keys.plan(step))
    if plan is None:
        return
    theirs, ours = asdict(plan.sampling), asdict(_plan(inputs, step).sampling)
    for name in ("temperature", "top_p", "top_k"):
        if theirs[name] != ours[name]:
            raise TraceError(
                f"{source.uri}, step {step}: sampled with {name} {theirs[name]}, this run has "
                f"{ours[name]}; set actor_rollout_ref.rollout.{name}={theirs[name]}"
            )


def _replay_notes(inputs: CheckedInputs) -> Iterator[str]:
    """A set without plans or weights cannot be compared with this run's sampling or policy."""
    place = inputs.config.actor_rollout_ref.actor.router_replay.replay_file
    if place is None:
        return
    source, total = open_store(place), inputs.config.trainer.total_training_steps
    unknown = [step for step in range(total) if source.size(keys.plan(step)) is None]
    if unknown:
        yield (
            f"{_REPLAY}.replay_file: {place} does not say how {len(unknown)} of {total} steps were "
            "sampled (no plan.json); temperature, top_p and top_k are taken to be this run's"
        )
    if not _other_weights(inputs) and not names_weights(source, 0):
        yield (
            f"{_REPLAY}.replay_file: {place} does not say which weights its policy 0 had; whether "
            "they are this run's is not checked"
        )


def _expected(
    inputs: CheckedInputs,
    tokens: Mapping[str, npt.NDArray[np.uint32]],
    step: int,
    weights: str | None,
) -> Expected:
    mode = inputs.config.actor_rollout_ref.actor.router_replay.mode
    return Expected(
        prompt_tokens=tokens,
        window=make_window(inputs.config, inputs, step),
        geometry=None if mode == "disabled" else inputs.geometry,
        kind=None if mode == "disabled" else mode,
        weights=weights,
    )


def _plan(inputs: CheckedInputs, step: int) -> StepPlan:
    """What this run would plan; it is only compared, so its shards do not matter."""
    return make_plan(inputs.config, inputs, step, shards=1)


def _tokens_by_row(inputs: CheckedInputs) -> dict[str, npt.NDArray[np.uint32]]:
    column = inputs.prompts.table["token_ids"].to_pylist()
    return {str(row): np.asarray(ids, np.uint32) for row, ids in enumerate(column)}


def _try(problems: list[str], check: Callable[[], _T]) -> _T | None:
    """The result of a check; None after its problems were added."""
    try:
        return check()
    except InputError as error:
        problems += error.problems
        return None
