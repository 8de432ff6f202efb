"""Fixtures that call Helm for the tests of the chart."""

import shutil
import subprocess

import pytest
import yaml

from tests.unit.chart.objects import CHART


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
    """Render a release `retrace` in the namespace `runs`.

    Return its manifests, keyed by (kind, name).
    """

    def run(*arguments):
        result = helm("template", "retrace", CHART, "--namespace", "runs", *arguments)
        assert result.returncode == 0, result.stderr
        objects = [body for body in yaml.safe_load_all(result.stdout) if body]
        names = [(body["kind"], body["metadata"]["name"]) for body in objects]
        assert len(set(names)) == len(names), "two objects have the same name"
        return dict(zip(names, objects, strict=True))

    return run


@pytest.fixture(scope="module")
def refuse(helm):
    """Render values that Helm must refuse; return its error output."""

    def run(*arguments):
        result = helm("template", "retrace", CHART, "--namespace", "runs", *arguments)
        assert result.returncode != 0, "Helm rendered the values"
        return result.stderr

    return run
