"""Creates and destroys the process group and Megatron's parallel groups."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from torch.distributed import ProcessGroup, distributed_c10d

from operators.cpu import without_cuda
from operators.training.agree import await_ranks, drop_group, make_group
from operators.training.batches.micro_batch import Slice
from operators.zigzag import Zigzag
from pipeline.config.actor import Megatron
from pipeline.config.launch import Launch
from pipeline.config.rules.layout import expert_tensor_parallel_size, size_problems
from pipeline.errors import InputError

_SEED = 1
_LATER_S = 300.0
"""Seconds added to the timeouts of ranks that wait for another rank. A rank that waits for an
object then times out before the ranks that wait for it, and the first error names the object. A
failing request to the store is retried for less time than this."""


@dataclass(frozen=True)
class Limits:
    """Timeouts of ranks that wait for each other, in seconds. Example: Limits(3600.0, 4800.0)."""

    pass_s: float
    """The limit in a pass, where no rank waits for the store."""
    store_s: float
    """The limit while a rank starts or waits for the store."""


def limits_of(launch: Launch) -> Limits:
    """Return the limits for a run's process groups; they exceed the waits that settings allow."""
    return Limits(
        pass_s=launch.step_timeout_s,
        store_s=launch.start_timeout_s + launch.step_timeout_s + _LATER_S,
    )


@dataclass(frozen=True)
class RankPosition:
    """The position of this process in the parallel layout."""

    dp_rank: int
    data_parallel: int
    stage: int
    """The pipeline stage."""
    last_stage: bool
    """Whether this is the last stage, the only one with logits, losses and log-probs."""
    tensor_rank: int
    tensor_group: ProcessGroup
    sequence: Slice
    """The part of the rank's positions that its routers see."""
    context: Zigzag
    """The positions of each sequence that this rank holds."""
    context_group: ProcessGroup
    """The context-parallel ranks, which share the positions of the same samples."""
    samples_group: ProcessGroup
    """The data-parallel ranks, which share the step's samples."""
    data_group: ProcessGroup
    """The ranks over which gradients are summed: the data- and context-parallel ranks."""

    @property
    def speaks_for_rows(self) -> bool:
        """Whether this rank counts its router rows, so that each row is counted once."""
        return self.sequence.count > 1 or self.tensor_rank == 0

    @property
    def speaks_for_tokens(self) -> bool:
        """Whether this rank reports the results for the tokens that it holds."""
        return self.last_stage and self.tensor_rank == 0

    @property
    def speaks_for_samples(self) -> bool:
        """Whether this rank reports its data-parallel rank's results for entire samples."""
        return self.speaks_for_tokens and self.context.index == 0


def _prepare_cuda(megatron: Megatron) -> None:
    """Set the variables that CUDA and torch's allocator read when a process first uses a GPU.

    Variables that are already set stay unchanged.
    """
    # Micro-batches have different lengths, which would fragment segments of a fixed size.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if megatron.tensor_model_parallel_size > 1 or megatron.context_parallel_size > 1:
        # Megatron then overlaps communication with matmuls, and requires that kernels start in the
        # order in which they were queued.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def start(megatron: Megatron, limits: Limits | None = None) -> RankPosition:
    """Join the process group (once per process) and create Megatron's groups for this layout.

    Rank and world size are read from torchrun's environment. The backend is Gloo on CPU and NCCL on
    CUDA. `limits` applies to the groups; None selects the limits from the default settings.

    The random number tracker is Megatron's variant for inference, which never forks the generator.
    This variant is sufficient because no random numbers are drawn. All weights are loaded, and
    build_model refuses dropout.

    Raises InputError if the layout does not fit the ranks.
    """
    without_cuda.adapt()
    limits = limits or limits_of(Launch())
    if not torch.distributed.is_initialized():
        if not without_cuda.ON_CPU:
            _prepare_cuda(megatron)
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group(
            "gloo" if without_cuda.ON_CPU else "nccl", timeout=timedelta(seconds=limits.store_s)
        )
        make_group(limits.store_s)
        # All ranks have joined. From here on, only collectives in passes use this group.
        distributed_c10d._set_pg_timeout(timedelta(seconds=limits.pass_s))
    world = torch.distributed.get_world_size()
    if problems := list(size_problems(megatron, world, f"training ranks: found {world}")):
        raise InputError(problems)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=megatron.tensor_model_parallel_size,
        pipeline_model_parallel_size=megatron.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=megatron.virtual_pipeline_model_parallel_size,
        context_parallel_size=megatron.context_parallel_size,
        expert_model_parallel_size=megatron.expert_model_parallel_size,
        expert_tensor_parallel_size=expert_tensor_parallel_size(megatron),
        distributed_timeout_minutes=limits.pass_s / 60,
    )
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    torch.manual_seed(_SEED)
    return _position(megatron.sequence_parallel)


def stop() -> None:
    """Destroy Megatron's groups, so that this process can start another layout.

    Every rank must call this. Megatron itself only drops its references to most groups, and their
    threads and sockets would remain.
    """
    await_ranks()
    for group in parallel_state._global_process_group_list:
        if group is not None:  # None: the default group
            torch.distributed.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


def leave() -> None:
    """Stop, and leave the process group."""
    stop()
    drop_group()
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
