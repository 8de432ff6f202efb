"""The messages that a user sees for runs that cannot work.

None of these runs loads an engine, and most of them only wait, so all are started at the same time.
"""

import base64
import datetime
import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pipeline.config.reading.load import load_config
from pipeline.errors import InputError
from tests.e2e.installation import Installation, live_pods
from tests.e2e.kubectl import Object, command
from tests.e2e.prefect_api import NO_ROLLOUT, NO_TRAINING, SINGLE, FlowRun, Prefect, RefusedError
from tests.integration.run.retrace_runs import EXAMPLE
from tests.patience import eventually

NO_IMAGE = "retrace/none:1"
SAID_WITHIN_S = 30
BAD_OVERRIDES = ("trainer.total_traning_steps=3", "trainer.save_freq=often", "no value")

CANNOT_WORK: dict[str, tuple[str, ...]] = {
    "no-image": (
        f"launch.kubernetes.rollout.image={NO_IMAGE}",
        f"launch.kubernetes.training.image={NO_IMAGE}",
        "launch.start_timeout_s=45",  # a failing pull takes a while
    ),
    "no-memory": ("launch.kubernetes.rollout.memory=200Mi", "launch.max_restarts=0", NO_TRAINING),
    "no-node": (NO_ROLLOUT, NO_TRAINING, "launch.start_timeout_s=20"),
    "no-such-gpus": ("launch.kubernetes.training.gpus=2",),
    # The flow image contains no engine.
    "no-engine": (
        "launch.kubernetes.rollout.image=docker.io/retrace/flow:test",
        "launch.max_restarts=0",
        NO_TRAINING,
    ),
    "no-setting": BAD_OVERRIDES,
}


@pytest.fixture(scope="module")
def runs(prefect: Prefect) -> dict[str, FlowRun]:
    """Start all runs that cannot work."""
    started = {name: prefect.start(name, [*SINGLE, *more]) for name, more in CANNOT_WORK.items()}
    started["no-flow"] = prefect.start("no-flow", job_variables={"image": NO_IMAGE})
    return started


def failed(run: FlowRun) -> str:
    """Wait for a run to end, check that it failed, and return its message."""
    state = run.end()
    assert state["type"] == "FAILED", run.describe()
    message: str = state["message"]
    return message


def said_in_time(run: FlowRun, text: str, pods: list[Object]) -> None:
    """Check that the log showed a text soon after the first of the pods' containers ended.

    If no container has ended, the time is measured from the start of the first pod.
    """
    line = run.says(text)
    times = [
        status["state"]["terminated"]["finishedAt"]
        for pod in pods
        for status in pod["status"].get("containerStatuses", [])
        if "terminated" in status["state"]
    ] or [pod["status"]["startTime"] for pod in pods]
    _soon_after(times, line)


def said_after_event(installed: Installation, run: FlowRun, reason: str, text: str) -> None:
    """Check that the log showed a text soon after the cluster's first event with this reason."""
    line = run.says(text)
    times = [
        event["eventTime"] or event["firstTimestamp"]
        for event in installed.namespace.get("events")
        if event["reason"] == reason and event["involvedObject"]["name"].startswith(f"{run.name}-")
    ]
    _soon_after(times, line)


def _soon_after(times: list[str], line: Object) -> None:
    delay = _time(line["timestamp"]) - min(_time(text) for text in times)
    assert delay.total_seconds() < SAID_WITHIN_S, (line, times)


def _time(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))


def test_a_missing_image_fails_the_run_after_a_wait(
    installed: Installation, runs: dict[str, FlowRun]
):
    """The image may still appear, so the run fails only after launch.start_timeout_s.

    The log reports the problem immediately.
    """
    run = runs["no-image"]
    message = failed(run)
    assert "ImagePull" in message
    assert NO_IMAGE in message
    assert "waited 45 s (launch.start_timeout_s)" in message
    log = run.log_text()
    assert "does not start: ErrImagePull" in log or "does not start: ImagePullBackOff" in log
    assert "(pod no-image-" in log
    said_after_event(installed, run, "Failed", "does not start: ")


def test_the_message_about_a_pod_out_of_memory_names_the_setting(
    installed: Installation, runs: dict[str, FlowRun]
):
    run = runs["no-memory"]
    message = failed(run)
    assert "rollout worker 0 (pod no-memory-" in message
    assert "OOMKilled (exit code 137)" in message
    assert "limit of 200Mi; raise launch.kubernetes.rollout.memory" in message
    said_in_time(run, "OOMKilled", installed.pods(run, "rollout"))


def test_a_wrong_number_of_gpus_is_refused_before_any_job(
    installed: Installation, runs: dict[str, FlowRun]
):
    run = runs["no-such-gpus"]
    assert "launch.kubernetes.training.gpus: found 2 " in failed(run)
    assert not installed.jobs(run)


def test_a_request_for_more_processors_than_any_node_has_fails_the_run(
    installed: Installation, runs: dict[str, FlowRun]
):
    """The message contains the scheduler's reason and the setting that limits the wait."""
    run = runs["no-node"]
    message = failed(run)
    said_after_event(installed, run, "FailedScheduling", "does not start: Unschedulable: ")
    assert "Insufficient cpu" in message
    assert "waited 20 s (launch.start_timeout_s)" in message


@contextmanager
def more_gpus(node: str) -> Iterator[None]:
    """Make a node report two GPUs during the block, even if it has none."""
    path = "/status/capacity/nvidia.com~1gpu"

    def patch(operation: Object) -> None:
        line = ("patch", "node", node, "--subresource=status", "--type=json")
        command("kubectl", *line, "--patch", json.dumps([operation | {"path": path}]))

    before = json.loads(command("kubectl", "get", "node", node, "--output", "json"))
    had = before["status"]["capacity"].get("nvidia.com/gpu")
    patch({"op": "add", "value": "2"})
    try:
        yield
    finally:
        patch({"op": "remove"} if had is None else {"op": "add", "value": had})


def test_pods_start_when_a_suitable_node_appears(installed: Installation, prefect: Prefect):
    """Unschedulable pods start when a node with GPUs appears, and the run continues.

    The test makes a node report GPUs, as if an autoscaler had added one. Until then, no node has
    enough GPUs.
    """
    gpus = [f"launch.kubernetes.{part}.gpus=1" for part in ("rollout", "training")]
    run = prefect.start("later", [*SINGLE, *gpus])
    run.says("does not start: Unschedulable: ")
    [node, *_] = command("kubectl", "get", "nodes", "--output", "name").split()
    with more_gpus(node.removeprefix("node/")):
        for component in ("rollout", "training"):
            eventually(lambda part=component: live_pods(installed.pods(run, part)), run.describe)
        assert run.at_work()
        run.cancel()
        eventually(lambda: not installed.jobs(run), run.describe)
    run.end()


def test_a_failed_worker_is_named_with_exit_code_and_log(
    installed: Installation, runs: dict[str, FlowRun]
):
    """The message contains the worker's pod, index and exit code, and the end of its log."""
    run = runs["no-engine"]
    message = failed(run)
    assert "rollout worker 0 (pod no-engine-" in message
    assert "failed: exit code 78. From its log:" in message
    lacks = "this installation of retrace has no torch, vllm, which a rollout worker needs"
    assert lacks in message
    said_in_time(run, lacks, installed.pods(run, "rollout"))


def test_invalid_overrides_are_reported_together(installed: Installation, runs: dict[str, FlowRun]):
    """The run fails with all messages of `retrace check`, and creates no Job."""
    run = runs["no-setting"]
    message = failed(run)
    with pytest.raises(InputError) as refused:
        load_config(EXAMPLE, BAD_OVERRIDES)
    for problem in refused.value.problems:
        assert problem in message
        assert problem in run.log_text()
    assert len(refused.value.problems) == 3
    assert not installed.jobs(run)


@pytest.mark.parametrize(
    ("parameters", "complaint"),
    [
        ({"preset": "quickstart", "run_name": "a", "steps": 0}, "minimum"),
        ({"preset": "no-such-preset", "run_name": "a"}, "no-such-preset"),
        ({"preset": "quickstart", "run_name": "Not a name"}, "Not a name"),
        ({"preset": "quickstart", "run_name": "a", "router_replay": "R4"}, "R4"),
        ({"preset": "quickstart", "run_name": "a", "overrides": "a=b"}, "array"),
        ({"run_name": "a"}, "preset"),
    ],
)
def test_the_form_refuses_invalid_parameters(prefect: Prefect, parameters: Object, complaint: str):
    """The API creates no flow run for parameters that the schema does not allow."""
    path = f"/deployments/{prefect.deployment()['id']}/create_flow_run"
    before = prefect.flow_runs()
    with pytest.raises(RefusedError, match=r": 4(09|22) ") as refused:
        prefect.call("POST", path, {"parameters": parameters})
    assert complaint in str(refused.value)
    assert prefect.flow_runs() == before


def test_an_automation_ends_a_run_whose_flow_image_is_missing(
    runs: dict[str, FlowRun], installed: Installation
):
    """The flow cannot start and report the problem, so an automation ends the run as crashed."""
    run = runs["no-flow"]
    state = run.end()
    assert state["type"] == "CRASHED", run.describe()
    assert "The flow pod did not start within 120 s" in state["message"]
    assert NO_IMAGE in run.log_text()
    assert not installed.jobs(run)


@contextmanager
def wrong_credentials(installed: Installation) -> Iterator[None]:
    """Put a wrong password into the store's Secret during the block."""
    name = f"{installed.fullname}-store"
    right = installed.namespace.secret(name)["AWS_SECRET_ACCESS_KEY"]

    def patch(secret: str) -> None:
        encoded = base64.b64encode(secret.encode()).decode()
        body = json.dumps({"data": {"AWS_SECRET_ACCESS_KEY": encoded}})
        installed.namespace.kubectl("patch", "secret", name, "--patch", body)

    patch("not the password")
    try:
        yield
    finally:
        patch(right)


def test_wrong_store_credentials_fail_the_run(
    installed: Installation, prefect: Prefect, runs: dict[str, FlowRun]
):
    """The message contains status 403 and the fix, and the run creates no Job.

    All other runs end before the credentials change, so the wrong password does not affect them.
    """
    for run in runs.values():
        run.end()
    with wrong_credentials(installed):
        run = prefect.start("no-access")
        message = failed(run)
    assert "403" in message
    assert "pass valid credentials" in message
    assert not installed.jobs(run)
