"""Process group, Megatron's parallel groups and random numbers: start, stop, rank position."""

import os
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from torch.distributed import ProcessGroup

from operators.training.batches.micro_batch import Slice
from operators.training.batches.zigzag import Zigzag
from operators.training.megatron import cpu_megatron
from pipeline.config.actor import Megatron
from pipeline.config.rules.layout import expert_tensor_parallel_size, size_problems
from pipeline.errors import InputError

_SEED = 1


@dataclass(frozen=True)
class RankPosition:
    """The position of this process in the parallel layout."""

    dp_rank: int
    data_parallel: int
    stage: int
    """Pipeline stage."""
    last_stage: bool
    """Logits, losses and log-probs exist on the last stage only."""
    tensor_rank: int
    tensor_group: ProcessGroup
    sequence: Slice
    """The part of the rank's positions that its routers see."""
    context: Zigzag
    """The positions of each sequence that this rank holds."""
    context_group: ProcessGroup
    """The ranks that hold the other positions of the same samples."""
    samples_group: ProcessGroup
    """The data-parallel ranks, which hold the step's other samples."""
    data_group: ProcessGroup
    """The ranks over which gradients are summed: data- and context-parallel ones."""

    @property
    def speaks_for_rows(self) -> bool:
        """Whether this rank counts its router rows, which no other counting rank has."""
        return self.sequence.count > 1 or self.tensor_rank == 0

    @property
    def speaks_for_tokens(self) -> bool:
        """Whether this rank reports results of the tokens that it holds."""
        return self.last_stage and self.tensor_rank == 0

    @property
    def speaks_for_samples(self) -> bool:
        """Whether this rank reports the results of its data-parallel share's whole samples."""
        return self.speaks_for_tokens and self.context.index == 0


def start(megatron: Megatron) -> RankPosition:
    """Join the process group (once per process) and make Megatron's groups for this layout.

    Rank and world size come from torchrun's environment; the backend is Gloo on CPU, NCCL on CUDA.
    The random number tracker is the one that never forks the generator: all weights are loaded, and
    build_model refuses dropout, so nothing draws random numbers.
    Raises InputError if the layout does not fit the ranks.
    """
    cpu_megatron.adapt()
    if not torch.distributed.is_initialized():
        if not cpu_megatron.ON_CPU:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("gloo" if cpu_megatron.ON_CPU else "nccl")
    world = torch.distributed.get_world_size()
    if problems := size_problems(megatron, world, f"training ranks: found {world}"):
        raise InputError(problems)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=megatron.tensor_model_parallel_size,
        pipeline_model_parallel_size=megatron.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=megatron.virtual_pipeline_model_parallel_size,
        context_parallel_size=megatron.context_parallel_size,
        expert_model_parallel_size=megatron.expert_model_parallel_size,
        expert_tensor_parallel_size=expert_tensor_parallel_size(megatron),
    )
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    torch.manual_seed(_SEED)
    return _position(megatron.sequence_parallel)


def stop() -> None:
    """Destroy Megatron's groups, so that this process can start another layout. Collective.

    Megatron itself only drops its references to most of them, and their threads and sockets stay.
    """
    torch.distributed.barrier()
    for group in parallel_state._global_process_group_list:
        if group is not None:  # None: the default group
            torch.distributed.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


def leave() -> None:
    """Stop and leave the process group; the process cannot start again."""
    stop()
    torch.distributed.destroy_process_group()


def _position(sequence_parallel: bool) -> RankPosition:
    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    tensor_size = parallel_state.get_tensor_model_parallel_world_size()
    return RankPosition(
        dp_rank=parallel_state.get_data_parallel_rank(),
        data_parallel=parallel_state.get_data_parallel_world_size(),
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        last_stage=parallel_state.is_pipeline_last_stage(ignore_virtual=True),
        tensor_rank=tensor_rank,
        tensor_group=parallel_state.get_tensor_model_parallel_group(),
        sequence=Slice(tensor_rank, tensor_size) if sequence_parallel else Slice(),
        context=Zigzag(
            parallel_state.get_context_parallel_rank(),
            parallel_state.get_context_parallel_world_size(),
        ),
        context_group=parallel_state.get_context_parallel_group(),
        samples_group=parallel_state.get_data_parallel_group(),
        data_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
    )
