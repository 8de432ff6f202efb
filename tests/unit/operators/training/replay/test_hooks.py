"""Recorders and replayers on plain tensors, called by Megatron's own routing function."""

import types

import numpy as np
import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

from operators.training.batches.micro_batch import NATIVE, PADDING, REPLAYED
from operators.training.errors import ReplayError
from operators.training.replay.hooks import DIFFERENT, FOREIGN, SAME, Recorder, Replayer, bound
from operators.training.replay.replayed import ReplayedRows

ROWS, EXPERTS = 512, 32


def scores_of(seed, rows=ROWS):
    return torch.randn(rows, EXPERTS, generator=torch.Generator().manual_seed(seed)) * 3


def route(scores, topk, replay=None, **options):
    return topk_routing_with_score_function(scores, topk, router_replay=replay, **options)


def native_sets(scores, topk):
    return scores.topk(topk, dim=1).indices.sort(dim=1).values.numpy().astype(np.uint8)


def replayer(sets, kinds=None, experts=EXPERTS):
    kinds = [np.full(len(s), REPLAYED, np.uint8) for s in sets] if kinds is None else kinds
    rows = [
        ReplayedRows(kinds_R, sets_RK[None], [1], experts, torch.device("cpu"))
        for kinds_R, sets_RK in zip(kinds, sets, strict=True)
    ]
    return Replayer(1, 0, experts, rows)


def misfits(replay, micro_batch=0):
    return replay._micro_batches[micro_batch].misfits_LR[0].tolist()


OPTIONS = [
    {},
    {"use_pre_softmax": True},
    {"score_function": "sigmoid", "scaling_factor": 2.5},
    {"score_function": "sigmoid", "expert_bias": torch.linspace(-0.1, 0.1, EXPERTS)},
    {"score_function": "sigmoid", "num_groups": 4, "group_topk": 2},
]


@pytest.mark.parametrize("topk", [4, 8])
@pytest.mark.parametrize("options", OPTIONS)
def test_replaying_the_native_choice_changes_no_bit(topk, options):
    """Weights, routing map and gradients are equal for each score function."""
    scores = scores_of(0)
    recorder = Recorder(1, 1, torch.uint8)
    with torch.no_grad():
        route(scores, topk, recorder, **options)
    recorder.finish(forward_only=True)
    sets = recorder.sets_RK[0].numpy()
    assert (np.diff(sets.astype(int), axis=1) > 0).all()

    results = []
    for replay in (None, replayer([sets])):
        live = scores.clone().requires_grad_()
        probs, chosen = route(live, topk, replay, **options)
        (probs * scores_of(1)).sum().backward()
        results.append((probs.detach(), chosen, live.grad))
    for native, replayed in zip(*results, strict=True):
        assert torch.equal(native, replayed)

    class InIdOrder:
        def get_replay_topk(self, scores, *_):
            ids = torch.from_numpy(sets).long()
            return scores.gather(1, ids), ids

    in_id_order = route(scores, topk, InIdOrder(), **options)[0]
    if not options.get("use_pre_softmax"):  # pre-softmax sums nothing over the chosen experts
        assert not torch.equal(in_id_order, results[0][0])


def test_recorded_sets_are_imposed_with_weights_from_live_scores():
    scores = scores_of(0).requires_grad_()
    other = native_sets(-scores_of(0), 4)
    probs, chosen = route(scores, 4, replay := replayer([other]))
    assert (chosen.nonzero()[:, 1].view(ROWS, 4).numpy() == other).all()
    assert SAME not in misfits(replay)
    assert torch.allclose(
        probs.gather(1, torch.from_numpy(other).long()),
        scores.gather(1, torch.from_numpy(other).long()).softmax(1),
    )
    probs.square().sum().backward()
    assert ((scores.grad != 0) <= chosen).all()


def test_rows_without_a_valid_recording_are_routed_natively():
    """The router itself chooses for invalid rows and padding; these rows do not get a constant set.
    Each kind is counted. Agreement counts only replayed rows."""
    scores = scores_of(0)
    kinds = np.arange(ROWS, dtype=np.uint8) % 3
    sets = native_sets(scores, 4)
    sets[kinds != REPLAYED] = 0  # meaningless, never imposed
    replay = replayer([sets], [kinds])
    probs, chosen = route(scores, 4, replay)
    native_probs, native_chosen = route(scores, 4)
    assert torch.equal(chosen, native_chosen)
    assert torch.equal(probs, native_probs)
    counts = [int((kinds == kind).sum()) for kind in (REPLAYED, NATIVE, PADDING)]
    assert replay.rows.tolist() == counts
    assert misfits(replay) == [SAME] * ROWS


@pytest.mark.parametrize(
    ("topk", "common", "expected"),
    [
        (4, (4, 3, 2, 1, 0), (SAME, DIFFERENT, DIFFERENT, FOREIGN, FOREIGN)),
        (3, (3, 2, 1, 0), (SAME, DIFFERENT, FOREIGN, FOREIGN)),
        (2, (2, 1, 0), (SAME, DIFFERENT, FOREIGN)),
        (1, (1, 0), (SAME, DIFFERENT)),
    ],
)
def test_recorded_sets_are_compared_with_the_native_choice(topk, common, expected):
    """A set with less than half of its experts in common is foreign, except in top-1 models."""
    scores = scores_of(0, len(common))
    order = scores.argsort(dim=1, descending=True)
    rows = [[*order[i, :n], *order[i, topk : 2 * topk - n]] for i, n in enumerate(common)]
    sets = np.sort(np.array(rows, np.uint8), axis=1)
    route(scores, topk, replay := replayer([sets]))
    assert misfits(replay) == list(expected)
    kinds = np.full(len(common), NATIVE, np.uint8)
    route(scores, topk, native := replayer([sets], [kinds]))
    assert misfits(native) == [SAME] * len(common)


def test_a_recomputation_gets_the_routes_of_its_micro_batch():
    """In 1F1B, forwards run ahead of recomputations."""
    sets = [native_sets(scores_of(seed), 4) for seed in range(3)]
    replay = replayer(sets)

    def call(seed):
        chosen = route(-scores_of(seed), 4, replay)[1]
        assert (chosen.nonzero()[:, 1].view(ROWS, 4).numpy() == sets[seed]).all()

    for forward, recompute in ((0, None), (1, 0), (2, 1), (None, 2)):
        if forward is not None:
            with torch.no_grad():
                call(forward)
        if recompute is not None:
            call(recompute)
    replay.finish(forward_only=False)
    assert replay.rows[REPLAYED] == 3 * ROWS


def run(replay, without_grad, with_grad):
    with torch.no_grad():
        for _ in range(without_grad):
            route(scores_of(0), 4, replay)
    for _ in range(with_grad):
        route(scores_of(0), 4, replay)


@pytest.mark.parametrize(
    ("forward_only", "without_grad", "with_grad", "right"),
    [
        (True, 2, 0, True),
        (True, 1, 0, False),
        (True, 2, 1, False),
        (False, 0, 2, True),
        (False, 2, 2, True),
        (False, 0, 1, False),
        (False, 2, 1, False),
        (False, 2, 0, False),
    ],
)
@pytest.mark.parametrize("kind", ["record", "replay"])
def test_an_incorrect_call_count_is_refused(kind, forward_only, without_grad, with_grad, right):
    """A pass uses each micro-batch once, or twice if all micro-batches are recomputed."""
    object_ = (
        Recorder(1, 2, torch.uint8)
        if kind == "record"
        else replayer([native_sets(scores_of(0), 4)] * 2)
    )
    run(object_, without_grad, with_grad)
    if right:
        object_.finish(forward_only)
    else:
        with pytest.raises(ReplayError, match="layer 1: the router ran"):
            object_.finish(forward_only)


def test_a_surplus_micro_batch_raises_an_error_immediately():
    with pytest.raises(ReplayError, match=r"layer 1: .* than the 1 of this pass"):
        run(replayer([native_sets(scores_of(0), 4)]), 2, 0)


def test_routes_with_an_incorrect_shape_are_refused():
    with pytest.raises(ReplayError, match="scores 500 tokens x 32 experts and selects 4"):
        route(scores_of(0, rows=500), 4, replayer([native_sets(scores_of(0), 4)]))
    with pytest.raises(ReplayError, match="for 64 experts"):
        route(scores_of(0), 4, replayer([native_sets(scores_of(0), 4)], experts=64))


def test_impossible_expert_ids_are_refused_before_use():
    """An id of E or more, or a repeated id, would lead to incorrect sizes in the all-to-all."""
    sets = native_sets(scores_of(0), 4)
    sets[7, 3] = EXPERTS
    with pytest.raises(ReplayError, match="id is 32, expected less than 32"):
        replayer([sets])
    sets = native_sets(scores_of(0), 4)
    sets[7, 2] = sets[7, 3]
    with pytest.raises(ReplayError, match=r"layer 1: .* names an expert twice"):
        replayer([sets])


def test_ids_above_255_do_not_wrap():
    scores = torch.randn(64, 300, generator=torch.Generator().manual_seed(0))
    recorder = Recorder(1, 1, torch.int16)
    with torch.no_grad():
        route(scores, 8, recorder)
    sets = recorder.sets_RK[0].numpy().astype(np.uint16)
    assert sets.max() > 255
    assert torch.equal(route(scores, 8, replayer([sets], experts=300))[1], route(scores, 8)[1])


def routers(*layers):
    return {layer: types.SimpleNamespace(router_replay=None) for layer in layers}


def test_every_exit_unbinds_all_routers():
    """Routers are unbound on success and on an exception; a failed pass is not checked."""
    two = routers(0, 3)
    objects = {layer: Recorder(layer, 1, torch.uint8) for layer in two}
    with bound(two, objects, forward_only=True):
        assert all(two[layer].router_replay is objects[layer] for layer in two)
        for layer in two:
            run(objects[layer], 1, 0)
    assert all(router.router_replay is None for router in two.values())
    with pytest.raises(KeyError), bound(two, objects, forward_only=True):
        raise KeyError
    assert all(router.router_replay is None for router in two.values())


def test_an_unused_router_is_refused():
    """The most common fault is replay that silently has no effect."""
    two = routers(0, 3)
    objects = {layer: Recorder(layer, 1, torch.uint8) for layer in two}
    with pytest.raises(ReplayError, match="layer 3: the router ran 0 times"):  # noqa: SIM117
        with bound(two, objects, forward_only=True):
            run(objects[0], 1, 0)
    assert all(router.router_replay is None for router in two.values())


def test_layers_are_looked_up_by_model_index():
    """If layers of a dense-first model are miscounted, binding fails; routes are not shifted."""
    objects = {layer: Recorder(layer, 1, torch.uint8) for layer in (0, 1)}
    with pytest.raises(ReplayError, match=r"MoE layers are \[1, 2\]; layers without routes: \[2\]"):
        bound(routers(1, 2), objects, forward_only=True).__enter__()


def test_a_bound_router_is_not_bound_again():
    one = routers(1)
    one[1].router_replay = object()
    with pytest.raises(ReplayError, match=r"layers \[1\]: router_replay is already set"):
        bound(one, {1: Recorder(1, 1, torch.uint8)}, forward_only=True).__enter__()
