"""Attaching to an existing run, which must be the same run.

pipeline.config.identity defines what may not change; the inputs' content is compared with the
staged files.
"""

import functools
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config.identity import differing
from pipeline.config.stored import with_former_values
from pipeline.config.tree import RunConfig
from pipeline.errors import InputError
from pipeline.inputs.checked import CheckedInputs
from pipeline.inputs.prompts import PromptTable
from pipeline.run.amendments import find_description
from pipeline.run.commit import DataFile, read_data, sha256_of_file
from pipeline.run.description import StagedInputs
from pipeline.run.run_config import config_of
from pipeline.store import Store, StoreError, open_store


def settings_of_older_run(config: RunConfig) -> tuple[RunConfig, tuple[str, ...]]:
    """Settings for a run that may be there already, and be older than some of them; with notes.

    What the user did not write has the value that the run had, so that a new default changes no
    old run. A store or run that cannot be read changes nothing here: `check_inputs` and
    `attach_problems` refuse it.
    """
    try:
        run = find_description(open_store(config.run_uri))
    except StoreError:
        return config, ()
    if run is None:
        return config, ()
    config, taken = with_former_values(config, run.settings)
    return config, tuple(
        f"{key}: {value!r}, as before this setting existed: the run is older"
        for key, value in taken.items()
    )


def attach_problems(inputs: CheckedInputs) -> list[str]:
    """The reasons why these inputs cannot continue the run of the same name, if it exists."""
    name = inputs.config.trainer.run_name
    where = f"trainer.experiment_name: the run {name!r} in {inputs.store.uri}"
    try:
        run = find_description(inputs.store)
        if run is None:
            return []
        changes = [
            f"{key}: it has {was!r}, now {now!r}"
            for key, (was, now) in differing(config_of(run), inputs.config).items()
        ]
        changes += _changed_inputs(inputs, run.inputs)
    except InputError as error:
        found = "\n  ".join(error.problems)
        return [f"{where} was made by another version; choose another name:\n  {found}"]
    except (StoreError, pa.ArrowException) as error:
        return [f"{where} cannot be read: {error}; or choose another name"]
    if not changes:
        return []
    return [
        "\n  ".join(
            [
                f"{where} exists with other settings; choose another trainer.experiment_name, or "
                "go on with the old values:",
                *changes,
            ]
        )
    ]


def _changed_inputs(inputs: CheckedInputs, staged: StagedInputs) -> Iterator[str]:
    for key, file, table in (
        ("data.train_files", staged.prompts, inputs.prompts),
        ("data.val_files", staged.val_prompts, inputs.val_prompts),
    ):
        change = _changed_table(inputs.store, file, table)
        if change:
            yield f"{key}: {change}"
    yield from _changed_reward(inputs.reward, staged.reward)
    yield from _changed_model(inputs, staged.model)


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


def _changed_reward(reward: bytes | None, staged: DataFile | None) -> Iterator[str]:
    now = None if reward is None else hashlib.sha256(reward).hexdigest()
    was = None if staged is None else staged.sha256
    if now != was:
        yield f"custom_reward_function.path: {_digests(was, now)}"


def _changed_model(inputs: CheckedInputs, staged: Mapping[str, DataFile]) -> Iterator[str]:
    model = inputs.model
    names = {*model.small_files, *model.weight_files}
    key = "actor_rollout_ref.model.path"
    if names != set(staged):
        yield f"{key}: it has the files {', '.join(sorted(staged))}, now {', '.join(sorted(names))}"
        return
    # A remote model's weights may not be here yet; its index and config are.
    here = sorted(names) if model.remote is None else sorted(model.small_files)
    for name in here:
        now = digest_of(model.folder / name)
        if now != staged[name].sha256:
            yield f"{key}: {name}: {_digests(staged[name].sha256, now)}"


def _digests(was: str | None, now: str | None) -> str:
    def short(digest: str | None) -> str:
        return "none" if digest is None else f"SHA-256 {digest[:16]}..."

    return f"it has {short(was)}, now {short(now)}"


def digest_of(path: Path) -> str:
    """Hex SHA-256 of a local file, computed once as long as the file does not change."""
    status = path.stat()
    return _digest_of(path, status.st_size, status.st_mtime_ns)


@functools.cache
def _digest_of(path: Path, size: int, modified_ns: int) -> str:
    return sha256_of_file(path)
