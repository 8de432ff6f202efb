"""Create the stored objects of a run, so that a rollout worker can run alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config.tree import RunConfig
from pipeline.model.geometry import Geometry
from pipeline.policies.versions import refer_policy
from pipeline.run import keys
from pipeline.run.attempts import Attempt
from pipeline.run.commit import DataFile, commit, new_write_id, put_file, sha256
from pipeline.run.description import RunDescription, StagedInputs, create_description
from pipeline.run.plan import (
    PlannedPrompt,
    Sampling,
    StepPlan,
    ValidationPlan,
    publish_plan,
)
from pipeline.store import Store
from tests.attempts import make_attempt
from tests.data_files import put_data
from tests.paths import ROOT
from tests.tiny_models import make_tiny
from tests.weights import digest_of

GEOMETRY = Geometry(experts=16, topk=4, layers=(0, 1, 2, 3))
TEMPERATURE = 0.8

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if extra_info["raises"]:
        raise KeyError("no such rubric")
    return {"score": len(solution_str) % 3, "truth": ground_truth, "source": data_source}
"""


def make_run(
    store: Store, folder: Path, validations=(), raises=(), on_error="fail", reward=REWARD
) -> list[Path]:
    """Create a run with 5 prompts, recorded routes and one worker, and write its attempt 0.

    Args:
        store: The run's store.
        folder: The folder in which to create two policies.
        validations: The policy versions to validate.
        raises: The prompts for which the reward function raises an exception.
        on_error: The value of reward.on_error.
        reward: The source of the reward function.

    Returns:
        The folders of the two policies; the store contains only the first one, as version 0.
    """
    policies = [make_tiny(folder / f"policy{i}", "qwen3_moe", seed=i) for i in range(2)]
    config = RunConfig.model_validate(
        {
            "data": {"max_prompt_length": 64, "max_response_length": 24},
            "actor_rollout_ref": {
                "model": {"path": "staged"},
                "rollout": {
                    "enable_rollout_routing_replay": True,
                    "dtype": "float32",
                    "max_num_seqs": 16,
                    "max_num_batched_tokens": 256,
                },
            },
            "trainer": {"experiment_name": "by-hand", "total_training_steps": 2},
            "custom_reward_function": {"path": "reward.py"},
            "reward": {"on_error": on_error},
        }
    )
    staged = {
        path.name: put_file(store, keys.input_file("model", path.name), path)
        for path in sorted(policies[0].iterdir())
    }
    inputs = StagedInputs(
        prompts=_stage(store, "prompts.parquet", _prompts(raises)),
        val_prompts=_stage(store, "val_prompts.parquet", _prompts(())),
        reward=_stage(store, "reward.py", reward.encode()),
        model=staged,
    )
    settings = config.model_dump(mode="json")
    create_description(store, RunDescription("by-hand", settings, inputs, GEOMETRY, {}))
    refer_policy(store, 0, list(staged.values()), digest_of(policies[0]))
    begin(store, 0, validations)
    return policies


def begin(store: Store, number: int, validations=()) -> Attempt:
    """Write attempts/NNN.json.

    Args:
        store: The run's store.
        number: The attempt's number.
        validations: The policy versions to validate.
    """
    return make_attempt(store, number, steps=2, save_freq=1, validations=validations)


def plan(store: Store, step: int, version: int, validation: bool = False) -> None:
    """Publish a plan of 5 prompts in 2 shards. For a step, prompt 3 is in its second epoch.

    Args:
        store: The run's store.
        step: The step.
        version: The policy version that generates the samples.
        validation: Whether to plan a validation instead of the step.
    """
    common = {
        "policy_version": version,
        "prompts": tuple(PlannedPrompt(row, int(row == 3 and not validation)) for row in range(5)),
        "n": 1 if validation else 3,
        "sampling": Sampling(0.0 if validation else TEMPERATURE, 1.0, -1, 24),
        "shards": 2,
        "routes": not validation,
        "seed": 11,
    }
    publish_plan(store, ValidationPlan(**common) if validation else StepPlan(**common, step=step))


def stop(store: Store, number: int) -> None:
    """Write attempts/NNN.stop.json."""
    body = {"reason": "finished", "message": ""}
    commit(store, keys.stop(number), body, new_write_id())


def start_worker(store: Store, number: int) -> subprocess.Popen[str]:
    """Start a rollout worker."""
    arguments = ("--run-uri", store.uri, "--worker", "0", "--attempt", str(number))
    return subprocess.Popen(
        [sys.executable, "-m", "operators.rollout", *arguments],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def _prompts(raises) -> bytes:
    rows = []
    for row in range(5):
        rows.append(
            {
                "prompt_id": row,
                "messages": json.dumps([{"role": "user", "content": f"prompt {row}"}]),
                "token_ids": [2, *range(20, 50 + 3 * row), 2],
                "data_source": "by-hand",
                "ground_truth": json.dumps(str(row)),
                "extra_info": json.dumps({"raises": row in raises}),
            }
        )
    types = {"token_ids": pa.list_(pa.uint32()), "prompt_id": pa.int64()}
    schema = pa.schema([(name, types.get(name, pa.string())) for name in rows[0]])
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, schema), sink)
    return sink.getvalue().to_pybytes()


def _stage(store: Store, name: str, data: bytes) -> DataFile:
    return put_data(store, keys.input_file(sha256(data), name), data)
