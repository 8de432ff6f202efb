"""Values that the chart refuses, and the documentation generated from values.yaml."""

import importlib.util
import json
import sys

import pytest

from tests.unit.chart.objects import CHART, ROOT, STORE


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([], 'store.uri: found "", expected s3://BUCKET/PREFIX; set store.uri, or minio.enabled'),
        ([], 'images.rollout.repository: found "", expected the image\'s name in your registry'),
        (["store.uri=/data"], 'store.uri: found "/data", expected s3://BUCKET/PREFIX; set the URI'),
        (["store.uri=s3://B/x"], 'store.uri: found "s3://B/x", expected s3://BUCKET or'),
        (["store.endpoint=minio:9000"], 'store.endpoint: found "minio:9000", expected http://'),
        (["store.caBundle.secret=a,store.caBundle.configMap=b"], "store.caBundle: found configMap"),
        (["store.existingSecret=My_Secret"], 'store.existingSecret: found "My_Secret", expected'),
        (["minio.enabled=true"], 'store.uri: found "s3://runs/retrace" with minio.enabled=true'),
        (["images.flow.digest=sha256:12"], 'images.flow.digest: found "sha256:12", expected sha'),
        (["images.rollout.repository=a/b:1"], "move the part after the last colon to images.roll"),
        (["images.training.tag=a:b"], 'images.training.tag: found "a:b", expected a tag'),
        (["images.flow.taag=1"], "at '/images/flow': additional properties 'taag' not allowed"),
        (["images.pullPolicy=always"], "at '/images/pullPolicy': value must be one of 'Always'"),
        (["gpuResource=gpu"], 'gpuResource: found "gpu", expected a resource name with its domain'),
        (["rollout.gpus=two"], "at '/rollout/gpus': got string, want null or integer"),
        (["rollout.resources.limits.memory=4Gb"], "rollout.resources.limits.memory: found"),
        (
            [r"training.resources.limits.nvidia\.com/gpu=8"],
            "training.resources.limits: found nvidia.com/gpu, expected CPU and memory",
        ),
        (["training.shmSize=big"], 'training.shmSize: found "big", expected a quantity'),
        (["rollout.tolerations[0].efect=NoSchedule"], "additional properties 'efect' not allowed"),
        (
            ["rollout.volumes[0].name=tmp"],
            'rollout.volumes: found the name "tmp", expected a name that the chart does not use',
        ),
        (
            ["flow.volumeMounts[0].name=x,flow.volumeMounts[0].mountPath=/x"],
            'flow.volumeMounts: found "x" at /x, expected one of flow.volumes (none)',
        ),
        (
            [r"rollout.podLabels.retrace\.dev/run=x"],
            "rollout.podLabels: found retrace.dev/run, expected a label outside the domains that",
        ),
        (
            [r"flow.podLabels.app\.kubernetes\.io/component=x"],
            "flow.podLabels: found app.kubernetes.io/component, expected a label outside",
        ),
        (["flow.backoffLimit=0"], "at '/flow/backoffLimit': minimum: got 0, want 1"),
        (["flow.resources.limits=null"], "missing property 'limits'"),
        (["images.flow=null"], "missing property 'flow'"),
        (["prefect.server.enabled=false"], 'prefect.apiUrl: found "" with prefect.server.enabled'),
        (["prefect.server.enabled=false"], 'prefect.auth.existingSecret: found "" with prefect.s'),
        (
            ["prefect.server.enabled=false,prefect.apiUrl=https://api.prefect.cloud/api/x"],
            "expected a self-hosted Prefect server: Prefect Cloud requires an API key",
        ),
        (["prefect.apiUrl=http://p/api"], "with prefect.server.enabled=true, expected only one s"),
        (
            ["prefect.server.database.existingSecret=db"],
            "prefect.server.persistence.enabled: found true with prefect.server.database",
        ),
        (["presets.My_Run.a=1"], 'presets: found the name "My_Run", expected a DNS label'),
        (["presets.mine=1"], "at '/presets/mine': got number, want object"),
        (["fullnameOverride=My"], 'fullnameOverride: found "My", expected a DNS label'),
        (["worker.workPool=a/b"], 'worker.workPool: found "a/b", expected at most 63 letters'),
        (["worker.workPool=a--b"], 'worker.workPool: found "a--b", expected at most 63 letters'),
        (["janitor.intervalSeconds=0"], "at '/janitor/intervalSeconds': minimum: got 0, want 1"),
    ],
    ids=lambda item: item[0] if isinstance(item, list) and item else None,
)  # fmt: skip
def test_invalid_values_are_refused(refuse, values, said):
    store = [] if not values else STORE
    assert said in refuse(*store, *(part for value in values for part in ("--set", value)))


def test_one_error_lists_all_problems(refuse):
    said = refuse("--set", "images.flow.digest=sha1,gpuResource=gpu")
    assert all(
        f"- {key}: found" in said for key in ("images.flow.digest", "gpuResource", "store.uri")
    )


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
