"""`helm upgrade` in the middle of a run."""

from tests.e2e.installation import Installation
from tests.e2e.prefect_api import Prefect
from tests.e2e.test_cancel import NEVER_STARTS, cancel, ends_cancelled, when_jobs_exist
from tests.patience import eventually


def test_an_upgrade_keeps_secrets_history_and_runs(installed: Installation, prefect: Prefect):
    """The form offers the new preset; Secrets, the run history and the run's Jobs remain."""
    namespace = installed.namespace
    names = (f"{installed.fullname}-auth", f"{installed.fullname}-store")
    run = prefect.start("upgraded", NEVER_STARTS)
    when_jobs_exist(installed, run)
    jobs = {job["metadata"]["uid"] for job in installed.jobs(run)}
    secrets = [namespace.secret(name) for name in names]
    before = prefect.flow_runs()

    installed.helm("upgrade", "presets.other.trainer.total_training_steps=3")

    assert [namespace.secret(name) for name in names] == secrets
    assert set(before) <= set(prefect.flow_runs())
    assert {job["metadata"]["uid"] for job in installed.jobs(run)} == jobs
    assert run.state["type"] == "RUNNING", run.describe()
    schema = prefect.deployment()["parameter_openapi_schema"]
    assert schema["properties"]["preset"]["enum"] == ["other", "quickstart"]
    # The flow still watches the run's pods.
    eventually(lambda: "does not start" in run.log_text(), run.describe)
    cancel(installed, run)
    ends_cancelled(installed, run)
