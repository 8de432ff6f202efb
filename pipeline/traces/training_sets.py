"""Sealing a training set: what the step's training.json names is the step's one set."""

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
    """Seal a training set whose parts are all committed: write the step's training.json.

    `geometry` is the model's, with all MoE layers. `ours` is False when the step has a set already,
    which stays. Raises TraceError unless the parts hold every sample of the manifest once in every
    layer; ObjectMissingError; CorruptObjectError; StoreError.
    """
    manifest = open_manifest(store, new.manifest.step).all()
    if manifest.sha256 != new.manifest.sha256:
        raise TraceError(
            f"{keys.manifest(manifest.step)} in {store.uri}: content {manifest.sha256[:16]}..., "
            f"the training set is of {new.manifest.sha256[:16]}..."
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
