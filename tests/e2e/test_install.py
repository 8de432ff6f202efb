"""What `helm install` says of values that name what the cluster does not have. Nothing is made."""

import pytest

from tests.e2e.installation import CHART, TRIAL, new_namespace
from tests.e2e.kubectl import CommandError, Namespace

LABELS = "jobs.labels.team=a b"
DRY = ("--values", str(TRIAL), "--dry-run=server")


@pytest.mark.parametrize("there", [True, False], ids=["namespace", "--create-namespace"])
def test_a_secret_that_is_not_there(cluster: None, there: bool):
    """Helm creates a namespace only after it has rendered the chart."""
    database = "prefect.server.database.existingSecret=no-such-secret"
    install = ("install", "retrace", str(CHART), *DRY, "--set", database)
    with new_namespace() as made:
        namespace = made if there else Namespace(f"{made.name}-none")
        with pytest.raises(CommandError) as refused:
            namespace.helm(*install, *(() if there else ("--create-namespace",)))
    said = str(refused.value)
    assert 'prefect.server.database.existingSecret: found "no-such-secret"' in said
    assert f"namespace {namespace.name} has no such Secret; create it first" in said


def test_labels_that_kubernetes_refuses(cluster: None):
    """The pods of runs are made later; their fields are shown to the API server before."""
    with new_namespace() as namespace, pytest.raises(CommandError) as refused:
        namespace.helm("install", "retrace", str(CHART), "--values", str(TRIAL), "--set", LABELS)
    assert "a valid label must be" in str(refused.value)
