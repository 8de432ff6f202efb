"""Rules that Prefect's server applies to the flow runs of one deployment, triggered by events.

lost     a flow run that sent events, and then no more     -> Crashed
found    a crashed flow run that sends heartbeats again    -> Running
stuck    a flow run whose pod does not start               -> Crashed

Usually Prefect's worker is the first to see that a flow pod is gone. `lost` catches what it does
not see: a flow Job that somebody deleted, a node that went silent, a worker that was away.

The server measures time by its own clock. While it is down it receives nothing, and after a longer
downtime it takes runs that go on for lost; `found` corrects that. Nothing is deleted meanwhile, as
the janitor looks for live flow pods. Pods of workers are watched by pipeline/launch/kubernetes.
"""

from datetime import timedelta
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

HEARTBEAT_S = 30
"""PREFECT_FLOWS_HEARTBEAT_FREQUENCY of flow pods: the shortest that Prefect allows."""
_GRACE_S, _BACK_OFF_S, _MARGIN_S = 10, 40, 10
"""Seconds: the grace of a flow pod that ends; the back-off before its third replacement, which is
the longest; a margin for polling and clocks."""
_FOUND_HEARTBEATS = 2
"""One may be on its way while a flow run crashes."""

_ID = "prefect.resource.id"
_ANY = "prefect.flow-run.*"
_HEARTBEAT = "prefect.flow-run.heartbeat"
_RUNNING = "prefect.flow-run.Running"
_CRASHED = "prefect.flow-run.Crashed"
_PENDING = {
    f"prefect.flow-run.{state}" for state in ("Pending", "Submitting", "InfrastructurePending")
}
_NOT_PENDING = {
    f"prefect.flow-run.{state}"
    for state in (
        "AwaitingConcurrencySlot",
        "AwaitingRetry",
        "Cancelled",
        "Cancelling",
        "Completed",
        "Crashed",
        "Failed",
        "Paused",
        "Running",
        "Scheduled",
        "Suspended",
    )
}


def silence_s(start_timeout_s: int) -> int:
    """Seconds after which a silent flow run is lost.

    A flow pod that died is replaced after its Job's back-off, and the new one may take as long to
    start as any other. Only a run that is silent for longer has no flow pod left.
    """
    return HEARTBEAT_S + _GRACE_S + _BACK_OFF_S + _MARGIN_S + start_timeout_s


def automations(
    deployment: UUID, name: str, start_timeout_s: int, silent_s: int
) -> list[AutomationCore]:
    """The rules of the deployment called `name`, which apply to its own flow runs only."""
    lost = EventTrigger(
        posture=Posture.Proactive,
        # A state is a sign of life too: the first heartbeat may never come.
        after={_HEARTBEAT, _RUNNING},
        expect={_ANY},
        within=timedelta(seconds=silent_s),
        **_runs_of(deployment),
    )
    found = EventTrigger(
        posture=Posture.Reactive,
        after={_CRASHED},
        expect={_HEARTBEAT},
        threshold=_FOUND_HEARTBEATS,
        within=timedelta(seconds=(_FOUND_HEARTBEATS + 2) * HEARTBEAT_S),
        **_runs_of(deployment),
    )
    stuck = EventTrigger(
        posture=Posture.Proactive,
        after=_PENDING,
        # After a restart the server may hold states back for 15 minutes, but not heartbeats.
        expect={*_NOT_PENDING, _HEARTBEAT},
        within=timedelta(seconds=start_timeout_s),
        **_runs_of(deployment),
    )
    return [
        _rule(
            deployment,
            f"{name}: lost flow pod",
            lost,
            StateType.CRASHED,
            f"Nothing was heard of the flow pod for {silent_s} s, and none came back. Start the "
            "run again with the same name: it goes on from what is committed.",
        ),
        _rule(
            deployment,
            f"{name}: found flow pod",
            found,
            StateType.RUNNING,
            "The flow pod sends heartbeats again: it was never lost.",
        ),
        _rule(
            deployment,
            f"{name}: stuck flow pod",
            stuck,
            StateType.CRASHED,
            f"The flow pod did not start within {start_timeout_s} s. The log above, or "
            "`kubectl describe pods -l prefect.io/flow-run-id`, shows why: an image that cannot be "
            "pulled (images.flow of the chart), no node with room for it, a quota.",
        ),
    ]


def register_automations(
    client: SyncPrefectClient, deployment: UUID, name: str, start_timeout_s: int
) -> None:
    """Make the rules, in place of those of an earlier registration.

    Rules that are up to date stay: a new rule knows nothing of the runs before it.
    """
    owner = owner_of(deployment)
    rules = automations(deployment, name, start_timeout_s, silence_s(start_timeout_s))
    found = [_content(rule) for rule in client.read_resource_related_automations(owner)]
    if len(found) == len(rules) and all(_content(rule) in found for rule in rules):
        return
    client.delete_resource_owned_automations(owner)
    for rule in rules:
        client.create_automation(rule)


def _content(rule: AutomationCore) -> dict[str, Any]:
    # The server's answer leaves out the owner.
    fields = set(AutomationCore.model_fields) - {"owner_resource"}
    return rule.model_dump(include=fields)


def _runs_of(deployment: UUID) -> dict[str, Any]:
    """Matches the flow runs of the deployment, each separately."""
    return {
        "match": {_ID: "prefect.flow-run.*"},
        "match_related": {_ID: _resource(deployment), "prefect.resource.role": "deployment"},
        "for_each": {_ID},
    }


def _rule(
    deployment: UUID, name: str, trigger: EventTrigger, state: StateType, message: str
) -> AutomationCore:
    return AutomationCore(
        name=name,
        description=f"{state.value.capitalize()}: {message}",
        trigger=trigger,
        actions=[ChangeFlowRunState(state=state, message=message)],
        owner_resource=owner_of(deployment),
    )


def owner_of(deployment: UUID) -> str:
    """The owner of its rules. Not the deployment itself: Prefect deletes what that owns whenever it
    is updated."""
    return f"retrace.deployment.{deployment}"


def _resource(deployment: UUID) -> str:
    return f"prefect.deployment.{deployment}"
