"""One installation of the chart for all tests of this folder, on the cluster of KUBECONFIG.

The tests kill pods, patch Secrets and fill the cluster: use one that nobody needs.
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
    """Skips where there is no cluster; `make e2e` fails before it comes to this."""
    why = why_no_cluster(os.environ.get("KUBECONFIG"))
    if why is not None:
        pytest.skip(why)


@pytest.fixture(scope="package")
def namespace(cluster: None) -> Iterator[Namespace]:
    with new_namespace() as made:
        yield made


@pytest.fixture(scope="package")
def installed(namespace: Namespace) -> Installation:
    """The chart with MinIO, two rollout and two training pods a run."""
    # More runs at once than by default, and an early end for flow pods that cannot start: here
    # that takes seconds, a minute when many start on two cores.
    settings = ("worker.maxRuns=12", "flow.startTimeoutSeconds=120")
    installation = Installation(namespace, "retrace", settings)
    installation.helm("install")
    return installation


@pytest.fixture(scope="package")
def prefect(installed: Installation) -> Iterator[Prefect]:
    with installed.prefect() as api:
        yield api


@pytest.fixture(scope="package")
def s3(installed: Installation) -> Iterator[dict[str, str]]:
    """This process's environment reaches the installation's store."""
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
    """The quickstart at its smallest size, done: 2 steps, 2 rollout pods, 2 training pods."""
    run = prefect.start("main", SMALL, steps=2)
    run.completes(within_s=800)
    return run


@pytest.fixture(scope="package")
def main_store(main_run: FlowRun, s3: dict[str, str]) -> Store:
    return open_store(f"{RUNS}/{main_run.name}")
