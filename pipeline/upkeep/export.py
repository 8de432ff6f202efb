"""Routes exported as plain arrays, for analysis with other tools and for other trainers."""

import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pipeline.store import Store
from pipeline.traces.format.manifest import Manifest
from pipeline.traces.format.types import Routes, Sample, TraceError
from pipeline.traces.read.peers import slime_sample, verl_sample
from pipeline.traces.read.reader import read_routes, read_samples
from pipeline.traces.read.training import used_routes

Format = Literal["npy", "pt"]
"""Formats with one file per sample."""
Peer = Literal["verl", "slime"]
"""Trainers for which each step becomes one file."""
_SAMPLES_AT_ONCE = 64


def export(store: Store, step: int, folder: Path, form: Format) -> int:
    """Write a step's routes to a folder, with samples.json as index; return the number of samples.

    npy: `NAME.npy` with the sets [T, L, K] and `NAME.valid.npy` with the validity [T]. pt: one
    dict of the tensors `sets` and `valid` per sample. Raises TraceError when the step has no
    routes, the folder cannot be written to, or, for pt, torch is not installed.
    """
    manifest = used_routes(store, step)
    if manifest.geometry is None:
        raise TraceError(f"step {step} in {store.uri}: no routes were recorded")
    torch = _torch() if form == "pt" else None
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        listed = _write_samples(store, manifest, folder, form, torch)
        index = {
            "experts": manifest.geometry.experts,
            "topk": manifest.geometry.topk,
            "layers": list(manifest.geometry.layers),
            "samples": listed,
        }
        (folder / "samples.json").write_text(json.dumps(index) + "\n")
    return len(listed)


def export_for(
    store: Store, step: int, folder: Path, peer: Peer, num_layers: int | None = None
) -> tuple[int, int]:
    """Write a step as `STEP.pt`, a torch file with the samples in a peer's in-memory form.

    verl: `{"ids": [...], "samples": [...]}`, each sample with the fields of
    AgentLoopOutput.as_dict. slime: `{"rollout_id": STEP, "samples": [...]}`, which its
    `--load-debug-rollout-data` reads. `num_layers` is that of `peers.dense_routes`. Returns the
    number of samples, and how many of them are out of the loss because of unknown rows. The whole
    step is held in memory. Raises the errors of `export`; TraceError for ids or layers that do not
    fit.
    """
    manifest = used_routes(store, step)
    if manifest.geometry is None:
        raise TraceError(f"step {step} in {store.uri}: no routes were recorded")
    torch = _torch()
    samples: list[dict[str, Any]] = []
    groups: dict[str, int] = {}
    unknown = 0
    for sample, routes in _samples(store, manifest):
        group = groups.setdefault(sample.group, len(groups))
        if peer == "verl":
            fields = verl_sample(sample, routes, manifest.geometry, num_layers)
        else:
            at = (len(samples), group)
            fields = slime_sample(sample, routes, manifest.geometry, num_layers, *at)
        samples.append({name: _tensor(value, torch) for name, value in fields.items()})
        unknown += not routes.valid_T.all()
    named = {"ids": manifest.ids} if peer == "verl" else {"rollout_id": step}
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{step}.pt").open("wb") as out:
            torch.save({**named, "samples": samples}, out)
    return len(samples), unknown


def _tensor(value: Any, torch: Any) -> Any:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def _write_samples(
    store: Store, manifest: Manifest, folder: Path, form: Format, torch: Any
) -> list[dict[str, Any]]:
    """Write each sample's arrays and return its entries for samples.json."""
    listed = []
    for sample, routes in _samples(store, manifest):
        name = sample.id.replace("/", "_")
        _save(folder / name, routes, torch)
        listed.append(
            {
                "id": sample.id,
                "file": f"{name}.{form}",
                "prompt_length": len(sample.prompt_tokens_P),
                "tokens": sample.tokens_S.tolist(),
            }
        )
    return listed


def _samples(store: Store, manifest: Manifest) -> Iterator[tuple[Sample, Routes]]:
    for start in range(0, len(manifest.ids), _SAMPLES_AT_ONCE):
        ids = manifest.ids[start : start + _SAMPLES_AT_ONCE]
        routes = read_routes(store, manifest, ids)
        for sample in read_samples(store, manifest, ids):
            yield sample, routes[sample.id]


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    # Stores raise no OSError, so this one comes from the folder.
    try:
        yield
    except OSError as error:
        raise TraceError(
            f"cannot write to {folder}: {error.strerror or error}; give a folder that you may "
            "write to, with room for the arrays"
        ) from error


def _save(path: Path, routes: Routes, torch: Any) -> None:
    if torch is None:
        np.save(f"{path}.npy", np.ascontiguousarray(routes.sets_TLK))
        np.save(f"{path}.valid.npy", routes.valid_T)
    else:
        tensors = {
            "sets": _tensor(np.ascontiguousarray(routes.sets_TLK), torch),
            "valid": _tensor(routes.valid_T, torch),
        }
        with Path(f"{path}.pt").open("wb") as out:  # given a path, torch hides the OSError
            torch.save(tensors, out)


def _torch() -> Any:
    # By name: `pipeline` must not depend on torch, as an import contract checks. Only .pt files
    # need it.
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise TraceError("this format needs torch: install it, or use --format npy") from error
