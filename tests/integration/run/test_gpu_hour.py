"""The step of scripts/gpu_hour.py that kills and resumes a run, on a CPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from scripts import gpu_hour
from tests.exhaustive import TEST_ALL
from tests.integration.run.retrace_runs import EXAMPLE
from tests.paths import ROOT

pytestmark = pytest.mark.integration


@pytest.mark.skipif(not TEST_ALL, reason="takes minutes; unit tests cover the step's checks")
def test_a_killed_run_continues_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    example = yaml.safe_load(EXAMPLE.read_text())
    example["data"] |= {"train_batch_size": 8, "val_files": None}
    policy = example["actor_rollout_ref"]
    policy["actor"]["ppo_mini_batch_size"] = policy["rollout"]["n"] = 4
    small = tmp_path / "small.yaml"
    small.write_text(yaml.safe_dump(example))
    monkeypatch.setattr(gpu_hour, "DEVICE", "cpu")
    monkeypatch.setattr(gpu_hour, "EXAMPLE", str(small))
    record = (
        f"{gpu_hour.ACTOR}.router_replay.record_file={tmp_path}/set",
        f"trainer.total_training_steps={gpu_hour.RESUMED}",
        "trainer.val_before_train=false",
    )
    words = gpu_hour.run_words(tmp_path, "quickstart", *record)
    subprocess.run((sys.executable, *words), cwd=ROOT, check=True)
    gpu_hour.resume(tmp_path)
    log = gpu_hour.trainer_log(tmp_path).read_text()
    assert log.count(f"{gpu_hour.CONTINUED}{gpu_hour.EVERY}") == 1
