"""Saves checkpoints: each rank writes its part to local files and uploads them. Rank 0 commits."""

import queue
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from operators.patches import require_source
from operators.training.agree import agreed, await_ranks
from operators.training.background import Background
from operators.training.megatron.checkpoint.layouts import layout
from operators.training.megatron.checkpoint.state import CRITIC, saved_state
from operators.training.megatron.model import TrainedModel
from pipeline.config.launch import Launch
from pipeline.run import keys
from pipeline.run.commit import (
    Committed,
    commit,
    file_list,
    files_in,
    new_write_id,
    put_file,
)
from pipeline.run.shares import await_shares, write_share
from pipeline.scratch import scratch_folder
from pipeline.store import Store


@dataclass
class CheckpointWriter:
    """Writes checkpoints: to local files while training is paused, and then to the store.

    The upload runs in the background during the next steps. The next checkpoint waits for this
    upload, so local files of two checkpoints never exist at the same time.
    """

    store: Store
    background: Background
    timeout_s: float
    """Seconds that rank 0 waits for the other ranks' parts after its own upload."""
    _on_its_way: Future[None] | None = field(default=None, init=False)
    """The upload of the latest checkpoint."""

    def save(self, version: int, model: TrainedModel, critic: TrainedModel | None = None) -> None:
        """Begin to write the training state of a policy version, and of its critic.

        Every rank must call this. The checkpoint exists once it is committed. If this version's
        checkpoint was already committed, that first commit stands and the new files are debris.
        Raises the error of an earlier background job that failed.

        Args:
            version: The policy version.
            model: The model and its optimizer.
            critic: The critic and its optimizer; None if there is no critic.
        """
        if self._on_its_way is not None:
            self.background.wait_for(self._on_its_way)
        self.background.check()
        write_id = agreed(new_write_id)
        await_ranks()
        files = ExitStack()  # the upload job removes the files
        models = {"": model} | ({} if critic is None else {CRITIC: critic})
        with ExitStack() as until_handed_over:
            until_handed_over.push(files)
            folder = files.enter_context(scratch_folder("checkpoint"))
            for prefix, trained in models.items():
                of_model = folder / f"{prefix}files"
                of_model.mkdir()
                _save_files(of_model, version, trained)
            upload = _Upload(self.store, version, write_id, layout(model), folder)
            self._on_its_way = self.background.submit(
                f"uploading the checkpoint of policy {version}",
                lambda: upload.run(files, list(models), self.timeout_s),
            )
            until_handed_over.pop_all()


def save(
    store: Store,
    version: int,
    model: TrainedModel,
    critic: TrainedModel | None = None,
    timeout_s: float = Launch().step_timeout_s,
) -> None:
    """Write and commit a checkpoint, and wait for the commit. Every rank must call this.

    Args:
        store: The store of the run.
        version: The policy version.
        model: The model and its optimizer.
        critic: The critic and its optimizer; None if there is no critic.
        timeout_s: Seconds that rank 0 waits for the other ranks' parts after its own upload.
    """
    with Background() as background:
        CheckpointWriter(store, background, timeout_s).save(version, model, critic)
        background.finish()
    await_ranks()


@dataclass(frozen=True)
class _Upload:
    """The upload of a rank's part to the store.

    It does not use process groups, because it runs in a background thread.
    """

    store: Store
    version: int
    write_id: str
    layout: dict[str, Any]
    folder: Path
    rank: int = field(default_factory=torch.distributed.get_rank)
    ranks: int = field(default_factory=torch.distributed.get_world_size)

    def run(self, files: ExitStack, prefixes: Sequence[str], timeout_s: float) -> None:
        """Upload the files and the share that lists them; rank 0 commits when all shares exist.

        The local files are removed, even after an error.

        Args:
            files: Removes the local files when it is closed.
            prefixes: File name prefixes, one per model.
            timeout_s: Seconds that rank 0 waits for the other ranks' shares.
        """
        with files:
            written = [
                put_file(self.store, self._key(prefix + path.name), path)
                for prefix in prefixes
                for path in sorted((self.folder / f"{prefix}files").iterdir())
            ]
        share = {"rank": self.rank, "files": file_list(written)}
        write_share(self.store, self._share(self.rank), share, self.write_id)
        if self.rank == 0:
            self._commit(timeout_s)

    def _commit(self, timeout_s: float) -> Committed:
        shares = [self._share(rank) for rank in range(self.ranks)]
        found = await_shares(self.store, shares, timeout_s)
        files = [file for _, body in found for file in files_in(body)]
        body = {
            "version": self.version,
            "step": self.version,
            "layout": self.layout,
            "files": file_list([*files, *(share for share, _ in found)]),
        }
        return commit(self.store, keys.checkpoint(self.version), body, self.write_id)

    def _key(self, name: str) -> str:
        return keys.checkpoint_file(self.version, self.write_id, name)

    def _share(self, rank: int) -> str:
        return keys.checkpoint_share(self.version, self.write_id, rank)


def _save_files(folder: Path, version: int, model: TrainedModel) -> None:
    """Write this rank's part: at most one file of weights and one of optimizer state.

    Data-parallel ranks hold the same weights, and each writes a part of them. A rank that loads a
    checkpoint reads all weights, but only its own part of the optimizer state. Weights and
    optimizer state are therefore in separate files.
    """
    _keep_results_in_process()
    strategy = TorchDistSaveShardedStrategy(
        "torch_dist", 1, thread_count=2, separation_hint="optimizer"
    )
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    dist_checkpointing.save(
        saved_state(version, model),
        str(folder),
        sharded_strategy=FullyParallelSaveStrategyWrapper(strategy, group),
        validate_access_integrity=False,  # the wrapper validates after it has divided the weights
    )


def _keep_results_in_process() -> None:
    """Make Megatron's writer pass its results through a plain queue.

    For asynchronous saving, the writer uses a multiprocessing.Manager. The manager spawns a process
    that imports the entire program again (10 s and 0.6 GB per rank, on the first save). This
    process also executes the main module if it has no `__name__` guard, and outlives a killed
    trainer. A synchronous save writes and reads the results in one process, so a plain queue is
    enough.
    """
    require_source(
        filesystem_async._get_write_results_queue, "349269cbdd569d41", "_keep_results_in_process"
    )
    filesystem_async._results_queue = queue.Queue()
