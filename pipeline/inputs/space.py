"""Checks that places are writable and have space for the next steps of a run."""

import os
import shutil
import tempfile
from pathlib import Path

from rich.filesize import decimal

from pipeline.config.tree import RunConfig
from pipeline.errors import InputError
from pipeline.inputs.model_folder import ModelFolder
from pipeline.inputs.prompts.token_table import PromptTable
from pipeline.inputs.writes import Writes, estimate, needed_bytes
from pipeline.model.geometry import Geometry
from pipeline.policies.cache import cache_folder
from pipeline.run import keys
from pipeline.run.restarts import finished_steps
from pipeline.store import StoreError, open_store, shown_uri
from pipeline.store.schemes import free_bytes, place_in

_SCRATCH_BYTES = 1 << 16
_LONGEST_SCRATCH = 70
"""Maximum length of TMPDIR for engines with TP > 1. A socket's path has at most 107 bytes, and vLLM
appends 37."""


def probe(key: str, place: str) -> None:
    """Raise InputError unless objects can be created at a place; leave no objects behind."""
    try:
        open_store(place).probe()
    except StoreError as error:
        # The store's own errors name a fix, but errors of the operating system do not.
        fix = "; choose a different place" if isinstance(error.__cause__, OSError) else ""
        raise InputError(
            [f"{key}: found {shown_uri(place)}, which cannot be written: {error}{fix}"]
        ) from error


def check_scratch(config: RunConfig) -> None:
    """Raise InputError unless processes on this machine can use TMPDIR.

    Python would silently use a different folder if no files could be written in TMPDIR.
    """
    try:
        folder = os.environ.get("TMPDIR") or tempfile.gettempdir()
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_SCRATCH_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise InputError(
            [f"TMPDIR: files cannot be written there: {error}; set it to a folder with free space"]
        ) from error
    length = len(os.fsencode(os.path.abspath(folder)))
    tp = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    if tp > 1 and length > _LONGEST_SCRATCH:
        raise InputError(
            [
                f"TMPDIR: found a path of {length} bytes, expected at most {_LONGEST_SCRATCH}, "
                f"because the {tp} processes of an engine create sockets there; set it to a folder "
                "with a shorter path"
            ]
        )


def check_prefect_home() -> None:
    """Raise InputError unless a run's own Prefect server can write its database."""
    if os.environ.get("PREFECT_API_URL"):
        return  # the run starts no server
    try:
        home = Path(os.environ.get("PREFECT_HOME") or "~/.prefect").expanduser()
    except RuntimeError:  # neither HOME nor the password database names a home
        home = None
    found = None if home is None else _existing(home.absolute())
    if found is None or not (found.is_dir() and os.access(found, os.W_OK | os.X_OK)):
        what = "HOME is not set" if found is None else f"{found} is not a writable folder"
        raise InputError(
            [f"PREFECT_HOME: {what}; set it to a folder where Prefect may keep its database"]
        )


def check_policy_cache(config: RunConfig) -> None:
    """Raise InputError unless rollout workers on this machine can create the policy's folder."""
    if config.actor_rollout_ref.actor.router_replay.replay_file is not None:
        return  # no rollout worker is started
    setting = config.store.policy_cache
    found = _existing(cache_folder(setting))
    if not (found.is_dir() and os.access(found, os.W_OK | os.X_OK)):
        raise InputError(
            [
                f"store.policy_cache: found {setting}, but {found} is not a writable folder; "
                "choose a different folder, or write disk"
            ]
        )


def _existing(path: Path) -> Path:
    """Return the path, or its nearest ancestor that exists."""
    while not os.path.exists(path):  # Path.exists raises an error below an unreadable folder
        path = path.parent
    return path


def writes_of(
    config: RunConfig, model: ModelFolder, geometry: Geometry | None, prompts: PromptTable
) -> Writes | None:
    """Estimate the bytes that a run writes, or return None if the model's size is unknown.

    Args:
        config: Settings of the run.
        model: The model; if it is remote, its number of parameters may be unknown.
        geometry: Experts and MoE layers; None for a dense model.
        prompts: The tokenised prompts, for their mean length.
    """
    if model.parameters is None:
        return None
    return estimate(config, geometry, model.parameters, prompts.origin.tokens / prompts.rows)


def space_problems(config: RunConfig, writes: Writes | None) -> list[str]:
    """Return a problem if the store's disk lacks space for the next steps (at most two).

    Object storage is not checked, because its free space is unknown.
    """
    uri = config.store.uri
    free = free_bytes(uri)
    if writes is None or free is None:
        return []
    finished = finished_steps(open_store(config.run_uri))
    needed = needed_bytes(writes, finished, config.trainer.total_training_steps)
    if needed <= free:
        return []
    return [
        f"store.uri: {shown_uri(uri)} has {free:,} bytes free ({decimal(free)}), but the next "
        f"steps (at most two) need {needed:,} ({decimal(needed)}): {decimal(writes.step)} per "
        f"step, {decimal(writes.checkpoint)} per checkpoint; free some space, or choose a "
        "different place"
    ]


def space_notes(config: RunConfig, writes: Writes | None) -> list[str]:
    """Return notes on disks that are too small for the policies that workers keep.

    These are not errors, because new workers first remove the files of killed workers, which frees
    space.
    """
    uri, store = config.store.uri, open_store(config.run_uri)
    finished, total = finished_steps(store), config.trainer.total_training_steps
    if writes is None or finished >= total:
        return []
    kept = [
        (
            Path(tempfile.gettempdir()),
            writes.rank_copies,
            "that training ranks keep below TMPDIR",
        ),
        (
            cache_folder(config.store.policy_cache),
            writes.engine_copies,
            "that rollout workers keep in store.policy_cache",
        ),
    ]
    if free_bytes(uri) is not None:
        folder = Path(place_in(store, keys.run_json())).parent
        kept.append((folder, needed_bytes(writes, finished, total), "of the next steps"))
    by_disk: dict[int, list[tuple[Path, int, str]]] = {}
    for folder, size, what in kept:
        there = _existing(folder)
        if size:
            by_disk.setdefault(there.stat().st_dev, []).append((there, size, what))
    notes = []
    for parts in by_disk.values():
        free = shutil.disk_usage(parts[0][0]).free
        needed = sum(size for _, size, _ in parts)
        if needed > free:
            each = ", ".join(f"{decimal(size)} {what}" for _, size, what in parts)
            notes.append(
                f"{parts[0][0]} has {decimal(free)} free, but the run needs {decimal(needed)} "
                f"there: {each}; free some space, or set TMPDIR or store.policy_cache to a "
                "different disk"
            )
    return notes
