"""The janitor's decisions, which depend only on the states of runs and the phases of pods."""

import pytest
from prefect.client.schemas.objects import StateType

from pipeline.installation.janitor import Clocks, must_not_start, ownerless

AT_WORK = [StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.PAUSED]
OVER = [StateType.COMPLETED, StateType.FAILED, StateType.CRASHED]
CANCELLED = [StateType.CANCELLING, StateType.CANCELLED]
PHASES = ["Pending", "Running", "Succeeded", "Failed", "Unknown"]


@pytest.mark.parametrize("state", CANCELLED)
@pytest.mark.parametrize("flow_job", [True, False])
def test_jobs_of_cancelled_runs_get_no_grace_period(state: StateType, flow_job: bool) -> None:
    """Their Jobs are deleted immediately."""
    assert not ownerless(state, [], flow_job)


@pytest.mark.parametrize("state", [*OVER, None])
@pytest.mark.parametrize("flow_job", [True, False])
def test_runs_that_are_over_or_unknown_have_no_owner(
    state: StateType | None, flow_job: bool
) -> None:
    assert ownerless(state, [], flow_job)
    assert ownerless(state, ["Failed", "Succeeded"], flow_job)


@pytest.mark.parametrize("state", [*AT_WORK, *OVER, None])
@pytest.mark.parametrize("phase", ["Pending", "Running", "Unknown"])
@pytest.mark.parametrize("flow_job", [True, False])
def test_a_live_flow_pod_is_an_owner(state: StateType | None, phase: str, flow_job: bool) -> None:
    """The state may be wrong, for example because heartbeats did not arrive or because the server
    lost its database."""
    assert not ownerless(state, ["Failed", phase], flow_job)


@pytest.mark.parametrize("state", AT_WORK)
def test_runs_in_progress_have_an_owner_even_between_two_flow_pods(state: StateType) -> None:
    assert not ownerless(state, [], flow_job=True)


@pytest.mark.parametrize("state", AT_WORK)
def test_runs_in_progress_have_no_owner_when_their_flow_job_is_gone(state: StateType) -> None:
    """The flow Job was deleted without Prefect's knowledge."""
    assert ownerless(state, [], flow_job=False)
    assert ownerless(state, ["Failed"], flow_job=False)


@pytest.mark.parametrize("state", CANCELLED)
@pytest.mark.parametrize("pods", [[], ["Pending"], ["Failed"], ["Failed", "Pending"]])
def test_a_cancelled_run_does_not_start_later(state: StateType, pods: list[str]) -> None:
    assert must_not_start(state, pods)


@pytest.mark.parametrize("phase", ["Running", "Succeeded"])
@pytest.mark.parametrize("state", [*CANCELLED, StateType.CRASHED])
def test_a_flow_pod_that_is_running_or_has_succeeded_ends_its_run_itself(
    state: StateType, phase: str
) -> None:
    assert not must_not_start(state, ["Failed", phase])


def test_a_crashed_run_does_not_start_later() -> None:
    """Its flow pod is still pending, for example because pulling its image took too long."""
    assert must_not_start(StateType.CRASHED, ["Failed", "Pending"])


@pytest.mark.parametrize("state", [*AT_WORK, StateType.COMPLETED, StateType.FAILED, None])
@pytest.mark.parametrize("phase", PHASES)
def test_flow_jobs_of_other_runs_are_not_deleted(state: StateType | None, phase: str) -> None:
    assert not must_not_start(state, [phase])


def test_a_run_without_an_owner_is_due_after_the_grace_period() -> None:
    clocks = Clocks(grace_s=900)
    assert clocks.due({"a": None}, 0) == set()
    assert clocks.due({"a": None}, 899) == set()
    assert clocks.due({"a": None}, 900) == {"a"}


def test_an_owner_that_comes_back_restarts_the_clock() -> None:
    clocks = Clocks(grace_s=900)
    clocks.due({"a": StateType.CRASHED, "b": None}, 0)
    clocks.due({"b": None}, 500)
    assert clocks.due({"a": StateType.CRASHED, "b": None}, 900) == {"b"}
    assert clocks.due({"a": StateType.CRASHED}, 1799) == set()
    assert clocks.due({"a": StateType.CRASHED}, 1800) == {"a"}


def test_a_new_state_restarts_the_clock() -> None:
    clocks = Clocks(grace_s=900)
    clocks.due({"a": StateType.CRASHED}, 0)
    clocks.due({"a": None}, 600)
    assert clocks.due({"a": None}, 900) == set()
    assert clocks.due({"a": None}, 1500) == {"a"}


def test_an_outage_restarts_every_clock() -> None:
    clocks = Clocks(grace_s=900)
    clocks.due({"a": None}, 0)
    clocks.restart()
    assert clocks.due({"a": None}, 900) == set()
    assert clocks.due({"a": None}, 1800) == {"a"}
