"""Rules that Prefect's server applies to the flow runs of one deployment, by their events.

lost     a flow run that was heard of, and then no longer     -> Crashed
found    a crashed flow run that is heard of again            -> Running
stuck    a flow run whose pod does not start                  -> Crashed

Usually Prefect's worker sees first that a flow pod is gone. `lost` is the net for what it does not
see: a flow Job that somebody deleted, a node that went silent, a worker that was away.

The server measures time by its own clock. While it is down it hears nothing, and after a longer
downtime calls runs lost that go on; `found` takes that back. Nothing is deleted meanwhile, for the
janitor looks for live flow pods.
"""

from datetime import timedelta
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

HEARTBEAT_S = 30
"""PREFECT_FLOWS_HEARTBEAT_FREQUENCY of flow pods: the least that Prefect allows."""
_GRACE_S, _BACK_OFF_S, _MARGIN_S = 10, 40, 10
"""Of a flow pod that ends; before its third replacement, the longest; for polling and clocks."""
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
        *("Running", "Completed", "Failed", "Crashed", "Cancelling", "Cancelled"),
        *("Scheduled", "AwaitingRetry", "AwaitingConcurrencySlot", "Paused", "Suspended"),
    )
}


def silence_s(start_timeout_s: int) -> int:
    """After how long a silent flow run is lost.

    A flow pod that died comes back by its Job's back-off, and the new one may take as long to
    start as any other. Only a run that is silent for longer has nobody left.
    """
    return HEARTBEAT_S + _GRACE_S + _BACK_OFF_S + _MARGIN_S + start_timeout_s


def automations(
    deployment: UUID, name: str, start_timeout_s: int, silent_s: int
) -> list[AutomationCore]:
    """The rules of the deployment that is called `name`, for its own flow runs only."""
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
        # States may be held back for 15 minutes when the server was restarted; heartbeats are not.
        expect={*_NOT_PENDING, _HEARTBEAT},
        within=timedelta(seconds=start_timeout_s),
        **_runs_of(deployment),
    )
    return [
        _rule(
            *(deployment, name, "lost flow pod", lost, StateType.CRASHED),
            f"Nothing was heard of the flow pod for {silent_s} s, and none came back. Start the "
            "run again with the same name: it goes on from what is committed.",
        ),
        _rule(
            *(deployment, name, "found flow pod", found, StateType.RUNNING),
            "The flow pod is heard of again: it was never lost.",
        ),
        _rule(
            *(deployment, name, "stuck flow pod", stuck, StateType.CRASHED),
            f"The flow pod did not start within {start_timeout_s} s. Why is in the log above, or "
            "`kubectl describe pods -l prefect.io/flow-run-id` tells: an image that cannot be "
            "pulled (images.flow of the chart), no node with room for it, a quota.",
        ),
    ]


def register_automations(
    client: SyncPrefectClient, deployment: UUID, name: str, start_timeout_s: int
) -> None:
    """Make the rules in place of those of an earlier registration.

    Rules that are as they should be stay: one that is made anew has not heard of the runs before.
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
    # The server does not tell the owner.
    fields = set(AutomationCore.model_fields) - {"owner_resource"}
    return rule.model_dump(include=fields)


def _runs_of(deployment: UUID) -> dict[str, Any]:
    """Each flow run of the deployment by itself."""
    return {
        "match": {_ID: "prefect.flow-run.*"},
        "match_related": {_ID: _resource(deployment), "prefect.resource.role": "deployment"},
        "for_each": {_ID},
    }


def _rule(
    deployment: UUID, name: str, what: str, trigger: EventTrigger, state: StateType, message: str
) -> AutomationCore:
    return AutomationCore(
        name=f"{name}: {what}",
        description=f"{state.value.capitalize()}: {message}",
        trigger=trigger,
        actions=[ChangeFlowRunState(state=state, message=message)],
        owner_resource=owner_of(deployment),
    )


def owner_of(deployment: UUID) -> str:
    """What its rules belong to: not the deployment, whose rules Prefect deletes at an update."""
    return f"retrace.deployment.{deployment}"


def _resource(deployment: UUID) -> str:
    return f"prefect.deployment.{deployment}"
