"""The few calls to the API server that a launcher makes. Answers are plain JSON objects."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException
from urllib3.exceptions import HTTPError

from pipeline.launch.base import LaunchError
from pipeline.launch.kubernetes import names

Object = dict[str, Any]

_TIMEOUT_S = (5.0, 20.0)
"""Of connecting, and of reading an answer."""
_MISSING, _EXISTS = 404, 409
_BUSY = {408, 429, 500, 502, 503, 504}


class ApiUnavailableError(Exception):
    """The API server cannot be reached or is too busy; the same call may succeed later."""


class Api:
    """Jobs, their Services and their pods in one namespace.

    Every method may raise ApiUnavailableError, and LaunchError when the server refuses.
    """

    def __init__(self, namespace: str) -> None:
        """Use the pod's own service account or, outside a cluster, the user's kubeconfig."""
        try:
            config.load_incluster_config()
        except ConfigException:
            try:
                config.load_kube_config()
            except ConfigException as error:
                raise LaunchError(
                    f"no cluster: neither in a pod nor with a usable KUBECONFIG: {error}"
                ) from error
        self.namespace = namespace
        self._batch = client.BatchV1Api()
        self._core = client.CoreV1Api()

    def jobs(self, labels: Mapping[str, str]) -> list[Object]:
        """The Jobs with these labels."""
        return self._list(self._batch.list_namespaced_job, labels)

    def pods(self, labels: Mapping[str, str]) -> list[Object]:
        """The pods with these labels."""
        return self._list(self._core.list_namespaced_pod, labels)

    def create_job(self, job: Object) -> bool:
        """Create a Job; False when one of its name is there already."""
        return self._create(self._batch.create_namespaced_job, job)

    def create_service(self, service: Object) -> bool:
        """Create a Service; False when one of its name is there already."""
        return self._create(self._core.create_namespaced_service, service)

    def delete_job(self, name: str) -> None:
        """Delete a Job, its pods and its Service, if it is there."""
        delete = partial(
            self._batch.delete_namespaced_job,
            name,
            self.namespace,
            propagation_policy="Background",
        )
        _call(f"delete Job {name}", delete, fine=_MISSING)

    def last_warning(self, name: str) -> str | None:
        """The last warning about a Job or a pod: why no pod can be made, no volume be mounted.

        None: there is none.
        """
        fields = f"involvedObject.name={name},type=Warning"
        events = partial(self._core.list_namespaced_event, self.namespace, field_selector=fields)
        found = json.loads(_call(f"list events of {name}", events).data)["items"]
        last = max(found, key=lambda event: event.get("lastTimestamp") or "", default=None)
        return None if last is None else f"{last['reason']}: {last['message']}"

    def log_tail(self, pod: str, lines: int) -> str:
        """The last lines of a pod's log, or the reason why they cannot be read.

        Raises nothing: a log that its node cannot provide must not hide why a pod died.
        """
        read = partial(self._core.read_namespaced_pod_log, pod, self.namespace, tail_lines=lines)
        try:
            answer = _call(f"read the log of {pod}", read, fine=_MISSING)
        except (ApiUnavailableError, LaunchError) as error:
            return f"its log cannot be read: {error}"
        return "" if answer is None else answer.data.decode(errors="replace")

    def _list(self, method: Any, labels: Mapping[str, str]) -> list[Object]:
        chosen = names.selector(labels)
        answer = _call(f"list {chosen}", partial(method, self.namespace, label_selector=chosen))
        items: list[Object] = json.loads(answer.data)["items"]
        return items

    def _create(self, method: Any, body: Object) -> bool:
        what = f"create {body['kind']} {body['metadata']['name']}"
        return _call(what, partial(method, self.namespace, body), fine=_EXISTS) is not None


def _call(what: str, request: Callable[..., Any], fine: int | None = None) -> Any:
    """The raw answer; None for the status that is fine. `what` names the request in errors."""
    try:
        return request(_preload_content=False, _request_timeout=_TIMEOUT_S)
    except ApiException as error:
        if error.status == fine:
            return None
        message = _message(error)
        if error.status in _BUSY:
            raise ApiUnavailableError(f"{what}: {message}") from error
        # An exceeded quota is a 403 too; only a missing permission reads "... cannot ...".
        fix = " (upgrade the chart, which grants it)" if " cannot " in message else ""
        raise LaunchError(f"Kubernetes refuses to {what}: {message}{fix}") from error
    except (HTTPError, OSError) as error:
        raise ApiUnavailableError(f"{what}: {type(error).__name__}: {error}") from error


def _message(error: ApiException) -> str:
    """The server's message, without the headers that the exception's own text has."""
    try:
        return f"{error.status} {json.loads(error.body)['message']}"
    except (TypeError, ValueError, KeyError):
        return f"{error.status} {error.reason}"


def has_ended(job: Object) -> bool:
    """Whether a Job is complete, or has failed for good."""
    return any(
        condition["type"] in ("Complete", "Failed") and condition["status"] == "True"
        for condition in job.get("status", {}).get("conditions") or []
    )


def delete_jobs_of(api: Api, instance: str, flow_run: str) -> list[str]:
    """Delete the unfinished Jobs of a flow run; returns their names."""
    labels = {
        names.MANAGED_BY: names.RETRACE,
        names.INSTANCE: instance,
        names.FLOW_RUN: flow_run,
    }
    live = [job["metadata"]["name"] for job in api.jobs(labels) if not has_ended(job)]
    for name in live:
        api.delete_job(name)
    return live
