"""Checkpoints of a policy version and its critic: weights, fp32 masters, Adam's moments and step.

Each rank writes its part of Megatron's distributed checkpoint (torch_dist) into its own scratch
folder (under TMPDIR) and uploads it; rank 0 commits keys.checkpoint(version) once every file is in
the store. Loading downloads all files once per node. Any TP, PP, CP and DP size can load it
('fully_reshardable'); see refuse_other_layout for what cannot change.

Random number generators are not saved: build_model refuses dropout, so training draws no random
numbers. Saving is synchronous: Megatron's asynchronous save does not copy CPU tensors.

The version in `latest`, `save` and `load` is the version n + 1 that step n made: training continues
at step `version`.
"""

import queue
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async

from operators.training.agree import agreed, folder_of_node
from operators.training.megatron.model import TrainedModel
from operators.training.megatron.optimizer import parts
from operators.training.megatron.patched import require_source
from operators.training.megatron.torch_adam_resume import finish_loading, prepare_loading
from pipeline.errors import InputError
from pipeline.run import keys
from pipeline.run.commit import (
    Committed,
    CorruptObjectError,
    DataFile,
    commit,
    fetch_file,
    file_list,
    files_in,
    new_write_id,
    put_file,
    read_commit,
)
from pipeline.run.restarts import restarts
from pipeline.scratch import scratch_folder
from pipeline.store import Store

_FORMAT: dict[str, Any] = {
    # Each parameter's optimizer state is gathered whole, so that any layout can load it.
    "distrib_optim_sharding_type": "fully_reshardable",
    # Over Gloo, to one rank of each group. The other way gathers on the GPU, which has no room: 8
    # bytes of each number that a rank holds, where 18 are taken; and every rank's host holds all.
    "distrib_optim_fully_reshardable_mem_efficient": True,
    # Dense and expert optimizers share one key space.
    "chained_optim_avoid_prefix": True,
}
_CRITIC = "critic-"
"""How the names of the critic's files begin; Megatron names the files of each model alike."""
_REMOVE = "remove this checkpoint to start from the one before"


def latest(store: Store) -> int | None:
    """The version of the newest checkpoint at which a restart may begin; None without one."""
    return max(restarts(store), default=None)


def save(
    store: Store, version: int, model: TrainedModel, critic: TrainedModel | None = None
) -> None:
    """Write and commit the training state of a policy version, and of its critic. Collective.

    If it is already committed, the first commit counts and these files are debris.
    """
    _keep_results_in_process()
    write_id = agreed(new_write_id)
    written = _write(store, version, write_id, model, "")
    if critic is not None:
        written += _write(store, version, write_id, critic, _CRITIC)
    gathered: list[list[DataFile]] = [[]] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, written)
    if torch.distributed.get_rank() == 0:
        _commit(store, version, write_id, [file for files in gathered for file in files], model)
    torch.distributed.barrier()


def _write(
    store: Store, version: int, write_id: str, model: TrainedModel, prefix: str
) -> list[DataFile]:
    """Write this rank's part of a model's state, in files whose names begin with the prefix."""
    with scratch_folder("checkpoint") as folder:
        stepped = _has_stepped(model)
        state = _sharded_state(model, is_loading=False, with_optimizer=stepped)
        state |= {"version": version, "stepped": stepped}
        dist_checkpointing.save(state, str(folder), content_metadata=_FORMAT)
        return [
            put_file(store, keys.checkpoint_file(version, write_id, prefix + path.name), path)
            for path in sorted(folder.iterdir())
        ]


def _keep_results_in_process() -> None:
    """Megatron's writer passes its results through a multiprocessing.Manager, for asynchronous
    saving. The manager spawns a process that imports the whole program anew (10 s and 0.6 GB per
    rank, at the first save), runs a main module without a guard, and outlives a killed trainer. A
    synchronous save puts and takes the results in one process, where a plain queue suffices."""
    require_source(
        filesystem_async._get_write_results_queue, "349269cbdd569d41", "_keep_results_in_process"
    )
    filesystem_async._results_queue = queue.Queue()


def _commit(
    store: Store, version: int, write_id: str, files: list[DataFile], model: TrainedModel
) -> Committed:
    body = {
        "version": version,
        "step": version,
        "layout": layout(model),
        "files": file_list(files),
    }
    return commit(store, keys.checkpoint(version), body, write_id)


def load(
    store: Store, version: int, model: TrainedModel, critic: TrainedModel | None = None
) -> None:
    """Restore the training state of a policy version, and of its critic. Collective.

    Raises InputError if this layout cannot load it; CorruptObjectError; ObjectMissingError.
    """
    body = read_checkpoint(store, version)
    refuse_other_layout(version, body["layout"], layout(model))

    _read(store, body, model, "")
    if critic is not None:
        _read(store, body, critic, _CRITIC)


def _read(store: Store, body: dict[str, Any], model: TrainedModel, prefix: str) -> None:
    """Restore a model's state from the files of a checkpoint whose names begin with the prefix.

    Raises CorruptObjectError if there is none, or those of another version.
    """
    version = body["version"]
    files = {file.key.rsplit("/", 1)[-1]: file for file in files_in(body)}
    own = {
        name.removeprefix(prefix): file
        for name, file in files.items()
        if name.startswith(_CRITIC) == (prefix == _CRITIC)
    }
    if not own:
        raise CorruptObjectError(
            f"{keys.checkpoint(version)} in {store.uri}: found no file {prefix}*, expected the "
            f"state of the critic; {_REMOVE}"
        )

    def fetch(folder: Path) -> None:
        for name, file in own.items():
            fetch_file(store, file, folder / name, _REMOVE)

    with folder_of_node("checkpoint", fetch) as folder:
        # Older checkpoints do not say it: their optimizers had a state.
        stepped = dist_checkpointing.load_common_state_dict(str(folder)).get("stepped", True)
        if stepped:
            prepare_loading(model.optimizer)
        wanted = _sharded_state(model, is_loading=True, with_optimizer=stepped)
        state = dist_checkpointing.load(wanted, str(folder))
    if state["version"] != version:
        raise CorruptObjectError(
            f"{keys.checkpoint(version)} in {store.uri}: its files are of version "
            f"{state['version']}; {_REMOVE}"
        )
    for index, chunk in enumerate(model.bare_chunks):
        chunk.load_state_dict(state[f"model{index}"])
    if stepped:
        model.optimizer.load_state_dict(state["optimizer"])
        finish_loading(model.optimizer)


def read_checkpoint(store: Store, version: int) -> dict[str, Any]:
    """The commit of a checkpoint. Raises CorruptObjectError, also for one of something else;
    ObjectMissingError."""
    body = read_commit(store, keys.checkpoint(version))
    if body.get("version") != version or not isinstance(body.get("layout"), dict):
        raise CorruptObjectError(
            f"{keys.checkpoint(version)} in {store.uri}: found a commit of version "
            f"{body.get('version')!r} with layout {body.get('layout')!r}, expected version "
            f"{version} and a layout; {_REMOVE}"
        )
    return body


def layout(model: TrainedModel) -> dict[str, Any]:
    """The parts of the parallel layout that a checkpoint depends on or that inform its readers."""
    config = model.config
    return {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "context": parallel_state.get_context_parallel_world_size(),
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
    """Raise InputError if the layouts differ where optimizer state cannot be converted."""
    problems = [
        f"checkpoint of policy {version} was saved with "
        f"actor_rollout_ref.actor.megatron.{key} {saved[name]}, this attempt has {here[name]}: "
        "optimizer state cannot be loaded across that; set it back, or start a new run (another "
        "trainer.experiment_name) from this policy, of which only the weights are loaded then"
        for name, key in _FIXED.items()
        if saved[name] != here[name]
    ]
    if problems:
        raise InputError(problems)


def _has_stepped(model: TrainedModel) -> bool:
    """Whether the optimizer has made a step, and so has a state that can be saved. Collective.

    A policy has made none while only its critic is trained, or every mini-batch was skipped; its
    float32 weights are then those that it was built with. A rank may hold no part of the state.
    """
    found = any(bool(part.optimizer.state) for part in parts(model.optimizer))
    stepped = torch.tensor(int(found), device=next(model.chunks[0].parameters()).device)
    torch.distributed.all_reduce(stepped, op=torch.distributed.ReduceOp.MAX)
    return bool(stepped)


def _sharded_state(model: TrainedModel, is_loading: bool, with_optimizer: bool) -> dict[str, Any]:
    state: dict[str, Any] = {
        f"model{index}": chunk.sharded_state_dict(metadata=dict(_FORMAT))
        for index, chunk in enumerate(model.bare_chunks)
    }
    if not with_optimizer:
        return state
    # The optimizer finds its parameters in the (nested) entries of the chunks by identity; merged
    # flat, the chunks of a virtual pipeline would overwrite each other.
    state["optimizer"] = model.optimizer.sharded_state_dict(
        dict(state), is_loading=is_loading, metadata=dict(_FORMAT)
    )
    return state
