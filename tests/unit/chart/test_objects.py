"""The chart apart from its pods: servers, rights, volumes, policies, names."""

import json
import re

import pytest

from tests.unit.chart.objects import CHART, CI, ROOT, STORE, containers_of, pods_of, values_of


@pytest.mark.parametrize("values", CI, ids=lambda path: path.name)
def test_lint_passes(helm, values):
    result = helm("lint", CHART, "--strict", "--values", values)
    assert result.returncode == 0, result.stdout + result.stderr


def test_an_existing_prefect_server_is_used(render):
    objects = render(*values_of("external"))
    assert ("Deployment", "retrace-server") not in objects
    assert ("Service", "retrace-server") not in objects
    environment = objects["ConfigMap", "retrace-env"]["data"]
    assert environment["PREFECT_API_URL"] == "https://prefect.example.org/api"
    worker = pods_of(objects)["retrace-worker"]
    for container in containers_of(worker):
        names = {item["name"]: item for item in container["env"]}
        reference = names["PREFECT_API_AUTH_STRING"]["valueFrom"]["secretKeyRef"]
        assert reference == {"name": "prefect-auth", "key": "auth-string"}


def test_without_authentication_no_object_refers_to_it(render):
    objects = render(*STORE, "--set", "prefect.auth.enabled=false")
    assert "AUTH" not in json.dumps(list(objects.values()))


def rights_of(role):
    return {
        (what, verb)
        for rule in role["rules"]
        for what in rule["resources"]
        for verb in rule["verbs"]
    }


def test_rights_are_few_and_in_one_namespace(render):
    objects = render(*values_of("trial"))
    assert not {kind for kind, _ in objects} & {"ClusterRole", "ClusterRoleBinding"}
    roles = {name: rights_of(body) for (kind, name), body in objects.items() if kind == "Role"}
    assert set(roles) == {"retrace-worker", "retrace-flow", "retrace-janitor"}
    assert roles["retrace-janitor"] == {("jobs", "list"), ("jobs", "delete"), ("pods", "list")}
    assert not any("secrets" in right for rights in roles.values() for right in rights)
    assert objects["ServiceAccount", "retrace-job"]["automountServiceAccountToken"] is False


def test_the_flow_has_exactly_the_rights_that_the_launcher_uses(render):
    source = (ROOT / "pipeline/launch/kubernetes/api.py").read_text()
    calls = re.findall(r"self\._(?:batch|core)\.(\w+?)_namespaced_(\w+)", source)
    used = {
        ("pods/log", "get") if what == "pod_log" else (f"{what}s", verb) for verb, what in calls
    }
    assert rights_of(render(*values_of("trial"))["Role", "retrace-flow"]) == used


@pytest.mark.parametrize(
    "change",
    [
        "worker.maxRuns=9",
        "presets.mine.trainer.seed=1",
        "rollout.shmSize=2Gi",
        "flow.backoffLimit=5",
    ],
)
def test_a_change_to_the_registration_restarts_the_worker(render, change):
    def annotations(*more):
        worker = render(*values_of("trial"), *more)["Deployment", "retrace-worker"]
        return worker["spec"]["template"]["metadata"]["annotations"]

    assert annotations() == annotations()
    assert annotations() != annotations("--set", change)


def test_data_outlives_the_release(render):
    kept = {
        key
        for key, body in render(
            *values_of("trial"),
            "--set", "prefect.server.persistence.enabled=true,minio.persistence.enabled=true",
        ).items()
        if body["metadata"].get("annotations", {}).get("helm.sh/resource-policy") == "keep"
    }  # fmt: skip
    assert kept == {
        ("PersistentVolumeClaim", "retrace-server"),
        ("PersistentVolumeClaim", "retrace-minio"),
        ("Secret", "retrace-auth"),
        ("Secret", "retrace-store"),
    }


def test_a_database_replaces_the_volume_claim(render):
    objects = render(*values_of("gpu"))
    assert not any(kind == "PersistentVolumeClaim" for kind, _ in objects)
    (server,) = pods_of(objects)["retrace-server"]["containers"]
    url = next(e for e in server["env"] if e["name"] == "PREFECT_API_DATABASE_CONNECTION_URL")
    assert url["valueFrom"]["secretKeyRef"]["name"] == "prefect-database"


def test_network_policies_cover_every_pod(render):
    objects = render(*values_of("trial"), "--set", "networkPolicy.enabled=true")
    covered = set()
    for (kind, _), body in objects.items():
        if kind == "NetworkPolicy" and "Ingress" in body["spec"]["policyTypes"]:
            selector = body["spec"]["podSelector"]
            covered |= {selector["matchLabels"].get("app.kubernetes.io/component")}
            for expression in selector.get("matchExpressions", []):
                covered |= set(expression["values"])
    components = {"server", "minio", "worker", "janitor", "flow", "test", "rollout", "training"}
    assert covered - {None} == components
    jobs = objects["NetworkPolicy", "retrace-jobs"]["spec"]
    assert jobs["policyTypes"] == ["Egress"]
    external = render(*values_of("external"))["NetworkPolicy", "retrace-jobs"]["spec"]
    assert external["egress"][1] == {
        "ports": [{"port": 9443}],
        "to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
    }


def test_names_follow_the_release(helm):
    for release, server in (("retrace", "retrace-server"), ("lab", "lab-retrace-server")):
        text = helm("template", release, CHART, *STORE).stdout
        assert f"name: {server}\n" in text
