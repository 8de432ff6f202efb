"""What the trainer refuses of a sealed step, and what it counts."""

import types
from pathlib import Path

import numpy as np
import pytest

from operators.training.counts import LayerCounts, check_counts
from operators.training.data import layout_rules, load_step, records, replays_recorded
from operators.training.metrics import (
    RankReport,
    agreement_by_layer,
    replay_metrics,
    total_counts,
    training_metrics,
)
from operators.training.refuse import refuse_without_effect
from operators.training.replay import ReplayError
from pipeline.config.errors import InputError
from pipeline.config.tree import RouterReplay, RunConfig
from pipeline.rl.metrics import Mismatch
from pipeline.store import Store, open_store
from pipeline.store.commit import new_attempt
from pipeline.traces import (
    Geometry,
    Provenance,
    Routes,
    Sample,
    VersionSpan,
    open_manifest,
    seal,
    write_shard,
)

GEOMETRY = Geometry(experts=8, topk=2, layers=(1, 2))


def config(**replay: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "data": {},
            "actor_rollout_ref": {"model": {"path": "m"}, "actor": {"router_replay": replay}},
            "trainer": {"experiment_name": "x"},
        }
    )


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
    write_shard(store, 0, 0, new_attempt(), samples, geometry, provenance)
    seal(store, 0, 1, lambda _: [s.id for s in samples], 0)
    return store


def load(store: Store, settings: RunConfig, geometry: Geometry | None, dp_rank=0, dp=1):
    rules = layout_rules(settings, dp)
    return load_step(store, open_manifest(store, 0), settings, rules, dp_rank, geometry)


def test_a_rank_reads_its_share_and_its_layers(tmp_path):
    """Two data-parallel ranks hold all samples between them, routes of the stage's layer only, and
    each knows the advantages of its own, which the other's rewards decide, too."""
    store = sealed(tmp_path, GEOMETRY)
    stage = Geometry(8, 2, (2,))
    parts = [load(store, config(mode="R3"), stage, dp_rank, 2) for dp_rank in (0, 1)]
    ids = [set(part.samples) for part in parts]
    assert ids[0] | ids[1] == {f"000000/0/{k}" for k in range(3)}
    assert not ids[0] & ids[1]
    for part in parts:
        assert part.routes.keys() == part.samples.keys()
        assert all(routes.sets_TLK.shape == (4, 1, 2) for routes in part.routes.values())
    advantages = parts[0].advantages | parts[1].advantages
    assert advantages["000000/0/2"] == 0  # masked
    assert advantages["000000/0/1"] == pytest.approx(2**-0.5, rel=1e-4)


def test_a_step_without_routes_is_not_replayed(tmp_path):
    store = sealed(tmp_path, None)
    with pytest.raises(ReplayError, match="enable_rollout_routing_replay=True"):
        load(store, config(mode="R3"), GEOMETRY)
    assert load(store, config(mode="R2"), GEOMETRY).routes is None


@pytest.mark.parametrize("other", [Geometry(16, 2, (1, 2)), Geometry(8, 2, (0, 1))])
def test_routes_of_another_model_are_refused(tmp_path, other):
    """Other sizes, or a layer that the routes do not have: never shifted, never filled."""
    with pytest.raises(ReplayError, match="the routes are another model's"):
        load(sealed(tmp_path, GEOMETRY), config(mode="R3"), other)


def test_which_mode_records_and_which_replays():
    """With replay_file, R2 takes what an earlier log-prob pass recorded."""
    cases = {
        "disabled": (config(mode="disabled"), False, False),
        "R2": (config(mode="R2"), True, False),
        "R2 from file": (config(mode="R2", replay_file="set"), False, True),
        "R3": (config(mode="R3"), False, True),
    }
    for settings, does_record, does_replay in cases.values():
        assert (records(settings), replays_recorded(settings)) == (does_record, does_replay)


def test_replay_that_did_nothing_is_an_error():
    """Coverage 0, a layer that was left out, and rows that were not replayed."""
    right = {1: LayerCounts(90, 10, 4, 80), 2: LayerCounts(90, 10, 4, 70)}
    check_counts("step 0", right, [1, 2], valid=90, rows=100)
    with pytest.raises(ReplayError, match="none of the 100 rows has a valid recording"):
        check_counts("step 0", right, [1, 2], valid=0, rows=100)
    with pytest.raises(ReplayError, match="layer 3: 0 rows were replayed"):
        check_counts("step 0", right, [1, 2, 3], valid=90, rows=100)
    with pytest.raises(ReplayError, match="layer 1: 90 rows were replayed and 10 routed natively"):
        check_counts("step 0", right, [1, 2], valid=91, rows=100)


def test_counts_of_ranks_add_up_by_layer():
    """Each pass for itself: the log-prob pass does not hide what an update did."""
    of_ranks = [{1: LayerCounts(3, 1, 2, 3)}, {1: LayerCounts(5, 0, 1, 4)}]
    of_ranks += [{2: LayerCounts(8, 1, 3, 4)}]
    reports = [RankReport(counts={"log-prob pass": c, "update epoch 0": {}}) for c in of_ranks]
    of_passes = total_counts([*reports, RankReport()])
    assert of_passes["update epoch 0"] == {}
    total = of_passes["log-prob pass"]
    assert total == {1: LayerCounts(8, 1, 3, 7), 2: LayerCounts(8, 1, 3, 4)}
    assert agreement_by_layer(total) == {"1": 7 / 8, "2": 0.5}
    metrics = replay_metrics(total)
    assert metrics["replay/rows"] == 8
    assert metrics["replay/coverage"] == 8 / 9
    assert metrics["replay/agreement"] == 11 / 16
    assert set(replay_metrics({}).values()) == {None}


def test_losses_are_means_over_the_tokens_of_all_ranks():
    """Mean over mini-batches of the mean over tokens; some ranks report none."""
    reports = [
        RankReport(Mismatch(2, 0.5, 1), None, [{"tokens": 2.0, "policy": 4.0}] * 2),
        RankReport(),
        RankReport(Mismatch(6, 0.3, 0), None, [{"tokens": 6.0, "policy": 0.0}] * 2),
    ]
    metrics = training_metrics(reports, {}, [1.0, 3.0])
    assert metrics["loss/policy"] == 0.5
    assert metrics["grad_norm"] == 2.0
    assert metrics["mismatch/kl"] == pytest.approx(0.1)
    assert metrics["mismatch/extreme_share"] == 1 / 8
    assert metrics["mismatch/kl_native"] is None
    assert metrics["loss/kl"] is None


TRANSFORMER = {
    "moe_router_fusion": False,
    "moe_router_load_balancing_type": "none",
    "moe_expert_capacity_factor": None,
    "moe_router_padding_for_quantization": False,
    "moe_router_force_load_balancing": False,
    "moe_input_jitter_eps": None,
    "cuda_graph_impl": "none",
    "cuda_graph_scope": [],
    "moe_aux_loss_coeff": 0.001,
}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("moe_router_fusion", {"moe_router_fusion": True}),
        ("moe_router_load_balancing_type", {"moe_router_load_balancing_type": "sinkhorn"}),
        ("moe_expert_capacity_factor", {"moe_expert_capacity_factor": 1.0}),
        ("moe_router_padding_for_quantization", {"moe_router_padding_for_quantization": True}),
        ("moe_router_force_load_balancing", {"moe_router_force_load_balancing": True}),
        ("moe_input_jitter_eps", {"moe_input_jitter_eps": 0.1}),
        ("cuda_graph_scope", {"cuda_graph_impl": "local"}),
        ("cuda_graph_scope", {"cuda_graph_impl": "local", "cuda_graph_scope": ["moe_router"]}),
        ("moe_aux_loss_coeff", {"moe_router_load_balancing_type": ["seq_aux_loss"]}),
    ],
)
def test_settings_under_which_replay_would_do_nothing(name, settings):
    """Whatever path they came by into Megatron's own config; without replay they are allowed."""
    transformer = types.SimpleNamespace(**{**TRANSFORMER, **settings})
    with pytest.raises(InputError, match=name):
        refuse_without_effect(transformer, RouterReplay(mode="R3"))
    refuse_without_effect(transformer, RouterReplay(mode="disabled"))


def test_settings_that_replay_works_with():
    replay = RouterReplay(mode="R3", allow_aux_loss=True)
    attention = {"cuda_graph_impl": "local", "cuda_graph_scope": ["attn"]}
    for settings in ({}, attention, {"moe_router_load_balancing_type": "aux_loss"}):
        refuse_without_effect(types.SimpleNamespace(**{**TRANSFORMER, **settings}), replay)
