"""DAPO on the example with real vLLM and Megatron-core: groups without variance are replaced."""

from pathlib import Path

import pytest

from pipeline.report.run_metrics import all_metrics, read_validation
from pipeline.run.plan import find_step_plans
from pipeline.store import open_store
from pipeline.traces import read_manifest
from tests.exhaustive import sample_or_all
from tests.integration.run.conftest import Query
from tests.integration.run.retrace_runs import command, run, small

pytestmark = pytest.mark.integration

DAPO = (
    "algorithm.filter_groups.enable=True",
    "algorithm.filter_groups.metric=acc",
    "algorithm.filter_groups.max_num_gen_batches=8",
    "algorithm.mask_truncated_samples=True",
    "actor_rollout_ref.actor.clip_ratio_high=0.28",
    "reward.reward_kwargs.overlong_buffer_cfg.enable=True",
    "reward.reward_kwargs.overlong_buffer_cfg.len=4",
    "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5",
)
WHOLE = (
    "trainer.total_training_steps=12",
    "actor_rollout_ref.actor.optim.lr=2e-4",
    "data.val_files=examples/addition/val.parquet",
    "data.train_batch_size=32",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "actor_rollout_ref.rollout.n=8",
)


@pytest.mark.parametrize("whole", sample_or_all([False], [True]))
def test_dapo_replaces_groups_without_variance(
    tmp_path: Path, on_prefect_server: Query, whole: bool
):
    """Each step seals the required number of groups, and replaces groups without variance.

    The small run also generates the next step during training. `verify` accepts both runs. In the
    full run (make test-all), the validation reward after training is at least 0.1 higher than
    before it.
    """
    more = WHOLE if whole else ("trainer.max_staleness=1", "data.gen_batch_size=6")
    run(*small(tmp_path, "dapo", *DAPO, *more))
    uri = f"{tmp_path}/store/dapo"
    store = open_store(uri)
    groups = 32 if whole else 8
    replaced = 0
    for step in all_metrics(store):
        manifest = read_manifest(store, step.step)
        rows = manifest.rows.select(["group", "reward"]).to_pylist()
        found = {row["group"] for row in rows}
        made = sum(len(plan.prompts) for plan in find_step_plans(store, step.step))
        assert (len(found), made - len(found)) == (groups, len(manifest.rejected))
        assert step.values["reward/groups_rejected"] == len(manifest.rejected)
        replaced += sum(group.reason.startswith("acc is ") for group in manifest.rejected)
    assert replaced > 0
    command("traces", "verify", uri)
    if whole:
        before, after = (read_validation(store, version) for version in (0, 12))
        assert before is not None
        assert after is not None
        assert after.reward - before.reward >= 0.1
