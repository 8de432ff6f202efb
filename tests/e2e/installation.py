"""An installation of the chart: install and upgrade it, and reach its Prefect server and store."""

import contextlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

from tests.e2e.kubectl import CommandError, Namespace, Object
from tests.e2e.prefect_api import FlowRun, Prefect
from tests.paths import ROOT
from tests.prefect_log import check_log

CHART = ROOT / "charts/retrace"
TRIAL = CHART / "ci/trial-values.yaml"


@dataclass(frozen=True)
class Installation:
    """A Helm release in a separate namespace."""

    namespace: Namespace
    release: str
    settings: tuple[str, ...]
    """Values for `helm --set`, as key=value. They override the trial's values."""

    @property
    def fullname(self) -> str:
        """The prefix of the release's object names, as the chart builds it."""
        return self.release if "retrace" in self.release else f"{self.release}-retrace"

    def helm(self, verb: str, *settings: str) -> str:
        """Run `helm install` or `helm upgrade`, and wait until everything is ready."""
        chosen = [word for pair in (*self.settings, *settings) for word in ("--set", pair)]
        try:
            line = [verb, self.release, str(CHART), "--values", str(TRIAL), *chosen]
            return self.namespace.helm(*line, "--wait", "--timeout", "5m")
        except CommandError as error:
            raise AssertionError(
                f"{error}\n{self.namespace.describe_trouble()}\n"
                "Does the cluster hold the images? `make e2e-images TAG=test` builds them."
            ) from error

    @contextlib.contextmanager
    def prefect(self) -> Iterator[Prefect]:
        """Yield the installation's Prefect API."""
        auth = self.namespace.secret(f"{self.fullname}-auth")["auth-string"]
        with self.namespace.forward(f"{self.fullname}-server", 4200) as port:
            yield Prefect(f"http://127.0.0.1:{port}", auth)

    def check_server_log(self) -> None:
        """Fail if the log of the Prefect server's pod contains an unexpected error."""
        check_log(self.namespace.kubectl("logs", f"deploy/{self.fullname}-server"))

    @contextlib.contextmanager
    def store(self) -> Iterator[dict[str, str]]:
        """Yield environment variables that let this machine reach the installation's store.

        Runs are in s3://retrace/runs.
        """
        credentials = self.namespace.secret(f"{self.fullname}-store")
        with self.namespace.forward(f"{self.fullname}-minio", 9000) as port:
            yield {
                **credentials,
                "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{port}",
                "AWS_REGION": "us-east-1",
                "RETRACE_S3_PATH_STYLE": "true",
            }

    def jobs(self, run: FlowRun) -> list[Object]:
        """Return the rollout and training Jobs of a flow run."""
        return self.namespace.get("jobs", f"retrace.dev/flow-run={run.id}")

    def pods(self, run: FlowRun, component: str) -> list[Object]:
        """Return the rollout or training pods of a flow run."""
        chosen = f"retrace.dev/flow-run={run.id},app.kubernetes.io/component={component}"
        return self.namespace.get("pods", chosen)

    def flow_pods(self, run: FlowRun) -> list[Object]:
        """Return the flow pods of a flow run."""
        return self.namespace.get("pods", f"prefect.io/flow-run-id={run.id}")


def live_pods(pods: list[Object]) -> list[str]:
    """Return the names of the pods that have a running container."""
    return [
        pod["metadata"]["name"]
        for pod in pods
        if any("running" in s["state"] for s in pod["status"].get("containerStatuses", []))
    ]


@contextlib.contextmanager
def new_namespace() -> Iterator[Namespace]:
    """Yield an empty namespace that enforces `restricted`, and remove it with its contents."""
    namespace = Namespace(f"retrace-e2e-{secrets.token_hex(3)}")
    namespace.kubectl("create", "namespace", namespace.name)
    try:
        label = "pod-security.kubernetes.io/enforce=restricted"
        namespace.kubectl("label", "namespace", namespace.name, label)
        yield namespace
    finally:
        namespace.kubectl("delete", "namespace", namespace.name, "--wait=false")
