"""Attaching to a run that exists: it must be the same run.

What may not change is named by pipeline.config.identity; of inputs the content is compared with
what was staged.
"""

import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from pipeline.config.identity import differing
from pipeline.config.tree import RunConfig
from pipeline.flows.prompts import PromptTable
from pipeline.flows.records import Inputs
from pipeline.store import Store, StoreError, keys
from pipeline.store.commit import DataFile, find_commit, read_data, sha256_of_file

FORMAT = 1
"""Of run.json."""


def attach_problems(inputs: Inputs) -> list[str]:
    """Why these inputs cannot go on with the run of the same name; none if there is no such run."""
    name = inputs.config.trainer.experiment_name
    where = f"trainer.experiment_name: the run {name!r} in {inputs.store.uri}"
    try:
        body = find_commit(inputs.store, keys.run_json())
        if body is None:
            return []
        if body.get("format") != FORMAT:
            return [
                f"{where} has format {body.get('format')!r}, expected {FORMAT}: it was made by "
                "another version; choose another name"
            ]
        old = RunConfig.model_validate(body["config"])
        changes = [
            f"{key}: it has {was!r}, now {now!r}"
            for key, (was, now) in differing(old, inputs.config).items()
        ]
        changes += _changed_inputs(inputs, body["inputs"])
    except ValidationError as error:
        return [f"{where} was made by another version: {error}; choose another name"]
    except (StoreError, KeyError, pa.ArrowException) as error:
        return [f"{where} cannot be read: {error!r}; restore it, or choose another name"]
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


def _changed_inputs(inputs: Inputs, staged: dict[str, Any]) -> Iterator[str]:
    for key, name, table in (
        ("data.train_files", "prompts", inputs.prompts),
        ("data.val_files", "val_prompts", inputs.val_prompts),
    ):
        change = _changed_table(inputs.store, staged[name], table)
        if change:
            yield f"{key}: {change}"
    yield from _changed_reward(inputs.reward, staged["reward"])
    yield from _changed_model(inputs, staged["model"])


def _changed_table(
    store: Store, staged: dict[str, Any] | None, table: PromptTable | None
) -> str | None:
    if staged is None or table is None:
        if staged is None and table is None:
            return None
        return f"it has {'prompts' if staged else 'none'}, now {'prompts' if table else 'none'}"
    file = DataFile(**staged)
    content = table.to_parquet()
    if hashlib.sha256(content).hexdigest() == file.sha256:
        return None
    # Another version of Parquet's writer makes other bytes of the same table.
    old = pq.read_table(pa.BufferReader(read_data(store, file)))
    if old.equals(table.table):
        return None
    return (
        f"it has {old.num_rows} prompts, now {table.table.num_rows}, with other content or tokens"
    )


def _changed_reward(reward: bytes | None, staged: dict[str, Any] | None) -> Iterator[str]:
    now = None if reward is None else hashlib.sha256(reward).hexdigest()
    was = None if staged is None else staged["sha256"]
    if now != was:
        yield f"custom_reward_function.path: {_digests(was, now)}"


def _changed_model(inputs: Inputs, staged: dict[str, Any]) -> Iterator[str]:
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
        if now != staged[name]["sha256"]:
            yield f"{key}: {name}: {_digests(staged[name]['sha256'], now)}"


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
