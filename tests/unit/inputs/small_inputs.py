"""The files of a small run: model folder, prompts in verl's layout, reward file, settings."""

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config.reading.load import load_config
from pipeline.config.tree import RunConfig
from pipeline.errors import InputError
from pipeline.inputs.check import check_inputs
from pipeline.inputs.checked import CheckedInputs
from pipeline.inputs.stage import StagedRun, stage, staged_change
from pipeline.run import keys
from pipeline.run.attempts import read_attempt, take_attempt
from pipeline.run.commit import commit, new_write_id
from pipeline.run.restarts import attempt_count
from pipeline.run.uses import ATTEMPT
from pipeline.store import Store
from tests.attempts import dead_owner

REPLAY = "actor_rollout_ref.actor.router_replay"
R3 = (f"{REPLAY}.mode=R3", "actor_rollout_ref.rollout.enable_rollout_routing_replay=True")
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)
"""


def verl_rows(count: int) -> list[dict[str, Any]]:
    """Return prompts as verl's own preprocessing writes them."""
    return [
        {
            "data_source": "add",
            "prompt": [{"role": "user", "content": f"{number} + {number} = ?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(2 * number)},
            "extra_info": {"index": number},
        }
        for number in range(count)
    ]


def write_prompts(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write rows to a Parquet file, and return its path."""
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def write_inputs(folder: Path, model: Path) -> Path:
    """Write everything that a run needs, and return the settings file."""
    write_prompts(folder / "train.parquet", verl_rows(10))
    (folder / "reward.py").write_text(REWARD)
    settings = folder / "config.yaml"
    settings.write_text(
        f"""
data:
  train_files: {folder}/train.parquet
  train_batch_size: 4
  max_prompt_length: 32
  max_response_length: 8
actor_rollout_ref:
  model: {{path: {model}}}
  actor: {{ppo_mini_batch_size: 4}}
  rollout: {{n: 2}}
custom_reward_function: {{path: {folder}/reward.py}}
trainer: {{experiment_name: test, total_training_steps: 2}}
store: {{uri: {folder}/store}}
"""
    )
    return settings


def load(settings: Path, *overrides: str) -> RunConfig:
    """Return the settings with overrides applied."""
    return load_config(settings, overrides).config


def check(settings: Path, *overrides: str) -> CheckedInputs:
    """Check the inputs, and return them."""
    return check_inputs(load(settings, *overrides))


def check_error(settings: Path, *overrides: str) -> tuple[str, ...]:
    """Return the problems that the check finds."""
    with pytest.raises(InputError) as caught:
        check(settings, *overrides)
    return caught.value.problems


def the_error(settings: Path, *overrides: str) -> str:
    """Return the only problem that the check finds."""
    (problem,) = check_error(settings, *overrides)
    return problem


def error_with_file(settings: Path, model: Path, name: str, content: str | None) -> str:
    """Replace a file in a copy of the model, or remove it (None), and return the only problem."""
    copy = settings.parent / "copy"
    shutil.copytree(model, copy)
    if content is None:
        (copy / name).unlink()
    else:
        (copy / name).write_text(content)
    return the_error(settings, f"actor_rollout_ref.model.path={copy}")


def use(store: Store, key: str = keys.rollout(0, 0)) -> None:
    """Commit a shard or another object, as a worker would."""
    commit(store, key, {"maker": {ATTEMPT: attempt_count(store) - 1}}, new_write_id())


def change_of(run: StagedRun) -> str | None:
    """Return what the newest start changed in its run; None if it changed nothing."""
    return read_attempt(run.store, attempt_count(run.store) - 1).reason or None


def prepare(config: RunConfig) -> StagedRun:
    """Start a run as a flow does, until its workers would start; the start's owner is dead."""
    inputs = check_inputs(config)
    change = partial(staged_change, inputs)
    take_attempt(inputs.store, inputs.config, dead_owner(), change=change)
    return stage(inputs)
