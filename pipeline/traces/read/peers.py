"""Routes in the in-memory layouts of other trainers: verl and slime.

In both layouts, the second axis is the decoder layer, so dense layers have unused entries. Neither
layout can mark a row as unknown. Unknown rows are therefore filled with the distinct experts
0..K-1, as in slime's padding. With K copies of expert 0, an all-to-all would get wrong sizes. A
sample with an unknown row is excluded from the trainer's loss.

Dimensions: T = S - 1 is the number of rows, N the number of decoder layers, K the number of experts
per token and B the number of samples.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.model.geometry import Geometry
from pipeline.model.limits import MOST_TOKENS
from pipeline.traces.format import domain
from pipeline.traces.format.routes import canonical
from pipeline.traces.format.types import Routes, Sample, TraceError

_MOST_BYTES = 8 << 30
"""Maximum size in bytes of one sample's routes over all decoder layers. A million rows of 94 layers
with top-8 take 3 GiB as int32."""
_STATUS = {"length": "truncated", "abort": "aborted"}


def dense_routes(
    routes: Routes,
    geometry: Geometry,
    dtype: npt.DTypeLike,
    num_layers: int | None = None,
    unknown: int | None = None,
) -> npt.NDArray[Any]:
    """Return routes [T, N, K] over all decoder layers, with ascending ids, and 0 in dense layers.

    Args:
        routes: A sample's routes in all layers of the geometry, in ascending order of the layers.
        geometry: The geometry of the routes.
        dtype: The integer dtype of the result.
        num_layers: N, the number of decoder layers; None counts up to the last MoE layer.
        unknown: The id that fills invalid rows; None fills them with 0..K-1.

    Raises:
        TraceError: The routes do not have this geometry, or an argument is malformed. Also raised
            if ids or `unknown` do not fit into the dtype, if `num_layers` leaves out a MoE layer,
            and if the result would take more than 8 GiB.
    """
    N = _decoder_layers(geometry, num_layers)
    info = _limits(dtype)
    if geometry.experts - 1 > info.max:
        raise TraceError(
            f"{geometry.experts} experts do not fit into {info.dtype}, expected at most "
            f"{info.max + 1}; use traces export --format npy"
        )
    if unknown is not None:
        domain.check_number(unknown, int(info.max), "unknown", int(info.min))
    domain.check_routes(routes, "dense_routes")
    T, L, K = routes.valid_T.size, len(geometry.layers), geometry.topk
    if routes.sets_TLK.shape[1:] != (L, K):
        raise TraceError(
            f"routes of shape {routes.sets_TLK.shape}, expected {(T, L, K)}: read the routes in "
            "all layers of the geometry, in ascending order"
        )
    size = T * N * K * info.dtype.itemsize
    if size > _MOST_BYTES:
        raise TraceError(
            f"{T} rows in {N} decoder layers take {size >> 30} GiB as {info.dtype}, expected "
            f"at most {_MOST_BYTES >> 30}; correct num_layers, or use traces export --format npy"
        )
    routes = canonical(routes, geometry, T)  # its invalid rows contain 0..K-1
    dense_TNK = np.zeros((T, N, K), dtype)
    dense_TNK[:, list(geometry.layers)] = routes.sets_TLK
    if unknown is not None:
        dense_TNK[np.ix_(~routes.valid_T, np.array(geometry.layers))] = unknown
    return dense_TNK


def _decoder_layers(geometry: Geometry, num_layers: int | None) -> int:
    """Return N, the number of decoder layers. Raises TraceError for malformed arguments."""
    needed = domain.check_geometry(geometry, "dense_routes").layers[-1] + 1
    if num_layers is None:
        return needed
    N = domain.check_number(num_layers, domain.MOST, "num_layers")
    if needed > N:
        raise TraceError(
            f"num_layers is {N}, but the routes contain layer {needed - 1}: give the "
            "number of all decoder layers, including dense ones"
        )
    return N


def _limits(dtype: npt.DTypeLike) -> np.iinfo[Any]:
    """Return the limits of an integer dtype. Raises TraceError for any other dtype."""
    try:
        return np.iinfo(np.dtype(dtype))
    except (TypeError, ValueError) as error:
        name = getattr(dtype, "__name__", dtype)
        raise TraceError(
            f"dtype {domain.shown(name)}, expected an integer dtype, such as np.int32"
        ) from error


def to_verl(
    routes: Routes, geometry: Geometry, num_layers: int | None = None
) -> npt.NDArray[np.int16]:
    """Return a sample's `routed_experts` for verl: int16 [S, N, K], with 0 in the last token's row.

    The result equals the value that AgentLoopOutput.as_dict (at 1dda039b, in
    verl/experimental/agent_loop/agent_loop.py) derives from an engine's output.

    Args:
        routes: A sample's routes.
        geometry: The geometry of the routes.
        num_layers: N, the number of decoder layers; None counts up to the last MoE layer.

    Raises:
        TraceError: Ids do not fit into int16, or `dense_routes` refuses the arguments.
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
    """Return `routed_experts` for padded samples: int16 [B, prompt_length + response_length, N, K].

    Prompts are padded with 0 on the left, and responses with 0 on the right, as in
    `_agent_loop_postprocess` in verl's agent_loop.py.

    Args:
        routes: The routes of each sample.
        prompt_lengths: The number of prompt tokens in each sample, 1..S.
        geometry: The geometry of the routes.
        prompt_length: verl's rollout setting `prompt_length`, in tokens.
        response_length: verl's rollout setting `response_length`, in tokens.
        num_layers: N, the number of decoder layers; None counts up to the last MoE layer.

    Raises:
        TraceError: A prompt or response is too long, a number is impossible, or `dense_routes`
            refuses the routes of a sample. The message gives the sample's position.
    """
    most = domain.check_number(prompt_length, MOST_TOKENS, "prompt_length")
    width = most + domain.check_number(response_length, MOST_TOKENS, "response_length")
    taken = domain.check_list(routes, "routes", "Routes")
    lengths = domain.check_list(prompt_lengths, "prompt_lengths", "numbers")
    if len(lengths) != len(taken):
        raise TraceError(
            f"{len(lengths)} prompt lengths, expected {len(taken)}, one per sample; pass both in "
            "the same order"
        )
    shape = (_decoder_layers(geometry, num_layers), geometry.topk)
    batch = np.zeros((len(taken), width, *shape), np.int16)
    for i, (of_sample, length) in enumerate(zip(taken, lengths, strict=True)):
        try:
            rows = to_verl(of_sample, geometry, num_layers)
        except TraceError as error:
            raise TraceError(f"sample {i}: {error}") from error
        P = domain.check_number(length, len(rows), f"prompt length of sample {i}", 1)
        start = most - P
        if start < 0 or start + len(rows) > width:
            raise TraceError(
                f"sample {i} of {P} prompt and {len(rows) - P} response tokens, expected at most "
                f"{prompt_length} and {response_length}"
            )
        batch[i, start : start + len(rows)] = rows
    return batch


def to_slime(
    routes: Routes, geometry: Geometry, num_layers: int | None = None
) -> npt.NDArray[np.int32]:
    """Return a sample's `rollout_routed_experts` for slime: int32 [S - 1, N, K].

    Sample.append_response_tokens produces the same form (slime/utils/types.py, at 624b824a).

    Args:
        routes: A sample's routes.
        geometry: The geometry of the routes.
        num_layers: N, the number of decoder layers; None counts up to the last MoE layer.

    Raises:
        TraceError: `dense_routes` refuses the arguments.
    """
    return dense_routes(routes, geometry, np.int32, num_layers)


def verl_sample(
    sample: Sample, trained: bool, geometry: Geometry | None, num_layers: int | None
) -> dict[str, npt.NDArray[Any]]:
    """Return a sample as a dict with the names, types and shapes of AgentLoopOutput.as_dict.

    `rm_scores` contains the reward at the last token of the response. `response_mask` is the loss
    mask. For a sample that is not trained on, the mask is 0 throughout, and verl then routes the
    sample natively.

    Args:
        sample: The sample.
        trained: Whether the sample is trained on.
        geometry: The geometry of its routes; None leaves routes out.
        num_layers: The number of decoder layers; None counts up to the last MoE layer.
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
    """Return a sample in the form of slime's Sample.to_dict, with the fields that a trace contains.

    A trace contains no text, so `prompt` and `response` are left out.

    Args:
        sample: The sample.
        trained: Whether the sample is trained on; if not, `remove_sample` makes its loss 0.
        geometry: The geometry of its routes; None leaves routes out.
        num_layers: The number of decoder layers; None counts up to the last MoE layer.
        numbers: The sample's index, group_index and rollout_id. The branches of a conversation
            have the same rollout_id.
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
    """Return the reward, limited to the range of float32, which both trainers use.

    Returns 0 if the sample has no reward.
    """
    most = float(np.finfo(np.float32).max)
    return min(max(sample.reward or 0.0, -most), most)


def unknown_logprobs(sample: Sample) -> bool:
    """Return whether the log-prob of a token included in the loss is unknown."""
    return not np.isfinite(sample.logprobs_G[sample.loss_mask_G]).all()


def _logprobs(sample: Sample) -> npt.NDArray[np.float32]:
    """Return log-probs, with 0.0 for tokens that the engine did not sample, as in both trainers.

    NaN cannot be used for these tokens, because a masked sum that contains NaN is NaN.
    """
    known_G = sample.loss_mask_G & np.isfinite(sample.logprobs_G)
    return np.where(known_G, sample.logprobs_G, np.float32(0.0))
