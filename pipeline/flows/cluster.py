"""The flow that users start in the Prefect UI, for a run whose workers are Kubernetes Jobs.

The UI shows the flow's parameters as the fields of a form. Prefect checks their values against a
schema when the run is created. The flow checks everything else before any worker starts, and
reports the same problems as `retrace check`.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import ObjectNotFound
from prefect.flows import Flow
from prefect.logging import get_run_logger
from prefect.logging.loggers import flow_run_logger
from prefect.runtime import flow_run
from prefect.states import Failed
from pydantic import Field

from pipeline.config.reading.load import LoadedConfig, load_config
from pipeline.config.rules.pods import InstalledGpus
from pipeline.config.tree import RunConfig
from pipeline.errors import InputError
from pipeline.flows.artifacts import Artifacts
from pipeline.flows.drive import drive
from pipeline.inputs.check import check_inputs
from pipeline.inputs.stage import StagedRun, stage, staged_change
from pipeline.launch.base import LaunchError, Workers
from pipeline.launch.kubernetes.api import Api, ApiUnavailableError, delete_jobs_of
from pipeline.launch.kubernetes.cluster import Cluster, read_cluster
from pipeline.launch.kubernetes.jobs import ClusterLaunch
from pipeline.launch.kubernetes.workers import kubernetes_workers
from pipeline.report.display import LogDisplay, warnings_of
from pipeline.report.run_metrics import all_metrics, validation_rewards
from pipeline.report.tables import summary
from pipeline.run.attempts import Attempt, claimed, validations_of
from pipeline.run.owner import this_owner
from pipeline.run.wait import WaitTimeoutError
from pipeline.store import StoreError
from pipeline.store.settings import ENDPOINT, use_settings
from pipeline.traces import TraceError

_MODE = "actor_rollout_ref.actor.router_replay.mode"
_LOCAL_FOLDER = "/tmp/retrace"


def preset_folder() -> Path:
    """Return the folder that contains the installation's presets, <preset>.yaml."""
    return Path(os.environ.get("RETRACE_PRESETS", "/etc/retrace/presets"))


def preset_names() -> list[str]:
    """Return the names of this installation's presets."""
    return sorted(path.stem for path in preset_folder().glob("*.yaml"))


Preset = Annotated[str, Field(json_schema_extra={"enum": list[Any](preset_names())})]
RunName = Annotated[str, Field(pattern=r"^([a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?)?$")]
RouterReplay = Literal["preset", "disabled", "R2", "R3"]
Steps = Annotated[int | None, Field(ge=1)]


def _delete_jobs(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """End the workers of a cancelled run. Prefect prescribes the parameter names."""
    log = flow_run_logger(flow_run, flow)
    try:
        cluster = read_cluster()
        deleted = delete_jobs_of(Api(cluster.namespace), cluster.instance, str(flow_run.id))
        log.info("the run was cancelled; deleted its Jobs: %s", ", ".join(deleted) or "none")
    except (InputError, LaunchError, ApiUnavailableError) as error:
        log.warning("the run was cancelled; the janitor will delete its Jobs: %s", error)


def run_name_of(name: str, flow_run_id: str) -> str:
    """Return a run's name, made of the name and the end of the id of its flow run.

    Prefect's generated names recur: there are 370,170 of them. Without the id, a scheduled run
    might therefore continue an older run. The function returns its own results unchanged, because
    a restarted flow pod must find its run.
    """
    end = flow_run_id[-4:]
    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-").removesuffix(end).strip("-")
    return f"{words[:35].rstrip('-')}-{end}".lstrip("-")


def _name() -> str:
    """Return the run's name, which Prefect also gives to the flow run."""
    given = flow_run.parameters.get("run_name")
    return str(given or run_name_of(str(flow_run.name), str(flow_run.id)))


@flow(name="retrace", flow_run_name=_name, on_cancellation=[_delete_jobs])
def retrace(
    preset: Preset,
    run_name: RunName = "",
    router_replay: RouterReplay = "preset",
    steps: Steps = None,
    overrides: list[str] = [],  # noqa: B006 - Prefect shows the default in the form
) -> Any:
    """Train a mixture-of-experts policy with GRPO, vLLM rollouts, Megatron and routing replay.

    Args:
        preset: The run configuration to start from. The Helm chart's values define the presets.
        run_name: Name of the run: at most 40 lower-case letters, digits and dashes. The name of an
            existing run continues that run. Empty, as in a schedule: a new run, named after the
            flow run, for example crimson-otter-3f9c.
        router_replay: The routing that the trainer replays. R3: the routing of the rollout engine.
            R2: the routing of the trainer's own log-prob pass. disabled: none. preset: as set in
            the preset.
        steps: Number of training steps. Empty: the number set in the preset.
        overrides: Other settings as key.path=value, one per line, for example trainer.save_freq=20.
            They take precedence over the other fields.

    Returns:
        The run's URI in the object store, or a failed state with the reason.
    """
    log = get_run_logger()
    try:
        cluster = read_cluster()
        loaded = load_preset(cluster, preset, _name(), router_replay, steps, overrides)
        return _run(cluster, loaded)
    except InputError as error:
        for problem in error.problems:
            log.error("error: %s", problem)
        return Failed(name="Refused", message=str(error))
    except (LaunchError, WaitTimeoutError, StoreError, TraceError) as error:
        text = f"{type(error).__name__}: {error}"
        log.error("%s\nStart the run again with the same name to continue it.", text)
        return Failed(message=text)


def load_preset(
    cluster: Cluster,
    preset: str,
    run_name: str,
    router_replay: str,
    steps: int | None,
    overrides: list[str],
) -> LoadedConfig:
    """Return a run's settings: the preset, overridden by the form's fields, then by `overrides`.

    Args:
        cluster: The installation, which sets the default of store.uri.
        preset: The preset's name.
        run_name: The run's name, the value of trainer.experiment_name.
        router_replay: The mode of router replay, or "preset" for the preset's mode.
        steps: The number of training steps; None selects the number in the preset.
        overrides: Settings as key.path=value.

    Raises:
        InputError: The preset is unknown, or a setting is invalid.
    """
    path = preset_folder() / f"{preset}.yaml"
    if preset not in preset_names():
        raise InputError(
            [f"preset: found {preset!r}, expected one of {', '.join(preset_names())}; choose one"]
        )
    fields = [f"trainer.experiment_name={run_name}"]
    if router_replay != "preset":
        fields.append(f"{_MODE}={router_replay}")
    if steps is not None:
        fields.append(f"trainer.total_training_steps={steps}")
    defaults = {"store.uri": cluster.store_uri, "trainer.default_local_dir": _LOCAL_FOLDER}
    return load_config(path, [*fields, *overrides], defaults)


def _run(cluster: Cluster, loaded: LoadedConfig) -> str:
    """Prepare the run and drive it to the end. Raises the same errors as `stage` and `drive`."""
    config = loaded.config
    name = config.trainer.run_name
    log = get_run_logger()
    use_settings(config.store)
    me = this_owner(str(flow_run.id))
    log.info("run %s, start %s of flow run %s", name, flow_run.run_count, me.flow_run)
    with Artifacts(name, log.warning) as artifacts:
        screen = LogDisplay(log.info, artifacts.status)
        with warnings_of("pipeline.store", screen.line):
            for note in loaded.notes:
                screen.line(f"note: {note}")
            screen.phase("flow", "checking and staging inputs")
            gpus = InstalledGpus(cluster.rollout.gpus, cluster.training.gpus)
            inputs = check_inputs(config, gpus)
            config = inputs.config
            for note in inputs.notes:
                screen.line(f"note: {note}")
            change = partial(staged_change, inputs)
            with claimed(inputs.store, config, me, _is_over, screen.line, change) as claim:
                run = stage(inputs)
                screen.phase("flow", None)
                if claim.attempt.reason:
                    screen.line(f"the run is changed: {claim.attempt.reason}")
                launch = partial(_workers, cluster, screen, str(flow_run.id))
                drive(run, claim, screen, artifacts, launch)
        artifacts.text("report", _report(config, run))
    return run.uri


def _is_over(flow_run_id: str) -> bool | None:
    """Return whether a flow run is over; None if the server has no record of it.

    Such a flow run may have been deleted, or may belong to another cluster's server.
    """
    with get_client(sync_client=True) as client:
        try:
            state = client.read_flow_run(UUID(flow_run_id)).state
        except ObjectNotFound:
            return None
    return state is None or state.is_final()


@contextlib.contextmanager
def _workers(
    cluster: Cluster,
    screen: LogDisplay,
    owner: str,
    config: RunConfig,
    run: StagedRun,
    attempt: Attempt,
) -> Iterator[Workers]:
    launch = ClusterLaunch(cluster, config, run.uri, attempt, owner)
    with kubernetes_workers(launch, screen) as workers:
        yield workers


def _report(config: RunConfig, run: StagedRun) -> str:
    """Return the run's results and the location of its data, as Markdown."""
    steps = all_metrics(run.store)
    lines = summary(steps, validation_rewards(run.store, validations_of(config)))
    endpoint = os.environ.get(ENDPOINT)
    return "\n".join(
        [
            f"# Run {run.name}",
            f"{len(steps)} of {config.trainer.total_training_steps} steps are finished.",
            "",
            "```",
            *lines,
            "```",
            "",
            f"All of the run's data is in `{run.uri}`" + (f" at {endpoint}." if endpoint else "."),
            "",
            "```",
            f"retrace traces ls {run.uri}",
            f"retrace traces verify {run.uri}",
            "```",
        ]
    )
