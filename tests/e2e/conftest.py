"""One installation of the chart for all tests in this folder, on the cluster of KUBECONFIG.

The tests kill pods, patch Secrets and fill the cluster, so use a disposable cluster.
"""

import os
from collections.abc import Iterator

import pytest

from pipeline.store import Store, open_store
from tests.e2e.installation import Installation, new_namespace
from tests.e2e.kubectl import Namespace, why_no_cluster
from tests.e2e.prefect_api import SMALL, FlowRun, Prefect

RUNS = "s3://retrace/runs"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == item.session.config.rootpath / "tests/e2e":
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="package")
def cluster() -> None:
    """Skip the tests if there is no cluster; `make e2e` fails earlier in this case."""
    why = why_no_cluster(os.environ.get("KUBECONFIG"))
    if why is not None:
        pytest.skip(why)


@pytest.fixture(scope="package")
def namespace(cluster: None) -> Iterator[Namespace]:
    with new_namespace() as created:
        yield created


@pytest.fixture(scope="package")
def installed(namespace: Namespace) -> Iterator[Installation]:
    """Install the chart with MinIO, and with two rollout and two training pods per run.

    The log of the Prefect server, which uses SQLite, must not contain errors.
    """
    # Allow more simultaneous runs than the default, and give up early on flow pods that cannot
    # start. Starting takes seconds here, or a minute if many pods start on two cores.
    settings = ("worker.maxRuns=12", "flow.startTimeoutSeconds=120")
    installation = Installation(namespace, "retrace", settings)
    installation.helm("install")
    yield installation
    installation.check_server_log()


@pytest.fixture(scope="package")
def prefect(installed: Installation) -> Iterator[Prefect]:
    with installed.prefect() as api:
        yield api


@pytest.fixture(scope="package")
def s3(installed: Installation) -> Iterator[dict[str, str]]:
    """Point this process's environment at the installation's store."""
    with installed.store() as environment, pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        patch.setenv("AWS_CONFIG_FILE", os.devnull)
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
        for name, value in environment.items():
            patch.setenv(name, value)
        yield environment


@pytest.fixture(scope="package")
def main_run(prefect: Prefect) -> FlowRun:
    """Run the smallest quickstart to completion: 2 steps, 2 rollout pods, 2 training pods."""
    run = prefect.start("main", SMALL, steps=2)
    run.completes(within_s=800)
    return run


@pytest.fixture(scope="package")
def main_store(main_run: FlowRun, s3: dict[str, str]) -> Store:
    return open_store(f"{RUNS}/{main_run.name}")
