"""Process group, Megatron's parallel groups and random numbers: start, stop, who am I."""

import os
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import initialize_rng_tracker

from operators.training import cpu_megatron
from pipeline.config.errors import InputError
from pipeline.config.tree import Megatron

_KEYS = "actor_rollout_ref.actor.megatron"
_SEED = 1


@dataclass(frozen=True)
class Ranks:
    """This process's place in the layout. Example: rank 1 of 2 under PP2, second stage."""

    rank: int
    world: int
    local_rank: int
    """Rank on this node; 0 does what a node needs once (downloads)."""
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    vpp_size: int
    """Model chunks per pipeline stage."""
    dp_rank: int
    dp_size: int
    ep_rank: int
    """Expert-parallel rank: EP divides the data-parallel ranks."""
    ep_size: int
    expert_tp_size: int
    is_last_stage: bool
    """Holds the output layer: logits and losses exist on the last pipeline stage only."""


def expert_tensor_parallel_size(megatron: Megatron) -> int:
    """Expert-TP: as set, else TP at EP1 and 1 otherwise.

    At EP1 Megatron-core 0.16.1 takes expert weights for dense ones and sums their gradients over
    the dense data-parallel group only (tensor_parallel/layers.py: allreduce = not (is_expert and
    EP > 1)). With expert-TP 1 under TP each rank would train its own copy of the experts on its own
    part of the tokens, and the copies would drift apart without an error. So unlike TP at EP1 is
    refused. Raises InputError.
    """
    tp, ep = megatron.tensor_model_parallel_size, megatron.expert_model_parallel_size
    chosen = megatron.expert_tensor_parallel_size
    if chosen is None:
        return tp if ep == 1 else 1
    if ep == 1 and chosen != tp:
        raise InputError(
            [
                f"{_KEYS}.expert_tensor_parallel_size is {chosen} with "
                f"expert_model_parallel_size 1 and tensor_model_parallel_size {tp}: copies of the "
                f"experts would drift apart in Megatron-core; set it to {tp} or leave it out"
            ]
        )
    return chosen


def start(megatron: Megatron) -> Ranks:
    """Join the process group (once per process) and make Megatron's groups for this layout.

    Rank and world size come from torchrun's environment. Gloo on CPU, NCCL on CUDA. The random
    number tracker is the one that never forks the generator: all weights are loaded, and
    build_model refuses dropout, so nothing draws random numbers.
    Raises InputError if the layout does not fit the ranks.
    """
    expert_tp = expert_tensor_parallel_size(megatron)
    cpu_megatron.adapt()
    local_rank = int(os.environ["LOCAL_RANK"])
    if not torch.distributed.is_initialized():
        if not cpu_megatron.ON_CPU:
            torch.cuda.set_device(local_rank)
        torch.distributed.init_process_group("gloo" if cpu_megatron.ON_CPU else "nccl")
    _check_sizes(megatron, expert_tp, torch.distributed.get_world_size())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=megatron.tensor_model_parallel_size,
        pipeline_model_parallel_size=megatron.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=megatron.virtual_pipeline_model_parallel_size,
        context_parallel_size=megatron.context_parallel_size,
        expert_model_parallel_size=megatron.expert_model_parallel_size,
        expert_tensor_parallel_size=expert_tp,
    )
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    torch.manual_seed(_SEED)
    return _ranks(local_rank, megatron.virtual_pipeline_model_parallel_size or 1)


def stop() -> None:
    """Destroy Megatron's groups, so that this process can start another layout. Collective.

    Megatron only forgets most of them; each keeps its threads and sockets.
    """
    torch.distributed.barrier()
    for group in parallel_state._global_process_group_list:
        if group is not None:  # None stands for the default group.
            torch.distributed.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


def leave() -> None:
    """Stop and leave the process group; the process cannot start again."""
    stop()
    torch.distributed.destroy_process_group()


def _check_sizes(megatron: Megatron, expert_tp: int, world: int) -> None:
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    ep = megatron.expert_model_parallel_size
    problems = []
    if world % (tp * pp):
        problems.append(
            f"{_KEYS}: tensor_model_parallel_size {tp} x pipeline_model_parallel_size {pp} does "
            f"not divide the {world} training ranks; change them or trainer.n_gpus_per_node and "
            "trainer.nnodes"
        )
    elif world % (ep * expert_tp * pp):
        problems.append(
            f"{_KEYS}: expert_model_parallel_size {ep} x expert_tensor_parallel_size {expert_tp} "
            f"x pipeline_model_parallel_size {pp} does not divide the {world} training ranks"
        )
    if megatron.virtual_pipeline_model_parallel_size and pp == 1:
        problems.append(
            f"{_KEYS}.virtual_pipeline_model_parallel_size needs pipeline_model_parallel_size > 1; "
            "it is 1"
        )
    if problems:
        raise InputError(problems)


def _ranks(local_rank: int, vpp_size: int) -> Ranks:
    return Ranks(
        rank=torch.distributed.get_rank(),
        world=torch.distributed.get_world_size(),
        local_rank=local_rank,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=parallel_state.get_pipeline_model_parallel_world_size(),
        vpp_size=vpp_size,
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        ep_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tp_size=parallel_state.get_expert_tensor_parallel_world_size(),
        is_last_stage=parallel_state.is_pipeline_last_stage(ignore_virtual=True),
    )
