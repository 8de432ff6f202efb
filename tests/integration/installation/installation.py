"""Write the files and variables that the chart gives to registration, janitor and smoke test."""

import json
import secrets
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from tests.patience import PATIENCE_S

RETRIES = 7
"""How many times a request is retried (after 2, 4, 8, ... s) if SQLite is locked."""
PATIENT = """
import runpy, sys
from pipeline.installation import programs
programs._TIMEOUT_S, programs._RETRIES = float(sys.argv.pop(1)), int(sys.argv.pop(1))
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
"""A script that runs a program like `python -m`, with longer timeouts and more retries."""
IMAGE = "docker.io/retrace/flow:test"
TEMPLATE = {
    "variables": {
        "type": "object",
        "properties": {"image": {"type": "string"}, "command": {"type": "string"}},
    },
    "job_configuration": {"image": "{{ image }}", "command": "{{ command }}"},
}


def start_program(module: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a program of the installation, as its pod does."""
    command = [sys.executable, "-c", PATIENT, str(PATIENCE_S), str(RETRIES), module, *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


@dataclass
class Installation:
    """One installation with its own work pool."""

    folder: Path
    environment: pytest.MonkeyPatch
    namespace: str = "first"
    pool: str = field(default_factory=lambda: f"pool-{secrets.token_hex(4)}")
    store_uri: str = "s3://retrace/runs"

    @property
    def template(self) -> Path:
        return self.folder / "base-job-template.json"

    def set(self, name: str, value: str) -> None:
        self.environment.setenv(name, value)

    def write(self) -> None:
        """Write the files and set the variables according to the current fields."""
        self.template.write_text(json.dumps(TEMPLATE))
        presets = self.folder / "presets"
        presets.mkdir(exist_ok=True)
        (presets / "quickstart.yaml").write_text("{}")
        cluster = {
            "namespace": self.namespace,
            "instance": "retrace",
            "storeUri": self.store_uri,
            "gpuResource": "",
            "jobs": {
                "ttlSecondsAfterFinished": 60,
                "activeDeadlineSeconds": 600,
                "queueName": "",
                "labels": {},
            },
            "rollout": {"gpus": None, "template": {}},
            "training": {"gpus": None, "template": {}},
        }
        (self.folder / "cluster.yaml").write_text(yaml.safe_dump(cluster))
        self.set("RETRACE_CLUSTER", str(self.folder / "cluster.yaml"))
        self.set("RETRACE_PRESETS", str(presets))
        self.set("RETRACE_BASE_JOB_TEMPLATE", str(self.template))
        self.set("RETRACE_WORK_POOL", self.pool)
        self.set("RETRACE_FLOW_IMAGE", IMAGE)
        self.set("RETRACE_MAX_RUNS", "3")
        self.set("RETRACE_POD_START_TIMEOUT_S", "600")
