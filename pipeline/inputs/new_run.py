"""Advice on how to use inputs in a new run if the existing run cannot use them."""

import re

from pipeline.inputs.checked import CheckedInputs
from pipeline.policies.versions import read_version
from pipeline.run import keys
from pipeline.store import Store, open_store
from pipeline.store.schemes import place_in

_LONGEST_NAME = 40
_RECORD_FILE = "actor_rollout_ref.actor.router_replay.record_file"


def new_run(inputs: CheckedInputs) -> str:
    """Return the end of an error message; it explains how to use these inputs in a new run.

    The new run starts from the newest whole policy of the old run, with a new optimizer state. If
    the old run has not trained a policy, the new run starts from the beginning. Raises StoreError.
    """
    config = inputs.config
    name = _free_name(config.run_uri.rpartition("/")[0], config.trainer.run_name)
    words = [f"trainer.experiment_name={name}"]
    start = "from the beginning"
    newest = _newest_policy(inputs.store)
    if newest is not None:
        version, place = newest
        start = f"from its policy {version} (with a new optimizer state)"
        words.append(f"actor_rollout_ref.model.path={place}")
    record_file = config.actor_rollout_ref.actor.router_replay.record_file
    if record_file is not None:  # a recorded set belongs to one run
        words.append(f"{_RECORD_FILE}={record_file.rstrip('/')}-{name}")
    return f"continue with the new ones in a new run, {start}: add {' '.join(words)}"


def _free_name(store_uri: str, name: str) -> str:
    base, number = re.fullmatch(r"(.*?)(?:-(\d{1,3}))?", name).groups()  # type: ignore[union-attr]
    after = int(number or 1)
    while True:
        after += 1
        end = f"-{after}"
        found = base[: _LONGEST_NAME - len(end)].rstrip("-") + end
        if open_store(f"{store_uri}/{found}").size(keys.run_json()) is None:
            return found


def _newest_policy(store: Store) -> tuple[int, str] | None:
    """Return the version of the newest trained whole policy, and its folder as a model path.

    The folder of a difference is not a complete model.
    """
    versions = [
        version
        for info in store.list(keys.policies())
        if (version := keys.number_of(info.key)) and info.key == keys.policy(version)
    ]
    for version in sorted(versions, reverse=True):
        policy = read_version(store, version)
        if policy.difference is None:
            return version, place_in(store, policy.files[0].key.rpartition("/")[0])
    return None
