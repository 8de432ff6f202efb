"""Strict JSON beyond the test vectors in docs/trace-format.md: encodings, bounds, digests."""

import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.run.commit import CorruptObjectError, commit, content_digest, read_commit
from pipeline.run.strict_json import MOST_DEPTH, canonical, parse_json, parse_numbers
from tests.memory_store import MemoryStore

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@given(VALUES.filter(lambda value: len(str(value)) < 90))
def test_json_that_python_writes_is_its_own_canonical_form(value):
    """The digests of all objects that Retrace has written remain valid."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    parsed, as_spelled = parse_numbers(text.encode())
    assert parsed == value
    assert as_spelled is parsed
    assert canonical(as_spelled) == text


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_other_encodings_are_refused(encoding):
    with pytest.raises(ValueError, match="expected UTF-8"):
        parse_json('{"a": 1}'.encode(encoding))


@pytest.mark.parametrize("text", [b'"\xed\xa0\x80"', b'"\xff"', b'"\xc0\x80"'])
def test_invalid_utf_8_is_refused(text):
    with pytest.raises(ValueError, match="not UTF-8"):
        parse_json(text)


@pytest.mark.parametrize("text", ['["\\ud800"]', '{"\\udfff": 1}', '["\\udc00\\ud800"]'])
def test_half_of_a_surrogate_pair_is_refused(text):
    with pytest.raises(ValueError, match="surrogate"):
        parse_json(text)


def test_depth_is_bounded():
    for begin, end, levels in (("[", "]", 1), ('{"a":', "}", 1), ('[{"a":', "}]", 2)):
        deep = MOST_DEPTH // levels
        parse_json(begin * deep + "1" + end * deep)
        for more in (deep + 1, 100_000):
            with pytest.raises(ValueError, match="64 deep"):
                parse_json(begin * more + "1" + end * more)


@pytest.mark.parametrize("number", ["1e5", "1.0", "-0", "1E+2", "9007199254740993", "1" * 100])
def test_the_digest_of_another_writers_commit_covers_numbers_as_spelled(number):
    """The digest does not cover the numbers as Python would write them."""
    digest = content_digest(parse_numbers(f'{{"n": {number}}}')[1])
    store = MemoryStore({"c": f'{{ "n": {number}, "content_sha256": "{digest}" }}'.encode()})
    assert read_commit(store, "c")["n"] == json.loads(number)
    python = content_digest({"n": json.loads(number)})
    if python != digest:
        store.objects["c"] = f'{{"n": {number}, "content_sha256": "{python}"}}'.encode()
        with pytest.raises(CorruptObjectError, match="its content has SHA-256"):
            read_commit(store, "c")


def test_a_commit_that_contains_a_key_twice_is_refused():
    store = MemoryStore()
    commit(store, "c", {"n": 1}, "aaaaaaaa")
    store.objects["c"] = store.objects["c"].replace(b'"n": 1', b'"n": 2,\n "n": 1')
    with pytest.raises(CorruptObjectError, match="'n' twice"):
        read_commit(store, "c")


def test_refusing_a_text_needs_little_memory():
    text = b"[" * 10_000_000
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="deep"):
            parse_json(text)
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()
