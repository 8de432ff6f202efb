"""Seals training sets. A step has at most one, which the step's training.json describes."""

from typing import Any

from pipeline.model.geometry import Geometry
from pipeline.run import keys
from pipeline.run.commit import Committed, commit
from pipeline.store import Store
from pipeline.traces.format.header import with_header
from pipeline.traces.format.manifest import open_manifest
from pipeline.traces.format.types import TraceError
from pipeline.traces.read.joined import joined
from pipeline.traces.read.training import TrainingSet, place_of, read_training_commit
from pipeline.traces.write.training import NewTrainingSet


def seal_training_set(store: Store, new: NewTrainingSet, geometry: Geometry) -> Committed:
    """Seal a training set, whose parts must all be committed, by writing the step's training.json.

    Args:
        store: The store that contains the run.
        new: The training set to seal.
        geometry: The model's geometry, with all MoE layers.

    Returns:
        The commit; its `ours` is False if the step already has a set, which remains unchanged.

    Raises:
        ObjectMissingError: The manifest or a part is missing.
        CorruptObjectError: The manifest or a part is damaged.
        StoreError: The store failed.
        TraceError: The parts do not contain every sample of the manifest exactly once in every
            layer.
    """
    manifest = open_manifest(store, new.manifest.step).all()
    if manifest.sha256 != new.manifest.sha256:
        raise TraceError(
            f"{keys.manifest(manifest.step)} in {store.uri}: content {manifest.sha256[:16]}..., "
            f"expected {new.manifest.sha256[:16]}... as in the training set"
        )
    found = [info.key for info in store.list(keys.trainings(manifest.step))]
    commits = [
        read_training_commit(store, manifest, key)
        for key in found
        if key.endswith(f".{new.id}.json")
    ]
    training = TrainingSet(
        f"training set {new.id} of step {manifest.step} in {store.uri}",
        geometry,
        new.provenance,
        tuple(sorted(commits, key=place_of)),
        new.policies,
    )
    training.check()
    rows = joined(store, manifest, training).rows
    counts = {name: sum(rows[name].to_pylist()) for name in ("rows_total", "rows_valid")}
    body: dict[str, Any] = {
        "step": manifest.step,
        "manifest_sha256": manifest.sha256,
        "commits": [{"key": c.key, "commit_sha256": c.sha256} for c in training.commits],
        "counts": {"samples": len(rows), **counts},
    }
    body = with_header(body, [], geometry, new.provenance, new.policies)
    return commit(store, keys.training_set(manifest.step), body, new.id)
