"""Downloads inputs from object storage to the flow's machine.

A flow in a pod has no folder with inputs, so prompts, the reward function and the model may be
given as URIs of remote stores. The flow reads them with the credentials and endpoint of the run's
store.
"""

import contextlib
import functools
import hashlib
import tempfile
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from pipeline.config.tree import RunConfig
from pipeline.errors import InputError
from pipeline.scratch import scratch_folder
from pipeline.store import ObjectMissingError, RefusedError, StoreError, is_remote, open_store
from pipeline.store.download import downloaded
from pipeline.store.schemes import REMOTE_URI, greet


def greet_servers(config: RunConfig) -> None:
    """Find servers of remote places that do not answer, so that the check waits for each once."""
    data, actor = config.data, config.actor_rollout_ref
    replay = actor.actor.router_replay
    places = [config.store.uri, actor.model.path, replay.record_file, replay.replay_file]
    if config.custom_reward_function is not None:
        places.append(config.custom_reward_function.path)
    for files in (data.train_files, data.val_files):
        places += [files] if isinstance(files, str) else files or []
    remote = [place for place in places if place is not None and is_remote(place)]
    # All places of a scheme have the same server.
    for place in {place.partition(":")[0]: place for place in remote}.values():
        with contextlib.suppress(StoreError):  # reported with the setting
            greet(place)


def local_file(key: str, place: str) -> Path:
    """Return the path of a local file, or of a fetched copy of an object. Raises InputError."""
    if not is_remote(place):
        return Path(place).expanduser()
    parent, _, name = place.rpartition("/")
    return _fetch(key, parent, (name,)) / name


def remote_stamp(key: str, place: str) -> str | None:
    """Return the place, size and time of an object; None for a local file.

    If the stamp is unchanged, the content is, so the object need not be fetched again. The result
    is also None if the object is missing or may not be listed. Raises InputError.
    """
    if not is_remote(place):
        return None
    parent, _, name = place.rpartition("/")
    try:
        found = [info for info in open_store(parent).list(name) if info.key == name]
    except RefusedError:
        return None  # to list objects, more permissions are needed than to read them
    except StoreError as error:
        raise InputError([f"{key}: {place} cannot be listed: {error}"]) from error
    return f"{place} {found[0].size} {found[0].modified_s}" if found else None


def remote_names(key: str, place: str, patterns: Sequence[str]) -> list[str]:
    """List the objects directly under a URI that match a pattern.

    Args:
        key: The setting that names the URI, for messages.
        place: The URI.
        patterns: File name patterns in fnmatch's syntax.

    Raises:
        InputError: The URI cannot be listed.
    """
    try:
        found = [info.key for info in open_store(place).list("")]
    except StoreError as error:
        raise InputError([f"{key}: {place} cannot be listed: {error}"]) from error
    return sorted(name for name in found if any(fnmatch(name, pattern) for pattern in patterns))


def fetch_files(key: str, place: str, names: Sequence[str]) -> Path:
    """Fetch objects that are directly under a URI, and return the local folder with the copies.

    Args:
        key: The setting that names the URI, for messages.
        place: The URI.
        names: Names of the objects.

    Raises:
        InputError: An object does not exist or cannot be fetched.
    """
    return _fetch(key, place.rstrip("/"), tuple(names))


@functools.cache
def _fetch(key: str, place: str, names: tuple[str, ...]) -> Path:
    digest = hashlib.sha256(place.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir(), "retrace-inputs", digest)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        store = open_store(place)
        with scratch_folder("inputs") as scratch:
            for name in names:
                size = store.size(name)
                if size is None:
                    raise ObjectMissingError(f"there is no object {name} in {store.uri}")
                with downloaded(store, name, size, scratch / name):
                    pass  # nothing to check: the digest is not known in advance
                # A file is moved only when complete. If the flow is killed before then, its
                # scratch folder is removed later.
                (scratch / name).replace(folder / name)
    except ObjectMissingError as error:
        raise InputError(
            [f"{key}: {error}; give the {REMOTE_URI} of an object that exists"]
        ) from error
    except (StoreError, OSError) as error:
        raise InputError([f"{key}: {place} cannot be fetched: {error}"]) from error
    return folder
