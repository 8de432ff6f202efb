"""Counts of replayed rows, and the check that each pass replayed all valid rows of the step."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from operators.training.batches.micro_batch import REPLAYED, Contents, Slice, lay_out
from operators.training.errors import ReplayError
from operators.training.replay.counts import (
    BLOCK,
    LayerCounts,
    Replay,
    check_passes,
    sample_counts_of,
)
from operators.zigzag import Zigzag
from tests.unit.operators.training.batches.test_layout import (
    GEOMETRY,
    coded_routes,
    make_sample,
    placed,
)


def test_a_pass_that_did_not_replay_all_valid_rows_is_refused():
    """Cases: no pass, a coverage of 0, a missing layer, and rows that were not replayed."""
    right = {1: LayerCounts(90, 10, 4, 80), 2: LayerCounts(90, 10, 4, 70)}
    passes = {"log-prob pass": right, "update epoch 0": right}
    check_passes(0, passes, [1, 2], valid=90, rows=100)
    with pytest.raises(ReplayError, match="step 0: no pass replayed routes"):
        check_passes(0, {}, [1, 2], valid=90, rows=100)
    with pytest.raises(ReplayError, match="none of the 100 rows has a valid recording"):
        check_passes(0, passes, [1, 2], valid=0, rows=100)
    with pytest.raises(ReplayError, match="log-prob pass, layer 3: 0 rows were replayed"):
        check_passes(0, passes, [1, 2, 3], valid=90, rows=100)
    with pytest.raises(ReplayError, match="layer 1: 90 rows were replayed and 10 routed natively"):
        check_passes(0, passes, [1, 2], valid=91, rows=100)
    with pytest.raises(ReplayError, match="update epoch 0, layer 1: 0 rows were replayed"):
        check_passes(0, {**passes, "update epoch 0": {}}, [1, 2], valid=90, rows=100)


@pytest.mark.parametrize(("context", "slices"), [(1, 1), (2, 1), (1, 2), (3, 2)])
@pytest.mark.parametrize("packed", [False, True])
def test_each_set_of_a_sample_is_counted_once_over_all_ranks(packed, context, slices):
    """Each set's first expert determines how the set compares with the router's choice."""
    samples = {f"{i}/0/0": make_sample(f"{i}/0/0", 3 + i, 4 + 9 * i) for i in range(3)}
    lengths = {id: len(sample.tokens_S) - 1 for id, sample in samples.items()}
    valid = {id: np.arange(length) != 5 for id, length in lengths.items()}
    routes = {id: coded_routes(sample, valid[id]) for id, sample in samples.items()}
    where, ids = placed(samples, packed, slices, context)
    total = dict.fromkeys(samples, 0)
    for rank, index in itertools.product(range(context), range(slices)):
        of_rank = {"sequence": Slice(index, slices), "context": Zigzag(rank, context)}
        batch = lay_out(where, ids, Contents(samples, frozenset(), routes, GEOMETRY, **of_rank))
        misfits_LR = (batch.rows.sets_LRK[..., 0] % 3) * (batch.rows.kinds_R == REPLAYED)
        rows = SimpleNamespace(misfits_LR=torch.from_numpy(misfits_LR.astype(np.uint8)))
        replay = Replay([rows], dict.fromkeys(GEOMETRY.layers))
        for id, of in sample_counts_of(replay, [batch]).items():
            total[id] = total[id] + np.concatenate([of.sets_LPC.reshape(-1, 3), of.block_BC])
    for id, sample in samples.items():
        misfits_TL = np.where(valid[id][:, None], routes[id].sets_TLK[..., 0].astype(int) % 3, -1)
        counted_TLC = np.stack([misfits_TL >= least for least in range(3)], axis=2)
        P = len(sample.prompt_tokens_P)
        sets_LPC = np.stack([counted_TLC[:P].sum(axis=0), counted_TLC[P:].sum(axis=0)], axis=1)
        starts = np.arange(0, lengths[id], BLOCK)
        block_BC = np.add.reduceat(counted_TLC.sum(axis=1), starts, axis=0)
        expected = np.concatenate([sets_LPC.reshape(-1, 3), block_BC])
        assert total[id].tolist() == expected.tolist()
    assert sample_counts_of(Replay(), [batch]) == {}
