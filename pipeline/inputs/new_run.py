"""How inputs that a run cannot be amended with go on all the same: in a new run."""

import re

from pipeline.inputs.checked import CheckedInputs
from pipeline.run import keys
from pipeline.run.commit import files_in, read_commit
from pipeline.store import Store, open_store
from pipeline.store.schemes import place_in

_LONGEST_NAME = 40
_RECORD_FILE = "actor_rollout_ref.actor.router_replay.record_file"


def new_run(inputs: CheckedInputs) -> str:
    """How to go on with these inputs in a new run, as the end of a refusal.

    The new run begins with the newest policy of the old one, with a new optimizer state, or from
    the beginning while there is none but the model itself. Raises StoreError.
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
    return f"go on with the new ones in a new run, {start}: add {' '.join(words)}"


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
    """The newest policy that the run has trained, and its folder, as a model's path."""
    versions = [
        version
        for info in store.list(keys.policies())
        if (version := keys.number_of(info.key)) and info.key == keys.policy(version)
    ]
    if not versions:
        return None
    files = files_in(read_commit(store, keys.policy(max(versions))))
    return max(versions), place_in(store, files[0].key.rpartition("/")[0])
