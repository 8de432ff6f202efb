"""Errors from `helm install` about values that the cluster refuses; nothing is installed."""

import pytest

from tests.e2e.installation import CHART, TRIAL, new_namespace
from tests.e2e.kubectl import CommandError, Namespace

LABELS = "jobs.labels.team=a b"
DRY = ("--values", str(TRIAL), "--dry-run=server")


@pytest.mark.parametrize("exists", [True, False], ids=["namespace", "--create-namespace"])
def test_a_missing_secret_is_refused(cluster: None, exists: bool):
    """The check works with --create-namespace, although the namespace does not exist yet."""
    database = "prefect.server.database.existingSecret=no-such-secret"
    install = ("install", "retrace", str(CHART), *DRY, "--set", database)
    with new_namespace() as created:
        namespace = created if exists else Namespace(f"{created.name}-none")
        with pytest.raises(CommandError) as refused:
            namespace.helm(*install, *(() if exists else ("--create-namespace",)))
    message = str(refused.value)
    assert 'prefect.server.database.existingSecret: found "no-such-secret"' in message
    expected = (
        f"expected the name of a Secret in namespace {namespace.name}; create the Secret first"
    )
    assert expected in message


def test_labels_that_kubernetes_refuses_fail_the_installation(cluster: None):
    """The API server already checks the fields of run pods during installation."""
    with new_namespace() as namespace, pytest.raises(CommandError) as refused:
        namespace.helm("install", "retrace", str(CHART), "--values", str(TRIAL), "--set", LABELS)
    assert "a valid label must be" in str(refused.value)
