"""Samples and sealed steps for the tests of the trace format."""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.run import keys
from pipeline.run.commit import new_write_id
from pipeline.run.description import RunDescription, StagedInputs, create_description
from pipeline.run.plan import PlannedPrompt, Sampling, StepPlan, ValidationPlan, Window
from pipeline.run.prompt_table import StoredPrompts
from pipeline.store import Store
from pipeline.traces import (
    Geometry,
    Manifest,
    NewTrainerRoutes,
    Provenance,
    Routes,
    Sample,
    VersionSpan,
    expected_ids,
    group_id,
    read_manifest,
    sample_id,
    sampling_seed,
    seal,
    seal_trainer_routes,
    shard_ids,
    write_shard,
    write_trainer_routes,
)
from pipeline.traces.format.header import TraceFile
from tests.data_files import put_data

GEOMETRY = Geometry(experts=16, topk=4, layers=(1, 2, 5))
R3 = Provenance("R3", 0, "vllm 0.32.0")
R2 = Provenance("R2", 0, "megatron-core 0.16.1")
STAGES = ((0, (1, 2)), (1, (5,)))
"""Pipeline stages and their MoE layers; together, they have all of GEOMETRY's layers."""


def random_sets(rng: np.random.Generator, rows: int, geometry: Geometry) -> np.ndarray:
    """Return random sets [rows, L, K], ascending, in the geometry's dtype.

    Args:
        rng: The source of randomness.
        rows: The number of rows.
        geometry: The number of experts, the top-k and the layers.
    """
    scores = rng.random((rows, len(geometry.layers), geometry.experts))
    sets = np.argsort(scores, axis=-1)[..., : geometry.topk]
    return np.sort(sets, axis=-1).astype(geometry.dtype)


def make_samples(
    prompts: int = 3,
    n: int = 2,
    geometry: Geometry = GEOMETRY,
    seed: int = 0,
    step: int = 0,
    version: int = 0,
    known: float = 0.9,
    prompt_seed: int | None = None,
) -> list[Sample]:
    """Return groups of samples with random tokens and routes.

    The prompt rows of a group's samples are equal; their other rows differ.

    Args:
        prompts: The number of groups.
        n: The number of samples per group.
        geometry: The geometry of the routes.
        seed: The seed of tokens and routes.
        step: The step in the samples' ids.
        version: The policy version.
        known: The probability that a response's row is valid. A sample with other rows is aborted.
        prompt_seed: The seed of the prompts' tokens; None if `seed` also determines these.
    """
    rng = np.random.default_rng(seed)
    of_prompts = rng if prompt_seed is None else np.random.default_rng(prompt_seed)
    samples = []
    for row in range(prompts):
        P = int(of_prompts.integers(1, 9))
        prompt_P = of_prompts.integers(0, 100, P).astype(np.uint32)
        shared = random_sets(rng, P, geometry)
        for k in range(n):
            G = int(rng.integers(1, 12))
            sets = random_sets(rng, P + G - 1, geometry)
            valid = rng.random(P + G - 1) < known
            sets[:P] = shared[: len(sets)]
            valid[:P] = True
            id = sample_id(step, str(row), k)
            samples.append(
                Sample(
                    id=id,
                    group=group_id(step, str(row)),
                    prompt_id=str(row),
                    prompt_tokens_P=prompt_P,
                    response_tokens_G=rng.integers(0, 100, G).astype(np.uint32),
                    loss_mask_G=rng.random(G) < 0.9,
                    logprobs_G=-rng.random(G).astype(np.float32),
                    finish_reason="stop" if valid.all() else "abort",
                    version_spans=(VersionSpan(version, 0, G),),
                    seed=sampling_seed(1, id),
                    reward=float(rng.random()),
                    reward_error=None,
                    extras={"format": k},
                    routes=Routes(sets, valid),
                )
            )
    return samples


def make_plan(prompts: int = 3, n: int = 2, step: int = 0, version: int = 0) -> StepPlan:
    """Return the plan for the samples of `make_samples`.

    Args:
        prompts, n: The number of prompts, and of samples per prompt.
        step: The plan's step.
        version: The plan's policy version.
    """
    return StepPlan(**_common(prompts, n), step=step, policy_version=version)


def make_window(prompts: int = 3, n: int = 2, step: int = 0, version: int = 0) -> Window:
    """Return the window of a step whose only plan is `make_plan`'s.

    Args:
        prompts, n: The number of prompts, and of samples per prompt.
        step: The plan's step.
        version: The plan's policy version.
    """
    return Window((make_plan(prompts, n, step, version),), prompts)


def samples_of(plan: StepPlan, shard: int, rewards: Callable[[str], float | None]) -> list[Sample]:
    """Return the samples that a worker generates for a shard.

    All calls return the same prompt for the same row of the prompt table, and the same response for
    the same id.

    Args:
        plan: The step's plan.
        shard: The shard's number in the plan.
        rewards: Returns the reward for a sample's id, or None if the reward function failed.
    """
    made = []
    for id in shard_ids(plan, shard):
        group, _, k = id.rpartition("/")
        row = int(group.partition("/")[2].split(".")[0])
        prompt_P = np.random.default_rng(row).integers(0, 100, 3 + row % 3).astype(np.uint32)
        rng = np.random.default_rng(sampling_seed(plan.seed, id))
        G = int(rng.integers(1, 6))
        rows = len(prompt_P) + G - 1
        reward = rewards(id)
        baseline = int(k) >= plan.n
        made.append(
            Sample(
                id=id,
                group=group,
                prompt_id=group.partition("/")[2],
                prompt_tokens_P=prompt_P,
                response_tokens_G=rng.integers(0, 100, G).astype(np.uint32),
                loss_mask_G=np.full(G, not baseline),
                logprobs_G=-rng.random(G).astype(np.float32),
                finish_reason="stop",
                version_spans=(VersionSpan(plan.policy_version, 0, G),),
                seed=sampling_seed(plan.seed, id),
                reward=reward,
                reward_error="it failed" if reward is None else None,
                extras={},
                routes=Routes(random_sets(rng, rows, GEOMETRY), np.full(rows, True)),
            )
        )
    return made


def make_validation_plan(prompts: int = 3, n: int = 2, version: int = 0) -> ValidationPlan:
    """Return the plan of a validation with the prompts that `make_plan` uses.

    Args:
        prompts, n: The number of prompts, and of samples per prompt.
        version: The policy version to validate.
    """
    return ValidationPlan(**_common(prompts, n), policy_version=version)


def _common(prompts: int, n: int) -> dict[str, Any]:
    return {
        "prompts": tuple(PlannedPrompt(row, 0) for row in range(prompts)),
        "n": n,
        "sampling": Sampling(1.0, 1.0, -1, 16),
        "routes": True,
        "seed": 1,
        "shards": 2,
    }


def without_routes(samples: Sequence[Sample]) -> list[Sample]:
    return [replace(sample, routes=None) for sample in samples]


def of_one_token(sample: Sample) -> Sample:
    """Return a sample that was aborted before its first response token, with one prompt token."""
    assert sample.routes is not None
    return replace(
        sample,
        prompt_tokens_P=sample.prompt_tokens_P[:1],
        response_tokens_G=sample.response_tokens_G[:0],
        loss_mask_G=sample.loss_mask_G[:0],
        logprobs_G=sample.logprobs_G[:0],
        version_spans=(VersionSpan(0, 0, 0),),
        routes=Routes(sample.routes.sets_TLK[:0], sample.routes.valid_T[:0]),
    )


def by_shard(ids: Sequence[str], shards: int) -> Callable[[int], list[str]]:
    """Return a function that returns a shard's ids; prompt i belongs to shard i mod `shards`."""
    return lambda shard: [id for id in ids if int(id.split("/")[1]) % shards == shard]


def write_shards(store: Store, samples: Sequence[Sample], step: int = 0) -> None:
    """Write samples with routes as two shards, between which the groups alternate.

    Args:
        store: The run's store.
        samples: The samples of the step.
        step: The step.
    """
    for shard in range(2):
        mine = [s for s in samples if int(s.prompt_id) % 2 == shard]
        write_shard(store, step, shard, new_write_id(), mine, GEOMETRY, R3)


def sealed_r3(store: Store, samples: Sequence[Sample], training: bool = False) -> Manifest:
    """Seal a step with the engine's routes.

    Args:
        store: The run's store.
        samples: The samples of the step.
        training: Whether the step's trainer also records routes, for an audit of the replay.
    """
    write_shards(store, samples)
    ids = by_shard([sample.id for sample in samples], 2)
    return seal(store, 0, 2, ids, 0, training=training).all()


def sealed_r2(store: Store, samples: Sequence[Sample]) -> Manifest:
    """Seal a step without the engine's routes, and record the trainer's routes.

    The trainer has two pipeline stages and two data-parallel ranks.
    """
    write_shard(store, 0, 0, new_write_id(), without_routes(samples), None, None)
    manifest = seal(store, 0, 1, lambda _: [sample.id for sample in samples], 0, training=True)
    train(store, samples)
    return manifest.all()


def train(
    store: Store, samples: Sequence[Sample], ranks: int = 2, step: int = 0
) -> NewTrainerRoutes:
    """Record and seal the trainer's routes of a sealed step, with two pipeline stages.

    Args:
        store: The run's store.
        samples: The samples of the step.
        ranks: The number of data-parallel ranks.
        step: The step.
    """
    new = NewTrainerRoutes(read_manifest(store, step), R2)
    files = [
        write_stage(store, new, stage, dp_rank, layers, samples[dp_rank::ranks])
        for stage, layers in STAGES
        for dp_rank in range(ranks)
    ]
    seal_trainer_routes(store, new, files, GEOMETRY)
    return new


def write_stage(
    store: Store,
    new: NewTrainerRoutes,
    stage: int,
    dp_rank: int,
    layers: Sequence[int],
    samples: Sequence[Sample],
) -> TraceFile:
    """Write the routes of one pipeline stage and data-parallel rank.

    Args:
        store: The run's store.
        new: What all ranks share.
        stage, dp_rank: The pipeline stage and the data-parallel rank.
        layers: The stage's MoE layers.
        samples: The rank's samples.
    """
    geometry = replace(GEOMETRY, layers=tuple(layers))
    routes = {sample.id: layers_of(sample.routes, layers) for sample in samples if sample.routes}
    return write_trainer_routes(store, new, stage, dp_rank, routes, geometry)


def layers_of(routes: Routes, layers: Sequence[int]) -> Routes:
    columns = [GEOMETRY.layers.index(layer) for layer in layers]
    return Routes(routes.sets_TLK[:, columns], routes.valid_T)


def parquet(table: pa.Table) -> bytes:
    """Return a table as the content of a Parquet file."""
    out = io.BytesIO()
    pq.write_table(table, out)
    return out.getvalue()


def stored_prompts(table: pa.Table, name: str) -> StoredPrompts:
    """Return a reader of a table of prompts that is in no store."""
    data = parquet(table)
    return StoredPrompts(
        name, len(data), lambda ranges: [data[start : start + length] for start, length in ranges]
    )


def write_run(
    store: Store,
    samples: Sequence[Sample],
    mode: str,
    model: bytes = b"",
    replay_file: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Write run.json and the staged prompts of a run that could generate or replay these samples.

    Args:
        store: The run's store.
        samples: The samples, whose prompts are staged.
        mode: The mode of router replay.
        model: The content of the model's tokenizer.json; empty if the model has no tokenizer.
        replay_file: The recorded set that the run replays.
        settings: Further groups of settings.
    """
    prompts = {int(s.prompt_id.split(".")[0]): s.prompt_tokens_P.tolist() for s in samples}
    rows = range(max(prompts, default=-1) + 1)
    table = pa.table(
        {
            "prompt_id": pa.array(rows, pa.int64()),
            "token_ids": pa.array([prompts.get(row, []) for row in rows], pa.list_(pa.uint32())),
        }
    )
    file = put_data(store, keys.input_file("0" * 64, "prompts.parquet"), parquet(table))
    files = {}
    if model:
        files["tokenizer.json"] = put_data(
            store, keys.input_file("1" * 64, "tokenizer.json"), model
        )
    replay = {"mode": mode, "record_file": None}
    if replay_file is not None:
        replay["replay_file"] = replay_file
    create_description(
        store,
        RunDescription(
            name="made",
            settings={
                "actor_rollout_ref": {"actor": {"router_replay": replay}},
                **(settings or {}),
            },
            inputs=StagedInputs(file, None, None, files),
            geometry=GEOMETRY,
            versions={},
        ),
    )


def planned_ids(prompts: int = 3, n: int = 2) -> list[str]:
    return expected_ids(make_plan(prompts, n))


def equal(found: Routes, expected: Routes) -> bool:
    """Return whether the same rows are valid and the sets of these rows are equal."""
    valid_T = expected.valid_T
    return np.array_equal(found.valid_T, valid_T) and np.array_equal(
        found.sets_TLK[valid_T], expected.sets_TLK[valid_T]
    )


def same_sample(found: Sample, expected: Sample) -> bool:
    """Return whether two samples are equal, apart from their routes."""
    arrays = ("prompt_tokens_P", "response_tokens_G", "loss_mask_G", "logprobs_G")
    values = (
        *("id", "group", "prompt_id", "finish_reason", "version_spans", "seed", "reward"),
        *("reward_error", "extras"),
    )
    return all(
        np.array_equal(getattr(found, n), getattr(expected, n))
        and getattr(found, n).dtype == getattr(expected, n).dtype
        for n in arrays
    ) and all(getattr(found, n) == getattr(expected, n) for n in values)
