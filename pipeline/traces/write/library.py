"""Traces as a library: samples from plain arrays, a step in one call."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.model.geometry import Geometry
from pipeline.run import keys, weights
from pipeline.run.commit import new_write_id
from pipeline.store import Store
from pipeline.traces.format import domain
from pipeline.traces.format.ids import group_id, sample_id
from pipeline.traces.format.manifest import SealedManifest
from pipeline.traces.format.types import Provenance, Routes, Sample, TraceError, VersionSpan
from pipeline.traces.write.checked import shard_key
from pipeline.traces.write.seal import seal
from pipeline.traces.write.writer import write_shard


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
    """Make sample k of a prompt in a step from an engine's output.

    `prompt_id` is a name without '/'. Arrays may be lists, or of any type that numpy takes without
    loss: tokens and `experts` integers, `loss_mask` bools or 0 and 1, `logprobs` numbers.
    `experts` are [S - 1, L, K], where L counts MoE layers only; a row of -1 throughout is unknown.
    Without `experts` the sample has no routes. By default `logprobs` are NaN (unknown) and every
    response token counts in the loss; `versions` is the policy version of the whole response, or
    its spans. Raises TraceError, naming the sample, for what a trace cannot hold
    (docs/trace-format.md, Limits); whether routes have the step's geometry the writer checks.
    """
    domain.check_number(step, domain.MOST_STEP, "step")
    domain.check_prompt_id(prompt_id, f"step {step}: prompt_id")
    domain.check_number(k, domain.MOST, f"step {step}: prompt {prompt_id}: k")
    id = sample_id(step, prompt_id, k)
    response_G = _tokens(id, response_tokens)
    G = len(response_G)
    sample = Sample(
        id=id,
        group=group_id(step, prompt_id),
        prompt_id=prompt_id,
        prompt_tokens_P=_tokens(id, prompt_tokens),
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
    """Write a whole step as one shard and seal it; readers treat it like any other step.

    Without geometry and provenance the samples have no routes. `policies` are the weights digests
    (`weights_digest`) of all policy versions that made the responses; None: not known. A step is
    written once. Raises TraceError, naming the sample, for what no reader would accept, and for a
    step that already exists; StoreError.
    """
    key, taken = shard_key(step, 0), list(samples)
    if not taken:
        raise TraceError(f"step {step}: no samples, expected at least one")
    if store.size(keys.manifest(step)) is not None:
        raise TraceError(f"step {step} in {store.uri}: it is there already, and is written once")
    write_id = new_write_id()
    if store.size(key) is not None or not (
        write_shard(store, step, 0, write_id, taken, geometry, provenance, policies=policies).ours
    ):
        raise TraceError(
            f"step {step} in {store.uri}: {key} is there already; a step is written once, and "
            "seal() seals one whose writer was interrupted"
        )
    ids = [sample.id for sample in taken]
    return seal(store, step, 1, lambda _: ids, None)


def weights_digest(folder: str | Path) -> str:
    """The digest that names the weights in a folder: of all tensors of its safetensors files.

    How tensors are cut into files does not matter. Raises TraceError when the folder has no such
    file, or one that is not whole; OSError.
    """
    files = sorted(Path(folder).glob(f"*{weights.SUFFIX}"))
    if not files:
        raise TraceError(f"{folder}: no *{weights.SUFFIX} there, expected the weights of a policy")
    try:
        return weights.weights_digest(map(weights.read_weights, files))
    except ValueError as error:
        raise TraceError(f"weights of {folder}: {error}") from error


def _tokens(id: str, tokens: npt.ArrayLike) -> npt.NDArray[np.uint32]:
    found = _array(id, "tokens", tokens)
    if found.size == 0:
        found = found.astype(np.uint32)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise TraceError(
            f"sample {id}: tokens of type {found.dtype} and shape {found.shape}, expected integers "
            "in one dimension"
        )
    if found.size and not 0 <= found.min() <= found.max() <= domain.MOST_TOKEN:
        raise TraceError(
            f"sample {id}: tokens {found.min()}..{found.max()}, expected 0..{domain.MOST_TOKEN}"
        )
    return found.astype(np.uint32)


def _mask(id: str, loss_mask: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    found = _array(id, "loss_mask", loss_mask)
    if found.size == 0:
        found = found.astype(np.bool_)
    if found.dtype.kind not in "biu" or not np.isin(found, (0, 1)).all():
        raise TraceError(
            f"sample {id}: loss_mask of type {found.dtype}, expected True and False, or 1 and 0"
        )
    return found.astype(np.bool_)


def _logprobs(id: str, logprobs: npt.ArrayLike) -> npt.NDArray[np.float32]:
    found = _array(id, "logprobs", logprobs)
    if found.dtype.kind not in "fiu":
        raise TraceError(
            f"sample {id}: logprobs of type {found.dtype}, expected numbers; NaN is one that is "
            "not known"
        )
    with np.errstate(over="ignore"):  # to infinity, which is refused
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
    experts_TLK = _array(id, "experts", experts)
    if experts_TLK.ndim != 3 or experts_TLK.dtype.kind not in "iu":
        raise TraceError(
            f"sample {id}: experts of type {experts_TLK.dtype} and shape {experts_TLK.shape}, "
            "expected integers [S - 1, L, K]"
        )
    valid_T = np.asarray((experts_TLK >= 0).any(axis=(1, 2)), np.bool_)
    return Routes(experts_TLK, valid_T)


def _array(id: str, name: str, values: npt.ArrayLike) -> npt.NDArray[Any]:
    """The values as numpy has them. Raises TraceError where it cannot take them."""
    if isinstance(values, np.ma.MaskedArray):
        raise TraceError(f"sample {id}: {name} is a masked array, expected one without a mask")
    try:
        return np.asarray(values)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        # Lists of several lengths; tensors on a GPU, or of types that numpy lacks.
        raise TraceError(
            f"sample {id}: {name} of type {type(values).__name__} make no array ({error}); give "
            "numpy's arrays, lists, or tensors in the memory of the CPU"
        ) from error
