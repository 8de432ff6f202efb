"""Complete runs for tests, with objects of every kind, written without an engine."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.policies.versions import publish_policy
from pipeline.run import keys
from pipeline.run.commit import (
    CONTENT_SHA256,
    commit,
    content_digest,
    file_list,
    new_write_id,
    to_json,
)
from pipeline.run.plan import publish_plan
from pipeline.store import Store
from pipeline.traces import seal, write_samples
from pipeline.traces.format.ids import validation_id
from tests.attempts import make_attempt
from tests.data_files import put_data
from tests.samples import (
    by_shard,
    make_plan,
    make_samples,
    make_validation_plan,
    sealed_r2,
    sealed_r3,
    train,
    without_routes,
    write_run,
    write_shards,
)
from tests.weights import some_weights

SAMPLES = make_samples(prompt_seed=0)


def whole_run(store: Store, scratch: Path, mode: str = "R3") -> None:
    """Write a run with one step, one policy, one checkpoint and one validation of two shards.

    Args:
        store: The run's store.
        scratch: A folder for temporary files.
        mode: The step's routes: "R2" or "R3".
    """
    write_run(store, SAMPLES, mode, b"{}")
    make_attempt(store, 0, steps=1)
    publish_plan(store, make_plan())
    (sealed_r3 if mode == "R3" else sealed_r2)(store, SAMPLES)
    weights = scratch / "weights"
    weights.mkdir()
    (weights / "model.safetensors").write_bytes(some_weights())
    (weights / "config.json").write_bytes(b"{}")
    policy = publish_policy(store, 1, weights).body
    values = {"critic/rewards/mean": 0.25}
    metrics = {"step": 0, "metrics": values, "policy_sha256": policy["weights_sha256"]}
    commit(store, keys.metrics(0), metrics, "a")
    write_checkpoint(store, 1)
    publish_plan(store, make_validation_plan())
    for shard in range(2):
        write_validation(store, shard)


def write_checkpoint(store: Store, version: int) -> None:
    state = put_data(store, keys.checkpoint_file(version, new_write_id(), "state"), b"state" * 99)
    body = {"version": version, "step": version, "layout": {}, "files": file_list([state])}
    commit(store, keys.checkpoint(version), body, "a")


def write_validation(store: Store, shard: int) -> None:
    samples = []
    for sample in without_routes(SAMPLES):
        _, row, k = sample.id.split("/")
        if int(row) % 2 == shard:
            id = validation_id(0, row, int(k))
            samples.append(replace(sample, id=id, group=id.rsplit("/", 1)[0]))
    file = write_samples(store, keys.validation_file(0, shard, new_write_id()), samples)
    rewards = [sample.reward or 0.0 for sample in samples]
    counts = {"count": len(samples), "masked": 0, "reward_sum": sum(rewards)}
    body = {"version": 0, "shard": shard, **counts, "files": file_list([file])}
    commit(store, keys.validation(0, shard), body, "a")


def write_step(store: Store, step: int, mode: str = "R3") -> None:
    """Write a trained step with the engine's routes.

    Args:
        store: The run's store.
        step: The step.
        mode: "R2" for a step that also has the trainer's routes.
    """
    samples = make_samples(step=step, seed=step, prompt_seed=0)
    publish_plan(store, make_plan(step=step))
    write_shards(store, samples, step)
    ids = by_shard([sample.id for sample in samples], 2)
    seal(store, step, 2, ids, 0, training=mode == "R2")
    if mode == "R2":
        train(store, samples, step=step)
    values = {"critic/rewards/mean": 0.25 + step}
    commit(store, keys.metrics(step), {"step": step, "metrics": values}, "a")


def long_run(store: Store, steps: int, checkpoints: tuple[int, ...]) -> None:
    """Write a run of several trained steps and some checkpoints.

    Args:
        store: The run's store.
        steps: The number of steps.
        checkpoints: The policy versions of the checkpoints.
    """
    write_run(store, SAMPLES, "R3")
    for step in range(steps):
        write_step(store, step)
    for version in checkpoints:
        write_checkpoint(store, version)


def put_signed(store: Store, key: str, body: dict[str, Any]) -> None:
    """Replace a commit with `body` and the right digest of its content."""
    body = {name: value for name, value in body.items() if name != CONTENT_SHA256}
    store.delete(key)
    store.create(key, to_json({**body, CONTENT_SHA256: content_digest(body)}))
