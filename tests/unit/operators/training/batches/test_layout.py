"""Every sample is trained exactly once, on every layout, with its own tokens and routes."""

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from operators.training.batches.layout import LENGTH_MULTIPLE, LayoutRules, make_layout
from operators.training.batches.micro_batch import (
    NATIVE,
    PADDING,
    REPLAYED,
    Contents,
    Slice,
    lay_out,
    pick,
    place,
    take_up,
)
from pipeline.model.geometry import Geometry
from pipeline.traces.format.types import Routes, Sample, TraceError, VersionSpan

GEOMETRY = Geometry(experts=300, topk=4, layers=(1, 3))


def code_of(tokens_T, layer):
    """K distinct experts, ascending, that a token's id and the layer determine."""
    first = (tokens_T.astype(np.int64) * 7 + layer) % 100
    return (first[:, None] + 50 * np.arange(4)).astype(np.uint16)


def make_sample(id, prompt, response, reward=1.0):
    rng = np.random.default_rng(zlib.crc32(id.encode()) + prompt)
    P, G = prompt, response
    return Sample(
        id=id,
        group=id.rsplit("/", 1)[0],
        prompt_id="0",
        prompt_tokens_P=rng.integers(0, 1000, P).astype(np.uint32),
        response_tokens_G=rng.integers(0, 1000, G).astype(np.uint32),
        loss_mask_G=rng.random(G) < 0.8,
        logprobs_G=rng.random(G).astype(np.float32),
        finish_reason="stop",
        version_spans=(VersionSpan(0, 0, G),),
        seed=0,
        reward=reward,
        reward_error=None,
        extras={},
        routes=None,
    )


def coded_routes(sample, valid=None):
    tokens_T = sample.tokens_S[:-1]
    sets = np.stack([code_of(tokens_T, layer) for layer in GEOMETRY.layers], axis=1)
    return Routes(sets, np.ones(len(tokens_T), bool) if valid is None else valid)


rules = st.builds(
    LayoutRules,
    seed=st.integers(0, 5),
    mini_batch_groups=st.integers(1, 6),
    micro_batch_samples=st.integers(1, 5),
    epochs=st.integers(1, 3),
    data_parallel=st.integers(1, 4),
    micro_batch_multiple=st.integers(1, 3),
    sequence_slices=st.integers(1, 4),
)


@st.composite
def steps(draw):
    """Groups and lengths of a step's rows; groups differ in size."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=20))
    groups_N = np.repeat(np.arange(len(sizes)), sizes)
    lengths = draw(st.lists(st.integers(1, 40), min_size=len(groups_N), max_size=len(groups_N)))
    return groups_N, np.array(lengths)


@given(steps(), rules)
@settings(max_examples=200, deadline=None)
def test_every_sample_is_trained_once_per_epoch_with_equal_shapes(step, rules):
    """The mini-batches of an epoch hold each sample once; a sample never changes its rank; all
    ranks of a mini-batch have the same shapes, and as equal numbers of samples as can be."""
    groups_N, lengths_N = step
    layout = make_layout(3, groups_N, lengths_N, rules)
    owners = {}
    for epoch in range(rules.epochs):
        seen = []
        for batch in layout.epoch(epoch):
            assert len(batch.shares) == rules.data_parallel
            assert len({share.shape for share in batch.shares}) == 1
            count, size = batch.shares[0].shape
            assert count % rules.micro_batch_multiple == 0
            assert 1 <= size <= rules.micro_batch_samples
            in_batch = [batch.rows(d) for d in range(rules.data_parallel)]
            numbers = [len(rows) for rows in in_batch]
            assert max(numbers) - min(numbers) <= 1
            longest = lengths_N[np.concatenate(in_batch)].max()
            assert longest <= batch.length < longest + LENGTH_MULTIPLE * rules.sequence_slices
            assert batch.length % (LENGTH_MULTIPLE * rules.sequence_slices) == 0
            for rank, rows in enumerate(in_batch):
                seen += rows.tolist()
                for row in rows.tolist():
                    assert owners.setdefault(row, rank) == rank
        assert sorted(seen) == list(range(len(groups_N)))
    rows = np.concatenate([layout.rows(d) for d in range(rules.data_parallel)])
    assert sorted(rows.tolist()) == list(range(len(groups_N)))


@given(steps(), rules)
@settings(max_examples=100, deadline=None)
def test_groups_stay_whole_and_mini_batches_even(step, rules):
    """A mini-batch has all samples of its groups, at most so many groups as the config says, and of
    each run of neighbouring groups one: it goes through the step's files from end to end."""
    groups_N, lengths_N = step
    layout = make_layout(3, groups_N, lengths_N, rules)
    batches = layout.epoch(0)
    of_group = {}
    for number, batch in enumerate(batches):
        rows = np.concatenate([batch.rows(d) for d in range(rules.data_parallel)])
        assert (np.diff(rows) > 0).all()
        groups = np.unique(groups_N[rows])
        assert len(groups) <= rules.mini_batch_groups
        for group in groups.tolist():
            assert of_group.setdefault(group, number) == number
    for first in range(0, len(of_group), len(batches)):
        run = [of_group[g] for g in range(first, min(first + len(batches), len(of_group)))]
        assert len(set(run)) == len(run)


@given(steps(), rules)
@settings(max_examples=50, deadline=None)
def test_layout_is_a_pure_function_and_its_mini_batches_do_not_depend_on_ranks(step, rules):
    """One data-parallel rank trains the same mini-batches as several: equal gradients up to
    summation order. What number a group has does not matter."""
    groups_N, lengths_N = step
    layout = make_layout(3, groups_N, lengths_N, rules)
    assert layout.sha256 == make_layout(3, 7 * groups_N + 1, lengths_N, rules).sha256
    alone = make_layout(3, groups_N, lengths_N, LayoutRules(**{**vars(rules), "data_parallel": 1}))
    for batch, batch_alone in zip(layout.epoch(0), alone.epoch(0), strict=True):
        together = np.concatenate([batch.rows(d) for d in range(rules.data_parallel)])
        assert (together == batch_alone.rows(0)).all()


@given(st.integers(2, 8), st.integers(1, 6), st.integers(0, 5))
@settings(max_examples=50, deadline=None)
def test_a_ranks_samples_lie_together(data_parallel, batches, seed):
    """Over all mini-batches of a step, a rank's rows are one run of the manifest, but for the
    neighbourhood of its ends: what it fetches of others' row groups does not grow with the step."""
    groups, n = 60 * data_parallel, 4
    groups_N = np.repeat(np.arange(groups), n)
    rules = LayoutRules(seed, -(-groups // batches), 4, 1, data_parallel)
    layout = make_layout(0, groups_N, np.full(len(groups_N), 9), rules)
    for rank in range(data_parallel):
        rows = layout.rows(rank)
        spread = rows.max() - rows.min() + 1
        assert spread <= len(rows) + 2 * batches * n


def test_step_seed_and_epoch_change_the_order():
    """Otherwise the same samples would meet in the same mini-batch for ever."""
    groups_N, lengths_N = np.arange(32), np.full(32, 5)
    rules = LayoutRules(1, 8, 4, 2, 1)
    layout = make_layout(3, groups_N, lengths_N, rules)
    first, second = ([b.rows(0).tolist() for b in layout.epoch(epoch)] for epoch in (0, 1))
    assert first != second
    assert layout.sha256 != make_layout(4, groups_N, lengths_N, rules).sha256
    other = LayoutRules(2, 8, 4, 2, 1)
    assert layout.sha256 != make_layout(3, groups_N, lengths_N, other).sha256


def test_the_layout_is_the_same_for_ever():
    """A restart with another numpy must lay out the same step: the order of a known one."""
    layout = make_layout(3, np.arange(12), np.full(12, 5), LayoutRules(1, 4, 2, 1, 2))
    found = [share.tolist() for batch in layout.mini_batches for share in batch.shares]
    assert found == [[[2, 4]], [[8, 9]], [[1, 3]], [[7, 10]], [[0, 5]], [[6, 11]]]


def test_nothing_to_train_is_an_error():
    with pytest.raises(ValueError, match="step 3: the manifest has no samples"):
        make_layout(3, np.arange(0), np.arange(0), LayoutRules(1, 8, 4, 2, 1))


shapes = st.lists(
    st.none() | st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=4
)


@given(shapes, st.integers(1, 3), st.data())
@settings(max_examples=200, deadline=None)
def test_tokens_and_routes_cannot_drift_apart(shapes, slices, data):
    """Each token's id is coded into its own route. After laying out, the code of the token that a
    router's row belongs to equals the recorded set of that row, for every slice of the sequence:
    a shift by one token or layer, or two samples swapped, would show."""
    ids = [None if shape is None else f"{b}/0/0" for b, shape in enumerate(shapes)]
    samples = {id: make_sample(id, *shape) for id, shape in zip(ids, shapes, strict=True) if shape}
    valid = {
        id: np.array(
            data.draw(
                st.lists(st.booleans(), min_size=len(s.tokens_S) - 1, max_size=len(s.tokens_S) - 1)
            ),
            dtype=bool,
        )
        for id, s in samples.items()
    }
    routes = {id: coded_routes(s, valid[id]) for id, s in samples.items()}
    advantages = dict.fromkeys(samples, 0.5)
    length = 24
    parts = [
        lay_out(ids, length, Contents(samples, advantages, routes, GEOMETRY, Slice(index, slices)))
        for index in range(slices)
    ]
    batch = parts[0]
    kinds_NB = np.concatenate([p.rows.kinds_R for p in parts]).reshape(length, len(ids))
    sets_LNBK = np.concatenate([p.rows.sets_LRK for p in parts], axis=1).reshape(
        2, length, len(ids), 4
    )
    assert all(len(p.rows.kinds_R) == length // slices * len(ids) for p in parts)
    for b, id in enumerate(ids):
        T = 0 if id is None else len(samples[id].tokens_S) - 1
        assert (kinds_NB[T:, b] == PADDING).all()
        assert (batch.padding_BN[b] == (np.arange(length) >= T)).all()
        assert not batch.loss_mask_BN[b, T:].any()
        if id is None:
            continue
        sample = samples[id]
        assert (kinds_NB[:T, b] == np.where(valid[id], REPLAYED, NATIVE)).all()
        assert (batch.tokens_BN[b, :T] == sample.tokens_S[:-1]).all()
        assert (batch.labels_BN[b, :T] == sample.tokens_S[1:]).all()
        for index, layer in enumerate(GEOMETRY.layers):
            expected = code_of(batch.tokens_BN[b, :T], layer)
            assert (sets_LNBK[index, :T, b][valid[id]] == expected[valid[id]]).all()
        first = len(sample.prompt_tokens_P) - 1
        assert (batch.loss_mask_BN[b, :first] == 0).all()
        assert (batch.loss_mask_BN[b, first:T] == sample.loss_mask_G).all()
        assert (batch.engine_logprobs_BN[b, first:T] == sample.logprobs_G).all()
        assert (batch.advantages_BN[b, first:T] == 0.5).all()


def test_what_is_recorded_comes_back_by_sample():
    """take_up reverses lay_out: routes laid out and taken up are the routes."""
    samples = {f"{i}/0/0": make_sample(f"{i}/0/0", 3 + i, 4) for i in range(3)}
    ids = [*samples, None]
    routes = {id: coded_routes(s) for id, s in samples.items()}
    batch = lay_out(ids, 16, Contents(samples, dict.fromkeys(samples, 0.0), routes, GEOMETRY))
    sets_NBLK = batch.rows.sets_LRK.reshape(2, 16, 4, 4).transpose(1, 2, 0, 3)
    taken = take_up(ids, samples, sets_NBLK)
    assert taken.keys() == routes.keys()
    for id in routes:
        assert (taken[id].sets_TLK == routes[id].sets_TLK).all()
        assert taken[id].valid_T.all()


def test_numbers_of_response_tokens_are_placed_where_their_labels_are():
    samples = {f"{i}/0/0": make_sample(f"{i}/0/0", 2 + i, 3 + i) for i in range(3)}
    ids = [None, *samples]
    values = {id: s.logprobs_G for id, s in samples.items()}
    placed_BN = place(ids, 16, samples, values)
    batch = lay_out(ids, 16, Contents(samples, dict.fromkeys(samples, 0.0)))
    assert (placed_BN == batch.engine_logprobs_BN).all()
    picked = pick(ids, samples, placed_BN)
    assert all((picked[id] == values[id]).all() for id in samples)


def test_a_sample_that_is_not_trained_on_has_no_loss_but_is_laid_out():
    sample = make_sample("0/0/0", 3, 5)
    batch = lay_out(["0/0/0"], 8, Contents({"0/0/0": sample}, {"0/0/0": None}))
    assert not batch.loss_mask_BN.any()
    assert (batch.tokens_BN[0, :7] == sample.tokens_S[:-1]).all()


def test_routes_of_another_length_are_refused_by_sample():
    """One row too many or too few is never cut or filled."""
    sample = make_sample("0/0/0", 3, 5)
    routes, contents = coded_routes(sample), ({"0/0/0": sample}, {"0/0/0": 0.0})
    for change in (slice(1, None), slice(None, -1)):
        wrong = Routes(routes.sets_TLK[change], routes.valid_T[change])
        with pytest.raises(TraceError, match="sample 0/0/0: routes of shape"):
            lay_out(["0/0/0"], 8, Contents(*contents, {"0/0/0": wrong}, GEOMETRY))


def test_padding_is_not_one_constant_token():
    """Padding repeats the text: a constant would send all of it to the same experts."""
    sample = make_sample("0/0/0", 4, 4)
    batch = lay_out(["0/0/0", None], 32, Contents({"0/0/0": sample}, {"0/0/0": 0.0}))
    assert len(set(batch.tokens_BN[0, 7:])) > 1
    assert len(set(batch.tokens_BN[1])) > 1
