"""Event-triggered rules that Prefect's server applies to the flow runs of one deployment.

lost     a flow run that no longer sends events            -> Crashed
found    a crashed flow run that sends heartbeats again    -> Running
stuck    a flow run whose pod does not start               -> Crashed

Usually Prefect's worker is the first to notice that a flow pod is gone. `lost` handles the cases
that the worker does not notice: a deleted flow Job, a node that no longer responds, and an outage
of the worker itself.

The server measures time by its own clock. While it is down, it receives no events. After a long
outage, it therefore marks runs as lost that are in fact still running; `found` corrects these
states. In the meantime, the janitor does not delete the Jobs of these runs, because it checks for
live flow pods. These rules do not apply to worker pods, which the launcher in
pipeline/launch/kubernetes watches.
"""

from datetime import timedelta
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

HEARTBEAT_S = 30
"""Prefect's minimum number of seconds between heartbeats (PREFECT_FLOWS_HEARTBEAT_FREQUENCY)."""
_GRACE_S, _BACK_OFF_S, _MARGIN_S = 10, 40, 10
"""Durations in seconds: the grace period of a flow pod; the longest back-off, which precedes the
pod's third replacement; and a margin for polling and for differences between clocks."""
_FOUND_HEARTBEATS = 2
"""Number of heartbeats that prove that a flow pod is alive.

A single heartbeat is not enough, because it may have been sent before a crash and arrive late.
"""

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
    """Return the seconds after which a silent flow run counts as lost.

    The Job replaces a dead flow pod after a back-off, and the new pod may need `start_timeout_s`
    seconds to start. A run that is silent for longer than all these delays together certainly has
    no flow pod left.
    """
    return HEARTBEAT_S + _GRACE_S + _BACK_OFF_S + _MARGIN_S + start_timeout_s


def automations(
    deployment: UUID, name: str, start_timeout_s: int, silent_s: int
) -> list[AutomationCore]:
    """Return a deployment's rules, which apply only to the deployment's own flow runs.

    Args:
        deployment: The deployment's id.
        name: The deployment's name, the prefix of the rules' names.
        start_timeout_s: Seconds within which a flow pod must start.
        silent_s: Seconds after which a silent flow run counts as lost.
    """
    lost = EventTrigger(
        posture=Posture.Proactive,
        # The state Running starts the clock as well, because the first heartbeat may never arrive.
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
        # After it restarts, the server may delay state events by up to 15 minutes, but it does not
        # delay heartbeats.
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
            f"The flow pod was silent for {silent_s} s and was not replaced. Start the run again "
            "with the same name; it continues from the last commit.",
        ),
        _rule(
            deployment,
            f"{name}: found flow pod",
            found,
            StateType.RUNNING,
            "The flow pod sends heartbeats again, so it was never lost.",
        ),
        _rule(
            deployment,
            f"{name}: stuck flow pod",
            stuck,
            StateType.CRASHED,
            f"The flow pod did not start within {start_timeout_s} s. The log above or "
            "`kubectl describe pods -l prefect.io/flow-run-id` shows the reason, for example an "
            "image that cannot be pulled (images.flow of the chart), no node with enough free "
            "resources, or a quota.",
        ),
    ]


def register_automations(
    client: SyncPrefectClient, deployment: UUID, name: str, start_timeout_s: int
) -> None:
    """Create the rules, replacing those from an earlier registration.

    Rules that are up to date are kept, because a new rule does not receive the events of runs that
    began before it was created.

    Args:
        client: A client of Prefect's API.
        deployment: The deployment's id.
        name: The deployment's name.
        start_timeout_s: Seconds within which a flow pod must start.
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
    # The server's response omits the owner.
    fields = set(AutomationCore.model_fields) - {"owner_resource"}
    return rule.model_dump(include=fields)


def _runs_of(deployment: UUID) -> dict[str, Any]:
    """Return the trigger fields that make a rule apply separately to each run of the deployment."""
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
    """Return the owner of a deployment's rules.

    The owner is not the deployment itself, because Prefect deletes the automations that a
    deployment owns whenever the deployment is updated.
    """
    return f"retrace.deployment.{deployment}"


def _resource(deployment: UUID) -> str:
    return f"prefect.deployment.{deployment}"
