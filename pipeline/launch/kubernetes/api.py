"""The launcher's calls to the API server, whose answers are plain JSON objects."""

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
"""Time limits, in seconds, for connecting and for reading an answer."""
_MISSING, _EXISTS = 404, 409
_BUSY = {408, 429, 500, 502, 503, 504}


class ApiUnavailableError(Exception):
    """The API server cannot be reached or is too busy; the same call may succeed later."""


class Api:
    """Jobs, their Services and their pods in one namespace.

    Every method may raise ApiUnavailableError, or LaunchError if the server refuses a request.
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
                    "found no cluster: this program runs outside a pod and has no usable "
                    f"kubeconfig; set KUBECONFIG: {error}"
                ) from error
        self.namespace = namespace
        self._batch = client.BatchV1Api()
        self._core = client.CoreV1Api()

    def jobs(self, labels: Mapping[str, str]) -> list[Object]:
        """Return the Jobs with these labels."""
        return self._list(self._batch.list_namespaced_job, labels)

    def pods(self, labels: Mapping[str, str]) -> list[Object]:
        """Return the pods with these labels."""
        return self._list(self._core.list_namespaced_pod, labels)

    def create_job(self, job: Object) -> bool:
        """Create a Job; return False if a Job of this name already exists."""
        return self._create(self._batch.create_namespaced_job, job)

    def create_service(self, service: Object) -> bool:
        """Create a Service; return False if a Service of this name already exists."""
        return self._create(self._core.create_namespaced_service, service)

    def delete_job(self, name: str) -> None:
        """Delete a Job with its pods and its Service, if the Job exists."""
        delete = partial(
            self._batch.delete_namespaced_job,
            name,
            self.namespace,
            propagation_policy="Background",
        )
        _call(f"delete Job {name}", delete, fine=_MISSING)

    def last_warning(self, name: str) -> str | None:
        """Return the last warning event of a Job or pod, or None if there is none.

        Such events report why a pod cannot be created or a volume cannot be mounted.
        """
        fields = f"involvedObject.name={name},type=Warning"
        events = partial(self._core.list_namespaced_event, self.namespace, field_selector=fields)
        found = json.loads(_call(f"list events of {name}", events).data)["items"]
        last = max(found, key=lambda event: event.get("lastTimestamp") or "", default=None)
        return None if last is None else f"{last['reason']}: {last['message']}"

    def log_tail(self, pod: str, lines: int) -> str:
        """Return the last lines of a pod's log, or the reason why they cannot be read.

        Raises no error, because an unreadable log must not hide why a pod died.
        """
        read = partial(self._core.read_namespaced_pod_log, pod, self.namespace, tail_lines=lines)
        try:
            answer = _call(f"read the log of {pod}", read, fine=_MISSING)
        except (ApiUnavailableError, LaunchError) as error:
            return f"the pod's log cannot be read: {error}"
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
    """Return the raw answer, or None if its status is `fine`.

    Error messages name the request as `what`.
    """
    try:
        return request(_preload_content=False, _request_timeout=_TIMEOUT_S)
    except ApiException as error:
        if error.status == fine:
            return None
        message = _message(error)
        if error.status in _BUSY:
            raise ApiUnavailableError(f"{what}: {message}") from error
        # An exhausted quota also causes a 403, but only messages about permissions contain
        # " cannot ".
        fix = " (upgrade the chart, which grants the permission)" if " cannot " in message else ""
        raise LaunchError(f"Kubernetes refuses to {what}: {message}{fix}") from error
    except (HTTPError, OSError) as error:
        raise ApiUnavailableError(f"{what}: {type(error).__name__}: {error}") from error


def _message(error: ApiException) -> str:
    """Return the server's message without the headers that the exception's text contains."""
    try:
        return f"{error.status} {json.loads(error.body)['message']}"
    except (TypeError, ValueError, KeyError):
        return f"{error.status} {error.reason}"


def has_ended(job: Object) -> bool:
    """Return whether a Job is complete or has failed permanently."""
    return any(
        condition["type"] in ("Complete", "Failed") and condition["status"] == "True"
        for condition in job.get("status", {}).get("conditions") or []
    )


def delete_jobs_of(api: Api, instance: str, flow_run: str) -> list[str]:
    """Delete the unfinished Jobs of a flow run, and return their names.

    Args:
        api: The API of the installation's namespace.
        instance: The installation's name.
        flow_run: The flow run's id in Prefect.

    Raises:
        ApiUnavailableError: The API server does not answer.
        LaunchError: The API server refuses a request.
    """
    labels = {
        names.MANAGED_BY: names.RETRACE,
        names.INSTANCE: instance,
        names.FLOW_RUN: flow_run,
    }
    live = [job["metadata"]["name"] for job in api.jobs(labels) if not has_ended(job)]
    for name in live:
        api.delete_job(name)
    return live
