"""Prefect's run history in PostgreSQL outlives the server's pod and the installation."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.installation import Installation, live_pods, new_namespace
from tests.patience import PATIENCE_S, eventually

DATABASE = Path(__file__).parent / "postgres/database.yaml"


@pytest.fixture(scope="module")
def on_postgres(cluster: None) -> Iterator[Installation]:
    """A second installation, in a separate namespace with a database.

    The log of the Prefect server must not contain errors.
    """
    with new_namespace() as namespace:
        namespace.kubectl("apply", "--filename", str(DATABASE))
        namespace.kubectl(
            "wait", "--for=condition=Ready", "pod/database", f"--timeout={PATIENCE_S:.0f}s"
        )
        settings = ("prefect.server.database.existingSecret=database",)
        installation = Installation(namespace, "team", settings)
        installation.helm("install")
        yield installation
        installation.check_server_log()


def test_history_outlives_pod_and_installation(on_postgres: Installation):
    """A schedule starts a run, and the run stays in the history when the server's pod is replaced.

    The flow refuses the run's settings. The history and the passwords also survive uninstalling the
    release and installing it again.
    """
    namespace = on_postgres.namespace
    with on_postgres.prefect() as prefect:
        run = prefect.start_by_schedule(["trainer.no_such_key=1"])
        state = run.end()
        assert "trainer.no_such_key: unknown key" in state["message"]
        server = f"app.kubernetes.io/instance={on_postgres.fullname}"
        server += ",app.kubernetes.io/component=server"
        on_postgres.check_server_log()
        before = prefect.flow_runs()
        [pod] = live_pods(namespace.get("pods", server))
        namespace.kubectl("delete", "pod", pod)
        namespace.kubectl("rollout", "status", f"deploy/{on_postgres.fullname}-server")
        assert run.state["id"] == state["id"]
    auth = namespace.secret(f"{on_postgres.fullname}-auth")
    store = namespace.secret(f"{on_postgres.fullname}-store")

    namespace.helm("uninstall", on_postgres.release, "--wait")
    left = "deployments,roles,rolebindings,serviceaccounts,configmaps,services"
    eventually(
        lambda: not namespace.get(left, f"app.kubernetes.io/instance={on_postgres.fullname}"),
        namespace.describe_trouble,
    )
    assert namespace.secret(f"{on_postgres.fullname}-auth") == auth
    assert namespace.secret(f"{on_postgres.fullname}-store") == store

    on_postgres.helm("install")
    with on_postgres.prefect() as prefect:
        assert prefect.flow_runs() == before
        assert run.id in before
        assert prefect.deployment()["name"] == "retrace"
