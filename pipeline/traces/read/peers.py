"""Routes in the in-memory layouts of other trainers: verl and slime.

Both index the second axis by decoder layer, so dense layers have unused entries, and neither can
mark a row as unknown. Such a row gets the distinct experts 0..K-1 here, as in slime's padding (K
times expert 0 would break the sizes of an all-to-all), and its sample is excluded from the loss.

Letters: T = S - 1 rows, N decoder layers, K experts per token, B samples.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.model.geometry import Geometry
from pipeline.traces.format.types import Routes, Sample, TraceError

_STATUS = {"length": "truncated", "abort": "aborted"}


def dense_routes(
    routes: Routes,
    geometry: Geometry,
    dtype: npt.DTypeLike,
    num_layers: int | None = None,
    unknown: int | None = None,
) -> npt.NDArray[Any]:
    """Routes over all decoder layers: [T, N, K], ids ascending, 0 in layers that are not MoE.

    N is `num_layers`; by default it covers the last MoE layer and all before it. An invalid row
    holds `unknown` throughout; by default 0..K-1. Raises TraceError when ids do not fit into the
    dtype, or `num_layers` leaves out a MoE layer.
    """
    info = np.iinfo(np.dtype(dtype))
    if geometry.experts - 1 > info.max:
        raise TraceError(f"{geometry.experts} experts do not fit into {np.dtype(dtype)}")
    needed = max(geometry.layers, default=-1) + 1
    N = needed if num_layers is None else num_layers
    if needed > N:
        raise TraceError(
            f"num_layers is {N}, but the routes have layer {needed - 1}: give the "
            "number of all decoder layers, dense ones included"
        )
    T, _, K = routes.sets_TLK.shape
    dense_TNK = np.zeros((T, N, K), dtype)
    dense_TNK[:, list(geometry.layers)] = routes.sets_TLK
    invalid_T = ~routes.valid_T
    if invalid_T.any():
        moe_layers = np.array(geometry.layers)
        filled = np.arange(K) if unknown is None else unknown
        dense_TNK[np.ix_(invalid_T, moe_layers)] = filled
    return dense_TNK


def to_verl(
    routes: Routes, geometry: Geometry, num_layers: int | None = None
) -> npt.NDArray[np.int16]:
    """A sample's `routed_experts` in verl: int16 [S, N, K], with 0 in the last token's row.

    Equals what AgentLoopOutput.as_dict (verl/experimental/agent_loop/agent_loop.py, at 1dda039b)
    makes of an engine's output. Raises the errors of `dense_routes`.
    """
    return np.pad(dense_routes(routes, geometry, np.int16, num_layers), ((0, 1), (0, 0), (0, 0)))


def to_verl_batch(
    routes: Sequence[Routes],
    prompt_lengths: Sequence[int],
    geometry: Geometry,
    prompt_length: int,
    response_length: int,
    num_layers: int | None = None,
) -> npt.NDArray[np.int16]:
    """The same for padded samples: int16 [B, prompt_length + response_length, N, K].

    Prompts are padded on the left and responses on the right, with 0, as `_agent_loop_postprocess`
    of the same file does; `prompt_length` and `response_length` are verl's rollout settings. Raises
    TraceError for a longer sample, and the errors of `dense_routes`.
    """
    samples = [to_verl(of_sample, geometry, num_layers) for of_sample in routes]
    width = prompt_length + response_length
    shape = samples[0].shape[1:] if samples else (num_layers or 0, geometry.topk)
    batch = np.zeros((len(samples), width, *shape), np.int16)
    for i, (rows, P) in enumerate(zip(samples, prompt_lengths, strict=True)):
        start = prompt_length - P
        if start < 0 or start + len(rows) > width:
            raise TraceError(
                f"sample {i} of {P} prompt and {len(rows) - P} response tokens: more "
                f"than {prompt_length} and {response_length}"
            )
        batch[i, start : start + len(rows)] = rows
    return batch


def to_slime(
    routes: Routes, geometry: Geometry, num_layers: int | None = None
) -> npt.NDArray[np.int32]:
    """A sample's `rollout_routed_experts` in slime: int32 [S - 1, N, K].

    Follows Sample.append_response_tokens (slime/utils/types.py, at 624b824a). Raises the errors of
    `dense_routes`.
    """
    return dense_routes(routes, geometry, np.int32, num_layers)


def verl_sample(
    sample: Sample, trained: bool, geometry: Geometry | None, num_layers: int | None
) -> dict[str, npt.NDArray[Any]]:
    """A sample with the names, types and shapes of AgentLoopOutput.as_dict; without geometry no
    routes.

    `rm_scores` has the reward at the last token of the response. `response_mask` is the loss mask,
    and all 0 for a sample that is not `trained` on: verl then routes it natively.
    """
    G = len(sample.response_tokens_G)
    scores_G = np.zeros(G, np.float32)
    scores_G[-1:] = _reward(sample)
    fields: dict[str, npt.NDArray[Any]] = {
        "prompts": sample.prompt_tokens_P.astype(np.int64),
        "responses": sample.response_tokens_G.astype(np.int64),
        "response_mask": (sample.loss_mask_G & trained).astype(np.int64),
        "rollout_log_probs": _logprobs(sample),
        "rm_scores": scores_G,
    }
    if geometry is not None and sample.routes is not None:
        fields["routed_experts"] = to_verl(sample.routes, geometry, num_layers)
    return fields


def slime_sample(
    sample: Sample,
    trained: bool,
    geometry: Geometry | None,
    num_layers: int | None,
    numbers: Mapping[str, int],
) -> dict[str, Any]:
    """A sample in the form of slime's Sample.to_dict, with the fields that a trace has.

    `numbers` are its index, group_index and rollout_id, which branches of a conversation share.
    `remove_sample` is set, and so the loss is 0, for a sample that is not `trained` on. A trace has
    no text: `prompt` and `response` are left out.
    """
    fields = {
        **numbers,
        "tokens": sample.tokens_S.tolist(),
        "response_length": len(sample.response_tokens_G),
        "reward": _reward(sample),
        "loss_mask": sample.loss_mask_G.astype(int).tolist(),
        "weight_versions": [str(span.version) for span in sample.version_spans],
        "rollout_log_probs": _logprobs(sample).tolist(),
        "remove_sample": not trained,
        "status": _STATUS.get(sample.finish_reason, "completed"),
        "metadata": {"id": sample.id, "extras": sample.extras},
    }
    if geometry is not None and sample.routes is not None:
        fields["rollout_routed_experts"] = to_slime(sample.routes, geometry, num_layers)
    return fields


def _reward(sample: Sample) -> float:
    """The reward, 0 if there is none; both trainers hold float32, where more would be infinite."""
    most = float(np.finfo(np.float32).max)
    return min(max(sample.reward or 0.0, -most), most)


def unknown_logprobs(sample: Sample) -> bool:
    """Whether the log-prob of a token that counts in the loss is not known."""
    return not np.isfinite(sample.logprobs_G[sample.loss_mask_G]).all()


def _logprobs(sample: Sample) -> npt.NDArray[np.float32]:
    """Log-probs, and 0.0 for tokens that the engine did not sample, as both trainers write them.

    NaN under a mask of 0 is still NaN in their sums.
    """
    known_G = sample.loss_mask_G & np.isfinite(sample.logprobs_G)
    return np.where(known_G, sample.logprobs_G, np.float32(0.0))
