"""The example in examples/mismatch at a small size, with real vLLM and Megatron."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.page import blocks_of
from examples.mismatch.arms import ARMS, arm_runs
from examples.mismatch.make_policy import ADDITION, make_policy
from examples.mismatch.results import ENTROPY, GRAD_NORM, KL, REWARD, read_result
from tests.exhaustive import TEST_ALL, sample_or_all
from tests.paths import ROOT

pytestmark = pytest.mark.integration

TINY = (
    "trainer.total_training_steps=1",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=4",
)


def mismatch(out: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "examples.mismatch", "--out", str(out), *words, *TINY],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=3600,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-8000:]
    return done.stdout


@pytest.mark.usefixtures("on_prefect_server")
def test_arms_run_once_and_appear_on_the_page(tmp_path: Path):
    """An arm's results appear on the page, and repeating the command does not run the arm again.

    make test-all runs all arms, with a policy and a dense twin that the example trains briefly.
    """
    pytest.importorskip("matplotlib", reason="no matplotlib: make install")
    for kind in ("moe", "dense"):
        if TEST_ALL:
            make_policy(kind, tmp_path / "policy" / kind, steps=2)
        else:
            shutil.copytree(ADDITION / "model", tmp_path / "policy" / kind)
    names = sample_or_all(["r3"], [arm.name for arm in ARMS])
    asked = ["--arms", ",".join(names)]
    printed = mismatch(tmp_path, *asked)
    assert f"0 of {len(names)} arms are finished" in printed
    for run in arm_runs(names, False, tmp_path):
        result = read_result(run)
        assert result is not None
        assert result.steps == 1
        assert None not in (result.values(metric)[0] for metric in (KL, ENTROPY, REWARD, GRAD_NORM))
        assert (result.agreement_by_layer[0] is not None) == ("r2" in run.name or "r3" in run.name)
        assert f"\n{run.name}: retrace run " in printed
    page = (tmp_path / "mismatch.md").read_text()
    lines = blocks_of(page)["results"].splitlines()
    first_cells = {line.split("|")[1].strip() for line in lines if line.startswith("|")}
    assert [arm.name for arm in ARMS if arm.label in first_cells] == names

    again = mismatch(tmp_path, *asked)
    assert f"{len(names)} of {len(names)} arms are finished" in again
    assert "retrace run" not in again
    assert (tmp_path / "mismatch.md").read_text() == page
