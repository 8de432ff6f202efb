"""In every layout, each sample is trained on exactly once per epoch, with its tokens and routes."""

import itertools
import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from operators.training.batches.balance import bins
from operators.training.batches.layout import LENGTH_MULTIPLE, LayoutRules, MicroRows, make_layout
from operators.training.batches.micro_batch import (
    NATIVE,
    PADDING,
    REPLAYED,
    Contents,
    Slice,
    lay_out,
    take_up,
)
from operators.zigzag import Zigzag, sequence_multiple
from pipeline.model.geometry import Geometry
from pipeline.traces.format.types import Routes, Sample, TraceError, VersionSpan

GEOMETRY = Geometry(experts=300, topk=4, layers=(1, 3))


def code_of(tokens_T, layer):
    """Return K distinct experts in ascending order, derived from a token's id and the layer."""
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
    context_parallel=st.integers(1, 3),
    packed=st.booleans(),
    max_tokens=st.none() | st.integers(40, 100),
    same_shape=st.sampled_from(["no", "ranks", "all"]),
)


@st.composite
def steps(draw):
    """Draw the groups and lengths for a step's rows; groups differ in size."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=20))
    groups_N = np.repeat(np.arange(len(sizes)), sizes)
    lengths = draw(st.lists(st.integers(1, 40), min_size=len(groups_N), max_size=len(groups_N)))
    return groups_N, np.array(lengths)


@given(steps(), rules)
@settings(max_examples=200, deadline=None)
def test_every_sample_is_trained_on_once_per_epoch(step, rules):
    """The mini-batches of an epoch contain each sample once, and a sample never changes its rank.
    All ranks have the same number of micro-batches. Micro-batches have only sizes and shapes that
    the rules allow."""
    groups_N, lengths_N = step
    layout = make_layout(3, groups_N, lengths_N, rules)
    owners = {}
    for epoch in range(rules.epochs):
        seen = []
        for batch in layout.epoch(epoch):
            assert len(batch.shares) == rules.data_parallel
            assert len({len(share) for share in batch.shares}) == 1
            assert len(batch.shares[0]) % rules.micro_batch_multiple == 0
            for share in batch.shares:
                for micro in share:
                    check_places(micro, lengths_N, rules)
                    assert len(micro.rows) <= rules.micro_batch_samples
                    if rules.packed and rules.max_tokens:
                        assert lengths_N[list(micro.rows)].sum() <= rules.max_tokens
            shapes = [[micro.shape for micro in share] for share in batch.shares]
            if rules.same_shape != "no":
                assert all(share == shapes[0] for share in shapes)
            if rules.same_shape == "all":
                assert len(set(shapes[0])) == 1
            for rank in range(rules.data_parallel):
                rows = batch.rows(rank).tolist()
                seen += rows
                for row in rows:
                    assert owners.setdefault(row, rank) == rank
        assert sorted(seen) == list(range(len(groups_N)))
    rows = np.concatenate([layout.rows(d) for d in range(rules.data_parallel)])
    assert sorted(rows.tolist()) == list(range(len(groups_N)))


def width_multiple(rules):
    return LENGTH_MULTIPLE * rules.sequence_slices * rules.context_parallel


def taken_in_packs(lengths_N, rules):
    """Return the number of positions that each sample takes in a packed row.

    Each sample is padded so that it can be divided into equal chunks.
    """
    chunks = 2 * rules.context_parallel * rules.sequence_slices if rules.context_parallel > 1 else 1
    return -(-lengths_N // chunks) * chunks


def check_places(micro, lengths_N, rules):
    """Check that samples do not overlap and stay in their rows, and that shapes are correct."""
    batch, width = micro.shape
    assert width % width_multiple(rules) == 0
    if micro.packed:
        lengths_N = taken_in_packs(lengths_N, rules)
    taken = np.zeros((batch, width), int)
    for row, start in zip(micro.rows, micro.starts, strict=True):
        b, n = divmod(start, width)
        assert n + lengths_N[row] <= width
        assert micro.packed or n == 0
        taken[b, n : n + lengths_N[row]] += 1
    assert taken.max(initial=0) <= 1
    assert batch == 1 or not micro.packed


@given(steps(), rules)
@settings(max_examples=100, deadline=None)
def test_rows_are_only_as_wide_as_their_samples_require(step, rules):
    groups_N, lengths_N = step
    multiple = width_multiple(rules)
    taken_N = taken_in_packs(lengths_N, rules) if rules.packed else lengths_N
    for batch in make_layout(3, groups_N, lengths_N, rules).mini_batches:
        needed = [
            [(sum if rules.packed else max)([0, *taken_N[list(m.rows)].tolist()]) for m in share]
            for share in batch.shares
        ]
        widths = [[m.shape[1] for m in share] for share in batch.shares]
        if rules.same_shape == "no":
            pairs = [p for n, w in zip(needed, widths, strict=True) for p in zip(n, w, strict=True)]
        elif rules.same_shape == "ranks":
            pairs = list(zip(map(max, zip(*needed, strict=True)), widths[0], strict=True))
        else:
            pairs = [(max(map(max, needed)), widths[0][0])]
        for need, width in pairs:
            assert need <= width < max(need, 1) + multiple


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 6), st.none() | st.just(5))
@settings(max_examples=200, deadline=None)
def test_bins_hold_each_sample_once_and_are_nearly_even(lengths, count, most):
    """No bin exceeds the mean load by more than the longest sample (Graham's bound)."""
    if most is not None and len(lengths) > most * count:
        return
    lengths_N = np.array(lengths, np.int64)
    found = bins(lengths_N, count, most)
    assert sorted(i for one in found for i in one) == list(range(len(lengths)))
    assert len(found) == count
    loads = [int(lengths_N[one].sum()) for one in found]
    assert loads == sorted(loads, reverse=True)
    assert most is None or max(map(len, found)) <= most
    if most is None and lengths:
        assert loads[0] <= sum(lengths) / count + (1 - 1 / count) * max(lengths) + 1e-9


@given(steps(), rules)
@settings(max_examples=100, deadline=None)
def test_groups_stay_together_and_mini_batches_spread_evenly(step, rules):
    """A mini-batch contains all samples of its groups, and at most the configured number of groups.
    If there are B mini-batches, each block of B neighbouring groups goes into B different
    mini-batches. Each mini-batch therefore spans the step's files."""
    groups_N, lengths_N = step
    layout = make_layout(3, groups_N, lengths_N, rules)
    batches = layout.epoch(0)
    of_group = {}
    for number, batch in enumerate(batches):
        rows = np.concatenate([batch.rows(d) for d in range(rules.data_parallel)])
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
    """One data-parallel rank trains on the same mini-batches as several ranks, so gradients are
    equal up to summation order. The numbers assigned to groups do not matter."""
    groups_N, lengths_N = step
    layout = make_layout(3, groups_N, lengths_N, rules)
    assert layout.sha256 == make_layout(3, 7 * groups_N + 1, lengths_N, rules).sha256
    alone = make_layout(3, groups_N, lengths_N, LayoutRules(**{**vars(rules), "data_parallel": 1}))
    for batch, batch_alone in zip(layout.epoch(0), alone.epoch(0), strict=True):
        together = np.concatenate([batch.rows(d) for d in range(rules.data_parallel)])
        assert sorted(together) == sorted(batch_alone.rows(0))
        ends = [sorted(batch.rows(d)) for d in range(rules.data_parallel)]
        assert sorted(together) == [row for rows in ends for row in rows]  # each rank has one range


def test_step_seed_and_epoch_change_the_order():
    """Otherwise the same samples would be in the same mini-batch each time."""
    groups_N, lengths_N = np.arange(32), np.full(32, 5)
    rules = LayoutRules(1, 8, 4, 2, 1)
    layout = make_layout(3, groups_N, lengths_N, rules)
    first, second = ([b.rows(0).tolist() for b in layout.epoch(epoch)] for epoch in (0, 1))
    assert first != second
    assert layout.sha256 != make_layout(4, groups_N, lengths_N, rules).sha256
    other = LayoutRules(2, 8, 4, 2, 1)
    assert layout.sha256 != make_layout(3, groups_N, lengths_N, other).sha256


def test_the_layout_of_a_known_step_never_changes():
    """A restart with a different version of numpy must lay out a step in the same order."""
    layout = make_layout(3, np.arange(12), np.full(12, 5), LayoutRules(1, 4, 2, 1, 2))
    found = [[m.rows for m in share] for batch in layout.mini_batches for share in batch.shares]
    assert found == [[(2, 4)], [(8, 9)], [(1, 3)], [(7, 10)], [(0, 5)], [(6, 11)]]


shapes = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=4)


def placed(samples, packed, slices=1, context=1, batch=None):
    """Place samples one after another in one row, or each in a separate row, with some padding."""
    chunks = sequence_multiple(context, slices)
    lengths = [len(sample.tokens_S) - 1 for sample in samples.values()]
    multiple = 8 * slices * context
    if packed:
        lengths = [-(-length // chunks) * chunks for length in lengths]
        width = -(-(sum(lengths) + 3) // multiple) * multiple
        starts, batch = np.cumsum([0, *lengths])[:-1], 1
    else:
        width = -(-max([*lengths, 1]) // multiple) * multiple
        starts, batch = width * np.arange(len(lengths)), batch or len(lengths) + 1
    rows = tuple(range(len(samples)))
    return MicroRows(rows, tuple(int(s) for s in starts), (batch, width), packed), dict(
        enumerate(samples)
    )


@given(shapes, st.booleans(), st.integers(1, 3), st.integers(1, 3), st.data())
@settings(max_examples=200, deadline=None)
def test_tokens_and_routes_cannot_drift_apart(shapes, packed, slices, context, data):
    """Each token's route encodes its id. After layout, the recorded set for a router's row still
    encodes the id of the row's token, for every slice of the sequence and every context-parallel
    rank."""
    samples = {f"{i}/0/0": make_sample(f"{i}/0/0", *shape) for i, shape in enumerate(shapes)}
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
    where, ids = placed(samples, packed, slices, context)
    batches = []
    for rank in range(context):
        parts = [
            lay_out(
                where,
                ids,
                Contents(
                    samples,
                    frozenset(),
                    routes,
                    GEOMETRY,
                    Slice(index, slices),
                    Zigzag(rank, context),
                ),
            )
            for index in range(slices)
        ]
        check_router_rows(parts)
        batches.append(parts)
    check_samples(samples, valid, where, batches)
    check_responses(samples, where, [parts[0] for parts in batches])


def check_router_rows(parts):
    """Check that a rank's slices have equal sizes and that its padding tokens are marked."""
    batch, (B, M) = parts[0], parts[0].tokens_BM.shape
    assert all(len(part.rows.kinds_R) == M // len(parts) * B for part in parts)
    kinds_BM = np.concatenate([part.rows.kinds_R for part in parts]).reshape(M, B).T
    assert (batch.padding_BM == (kinds_BM == PADDING)).all()


def check_samples(samples, valid, where, batches):
    """Check the kinds, tokens, positions and routes of all ranks.

    The ranks' parts are joined by Megatron-core's rule.
    """
    first = batches[0][0]
    held = [held_by_megatron(rank, len(batches), first.ends) for rank in range(len(batches))]
    B, N = where.shape
    whole = {
        name: np.empty((B, N, *shape), np.int64)
        for name, shape in (("kinds", ()), ("tokens", ()), ("positions", ()), ("sets", (2, 4)))
    }
    for parts, held_M in zip(batches, held, strict=True):
        rows = [np.concatenate([part.rows.kinds_R for part in parts])]
        rows.append(np.concatenate([part.rows.sets_LRK for part in parts], axis=1).swapaxes(0, 1))
        kinds, sets = (x.reshape(len(held_M), B, *x.shape[1:]).swapaxes(0, 1) for x in rows)
        whole["kinds"][:, held_M], whole["sets"][:, held_M] = kinds, sets
        whole["tokens"][:, held_M] = parts[0].tokens_BM
        whole["positions"][:, held_M] = parts[0].positions_BM
    assert (whole["kinds"] != PADDING).sum() == sum(len(s.tokens_S) - 1 for s in samples.values())
    for (id, sample), start in zip(samples.items(), where.starts, strict=True):
        b, n = divmod(start, N)
        T = len(sample.tokens_S) - 1
        here = (b, slice(n, n + T))
        assert (whole["kinds"][here] == np.where(valid[id], REPLAYED, NATIVE)).all()
        assert (whole["tokens"][here] == sample.tokens_S[:-1]).all()
        assert (whole["positions"][here] == np.arange(T)).all()
        for index, layer in enumerate(GEOMETRY.layers):
            expected = code_of(whole["tokens"][here], layer)
            assert (whole["sets"][here][:, index][valid[id]] == expected[valid[id]]).all()


def held_by_megatron(rank, ranks, ends):
    """Return the positions of a rank, sequence by sequence.

    This is get_batch_on_this_cp_rank from megatron.core.utils, applied to the positions.
    """
    if ranks == 1:
        return np.arange(ends[-1])
    parts = []
    for start, end in itertools.pairwise(ends.tolist()):
        chunks = np.arange(start, end).reshape(2 * ranks, -1)
        parts.append(chunks[[rank, 2 * ranks - rank - 1]].reshape(-1))
    return np.concatenate(parts)


def check_responses(samples, where, batches):
    """Check that each response token is on one rank, at the position that predicts it."""
    _, N = where.shape
    engine = {id: sample.logprobs_G for id, sample in samples.items()}
    found = {}
    for rank, batch in enumerate(batches):
        held_M = held_by_megatron(rank, len(batches), batch.ends)
        response = batch.response
        b_T, n_T = np.divmod(response.places_T, len(held_M))
        fields = (
            response.labels_T,
            response.loss_mask_T,
            response.joined(engine),
            response.sample_T,
        )
        for index, place, *values in zip(
            response.own_T, b_T * N + held_M[n_T], *fields, strict=True
        ):
            assert index not in found
            found[index] = (place, *values)
    assert sorted(found) == list(range(sum(len(s.response_tokens_G) for s in samples.values())))
    index = 0
    for i, (sample, start) in enumerate(zip(samples.values(), where.starts, strict=True)):
        first = start + len(sample.prompt_tokens_P) - 1
        for g, token in enumerate(sample.response_tokens_G):
            expected = (token, sample.loss_mask_G[g], sample.logprobs_G[g], i)
            assert found[index] == (first + g, *expected)
            index += 1


@given(shapes, st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_the_samples_of_a_pack_are_separate_sequences(shapes, context):
    """No sequence is longer than the longest sample, because a sequence as long as the row would
    select different rotary embeddings. Context parallelism pads each sequence to 2 * CP equal
    chunks."""
    samples = {f"{i}/0/0": make_sample(f"{i}/0/0", *shape) for i, shape in enumerate(shapes)}
    where, ids = placed(samples, packed=True, context=context)
    contents = Contents(samples, context=Zigzag(0, context))
    batch = lay_out(where, ids, contents)
    chunks = 2 * context if context > 1 else 1
    lengths = [-(-(len(s.tokens_S) - 1) // chunks) * chunks for s in samples.values()]
    ends = batch.ends.tolist()
    assert ends[0] == 0
    assert ends[-1] == where.shape[1]
    assert set(np.cumsum(lengths).tolist()) <= set(ends)
    assert batch.ends.dtype == np.int32
    longest = max(lengths, default=0) or 8 * chunks
    assert 0 < np.diff(ends).min() <= np.diff(ends).max() <= longest
    assert not (np.diff(ends) % chunks).any()


@pytest.mark.parametrize("context", [1, 2, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_recorded_routes_are_returned_for_each_sample(packed, context):
    """take_up reverses lay_out: it returns the routes that were laid out."""
    samples = {f"{i}/0/0": make_sample(f"{i}/0/0", 3 + i, 4) for i in range(3)}
    routes = {id: coded_routes(s) for id, s in samples.items()}
    where, ids = placed(samples, packed, context=context)
    parts = []
    for rank in range(context):
        part = Zigzag(rank, context)
        contents = Contents(samples, frozenset(), routes, GEOMETRY, context=part)
        batch = lay_out(where, ids, contents)
        B, M = batch.tokens_BM.shape
        parts.append(batch.rows.sets_LRK.reshape(2, M, B, 4).transpose(2, 1, 0, 3))
    taken = take_up(batch.places, batch.context.joined(parts, batch.ends))
    assert taken.keys() == routes.keys()
    for id in routes:
        assert (taken[id].sets_TLK == routes[id].sets_TLK).all()
        assert taken[id].valid_T.all()


@pytest.mark.parametrize("context", [1, 2])
def test_values_of_response_tokens_are_joined_and_split_for_each_sample(context):
    """`joined` joins the samples' values on one rank. `split` takes the values of all ranks and
    splits them into samples."""
    samples = {f"{i}/0/0": make_sample(f"{i}/0/0", 2 + i, 3 * i) for i in range(3)}
    values = {id: s.logprobs_G for id, s in samples.items()}
    where = placed(samples, packed=True, context=context)
    whole_U = np.zeros(9, np.float32)
    for rank in range(context):
        contents = Contents(samples, context=Zigzag(rank, context))
        response = lay_out(*where, contents).response
        joined_T = response.joined(values)
        assert joined_T.dtype == np.float32
        assert (joined_T == np.concatenate(list(values.values()))[response.own_T]).all()
        whole_U[response.own_T] += joined_T
    again = response.split(whole_U)
    assert again.keys() == values.keys()
    assert all((again[id] == values[id]).all() for id in samples)


@pytest.mark.parametrize(
    ("reason", "without", "counts"),
    [
        ("abort", frozenset({"abort"}), False),
        ("length", frozenset({"abort"}), True),
        ("length", frozenset({"abort", "length"}), False),
        ("stop", frozenset({"abort", "length"}), True),
    ],
)
def test_unfinished_responses_may_be_left_out_of_the_loss(reason, without, counts):
    sample = replace(make_sample("0/0/0", 3, 5), finish_reason=reason)
    contents = Contents({"0/0/0": sample}, without_loss=without)
    batch = lay_out(*placed({"0/0/0": sample}, False), contents)
    assert (batch.response.loss_mask_T == sample.loss_mask_G * counts).all()


def test_a_sample_that_is_not_trained_on_has_no_loss_but_is_laid_out():
    sample = make_sample("0/0/0", 3, 5)
    batch = lay_out(
        *placed({"0/0/0": sample}, False), Contents({"0/0/0": sample}, frozenset({"0/0/0"}))
    )
    assert not batch.response.loss_mask_T.any()
    assert (batch.tokens_BM[0, :7] == sample.tokens_S[:-1]).all()


def test_routes_with_an_incorrect_number_of_rows_are_refused():
    """Routes with one row too many or too few are never cut or filled in."""
    sample = make_sample("0/0/0", 3, 5)
    routes, contents = coded_routes(sample), ({"0/0/0": sample}, frozenset())
    for change in (slice(1, None), slice(None, -1)):
        wrong = Routes(routes.sets_TLK[change], routes.valid_T[change])
        with pytest.raises(TraceError, match="sample 0/0/0: routes have shape"):
            lay_out(*placed(contents[0], False), Contents(*contents, {"0/0/0": wrong}, GEOMETRY))


def test_a_sample_too_long_for_a_micro_batch_is_refused():
    rules = LayoutRules(0, 8, None, 1, 1, packed=True, max_tokens=20)
    with pytest.raises(ValueError, match="21 positions; a micro-batch holds at most 20"):
        make_layout(3, np.arange(2), np.array([4, 21]), rules)
