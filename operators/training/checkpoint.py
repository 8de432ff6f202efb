"""Checkpoints of a policy version: weights, fp32 masters, Adam's moments and step.

Megatron's distributed checkpoint (torch_dist), written by each rank into a scratch folder of its
own (under TMPDIR) and uploaded from there; rank 0 commits keys.checkpoint(version) once every file
is in the store. Loading downloads all files once per node. Any TP, PP and DP size can load it
('fully_reshardable'); see refuse_other_layout for what cannot change.

Random number generators are not saved: build_model refuses dropout, so training draws no random
numbers. Saving is synchronous: Megatron's asynchronous save does not copy CPU tensors.

`latest`, `save` and `load` speak of the version n + 1 that step n made: training goes on at step
`version`.
"""

import os
import queue
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async

from operators.training.model import TrainedModel
from operators.training.patched import require_source
from operators.training.torch_adam_resume import finish_loading, prepare_loading
from pipeline.config.errors import InputError
from pipeline.store import Store, keys
from pipeline.store.commit import (
    Committed,
    CorruptObjectError,
    DataFile,
    commit,
    file_list,
    files_in,
    new_attempt,
    put_file,
    read_commit,
    sha256_of_file,
)
from pipeline.store.restarts import restarts

_FORMAT: dict[str, Any] = {
    # Each parameter's optimizer state is gathered whole, so that any layout can load it.
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    # Dense and expert optimizers share one key space.
    "chained_optim_avoid_prefix": True,
}
_PIECE = 64 << 20


def latest(store: Store) -> int | None:
    """The newest checkpoint's version of those that a restart may begin at, None without one."""
    return max(restarts(store), default=None)


def save(store: Store, version: int, model: TrainedModel) -> None:
    """Write the training state that goes with a policy version and commit it. Collective.

    If it is committed already, the first commit stands and these files are debris.
    """
    _keep_results_in_process()
    attempt = _from_rank_0(new_attempt())
    with TemporaryDirectory(prefix="retrace-checkpoint-") as folder:
        state = _sharded_state(model, is_loading=False)
        dist_checkpointing.save({**state, "version": version}, folder, content_metadata=_FORMAT)
        written = [
            put_file(store, keys.checkpoint_file(version, attempt, path.name), path)
            for path in sorted(Path(folder).iterdir())
        ]
    gathered: list[list[DataFile]] = [[]] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, written)
    if torch.distributed.get_rank() == 0:
        _commit(store, version, attempt, [file for files in gathered for file in files], model)
    torch.distributed.barrier()


def _keep_results_in_process() -> None:
    """Megatron's writer hands its results over through a multiprocessing.Manager, for asynchronous
    saving. It spawns a process that imports the whole program anew (10 s and 0.6 GB for each rank,
    at the first save), runs a main module that has no guard, and outlives a killed trainer. A
    synchronous save puts and takes them in one process, where a plain queue does."""
    require_source(
        filesystem_async._get_write_results_queue, "349269cbdd569d41", "_keep_results_in_process"
    )
    filesystem_async._results_queue = queue.Queue()


def _commit(
    store: Store, version: int, attempt: str, files: list[DataFile], model: TrainedModel
) -> Committed:
    body = {
        "version": version,
        "step": version,
        "layout": layout(model),
        "files": file_list(files),
    }
    return commit(store, keys.checkpoint(version), body, attempt)


def load(store: Store, version: int, model: TrainedModel) -> None:
    """Restore the training state that goes with a policy version. Collective.

    Raises InputError if this layout cannot load it, CorruptObjectError, ObjectMissingError.
    """
    body = read_commit(store, keys.checkpoint(version))
    refuse_other_layout(version, body["layout"], layout(model))
    with TemporaryDirectory(prefix="retrace-checkpoint-") as own:
        folder = _node_folder(own)
        if _local_rank() == 0:
            for file in files_in(body):
                _download(store, file, folder / file.key.rsplit("/", 1)[-1])
        torch.distributed.barrier()
        prepare_loading(model.optimizer)
        state = dist_checkpointing.load(_sharded_state(model, is_loading=True), str(folder))
        # Nobody's folder goes while another rank of the node reads it.
        torch.distributed.barrier()
    if state["version"] != version:
        raise CorruptObjectError(
            f"{keys.checkpoint(version)} in {store.uri}: its files are of version "
            f"{state['version']}; remove the checkpoint and start from the one before"
        )
    for index, chunk in enumerate(model.bare_chunks):
        chunk.load_state_dict(state[f"model{index}"])
    model.optimizer.load_state_dict(state["optimizer"])
    finish_loading(model.optimizer)


def layout(model: TrainedModel) -> dict[str, Any]:
    """What of the parallel layout a checkpoint depends on, or a reader may want to know."""
    config = model.config
    return {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline": config.virtual_pipeline_model_parallel_size or 1,
        "data": parallel_state.get_data_parallel_world_size(),
        "expert": parallel_state.get_expert_model_parallel_world_size(),
        "distributed_optimizer": model.chunks[0].ddp_config.use_distributed_optimizer,
        "dtype": str(config.params_dtype).removeprefix("torch."),
    }


_FIXED = {
    # EP1 has one optimizer, EP2 has two (dense, expert): the state has another shape.
    "expert": "expert_model_parallel_size",
    "distributed_optimizer": "use_distributed_optimizer",
    "dtype": "dtype",
}


def refuse_other_layout(version: int, saved: dict[str, Any], here: dict[str, Any]) -> None:
    """Raises InputError for what of the layout optimizer state cannot be loaded across."""
    problems = [
        f"checkpoint of policy {version} was saved with "
        f"actor_rollout_ref.actor.megatron.{key} {saved[name]}, this attempt has {here[name]}: "
        "optimizer state cannot be loaded across that; set it back, or start a new run with "
        f"actor_rollout_ref.model.path at policies/{version:06d} (weights only)"
        for name, key in _FIXED.items()
        if saved[name] != here[name]
    ]
    if problems:
        raise InputError(problems)


def _sharded_state(model: TrainedModel, is_loading: bool) -> dict[str, Any]:
    state: dict[str, Any] = {
        f"model{index}": chunk.sharded_state_dict(metadata=dict(_FORMAT))
        for index, chunk in enumerate(model.bare_chunks)
    }
    # The optimizer finds its parameters in the (nested) entries of the chunks by identity; merged
    # flat, the chunks of a virtual pipeline would overwrite each other.
    state["optimizer"] = model.optimizer.sharded_state_dict(
        dict(state), is_loading=is_loading, metadata=dict(_FORMAT)
    )
    return state


def _local_rank() -> int:
    return int(os.environ["LOCAL_RANK"])


def _node_folder(own: str) -> Path:
    """The scratch folder of this node's first rank, given this rank's own."""
    node = os.environ["GROUP_RANK"]
    folders: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(folders, (node, _local_rank(), own))
    return Path(next(path for n, local, path in folders if n == node and local == 0))


def _download(store: Store, file: DataFile, target: Path) -> None:
    """Copy a data file in pieces, and check its digest."""
    with target.open("wb") as out:
        for offset in range(0, file.size, _PIECE):
            out.write(store.read_range(file.key, offset, min(_PIECE, file.size - offset)))
    found = sha256_of_file(target)
    if found != file.sha256:
        raise CorruptObjectError(
            f"{file.key} in {store.uri}: SHA-256 {found[:16]}..., its commit says "
            f"{file.sha256[:16]}...; remove this checkpoint to start from the one before"
        )


def _from_rank_0(value: str) -> str:
    values = [value]
    torch.distributed.broadcast_object_list(values, src=0)
    return values[0]
