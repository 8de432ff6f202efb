"""Finding commits that must exist, because other objects require them, but do not."""

import re
from collections.abc import Iterable

from pipeline.run import keys
from pipeline.run.restarts import trained_steps
from pipeline.store import Store

_SHARD = re.compile(r"/rollout/\d{5}\.json$")


def lost_manifests(store: Store, there: Iterable[str]) -> dict[int, str]:
    """Find the steps whose manifest is lost.

    A step that is being written has no manifest yet, but it is not trained, and no later step is
    sealed. A recorded set gets a step's plans only once the step is sealed.

    Args:
        store: The run or recorded set.
        there: All keys below `steps/`.

    Returns:
        For each of these steps, a text that names an object that requires the manifest.
    """
    of_steps = sorted((key, step) for key in there if (step := keys.folder_number(key)) is not None)
    sealed = {step for key, step in of_steps if key == keys.manifest(step)}
    last = max(sealed, default=-1)
    found: dict[int, str] = {}
    for key, step in of_steps:
        if step in sealed or step in found:
            continue
        if key == keys.metrics(step):
            why = f"the step was trained: {key}"
        elif keys.sub_plan_number(key) is not None and store.size(keys.run_json()) is None:
            why = f"the set contains {key}"
        elif step < last and _SHARD.search(key):
            why = f"step {last} is sealed, and this step has {key}"
        else:
            continue
        # The step may have been sealed since the keys were listed.
        if store.size(keys.manifest(step)) is None:
            found[step] = f"no such object, but {why}"
    return found


def lost_policies(store: Store) -> dict[str, str]:
    """Find the newest policy if its commit is lost but other objects of it exist.

    A finished step has published its policy. The folders of older policies may lack a commit,
    because a trainer removes the commit of an old policy before its files.

    Returns:
        The key of the missing commit, if any, with a text that names what requires it.
    """
    version = max(trained_steps(store), default=-1) + 1
    key = keys.policy(version)
    if version == 0 or store.size(key) is not None or not any(store.list(_folder(key))):
        return {}
    metrics = keys.metrics(version - 1)
    return {
        key: f"no such object, but its folder is not empty, and its step is finished: {metrics}"
    }


def _folder(key: str) -> str:
    return key.rpartition("/")[0] + "/"
