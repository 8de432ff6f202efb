"""Functions that write checkpoints as earlier versions did, and read checkpoints' tensors."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from operators.training.agree import agreed, await_ranks, gathered
from operators.training.megatron.checkpoint.layouts import layout
from operators.training.megatron.checkpoint.saving import _keep_results_in_process
from operators.training.megatron.model import TrainedModel
from pipeline.run import keys
from pipeline.run.commit import (
    commit,
    fetch_file,
    file_list,
    files_in,
    new_write_id,
    put_file,
    read_commit,
)
from pipeline.store import Store

FORMAT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "chained_optim_avoid_prefix": True,
}


def save_formerly(store: Store, version: int, model: TrainedModel) -> None:
    """Write a checkpoint in Megatron's format with gathered state. Every rank must call this.

    Args:
        store: The run's store.
        version: The checkpoint's policy version.
        model: The model.
    """
    _keep_results_in_process()
    write_id = agreed(new_write_id)
    with tempfile.TemporaryDirectory() as folder:
        chunks = enumerate(model.bare_chunks)
        state: dict[str, Any] = {
            f"model{index}": chunk.sharded_state_dict(metadata=dict(FORMAT))
            for index, chunk in chunks
        }
        optimizer = model.optimizer.sharded_state_dict(
            dict(state), is_loading=False, metadata=dict(FORMAT)
        )
        state |= {"optimizer": optimizer, "version": version, "stepped": True}
        dist_checkpointing.save(state, folder, content_metadata=FORMAT)
        written = [
            put_file(store, keys.checkpoint_file(version, write_id, path.name), path)
            for path in sorted(Path(folder).iterdir())
        ]
    files = [file for of_rank in gathered(written) for file in of_rank]
    if torch.distributed.get_rank() == 0:
        body = {"version": version, "step": version, "layout": layout(model)}
        commit(store, keys.checkpoint(version), body | {"files": file_list(files)}, write_id)
    await_ranks()


def tensors_of(store: Store, version: int, folder: Path) -> dict[str, torch.Tensor]:
    """Return the full tensors of a checkpoint, keyed by name, without a process group.

    Args:
        store: The run's store.
        version: The checkpoint's policy version.
        folder: A new folder for the downloaded files.
    """
    folder.mkdir()
    for file in files_in(read_commit(store, keys.checkpoint(version))):
        fetch_file(store, file, folder / file.key.rsplit("/", 1)[-1])
    found: dict[str, Any] = {}
    _load_state_dict(
        found, FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
