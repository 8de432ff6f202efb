"""Runs a model over a mini-batch, with Megatron's schedules and our batches and results.

    forward_pass   log-probs (and the routers' choices, if recorders are bound); no gradients
    training_pass  losses and gradients, left in the model's gradient buffers

Both support every pipeline schedule (none, 1F1B, interleaved). Results exist only on the last
stage.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model

from operators.training.batches.micro_batch import PADDING, MicroBatch
from operators.training.batches.upload import uploaded
from operators.training.megatron.head import without_logits

Chunk = torch.nn.Module
"""A model chunk for Megatron's schedules (DDP or Float16Module around GPTModel)."""
T = TypeVar("T")
Loss = Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]
"""(index of the micro-batch, hidden_BMH) -> (weighted sum over tokens, its divisor, report)."""
Finish = Callable[..., object]
"""A function that Megatron calls with a micro-batch's hidden states, for its loss or result."""


def forward_pass(
    chunks: Sequence[Chunk],
    batches: Sequence[MicroBatch],
    result: Callable[[int, torch.Tensor], T],
    with_padding_mask: bool,
) -> list[T]:
    """Run the model without gradients and return one result per micro-batch.

    Args:
        chunks: The model's chunks.
        batches: This data-parallel rank's micro-batches.
        result: Called with a micro-batch's index and its hidden_BMH on the last stage.
        with_padding_mask: Whether to pass a padding mask to the model.

    Returns:
        The return values of `result` on the last stage; [] elsewhere.
    """
    for chunk in chunks:
        chunk.eval()
    try:
        with torch.no_grad():
            return _run(chunks, batches, result, with_padding_mask, forward_only=True)
    finally:
        for chunk in chunks:
            chunk.train()


def training_pass(
    chunks: Sequence[DistributedDataParallel],
    batches: Sequence[MicroBatch],
    loss: Loss,
    with_padding_mask: bool,
    auxiliary_scale: float = 1.0,
) -> list[dict[str, torch.Tensor]]:
    """Compute the gradients of a mini-batch's loss.

    The loss is the weighted sum over tokens, divided by the sum of the micro-batches' divisors.

    Args:
        chunks: The trained model's chunks.
        batches: This data-parallel rank's micro-batches.
        loss: The loss of a micro-batch.
        with_padding_mask: Whether to pass a padding mask to the model.
        auxiliary_scale: Factor for the routers' auxiliary losses.

    Returns:
        The reports of `loss`, one per micro-batch, on the last stage; [] elsewhere.
    """
    for chunk in chunks:
        chunk.zero_grad_buffer()
    with _scaled_auxiliary(chunks[0], auxiliary_scale):
        return _run(chunks, batches, loss, with_padding_mask, forward_only=False)


@contextlib.contextmanager
def _scaled_auxiliary(chunk: Chunk, scale: float) -> Iterator[None]:
    """Scale the auxiliary losses in a pass, but not the main loss.

    Megatron calls grad_scale_func with the main loss, which requires a gradient. Megatron also
    calls the function with a constant 1, and uses that result as the scale for the auxiliary losses
    (forward_step_calc_loss).
    """
    config = cast(TransformerConfig, get_attr_wrapped_model(chunk, "config"))
    original = config.grad_scale_func
    if original is None:
        raise ValueError("the model was not wrapped for training")

    def scaled(value: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = original(value)
        return made if value.requires_grad else made * scale

    config.grad_scale_func = scaled
    try:
        yield
    finally:
        config.grad_scale_func = original


def _run(
    chunks: Sequence[Chunk],
    batches: Sequence[MicroBatch],
    finish: Callable[[int, torch.Tensor], object],
    with_padding_mask: bool,
    *,
    forward_only: bool,
) -> list[Any]:
    device = next(chunks[0].parameters()).device

    def forward_step(indices: Iterator[int], chunk: Chunk) -> tuple[torch.Tensor, Finish]:
        index = next(indices)
        batch = batches[index]
        # Causal attention creates its own mask; tokens do not attend to the padding on the right.
        output = chunk(
            uploaded(batch.tokens_BM, device),
            uploaded(batch.positions_BM, device),
            None,
            packed_seq_params=_sequences(batch, device) if batch.packed else None,
            padding_mask=uploaded(_padding_mask(batch, chunk), device)
            if with_padding_mask
            else None,
        )
        return output, lambda hidden, non_loss_data=False: finish(index, hidden)

    indices = [iter(range(len(batches))) for _ in chunks]
    first = batches[0]
    with without_logits(chunks):
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=indices if len(chunks) > 1 else indices[0],
            model=list(chunks) if len(chunks) > 1 else chunks[0],
            num_microbatches=len(batches),
            seq_length=int(first.ends[-1]),  # Megatron divides it by CP
            micro_batch_size=len(first.tokens_BM),
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )


def _sequences(batch: MicroBatch, device: torch.device) -> PackedSeqParams:
    """Return the sequences of a packed micro-batch.

    `max_seqlen` must be the length of the longest sequence. If it were the length of the row,
    Megatron would choose rotary embeddings by position in the row (_apply_rotary_pos_emb_thd in
    rope_utils.py). With context parallelism, all ranks pass the sequences of the entire row, each
    including its padding, which no token attends to. Transformer Engine also requires the `_padded`
    ends, which here equal the other ends.
    """
    ends = uploaded(batch.ends, device)
    longest = int(np.diff(batch.ends).max())
    padded = ends if batch.context.count > 1 else None
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
    )


def _padding_mask(batch: MicroBatch, chunk: Chunk) -> npt.NDArray[np.bool_]:
    """Return a mask [B, M], True for padding, which expert bias and auxiliary loss must exclude.

    The model's first chunk slices the mask along the sequence; other chunks expect a slice.
    """
    if get_attr_wrapped_model(chunk, "pre_process"):
        return batch.padding_BM
    padding_R = batch.rows.kinds_R == PADDING
    padding_BM: npt.NDArray[np.bool_] = padding_R.reshape(-1, len(batch.tokens_BM)).T.copy()
    return padding_BM
