"""Statistics of a step's routes: expert load per layer, agreement of two recordings, and size.

Dimensions: T is the number of rows in a sample, L the number of MoE layers, K the number of experts
    per row, and E the number of experts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import numpy.typing as npt

from pipeline.metrics.metric import layers_of
from pipeline.model.geometry import Geometry
from pipeline.run import keys
from pipeline.run.commit import find_commit_of, parsing
from pipeline.run.parse import typed
from pipeline.store import Store
from pipeline.traces.format.manifest import Manifest, read_manifest
from pipeline.traces.format.parquet import open_file
from pipeline.traces.format.schema import layer_column
from pipeline.traces.format.types import Kind, TraceError
from pipeline.traces.read.reader import read_routes
from pipeline.traces.read.trainer import find_trainer_routes, joined


@dataclass(frozen=True)
class LayerStats:
    """Statistics of one MoE layer.

    A load is an expert's share of the layer's choices. If the loads are even, each is 1 / E.
    """

    layer: int | None
    """The layer's number; None for all layers of a step together. In that case, `load_min`,
    `load_max` and `load_max_over_mean` are extremes over the layers, and the other fields are
    means."""
    load_min: float
    load_max: float
    load_max_over_mean: float
    """1 if the loads are even; E / K if every row chose the same K experts."""
    load_entropy: float
    """Entropy of the loads, as a share of log E; 1 if the loads are even."""
    agreement: float | None
    """Share of rows for which the engine (R3) and the trainer (R2) recorded the same set; None
    unless both recorded routes."""
    agreement_in_training: float | None
    """Share of rows for which the trainer would have chosen the replayed set itself; taken from the
    step's metrics."""


@dataclass(frozen=True)
class StepStats:
    """Statistics of one sealed step."""

    step: int
    kind: Kind
    samples: int
    not_trained: int
    """Number of the step's samples that are not trained on."""
    rejected: int
    """Number of rejected groups. Of these statistics, only `bytes_per_token_layer` includes their
    samples."""
    rows_total: int
    rows_valid: int
    bytes_per_token_layer: float
    """Compressed size in bytes of the coded columns, divided by (rows of the samples x layers).

    The routes of rejected groups are in the same files, so the bytes include these groups, but the
    rows do not."""
    layers: tuple[LayerStats, ...]

    @property
    def total(self) -> LayerStats:
        """The statistics of all layers together.

        Loads are not summed, because the experts of different layers are unrelated.
        """
        return LayerStats(
            layer=None,
            load_min=min(layer.load_min for layer in self.layers),
            load_max=max(layer.load_max for layer in self.layers),
            load_max_over_mean=max(layer.load_max_over_mean for layer in self.layers),
            load_entropy=fmean(layer.load_entropy for layer in self.layers),
            agreement=_mean(layer.agreement for layer in self.layers),
            agreement_in_training=_mean(layer.agreement_in_training for layer in self.layers),
        )


def step_stats(store: Store, step: int) -> StepStats:
    """Compute statistics over the valid rows of a step's routes.

    Raises TraceError if the step has no routes.
    """
    sealed = read_manifest(store, step)
    trainer = find_trainer_routes(store, sealed)
    trained = sealed if trainer is None else joined(store, sealed, trainer)
    # If the engine and the trainer both recorded routes, the loads are computed from the engine's
    # routes, and the trainer's routes are compared with these.
    manifest = trained if sealed.geometry is None else sealed
    if manifest.geometry is None or manifest.provenance is None:
        raise TraceError(f"step {step} in {store.uri}: no routes were recorded")
    layers = manifest.geometry.layers
    loads, rows_valid = _loads(store, manifest, manifest.geometry)
    agreement: Sequence[float | None] = [None] * len(layers)
    if trained is not manifest:
        agreement = _agreement(store, manifest, trained)
    body = find_commit_of(store, keys.metrics(step), {"step": step}) or {"metrics": {}}
    with parsing(store, keys.metrics(step)):
        metrics = typed(body, "metrics", dict[str, float | None])
        in_training = layers_of(metrics, "replay/agreement")
    rows_total = sum(manifest.rows["rows_total"].to_pylist())
    return StepStats(
        step=step,
        kind=manifest.provenance.kind,
        samples=len(manifest.ids),
        not_trained=len(manifest.ids) - manifest.rows["not_trained"].null_count,
        rejected=len(manifest.rejected),
        rows_total=rows_total,
        rows_valid=rows_valid,
        bytes_per_token_layer=_coded_bytes(store, manifest) / max(1, rows_total * len(layers)),
        layers=tuple(
            _layer(layer, load_E, same, in_training.get(layer))
            for layer, load_E, same in zip(layers, loads, agreement, strict=True)
        ),
    )


def _mean(shares: Iterable[float | None]) -> float | None:
    """Return the mean of the shares that are known; None if no share is known.

    The mean over layers is also the mean over rows, because all layers have the same number of
    rows.
    """
    known = [share for share in shares if share is not None]
    return fmean(known) if known else None


def _loads(
    store: Store, manifest: Manifest, geometry: Geometry
) -> tuple[list[npt.NDArray[np.float64]], int]:
    """Return each layer's loads [E], one per expert, and the number of valid rows."""
    rows_valid = 0
    counts_LE = np.zeros((len(geometry.layers), geometry.experts), np.int64)
    for ids in manifest.id_batches():
        for routes in read_routes(store, manifest, ids).values():
            sets_TLK = routes.sets_TLK[routes.valid_T]
            rows_valid += len(sets_TLK)
            for i, counts_E in enumerate(counts_LE):
                counts_E += np.bincount(sets_TLK[:, i].ravel(), minlength=geometry.experts)
    return [counts_E / max(1, counts_E.sum()) for counts_E in counts_LE], rows_valid


def _agreement(store: Store, one: Manifest, other: Manifest) -> list[float | None]:
    """Return, for each layer, the share of rows with equal sets in two recordings.

    The share is None if no row is valid in both recordings.
    """
    if one.geometry is None or one.geometry != other.geometry:
        raise TraceError(
            f"step {one.step} in {store.uri}: one recording has {one.geometry}, the other "
            f"{other.geometry}"
        )
    equal_L = np.zeros(len(one.geometry.layers), np.int64)
    compared = 0
    for ids in one.id_batches():
        theirs = read_routes(store, other, ids)
        for id, ours in read_routes(store, one, ids).items():
            valid_T = ours.valid_T & theirs[id].valid_T
            equal_TL = (ours.sets_TLK == theirs[id].sets_TLK).all(axis=2)
            equal_L += equal_TL[valid_T].sum(axis=0)
            compared += int(valid_T.sum())
    return [int(equal) / compared if compared else None for equal in equal_L]


def _layer(
    layer: int,
    load_E: npt.NDArray[np.float64],
    agreement: float | None,
    in_training: float | None,
) -> LayerStats:
    used = load_E[load_E > 0]
    entropy = -(used * np.log(used)).sum()
    return LayerStats(
        layer=layer,
        load_min=float(load_E.min()),
        load_max=float(load_E.max()),
        load_max_over_mean=float(load_E.max() * len(load_E)),
        # With only one expert, the load is even, but log E is 0.
        load_entropy=float(entropy / np.log(len(load_E))) if len(load_E) > 1 else 1.0,
        agreement=agreement,
        agreement_in_training=in_training,
    )


def _coded_bytes(store: Store, manifest: Manifest) -> int:
    total = 0
    for file in manifest.files:
        if file.role == "routes":
            opened = open_file(store, file)
            layers = map(layer_column, file.layers)
            total += opened.bytes_of(layers, range(opened.row_groups))
    return total
