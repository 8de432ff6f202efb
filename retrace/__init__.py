"""Retrace as a library: check and start runs, open stored runs, and write and read routing traces.

    retrace.run("my.yaml", trainer={"total_training_steps": 200})
    run = retrace.open_run("outputs/store/quickstart")
    run.metrics()["critic/rewards/mean"].to_pylist()
    for sample in run.step(3).samples():
        sample.response_text, sample.reward, sample.routes.sets_TLK

The names in `__all__`, here and in `retrace.traces` (writing and reading traces without a run), are
the public API. Everything else in `retrace`, and all of `pipeline` and `operators`, may change
without notice. docs/library.md shows each part of the API with examples.

Importing this package loads numpy and pyarrow. Pydantic, tokenizers and Prefect are loaded only
when a call needs them, so traces can be used without the other dependencies of Retrace.

Errors:
    InputError: Unusable settings or files; the error lists all problems.
    TraceError: Invalid or missing samples, routes or manifests.
    StoreError: The object store failed. `retrace.traces` contains the subclasses for missing,
        existing and damaged objects.
    LaunchError: The workers of a run could not start, ended too often, or hit an error that would
        recur after a restart.
    WaitTimeoutError: An object that a worker should have written did not appear in time.
"""

from pipeline import __version__
from pipeline.errors import InputError
from pipeline.launch.base import LaunchError
from pipeline.run.wait import WaitTimeoutError
from pipeline.store import Store, StoreError, open_store
from pipeline.traces import TraceError
from pipeline.upkeep.remove import remove_run
from pipeline.upkeep.run_list import list_runs
from retrace import traces
from retrace.local_logs import log_files
from retrace.opened import Run, open_run
from retrace.sealed import SealedStep, StepSample
from retrace.starting import ReadyRun, check, import_verl, run

__all__ = [
    "InputError",
    "LaunchError",
    "ReadyRun",
    "Run",
    "SealedStep",
    "StepSample",
    "Store",
    "StoreError",
    "TraceError",
    "WaitTimeoutError",
    "__version__",
    "check",
    "import_verl",
    "list_runs",
    "log_files",
    "open_run",
    "open_store",
    "remove_run",
    "run",
    "traces",
]
