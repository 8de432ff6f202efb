"""Train steps whose updates do not replay, on one rank.

The arguments are the run store, the model folder and the folder for results. The program writes
`<results>/silent.json`. For each case, the file contains the message of the ReplayError, or null if
there was no error.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from operators.training.batches.step_data import layout_rules, load_step
from operators.training.errors import ReplayError
from operators.training.megatron import parallel
from operators.training.passes import update
from operators.training.passes.share import make_replay
from operators.training.rank import make_rank
from operators.training.replay.counts import Replay
from operators.training.step import train_step
from pipeline.store import open_store
from pipeline.traces import open_manifest
from tests.integration.training_replay.sealed import config_of

MINI_BATCHES = 2
CASES = {
    "R3 full update": ("R3", 0),
    "R3 second epoch": ("R3", MINI_BATCHES),
    "R2 second epoch": ("R2", MINI_BATCHES),
    "R3 no fault": ("R3", 2 * MINI_BATCHES),
}
"""The mode, and how many mini-batches are replayed before the fault; an update has 2 epochs."""


def program(run_uri: str, model: str, results: str) -> None:
    """Train the step in each case, and write the results.

    Args:
        run_uri: The run's store.
        model: The model's folder.
        results: The folder for results.
    """
    store = open_store(run_uri)
    manifest = open_manifest(store, 0)
    found = {}
    for name, (mode, replayed) in CASES.items():
        config = config_of(router_replay={"mode": mode}, ppo_epochs=2)
        position = parallel.start(config.actor_rollout_ref.actor.megatron)
        rank, _ = make_rank(config, position, Path(model))
        data = load_step(store, manifest, config, layout_rules(config, 1), 0, rank.geometry)
        assert len(data.layout.epoch(0)) == MINI_BATCHES
        update.make_replay = Until(replayed)
        try:
            train_step(rank, data, 0.0, first=True)
            found[name] = None
        except ReplayError as error:
            found[name] = str(error)
        parallel.stop()
    Path(results, "silent.json").write_text(json.dumps(found))
    dist.destroy_process_group()


class Until:
    """Create the replay for `left` mini-batches of an update, then none, as if without routes."""

    def __init__(self, left: int) -> None:
        self.left = left

    def __call__(self, *arguments: Any) -> Any:
        self.left -= 1
        return make_replay(*arguments) if self.left >= 0 else Replay()


if __name__ == "__main__":
    program(*sys.argv[1:])
