"""Library functions that create samples from plain arrays and write a step in one call."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.model.geometry import Geometry
from pipeline.run import keys
from pipeline.run.commit import new_write_id
from pipeline.store import Store
from pipeline.traces.format import domain
from pipeline.traces.format.ids import group_id, sample_id
from pipeline.traces.format.manifest import SealedManifest
from pipeline.traces.format.routes import check_tokens
from pipeline.traces.format.types import (
    Provenance,
    Routes,
    Sample,
    TraceError,
    VersionSpan,
    check_array,
)
from pipeline.traces.write.seal import seal
from pipeline.traces.write.writer import shard_key, write_shard

_UNKNOWN = -1
"""The expert id that marks a row as unknown, if all entries of the row have this value."""


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
    seed: int = domain.NO_SEED,
    extras: Mapping[str, Any] | None = None,
) -> Sample:
    """Create sample k of a prompt in a step from an engine's output.

    Each array may be a list, or any other object that numpy converts without loss. The sample may
    refer to `experts` without a copy, so do not change the array until its shard is committed.

    Args:
        step: The step.
        prompt_id: The prompt's name, without '/'.
        k: The number of the sample within its group.
        prompt_tokens: Integers [P].
        response_tokens: Integers [G].
        experts: Integers [S - 1, L, K], where S = P + G and L counts only MoE layers. A row that
            contains only -1 is unknown; other negative ids are refused. None if the sample has no
            routes.
        logprobs: Numbers [G]; None means NaN (unknown) for every token.
        loss_mask: Booleans [G], or zeros and ones; None includes every response token in the loss.
        reward: A finite number; None if unknown.
        finish_reason: The engine's reason for stopping.
        versions: The policy version that generated the entire response, or version spans.
        seed: The engine's seed.
        extras: JSON values to store with the sample.

    Raises:
        TraceError: A value exceeds a limit of the trace format (docs/trace-format.md, Limits). The
            message names the sample. Routes are compared with the step's geometry only when they
            are written.
    """
    domain.check_number(step, domain.MOST_STEP, "step")
    domain.check_prompt_id(prompt_id, f"step {step}: prompt_id")
    domain.check_number(k, domain.MOST, f"step {step}: prompt {prompt_id}: k")
    id = sample_id(step, prompt_id, k)
    response_G = check_tokens(response_tokens, f"sample {id}")
    G = len(response_G)
    sample = Sample(
        id=id,
        group=group_id(step, prompt_id),
        prompt_id=prompt_id,
        prompt_tokens_P=check_tokens(prompt_tokens, f"sample {id}"),
        response_tokens_G=response_G,
        loss_mask_G=np.ones(G, np.bool_) if loss_mask is None else _mask(id, loss_mask),
        logprobs_G=_logprobs(id, np.full(G, np.nan) if logprobs is None else logprobs),
        finish_reason=finish_reason,
        version_spans=_spans(id, versions, G),
        seed=seed,
        reward=None if reward is None else domain.check_reward(reward, f"sample {id}"),
        reward_error=None,
        extras=_extras(id, extras),
        routes=None if experts is None else _routes(id, experts),
    )
    domain.check_new(sample, step)
    return sample


def write_step(
    store: Store,
    step: int,
    samples: Sequence[Sample],
    geometry: Geometry | None,
    provenance: Provenance | None,
    *,
    policies: Mapping[int, str] | None = None,
) -> SealedManifest:
    """Write an entire step as one shard and seal it. Readers treat it like any other step.

    A step can be written only once.

    Args:
        store: The store of the run or recorded set.
        step: The step.
        samples: All samples of the step.
        geometry: Geometry of the routes; None if there are no routes.
        provenance: Origin of the routes; None if there are no routes.
        policies: Weights digests (`weights_digest`) of all policy versions that generated the
            responses; None if unknown.

    Raises:
        StoreError: The store failed.
        TraceError: The step already exists, or a reader would refuse a sample. In the second case,
            the message names the sample.
    """
    key = shard_key(step, 0)
    if not isinstance(samples, Iterable):
        raise TraceError(
            f"step {step}: samples {domain.shown(samples)}, expected a list of samples"
        )
    taken = list(samples)
    if not taken:
        raise TraceError(f"step {step}: no samples, expected at least one")
    if store.size(keys.manifest(step)) is not None:
        raise TraceError(
            f"step {step} in {store.uri}: it already exists, and a step is written once"
        )
    write_id = new_write_id()
    if store.size(key) is not None or not (
        write_shard(store, step, 0, write_id, taken, geometry, provenance, policies=policies).ours
    ):
        raise TraceError(
            f"step {step} in {store.uri}: {key} already exists, but a step is written once; if its "
            f"writer was interrupted, complete the step with seal(store, {step}, 1, lambda _: "
            f"open_shard(store, {step}, 0).ids, None)"
        )
    ids = [sample.id for sample in taken]
    return seal(store, step, 1, lambda _: ids, None)


def _mask(id: str, loss_mask: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    found = check_array(loss_mask, f"sample {id}: loss_mask")
    if found.size == 0:
        found = found.astype(np.bool_)
    if found.dtype.kind not in "biu" or not np.isin(found, (0, 1)).all():
        raise TraceError(
            f"sample {id}: loss_mask of type {found.dtype}, expected True and False, or 1 and 0"
        )
    return found.astype(np.bool_)


def _logprobs(id: str, logprobs: npt.ArrayLike) -> npt.NDArray[np.float32]:
    found = check_array(logprobs, f"sample {id}: logprobs")
    if found.dtype.kind not in "fiu":
        raise TraceError(
            f"sample {id}: logprobs of type {found.dtype}, expected numbers; use NaN for "
            "unknown log-probs"
        )
    with np.errstate(over="ignore"):  # overflow produces infinity, which is refused later
        return found.astype(np.float32)


def _spans(id: str, versions: int | Sequence[VersionSpan], G: int) -> tuple[VersionSpan, ...]:
    if isinstance(versions, Sequence) and not isinstance(versions, str):
        return tuple(versions)
    version = domain.check_number(versions, domain.MOST, f"sample {id}: versions")
    return (VersionSpan(version, 0, G),)


def _extras(id: str, extras: Mapping[str, Any] | None) -> dict[str, Any]:
    if not isinstance(extras, Mapping | None):
        raise TraceError(
            f"sample {id}: extras of type {type(extras).__name__}, expected a JSON object"
        )
    return dict(extras or {})


def _routes(id: str, experts: npt.ArrayLike) -> Routes:
    experts_TLK = check_array(experts, f"sample {id}: experts")
    if experts_TLK.ndim != 3 or experts_TLK.dtype.kind not in "iu":
        raise TraceError(
            f"sample {id}: experts of type {experts_TLK.dtype} and shape {experts_TLK.shape}, "
            "expected integers [S - 1, L, K]"
        )
    valid_T = np.asarray((experts_TLK != _UNKNOWN).any(axis=(1, 2)), np.bool_)
    wrong = np.flatnonzero(valid_T & (experts_TLK < 0).any(axis=(1, 2)))
    if len(wrong):
        raise TraceError(
            f"sample {id}: row {wrong[0]} has the expert id {experts_TLK[wrong[0]].min()}, "
            f"expected ids from 0; set all entries of an unknown row to {_UNKNOWN}, and use a type "
            "that holds all ids"
        )
    return Routes(experts_TLK, valid_T)
