"""Routes exported as plain arrays, for analysis with other tools and for other trainers."""

import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from pipeline.model.geometry import Geometry
from pipeline.store import Store
from pipeline.traces.format.ids import file_name
from pipeline.traces.format.manifest import Manifest
from pipeline.traces.format.types import Routes, Sample, TraceError
from pipeline.traces.read.joined import used_routes
from pipeline.traces.read.peers import slime_sample, unknown_logprobs, verl_sample
from pipeline.traces.read.reader import read_routes, read_samples

Format = Literal["npy", "pt"]
"""Formats with one file per sample."""
Peer = Literal["verl", "slime"]
"""Trainers for which each step becomes one file."""
_AT_ONCE_BYTES = 64 << 20
"""Routes that are read at a time, unless one sample has more."""
_SAMPLES_AT_ONCE = 256

_LOGPROBS = "rollout_log_probs"
"""The field of both trainers."""


@dataclass(frozen=True)
class ForPeer:
    """What was written for a trainer."""

    samples: int
    """Samples in the file."""
    untrained: int
    """Samples of them that are out of the loss: they have unknown rows or no reward."""
    left_out: int
    """Samples of the step that the trainer would reject, and that are not in the file."""
    without_logprobs: int
    """Samples with unknown log-probs where the loss counts; with any, no sample has the field."""


def export(store: Store, step: int, folder: Path, form: Format) -> int:
    """Write a step's routes to a folder, with samples.json as index; return the number of samples.

    npy: `NAME.npy` with the sets [T, L, K] and `NAME.valid.npy` with the validity [T]. pt: one
    dict of the tensors `sets` and `valid` per sample. Held in memory: the manifest's rows, and the
    routes of a few samples. Raises TraceError when the step has no routes, a file exists already,
    the folder cannot be written to, or, for pt, torch is not installed.
    """
    manifest = used_routes(store, step)
    if manifest.geometry is None:
        raise TraceError(
            f"step {step} in {store.uri}: no routes were recorded; --format verl and slime write "
            "samples without routes"
        )
    torch = _torch() if form == "pt" else None
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # The index gets its name when all that it names is there.
        part = folder / "samples.json.part"
        with _created(part) as out:
            head = {
                "experts": manifest.geometry.experts,
                "topk": manifest.geometry.topk,
                "layers": list(manifest.geometry.layers),
            }
            out.write(json.dumps(head)[:-1].encode() + b', "samples": [')
            for number, sample in enumerate(_samples(store, manifest)):
                entry = _write_sample(sample, folder, form, torch)
                out.write((", " if number else "").encode() + json.dumps(entry).encode())
            out.write(b"]}\n")
        if (folder / "samples.json").exists():
            raise FileExistsError(None, "it is there already", str(folder / "samples.json"))
        part.rename(folder / "samples.json")
    return len(manifest.ids)


def export_for(
    store: Store, step: int, folder: Path, peer: Peer, num_layers: int | None = None
) -> ForPeer:
    """Write a step as `STEP.pt`, a torch file with the samples in a peer's in-memory form.

    verl: `{"ids": [...], "samples": [...]}`, each sample with the fields of
    AgentLoopOutput.as_dict. slime: `{"rollout_id": STEP, "samples": [...]}`, which its
    `--load-debug-rollout-data` reads. `num_layers` is that of `peers.dense_routes`. Samples that
    the peer rejects are left out: verl those without a response, whose reward has no token, and
    slime those of one token, which have no row. The samples of the step are held in memory as the
    peer has them. Raises the errors of `export`, but takes a step without routes; TraceError for
    ids or layers that do not fit.
    """
    manifest = used_routes(store, step)
    torch = _torch()
    samples: list[dict[str, Any]] = []
    ids: list[str] = []
    groups: dict[str, int] = {}
    conversations: dict[str, int] = {}
    untrained, unknown = 0, 0
    not_trained = dict(zip(manifest.ids, manifest.rows["not_trained"].to_pylist(), strict=True))
    for sample in _samples(store, manifest):
        if _rejects(peer, sample):
            continue
        trained = _trained(sample) and not_trained[sample.id] is None
        if peer == "verl":
            fields: dict[str, Any] = verl_sample(sample, trained, manifest.geometry, num_layers)
        else:
            first = sample.branch_of or sample.id
            numbers = {
                "group_index": groups.setdefault(sample.group, len(groups)),
                "index": len(samples),
                "rollout_id": conversations.setdefault(first, len(conversations)),
            }
            fields = slime_sample(sample, trained, manifest.geometry, num_layers, numbers)
        samples.append({name: _tensor(value, torch) for name, value in fields.items()})
        ids.append(sample.id)
        untrained += not trained
        unknown += trained and unknown_logprobs(sample)
    if unknown:  # both trainers look at the first sample for the fields that all have
        for fields in samples:
            del fields[_LOGPROBS]
    named = {"ids": ids} if peer == "verl" else {"rollout_id": step}
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with _created(folder / f"{step}.pt") as out:
            torch.save({**named, "samples": samples}, out)
    return ForPeer(len(ids), untrained, len(manifest.ids) - len(ids), unknown)


def _rejects(peer: Peer, sample: Sample) -> bool:
    """Whether a peer rejects a batch with this sample.

    verl: AgentLoopOutput.as_dict puts the reward at the last response token. slime:
    validate_rollout_routed_experts_for_replay wants a row of routes.
    """
    return len(sample.response_tokens_G) == 0 if peer == "verl" else len(sample.tokens_S) == 1


def _trained(sample: Sample) -> bool:
    """Neither peer can mark a row as unknown, so its sample stays out of the loss."""
    known = sample.routes is None or bool(sample.routes.valid_T.all())
    return sample.reward is not None and known


def _tensor(value: Any, torch: Any) -> Any:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def _samples(store: Store, manifest: Manifest) -> Iterator[Sample]:
    """The samples of a manifest in its order, with their routes; a few are read at a time."""
    for ids in _batches(manifest):
        found: dict[str, Routes] = {}
        if manifest.geometry is not None:
            found = read_routes(store, manifest, ids)
        for sample in read_samples(store, manifest, ids):
            yield replace(sample, routes=found.pop(sample.id, None))


def _batches(manifest: Manifest) -> Iterator[list[str]]:
    row_bytes = _row_bytes(manifest.geometry)
    batch: list[str] = []
    size = 0
    for id, rows in zip(manifest.ids, manifest.rows["rows_total"].to_pylist(), strict=True):
        size += rows * row_bytes
        if batch and (size > _AT_ONCE_BYTES or len(batch) == _SAMPLES_AT_ONCE):
            yield batch
            batch, size = [], rows * row_bytes
        batch.append(id)
    if batch:
        yield batch


def _row_bytes(geometry: Geometry | None) -> int:
    if geometry is None:
        return 0
    return len(geometry.layers) * geometry.topk * np.dtype(geometry.dtype).itemsize


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    # Stores raise no OSError, so this one comes from the folder.
    try:
        yield
    except FileExistsError as error:
        raise TraceError(
            f"cannot write {error.filename}: it is there already, and no file is written over; "
            "give an empty folder, on a file system that tells a from A"
        ) from error
    except OSError as error:
        raise TraceError(
            f"cannot write to {folder}: {error.strerror or error}; give a folder that you may "
            "write to, with room for the arrays"
        ) from error


def _created(path: Path) -> BinaryIO:
    """A new file; one that exists is refused."""
    return path.open("xb")


def _write_sample(sample: Sample, folder: Path, form: Format, torch: Any) -> dict[str, Any]:
    """Write a sample's arrays; its entry for samples.json."""
    name = file_name(sample.id)
    if sample.routes is not None:
        _save(folder, name, sample.routes, torch)
    return {
        "id": sample.id,
        "file": f"{name}.{form}",
        "prompt_length": len(sample.prompt_tokens_P),
        "tokens": sample.tokens_S.tolist(),
    }


def _save(folder: Path, name: str, routes: Routes, torch: Any) -> None:
    sets_TLK = np.ascontiguousarray(routes.sets_TLK)
    if torch is None:
        with _created(folder / f"{name}.npy") as out:
            np.save(out, sets_TLK)
        with _created(folder / f"{name}.valid.npy") as out:
            np.save(out, routes.valid_T)
    else:
        tensors = {"sets": _tensor(sets_TLK, torch), "valid": _tensor(routes.valid_T, torch)}
        with _created(folder / f"{name}.pt") as out:  # given a path, torch hides the OSError
            torch.save(tensors, out)


def _torch() -> Any:
    # By name: `pipeline` must not depend on torch, as an import contract checks. Only .pt files
    # need it.
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise TraceError("this format needs torch: install it, or use --format npy") from error
