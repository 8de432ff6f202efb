"""The data that a training rank reads from a sealed step, and the steps that it refuses."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from operators.training.batches.micro_batch import Contents, lay_out
from operators.training.batches.step_data import (
    group_baselines,
    group_codes,
    layout_rules,
    load_step,
)
from operators.training.errors import ReplayError
from operators.training.step_metrics import finish_reasons_of
from pipeline.config.keys import with_value
from pipeline.config.tree import RunConfig
from pipeline.errors import InputError
from pipeline.run import keys
from pipeline.run.commit import new_write_id
from pipeline.store import Store, open_store
from pipeline.traces import (
    Geometry,
    Provenance,
    Routes,
    Sample,
    VersionSpan,
    open_manifest,
    read_manifest,
    seal,
    write_shard,
)
from pipeline.traces.format.manifest import BASELINE
from pipeline.traces.write.seal import write_manifest

GEOMETRY = Geometry(experts=8, topk=2, layers=(1, 2))


def config(**replay: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "data": {},
            "actor_rollout_ref": {"model": {"path": "m"}, "actor": {"router_replay": replay}},
            "trainer": {"experiment_name": "x"},
        }
    )


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({}, "no"),
        ({"tensor_model_parallel_size": 2, "context_parallel_size": 2}, "no"),
        ({"expert_model_parallel_size": 2}, "ranks"),
        ({"pipeline_model_parallel_size": 2}, "all"),
        ({"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2}, "all"),
    ],
)
def test_stages_and_expert_groups_require_micro_batches_of_one_shape(sizes, expected):
    settings = config()
    for name, size in sizes.items():
        settings = with_value(settings, f"actor_rollout_ref.actor.megatron.{name}", size)
    assert layout_rules(settings, 1).same_shape == expected


def sealed(folder: Path, geometry: Geometry | None) -> Store:
    store = open_store(str(folder))
    samples = []
    for k, reward in enumerate([0.0, 2.0, None]):
        routes = None
        if geometry:
            sets = np.tile(np.array([k, k + 1], np.uint8), (4, len(geometry.layers), 1))
            routes = Routes(sets, np.ones(4, bool))
        samples.append(
            Sample(
                id=f"000000/0/{k}",
                group="000000/0",
                prompt_id="0",
                prompt_tokens_P=np.arange(2, dtype=np.uint32),
                response_tokens_G=np.arange(3, dtype=np.uint32),
                loss_mask_G=np.ones(3, bool),
                logprobs_G=np.zeros(3, np.float32),
                finish_reason="stop",
                version_spans=(VersionSpan(0, 0, 3),),
                seed=0,
                reward=reward,
                reward_error=None if reward is not None else "raised",
                extras={},
                routes=routes,
            )
        )
    provenance = Provenance("R3", 0, "test") if geometry else None
    write_shard(store, 0, 0, new_write_id(), samples, geometry, provenance)
    seal(store, 0, 1, lambda _: [s.id for s in samples], 0)
    return store


def load(store: Store, settings: RunConfig, geometry: Geometry | None, dp_rank=0, dp=1):
    rules = layout_rules(settings, dp)
    return load_step(store, open_manifest(store, 0), settings, rules, dp_rank, geometry)


def test_a_rank_reads_its_own_samples_and_layers(tmp_path):
    """Two data-parallel ranks share the samples; each reads only the routes of its stage's
    layer."""
    store = sealed(tmp_path, GEOMETRY)
    stage = Geometry(8, 2, (2,))
    parts = [load(store, config(mode="R3"), stage, dp_rank, 2) for dp_rank in (0, 1)]
    ids = [set(part.samples) for part in parts]
    assert ids[0] | ids[1] == {f"000000/0/{k}" for k in range(3)}
    assert not ids[0] & ids[1]
    for part in parts:
        assert part.routes.keys() == part.samples.keys()
        assert all(routes.sets_TLK.shape == (4, 1, 2) for routes in part.routes.values())
    assert parts[0].untrained | parts[1].untrained == {"000000/0/2"}


def test_a_sample_that_is_not_trained_on_has_no_loss(tmp_path):
    """The reason in the sample's manifest row does not matter."""
    manifest = read_manifest(sealed(tmp_path / "a", GEOMETRY), 0)
    at = manifest.rows.schema.get_field_index("not_trained")
    assert manifest.rows["not_trained"].to_pylist() == [None, None, "no reward"]
    reasons = pa.array([None, "too long", "no reward"])
    rows = manifest.rows.set_column(at, manifest.rows.schema.field(at), reasons)
    store = open_store(str(tmp_path / "a"))
    store.delete(keys.manifest(0))
    write_manifest(store, replace(manifest, rows=rows))
    data = load(store, config(mode="R3"), GEOMETRY)
    assert data.untrained == {"000000/0/1", "000000/0/2"}
    contents = Contents(data.samples, data.untrained)
    (mini_batch,) = data.layout.mini_batches
    trained = set()
    for micro_rows in mini_batch.shares[0]:
        response = lay_out(micro_rows, data.ids, contents).response
        trained |= {
            id for id, mask_G in response.split(response.loss_mask_T).items() if mask_G.any()
        }
    assert trained == {"000000/0/0"}


def test_a_step_without_routes_is_not_replayed(tmp_path):
    store = sealed(tmp_path, None)
    with pytest.raises(ReplayError, match="enable_rollout_routing_replay=True"):
        load(store, config(mode="R3"), GEOMETRY)
    assert load(store, config(mode="R2"), GEOMETRY).routes is None


@pytest.mark.parametrize("other", [Geometry(16, 2, (1, 2)), Geometry(8, 2, (0, 1))])
def test_routes_of_a_different_model_are_refused(tmp_path, other):
    """Routes with different sizes, or without one of the layers, are never shifted or filled in."""
    with pytest.raises(ReplayError, match="The routes belong to a different model"):
        load(sealed(tmp_path, GEOMETRY), config(mode="R3"), other)


class TestCuts:
    """All passes have the same samples on the same ranks, but each has its own micro-batches."""

    LOG_PROB = "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu"

    def settings(self, **values: object) -> RunConfig:
        found = with_value(config(mode="R3"), "actor_rollout_ref.actor.use_kl_loss", True)
        for key, value in values.items():
            found = with_value(found, f"actor_rollout_ref.{key.replace('__', '.')}", value)
        return found

    def cuts(self, tmp_path: Path, **values: object) -> list[list[int]]:
        """Return the number of samples in each micro-batch, for each pass."""
        data = load(sealed(tmp_path, GEOMETRY), self.settings(**values), GEOMETRY)
        layouts = [data.layouts[one] for one in ("update", "log_prob", "reference")]
        assert {tuple(sorted(layout.rows(0))) for layout in layouts} == {(0, 1, 2)}
        return [[len(m.rows) for m in layout.epoch(0)[0].shares[0]] for layout in layouts]

    def test_each_pass_follows_its_own_settings(self, tmp_path):
        """Each sample has four positions, so a budget of eight tokens holds two samples."""
        assert self.cuts(
            tmp_path,
            actor__ppo_micro_batch_size_per_gpu=1,
            rollout__log_prob_micro_batch_size_per_gpu=3,
            ref__log_prob_use_dynamic_bsz=True,
            ref__log_prob_max_token_len_per_gpu=8,
        ) == [[1, 1, 1], [3], [2, 1]]

    def test_the_token_budget_of_the_updates_applies_to_all_passes(self, tmp_path):
        values = {"actor__use_dynamic_bsz": True, "actor__ppo_max_token_len_per_gpu": 12}
        assert self.cuts(tmp_path, **values) == [[3]] * 3
        values |= {"rollout__log_prob_use_dynamic_bsz": False}
        values |= {"rollout__log_prob_micro_batch_size_per_gpu": 1}
        assert self.cuts(tmp_path / "b", **values) == [[3], [1, 1, 1], [3]]

    def test_a_sample_longer_than_the_token_budget_is_refused(self, tmp_path):
        values = {"rollout__log_prob_use_dynamic_bsz": True}
        values |= {"rollout__log_prob_max_token_len_per_gpu": 3}
        with pytest.raises(InputError, match=f"sample 000000/0/0: .* 4 .*{self.LOG_PROB}=3"):
            self.cuts(tmp_path, **values)


def test_finish_reasons_leave_out_baselines(tmp_path):
    """The counts include samples without a reward, but not greedy baselines."""
    data = load(sealed(tmp_path, None), config(), None)
    rows = data.manifest.rows
    marks = [BASELINE if id.endswith("/1") else None for id in data.manifest.ids]
    at = rows.schema.get_field_index("not_trained")
    marked = rows.set_column(at, "not_trained", pa.array(marks, pa.string()))
    assert finish_reasons_of(data) == {"stop": 3}
    with_one = replace(data, manifest=replace(data.manifest, rows=marked))
    assert finish_reasons_of(with_one) == {"stop": 2}


def test_a_samples_baseline_is_the_reward_of_its_groups_greedy_sample():
    """The baseline is NaN if the greedy sample or its reward is missing."""
    files = [["a", "b", "a"], ["c", "b", "c"]]  # each file of a manifest has its own dictionary
    groups = pa.chunked_array([pa.array(names).dictionary_encode() for names in files])
    marks = ["greedy baseline", None, None, None, "greedy baseline", "no reward"]
    rewards = pa.array([2.0, 1.0, 0.0, 1.0, None, None], pa.float64())
    columns = pa.table({"group": groups, "reward": rewards, "not_trained": marks})
    nan = np.nan
    np.testing.assert_array_equal(
        group_baselines(columns, group_codes(columns)), [2.0, nan, 2.0, nan, nan, nan]
    )
    none = columns.set_column(2, "not_trained", pa.nulls(6, pa.string()))
    assert group_baselines(none, group_codes(none)) is None
