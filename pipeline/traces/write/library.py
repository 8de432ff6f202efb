"""Traces as a library: samples from plain arrays, a step in one call."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.model.geometry import Geometry
from pipeline.run.commit import new_write_id
from pipeline.store import Store
from pipeline.traces.format.ids import group_id, sample_id
from pipeline.traces.format.manifest import SealedManifest
from pipeline.traces.format.types import Provenance, Routes, Sample, TraceError, VersionSpan
from pipeline.traces.write.seal import seal
from pipeline.traces.write.writer import write_shard

NO_SEED = -1
"""The seed of a sample that was not seeded, or whose seed is unknown."""

_MOST_TOKEN = 2**32 - 1


def new_sample(
    step: int,
    prompt_id: str,
    k: int,
    prompt_tokens: npt.ArrayLike,
    response_tokens: npt.ArrayLike,
    experts: npt.ArrayLike | None = None,
    *,
    logprobs: npt.ArrayLike | None = None,
    loss_mask: npt.ArrayLike | None = None,
    reward: float | None = None,
    finish_reason: str = "stop",
    versions: int | Sequence[VersionSpan] = 0,
    seed: int = NO_SEED,
    extras: Mapping[str, Any] | None = None,
) -> Sample:
    """Make sample k of a prompt in a step from an engine's output; `prompt_id` contains no '/'.

    `experts` are integers [S - 1, L, K], where L counts MoE layers only; a row of -1 throughout is
    unknown. Without `experts` the sample has no routes. By default `logprobs` are NaN (unknown) and
    every response token counts in the loss; `versions` is the policy version of the whole response,
    or its spans. Raises TraceError, naming the sample, for another prompt_id, tokens out of uint32
    and routes of another form; parts that do not fit together are refused by the writer.
    """
    id = sample_id(step, prompt_id, k)
    if not prompt_id or "/" in prompt_id:
        raise TraceError(f"sample {id}: prompt_id {prompt_id!r}, expected a name without '/'")
    response_G = _tokens(id, response_tokens)
    G = len(response_G)
    spans = (VersionSpan(versions, 0, G),) if isinstance(versions, int) else tuple(versions)
    return Sample(
        id=id,
        group=group_id(step, prompt_id),
        prompt_id=prompt_id,
        prompt_tokens_P=_tokens(id, prompt_tokens),
        response_tokens_G=response_G,
        loss_mask_G=np.ones(G, np.bool_) if loss_mask is None else np.asarray(loss_mask, np.bool_),
        logprobs_G=np.asarray(np.full(G, np.nan) if logprobs is None else logprobs, np.float32),
        finish_reason=finish_reason,
        version_spans=spans,
        seed=seed,
        reward=reward,
        reward_error=None,
        extras=dict(extras or {}),
        routes=None if experts is None else _routes(id, np.asarray(experts)),
    )


def write_step(
    store: Store,
    step: int,
    samples: Sequence[Sample],
    geometry: Geometry | None,
    provenance: Provenance | None,
) -> SealedManifest:
    """Write a whole step as one shard and seal it; readers treat it like any other step.

    Without geometry and provenance the samples have no routes. A step is written once. Raises
    TraceError, naming the sample, for what no reader would accept, and for a step that already
    exists; StoreError.
    """
    write_id = new_write_id()
    if not write_shard(store, step, 0, write_id, samples, geometry, provenance).ours:
        raise TraceError(f"step {step} in {store.uri}: it is there already, and is written once")
    ids = [sample.id for sample in samples]
    return seal(store, step, 1, lambda _: ids, None)


def _tokens(id: str, tokens: npt.ArrayLike) -> npt.NDArray[np.uint32]:
    found = np.asarray(tokens)
    if found.size == 0:
        found = found.astype(np.uint32)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise TraceError(
            f"sample {id}: tokens of type {found.dtype} and shape {found.shape}, expected integers "
            "in one dimension"
        )
    if found.size and not 0 <= found.min() <= found.max() <= _MOST_TOKEN:
        raise TraceError(
            f"sample {id}: tokens {found.min()}..{found.max()}, expected 0..{_MOST_TOKEN}"
        )
    return found.astype(np.uint32)


def _routes(id: str, experts_TLK: npt.NDArray[Any]) -> Routes:
    if experts_TLK.ndim != 3 or experts_TLK.dtype.kind not in "iu":
        raise TraceError(
            f"sample {id}: experts of type {experts_TLK.dtype} and shape {experts_TLK.shape}, "
            "expected integers [S - 1, L, K]"
        )
    valid_T = np.asarray((experts_TLK >= 0).any(axis=(1, 2)), np.bool_)
    return Routes(experts_TLK, valid_T)
