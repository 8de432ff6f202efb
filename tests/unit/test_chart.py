"""The Helm chart as Helm renders it: values, manifests, what is refused, and what is generated."""

import asyncio
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest
import yaml
from prefect.client.schemas.objects import Flow, FlowRun
from prefect_kubernetes.worker import KubernetesWorkerJobConfiguration

from pipeline.config.load import load_config
from pipeline.launch.kubernetes.cluster import read_cluster

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "retrace"
CI = sorted(CHART.glob("ci/*-values.yaml"))
STORE = ("--set", "store.uri=s3://runs/retrace")
QUICKSTART = {"trainer.nnodes": 2, "launch.rollout_workers": 2}
"""Where the chart's quickstart differs from examples/quickstart.yaml."""


@pytest.fixture(scope="module")
def helm():
    program = shutil.which("helm")
    if program is None:
        pytest.skip("helm is not on PATH")

    def run(*arguments):
        return subprocess.run(
            [program, *map(str, arguments)], capture_output=True, text=True, timeout=60
        )

    return run


@pytest.fixture(scope="module")
def render(helm):
    """Manifests by (kind, name), of a release `retrace` in the namespace `runs`."""

    def run(*arguments):
        result = helm("template", "retrace", CHART, "--namespace", "runs", *arguments)
        assert result.returncode == 0, result.stderr
        objects = [body for body in yaml.safe_load_all(result.stdout) if body]
        names = [(body["kind"], body["metadata"]["name"]) for body in objects]
        assert len(set(names)) == len(names), "two objects of one name"
        return dict(zip(names, objects, strict=True))

    return run


@pytest.fixture(scope="module")
def refuse(helm):
    """What Helm says to values that it must refuse."""

    def run(*arguments):
        result = helm("template", "retrace", CHART, "--namespace", "runs", *arguments)
        assert result.returncode != 0, "was rendered"
        return result.stderr

    return run


def values_of(name):
    return ("--values", CHART / "ci" / f"{name}-values.yaml")


def cluster_of(objects):
    return yaml.safe_load(objects["ConfigMap", "retrace-cluster"]["data"]["cluster.yaml"])


def template_of(objects):
    text = objects["ConfigMap", "retrace-base-job-template"]["data"]["base-job-template.json"]
    return json.loads(text)


def pods_of(objects):
    """All pod specs of the chart, by what they are: also those that others will make."""
    pods = {
        name: body["spec"]["template"]["spec"]
        for (kind, name), body in objects.items()
        if kind == "Deployment"
    }
    pods |= {name: body["spec"] for (kind, name), body in objects.items() if kind == "Pod"}
    cluster = cluster_of(objects)
    pods |= {part: cluster[part]["template"]["spec"] for part in ("rollout", "training")}
    job = template_of(objects)["job_configuration"]["job_manifest"]
    return pods | {"flow": job["spec"]["template"]["spec"]}


def containers_of(pod):
    return pod.get("initContainers", []) + pod["containers"]


def restricted_problems(pod):
    """What Pod Security's level `restricted` has against a pod spec."""
    problems = [key for key in ("hostNetwork", "hostPID", "hostIPC") if pod.get(key)]
    security = pod["securityContext"]
    if security.get("runAsNonRoot") is not True or security.get("runAsUser") == 0:
        problems.append("may run as root")
    if security.get("seccompProfile") != {"type": "RuntimeDefault"}:
        problems.append("seccompProfile")
    allowed = {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret", "csi"}
    for volume in pod["volumes"]:
        problems += [f"volume {kind}" for kind in set(volume) - {"name"} - allowed]
    for container in containers_of(pod):
        own = container["securityContext"]
        if own.get("privileged") or own.get("allowPrivilegeEscalation") is not False:
            problems.append(f"{container['name']}: privileges")
        if own.get("capabilities") != {"drop": ["ALL"]}:
            problems.append(f"{container['name']}: capabilities")
        if "runAsUser" in own or "seccompProfile" in own:
            problems.append(f"{container['name']}: overrides the pod's security context")
    return problems


@pytest.mark.parametrize("values", CI, ids=lambda path: path.name)
def test_lint_is_content(helm, values):
    result = helm("lint", CHART, "--strict", "--values", values)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("values", CI, ids=lambda path: path.name)
def test_pods_are_restricted_and_bounded(render, values):
    for name, pod in pods_of(render("--values", values)).items():
        assert restricted_problems(pod) == [], name
        assert pod["enableServiceLinks"] is False, name
        for container in containers_of(pod):
            where = f"{name}: {container['name']}"
            assert container["securityContext"]["readOnlyRootFilesystem"] is True, where
            assert container["resources"]["limits"]["memory"], where
            assert container["resources"]["requests"]["cpu"], where
            mounts = {mount["name"] for mount in container["volumeMounts"]}
            assert mounts <= {volume["name"] for volume in pod["volumes"]}, where
            assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}, where


def test_restricted_problems_are_found(render):
    pod = pods_of(render(*STORE))["rollout"]
    pod["volumes"].append({"name": "disk", "hostPath": {"path": "/"}})
    pod["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    assert restricted_problems(pod) == ["volume hostPath", "rollout: privileges"]


def test_gpu_values_reach_the_pods(render):
    cluster = cluster_of(render(*values_of("gpu")))
    assert cluster["namespace"] == "runs"
    assert cluster["instance"] == "retrace"
    assert cluster["storeUri"] == "s3://example-runs/retrace"
    assert cluster["gpuResource"] == "nvidia.com/gpu"
    assert cluster["jobs"] == {
        "ttlSecondsAfterFinished": 86400,
        "activeDeadlineSeconds": 2592000,
        "queueName": "training",
        "labels": {"team": "research"},
    }
    assert (cluster["rollout"]["gpus"], cluster["training"]["gpus"]) == (4, 8)
    for part, digit in (("rollout", "2"), ("training", "3")):
        pod = cluster[part]["template"]["spec"]
        (container,) = pod["containers"]
        assert container["name"] == part
        assert container["image"] == f"registry.example.org/retrace/{part}@sha256:{digit * 64}"
        assert pod["tolerations"] == [
            {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
        ]
        assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
        assert pod["serviceAccountName"] == "retrace-job"
        assert pod["automountServiceAccountToken"] is False
        # GPUs are the launcher's to add: it knows the run's parallel layout.
        assert set(container["resources"]["requests"]) == {"cpu", "memory"}
        assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
    training = cluster["training"]["template"]
    assert training["metadata"]["annotations"] == {"k8s.v1.cni.cncf.io/networks": "infiniband"}
    assert training["spec"]["priorityClassName"] == "training-high"
    assert training["spec"]["topologySpreadConstraints"][0]["maxSkew"] == 1
    shm = next(v for v in training["spec"]["volumes"] if v["name"] == "shm")
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}


def test_the_launcher_reads_what_the_chart_writes(render, tmp_path, monkeypatch):
    objects = render(*values_of("trial"))
    file = tmp_path / "cluster.yaml"
    file.write_text(objects["ConfigMap", "retrace-cluster"]["data"]["cluster.yaml"])
    monkeypatch.setenv("RETRACE_CLUSTER", str(file))
    cluster = read_cluster()
    assert cluster.store_uri == "s3://retrace/runs"
    assert cluster.gpu_resource == ""
    assert cluster.jobs.deadline_s == 2_592_000
    assert cluster.rollout.gpus is None
    container = cluster.training.template["spec"]["containers"][0]
    assert container["image"] == "docker.io/retrace/training:test"


def test_the_api_server_is_shown_the_pods_of_runs(render):
    """Hooks of no pods, with what the launcher and Prefect will make later."""
    objects = render(*values_of("gpu"))
    pods = pods_of(objects)
    for part in ("rollout", "training", "flow"):
        check = objects["Deployment", f"retrace-check-{part}"]
        assert check["spec"]["replicas"] == 0
        assert check["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
        shown = pods[f"retrace-check-{part}"]
        for key in ("volumes", "tolerations", "affinity", "nodeSelector", "imagePullSecrets"):
            assert shown.get(key) == pods[part].get(key), (part, key)
        assert shown["containers"][0]["volumeMounts"] == pods[part]["containers"][0]["volumeMounts"]


def test_web_identity_needs_no_credentials(render):
    objects = render(*values_of("gpu"))
    role = "eks.amazonaws.com/role-arn"
    for account, ends in (("job", "retrace-workers"), ("flow", "retrace-flow")):
        body = objects["ServiceAccount", f"retrace-{account}"]
        assert body["metadata"]["annotations"][role].endswith(ends)
    assert not any(kind == "Secret" for kind, _ in objects)
    for name in ("rollout", "training", "flow"):
        sources = pods_of(objects)[name]["containers"][0]["envFrom"]
        assert not any("secretRef" in source for source in sources), name
    store = objects["ConfigMap", "retrace-store"]["data"]
    assert store == {"AWS_REGION": "eu-central-1"}


def test_every_pod_of_a_run_reaches_the_store_alike(render):
    objects = render(*values_of("external"))
    assert objects["ConfigMap", "retrace-store"]["data"] == {
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_S3": "https://s3.example.org:9443",
        "RETRACE_S3_PATH_STYLE": "true",
        "AWS_CA_BUNDLE": "/etc/retrace/ca/ca.crt",
    }
    for name in ("rollout", "training", "flow", "retrace-test"):
        pod = pods_of(objects)[name]
        (container,) = pod["containers"]
        assert {"configMapRef": {"name": "retrace-store"}} in container["envFrom"], name
        assert {"secretRef": {"name": "store-credentials"}} in container["envFrom"], name
        assert "/etc/retrace/ca" in {m["mountPath"] for m in container["volumeMounts"]}, name


def test_another_prefect_server_is_used(render):
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


def test_without_auth_nobody_asks_for_it(render):
    objects = render(*STORE, "--set", "prefect.auth.enabled=false")
    assert "AUTH" not in json.dumps(list(objects.values()))


def test_flow_jobs_come_back_and_never_twice(render):
    job = template_of(render(*values_of("gpu")))["job_configuration"]["job_manifest"]
    assert job["spec"]["backoffLimit"] == 3
    assert job["spec"]["podReplacementPolicy"] == "Failed"
    assert job["metadata"]["generateName"] == "{{ name }}-"
    pod = job["spec"]["template"]["spec"]
    # prefect-kubernetes looks for these in the pod's spec.
    assert (pod["parallelism"], pod["completions"]) == (1, 1)
    assert pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] == 10
    assert pod["serviceAccountName"] == "retrace-flow"
    (container,) = pod["containers"]
    assert container["image"] == "{{ image }}"
    assert [item["name"] for item in container["env"]] == ["HF_TOKEN"]


def test_prefect_makes_the_flow_job_of_the_template(render, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://server/api")
    template = template_of(render(*values_of("gpu")))
    variables = template["variables"]["properties"]
    used = set(re.findall(r"{{ (\w+) }}", json.dumps(template["job_configuration"])))
    assert used == set(variables)
    values = {"image": "retrace/flow:other", "env": {"SOME": "text"}}
    # No block is referred to, so no server is asked.
    making = KubernetesWorkerJobConfiguration.from_template_and_values(template, values, object())
    job = asyncio.run(making)
    run = FlowRun(id=uuid4(), flow_id=uuid4(), name="first", deployment_id=None)
    job.prepare_for_flow_run(run, flow=Flow(id=run.flow_id, name="retrace"))
    pod = job.job_manifest["spec"]["template"]
    # What network policies choose by, and what tells whose pod it is.
    assert pod["metadata"]["labels"]["app.kubernetes.io/component"] == "flow"
    assert pod["metadata"]["labels"]["app.kubernetes.io/instance"] == "retrace"
    assert pod["metadata"]["labels"]["prefect.io/flow-run-id"] == str(run.id)
    (container,) = pod["spec"]["containers"]
    assert container["image"] == "retrace/flow:other"
    assert container["args"] == ["prefect", "flow-run", "execute"]
    assert container["resources"]["limits"] == {"memory": "1Gi"}
    environment = {item["name"]: item for item in container["env"]}
    assert environment["SOME"]["value"] == "text"
    assert environment["PREFECT__FLOW_RUN_ID"]["value"] == str(run.id)
    assert environment["HF_TOKEN"]["valueFrom"]["secretKeyRef"]["name"] == "hugging-face"
    assert {"configMapRef": {"name": "retrace-env"}} in container["envFrom"]


def test_rights_are_few_and_in_one_namespace(render):
    objects = render(*values_of("trial"))
    kinds = {kind for kind, _ in objects}
    assert not kinds & {"ClusterRole", "ClusterRoleBinding"}
    roles = {
        name: {
            (r, verb) for rule in body["rules"] for r in rule["resources"] for verb in rule["verbs"]
        }
        for (kind, name), body in objects.items()
        if kind == "Role"
    }
    assert set(roles) == {"retrace-worker", "retrace-flow", "retrace-janitor"}
    for name, rights in roles.items():
        assert not any("secrets" in right or "*" in right for right in rights), name
    assert ("jobs", "create") not in roles["retrace-janitor"]
    assert ("pods", "delete") not in roles["retrace-flow"]
    assert objects["ServiceAccount", "retrace-job"]["automountServiceAccountToken"] is False


@pytest.mark.parametrize(
    "change",
    [
        "worker.maxRuns=9",
        "presets.mine.trainer.seed=1",
        "rollout.shmSize=2Gi",
        "flow.backoffLimit=5",
    ],
)
def test_a_change_of_what_is_registered_rolls_the_worker(render, change):
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


def test_a_database_takes_the_volumes_place(render):
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


@pytest.mark.parametrize("values", CI, ids=lambda path: path.name)
def test_presets_are_run_configurations(render, values, tmp_path):
    for name, text in render("--values", values)["ConfigMap", "retrace-presets"]["data"].items():
        (tmp_path / name).write_text(text)
        assert load_config(tmp_path / name).config.trainer.total_training_steps > 0


def test_quickstart_is_the_example(tmp_path):
    example = ROOT / "examples" / "quickstart.yaml"
    overrides = [f"{key}={value}" for key, value in QUICKSTART.items()]
    ours = load_config(CHART / "files" / "presets" / "quickstart.yaml").config
    assert ours == load_config(example, overrides).config


def test_presets_are_merged_by_name(render, tmp_path):
    values = tmp_path / "values.yaml"
    values.write_text(
        "store: {uri: s3://runs}\n"
        "presets:\n"
        "  quickstart:\n"
        "    trainer: {total_training_steps: 3}\n"
        "    actor_rollout_ref: {rollout: {n: 4}, actor: {optim: {lr: 1.0e-7}}}\n"
        "  large:\n"
        "    data: {train_files: a.parquet}\n"
        "    actor_rollout_ref: {model: {path: m}}\n"
        "    trainer: {experiment_name: large, seed: 20000000}\n"
    )
    presets = render("--values", values)["ConfigMap", "retrace-presets"]["data"]
    loaded = {}
    for name, text in presets.items():
        (tmp_path / name).write_text(text)
        loaded[name] = load_config(tmp_path / name).config
    quickstart = loaded["quickstart.yaml"]
    assert quickstart.trainer.total_training_steps == 3
    assert quickstart.trainer.nnodes == 2
    # Helm reads YAML 1.1, where the key `n` is false.
    assert quickstart.actor_rollout_ref.rollout.n == 4
    assert quickstart.actor_rollout_ref.rollout.val_kwargs.n == 4
    assert quickstart.actor_rollout_ref.actor.optim.lr == 1e-7
    assert loaded["large.yaml"].trainer.seed == 20_000_000


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([], 'store.uri: found "", expected s3://BUCKET/PREFIX; set store.uri, or minio.enabled'),
        (["store.uri=/data"], 'store.uri: found "/data", expected s3://BUCKET/PREFIX; pods share'),
        (["store.uri=s3://B/x"], 'store.uri: found "s3://B/x", expected s3://BUCKET or'),
        (["store.endpoint=minio:9000"], 'store.endpoint: found "minio:9000", expected http://'),
        (["store.caBundle.secret=a,store.caBundle.configMap=b"], "store.caBundle: found configMap"),
        (["store.existingSecret=My_Secret"], 'store.existingSecret: found "My_Secret", expected'),
        (["minio.enabled=true"], 'store.uri: found "s3://runs/retrace" beside minio.enabled=true'),
        (["images.flow.digest=sha256:12"], 'images.flow.digest: found "sha256:12", expected sha'),
        (["images.rollout.repository=a/b:1"], "put what follows the last colon into images.rollo"),
        (["images.training.tag=a:b"], 'images.training.tag: found "a:b", expected a tag'),
        (["images.flow.taag=1"], "at '/images/flow': additional properties 'taag' not allowed"),
        (["images.pullPolicy=always"], "at '/images/pullPolicy': value must be one of 'Always'"),
        (["gpuResource=gpu"], 'gpuResource: found "gpu", expected a resource with its domain'),
        (["rollout.gpus=two"], "at '/rollout/gpus': got string, want null or integer"),
        (["rollout.resources.limits.memory=4Gb"], "rollout.resources.limits.memory: found"),
        (
            [r"training.resources.limits.nvidia\.com/gpu=8"],
            "training.resources.limits: found nvidia.com/gpu, expected CPU and memory",
        ),
        (["training.shmSize=big"], 'training.shmSize: found "big", expected a quantity'),
        (["rollout.tolerations[0].efect=NoSchedule"], "additional properties 'efect' not allowed"),
        (["rollout.volumes[0].name=tmp"], 'rollout.volumes: found the name "tmp", which the chart'),
        (
            ["flow.volumeMounts[0].name=x,flow.volumeMounts[0].mountPath=/x"],
            'flow.volumeMounts: found "x" at /x, expected one of flow.volumes (none)',
        ),
        (["flow.backoffLimit=0"], "at '/flow/backoffLimit': minimum: got 0, want 1"),
        (["flow.resources.limits=null"], "missing property 'limits'"),
        (["images.flow=null"], "missing property 'flow'"),
        (["prefect.server.enabled=false"], 'prefect.apiUrl: found "" with prefect.server.enabled'),
        (["prefect.server.enabled=false"], 'prefect.auth.existingSecret: found "" with prefect.s'),
        (["prefect.apiUrl=http://p/api"], "beside prefect.server.enabled=true, expected one serv"),
        (
            ["prefect.server.database.existingSecret=db"],
            "prefect.server.persistence.enabled: found true beside prefect.server.database",
        ),
        (["presets.My_Run.a=1"], 'presets: found the name "My_Run", expected a DNS label'),
        (["presets.mine=1"], "at '/presets/mine': got number, want object"),
        (["fullnameOverride=My"], 'fullnameOverride: found "My", expected a DNS label'),
        (["worker.workPool=a/b"], 'worker.workPool: found "a/b", expected a name of letters'),
        (["janitor.intervalSeconds=0"], "at '/janitor/intervalSeconds': minimum: got 0, want 1"),
    ],
    ids=lambda item: item[0] if isinstance(item, list) and item else None,
)  # fmt: skip
def test_wrong_values_are_refused(refuse, values, said):
    store = [] if not values else STORE
    assert said in refuse(*store, *(part for value in values for part in ("--set", value)))


def test_all_problems_are_shown_at_once(refuse):
    said = refuse("--set", "images.flow.digest=sha1,gpuResource=gpu")
    assert all(
        f"- {key}: found" in said for key in ("images.flow.digest", "gpuResource", "store.uri")
    )


def test_names_follow_the_release(helm):
    for release, server in (("retrace", "retrace-server"), ("lab", "lab-retrace-server")):
        text = helm("template", release, CHART, *STORE).stdout
        assert f"name: {server}\n" in text


@pytest.fixture(scope="module")
def chart_readme():
    spec = importlib.util.spec_from_file_location("chart_readme", ROOT / "scripts/chart_readme.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_readme_and_schema_are_generated_from_the_values(chart_readme):
    for path, text in chart_readme.outputs().items():
        assert path.read_text() == text, f"{path.name}: run `python scripts/chart_readme.py`"


def test_every_value_is_described(chart_readme):
    with pytest.raises(ValueError, match="size has no comment above it"):
        chart_readme.read_values("# A group.\ngroup:\n  # One.\n  one: 1\n  size: 2\n")
    schema = json.loads((CHART / "values.schema.json").read_text())

    def closed(node):
        if "properties" in node:
            assert node["additionalProperties"] is False
            for below in node["properties"].values():
                assert below["description"]
                closed(below)

    closed({**schema, "definitions": {}})
