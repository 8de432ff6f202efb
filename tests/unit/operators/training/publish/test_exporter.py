"""The assignment of a policy's tensors to ranks, rounds and files."""

from hypothesis import given
from hypothesis import strategies as st

from operators.training.publish.exporter import _in_files, _rounds, choose_owners
from pipeline.policies.weights import TensorPlace

SIZES = st.lists(st.integers(1, 1000), min_size=1, max_size=60)


@given(SIZES, st.integers(1, 6))
def test_owners_have_about_the_same_number_of_bytes(sizes, ranks):
    """The loads of two ranks differ by at most the largest tensor."""
    chosen = choose_owners([(size, range(ranks)) for size in sizes])
    loads = [
        sum(s for s, r in zip(sizes, chosen, strict=True) if r == rank) for rank in range(ranks)
    ]
    assert max(loads) - min(loads) <= max(sizes)


def test_the_owner_is_the_least_loaded_rank_that_holds_the_tensor():
    items = [(10, [2, 3]), (10, [2, 3]), (5, [0]), (1, range(4))]
    assert choose_owners(items) == [2, 3, 0, 1]
    assert choose_owners([(1, range(3))], loads=[7, 2, 3]) == [1]


@given(SIZES, st.integers(1, 4), st.integers(1, 2000))
def test_rounds_fit_into_the_buffer(sizes, ranks, room):
    """The rounds contain every position once, in order."""
    owners = [{0: rank} for rank in choose_owners([(size, range(ranks)) for size in sizes])]
    rounds = _rounds(owners, sizes, room)
    assert [position for positions in rounds for position in positions] == list(range(len(sizes)))
    for positions in rounds:
        for rank in range(ranks):
            own = [sizes[p] for p in positions if owners[p][0] == rank]
            assert len(own) <= 1 or sum(own) <= room


def test_a_new_file_begins_before_the_size_limit(monkeypatch):
    monkeypatch.setattr("operators.training.publish.exporter._LARGEST_FILE", 10)
    tensors = [
        TensorPlace(name, "F32", (), 0, size)
        for name, size in zip("abcd", (4, 6, 30, 1), strict=True)
    ]
    files = [[(t.name, t.begin, t.end) for t in file] for file in _in_files(tensors)]
    assert files == [[("a", 0, 4), ("b", 4, 10)], [("c", 0, 30)], [("d", 0, 1)]]
