"""Retrace as a library: check and start runs, open stored runs, and write and read routing traces.

    retrace.run("my.yaml", trainer={"total_training_steps": 200})
    run = retrace.open_run("outputs/store/quickstart")
    run.metrics()["critic/rewards/mean"].to_pylist()
    for sample in run.step(3).samples():
        sample.response_text, sample.reward, sample.routes.sets_TLK

The names in `__all__` are the public API. Everything else in `retrace`, and all of `pipeline` and
`operators`, may change without notice. docs/library.md shows each part of the API with examples.

Importing this package loads numpy and pyarrow. Pydantic, tokenizers and Prefect are loaded only
when a call needs them, so traces can be used without the other dependencies of Retrace.

Errors:
    InputError: Unusable settings or files; the error lists all problems.
    TraceError: Invalid or missing samples, routes or manifests.
    StoreError: The object store failed. Subclasses: ObjectMissingError, ObjectExistsError,
        CorruptObjectError, RefusedError.
    LaunchError: The workers of a run could not start. Subclass: StageFailedError, raised if workers
        ended too often or hit an error that would recur after a restart.
    WaitTimeoutError: An object that a worker should have written did not appear in time.
"""

from pipeline import __version__
from pipeline.errors import InputError
from pipeline.inputs.sizes.memory import Memory, MemoryPart
from pipeline.inputs.writes import Writes
from pipeline.launch.base import LaunchError, StageFailedError
from pipeline.report.run_metrics import Validation
from pipeline.run.amendments import Amendment
from pipeline.run.commit import CorruptObjectError, new_write_id
from pipeline.run.description import RunDescription
from pipeline.run.wait import WaitTimeoutError
from pipeline.store import (
    ObjectExistsError,
    ObjectMissingError,
    RefusedError,
    Store,
    StoreError,
    open_store,
)
from pipeline.traces import (
    Geometry,
    Kind,
    Manifest,
    Provenance,
    Routes,
    Sample,
    SealedManifest,
    ShardWriter,
    TraceError,
    VersionSpan,
    check_shard,
    dense_routes,
    new_sample,
    open_manifest,
    open_shard,
    read_manifest,
    read_routes,
    read_samples,
    routes_digest,
    seal,
    to_slime,
    to_verl,
    to_verl_batch,
    token_digest,
    used_routes,
    weights_digest,
    write_step,
)
from pipeline.upkeep.checkpoint_list import ListedCheckpoint
from pipeline.upkeep.policy_list import ListedPolicy
from pipeline.upkeep.remove import remove_run
from pipeline.upkeep.run_list import ListedRun, list_runs
from retrace.imports import import_verl
from retrace.local_logs import log_files
from retrace.opened import Run, open_run
from retrace.sealed import SealedStep, StepSample
from retrace.starting import ReadyRun, check, run

__all__ = [
    "Amendment",
    "CorruptObjectError",
    "Geometry",
    "InputError",
    "Kind",
    "LaunchError",
    "ListedCheckpoint",
    "ListedPolicy",
    "ListedRun",
    "Manifest",
    "Memory",
    "MemoryPart",
    "ObjectExistsError",
    "ObjectMissingError",
    "Provenance",
    "ReadyRun",
    "RefusedError",
    "Routes",
    "Run",
    "RunDescription",
    "Sample",
    "SealedManifest",
    "SealedStep",
    "ShardWriter",
    "StageFailedError",
    "StepSample",
    "Store",
    "StoreError",
    "TraceError",
    "Validation",
    "VersionSpan",
    "WaitTimeoutError",
    "Writes",
    "__version__",
    "check",
    "check_shard",
    "dense_routes",
    "import_verl",
    "list_runs",
    "log_files",
    "new_sample",
    "new_write_id",
    "open_manifest",
    "open_run",
    "open_shard",
    "open_store",
    "read_manifest",
    "read_routes",
    "read_samples",
    "remove_run",
    "routes_digest",
    "run",
    "seal",
    "to_slime",
    "to_verl",
    "to_verl_batch",
    "token_digest",
    "used_routes",
    "weights_digest",
    "write_step",
]
