"""A shard's routes file is read once, in bounded memory, wherever its row groups begin and end."""

from unittest.mock import patch

import pytest

from pipeline.upkeep.verify import verify
from pipeline.upkeep.verify.routes_pass import RoutesPass
from tests.forging import Forgery
from tests.memory_store import MemoryStore
from tests.samples import make_samples, sealed_r3

SAMPLES = make_samples(prompts=6, n=3, known=0.8)
ROW = 3 * 4
"""The number of bytes that a row's sets take up in all layers."""


class Counting(MemoryStore):
    """Counts the bytes read from routes files."""

    read_bytes = 0

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        self.read_bytes += length * key.endswith(".routes.parquet")
        return super().read_range(key, offset, length)


@pytest.fixture(scope="module")
def step() -> MemoryStore:
    """A step with small row groups, so that prompts and samples extend over several row groups."""
    store = MemoryStore()
    with patch("pipeline.traces.write.segments.ROW_GROUP_TOKENS", 8):
        sealed_r3(store, SAMPLES)
    return store


@pytest.fixture(params=[(1, 1), (1, 1 << 30), (20 * ROW, 40 * ROW), (1 << 30, 1 << 30)])
def windows(request):
    """Windows that contain one row group, as few as the samples allow, several, or all."""
    least, most = request.param
    with (
        patch("pipeline.upkeep.verify.routes_pass._WINDOW_BYTES", least),
        patch("pipeline.upkeep.verify.routes_pass._MOST_BYTES", most),
    ):
        yield request.param


def test_a_good_step_has_no_problems_however_it_is_divided_into_windows(step, windows):
    report = verify(MemoryStore(dict(step.objects)))
    assert not report.problems
    assert sum(key.endswith(".routes.parquet") for key in report.seen) == 2


@pytest.mark.parametrize("number", range(0, 14, 3))
def test_changed_sets_are_found_wherever_they_are(step, windows, number):
    """One byte of one segment is changed. Only the samples with this segment are named."""
    forgery = Forgery(step)
    row = forgery.segments[number % len(forgery.segments)]
    last = row["layer_00002"][-4:]
    other = bytes([0, 0, 0, 0]) if last != bytes(4) else bytes([1, 0, 0, 0])
    row["layer_00002"] = row["layer_00002"][:-4] + other
    if row["validity"] is not None:
        row["validity"] = None  # otherwise the last row may not be valid
    problems = verify(forgery.sealed()).problems
    named = {problem.sample for problem in problems if problem.sample}
    place = forgery.segments.index(row)
    holders = {
        sample["id"]
        for sample in forgery.samples
        if any(p["row"] == place and p["tokens"] == row["tokens"] for p in sample["segments"])
    }
    assert holders
    assert holders <= named
    assert named <= {
        sample["id"]
        for sample in forgery.samples
        if any(p["row"] == place for p in sample["segments"])
    }


def test_each_byte_is_read_once_except_those_of_footers_and_owner_columns(step):
    store = Counting(dict(step.objects))
    size = sum(len(data) for key, data in store.objects.items() if key.endswith(".routes.parquet"))
    assert not verify(store).problems
    small = 0
    for shard in Forgery(step).shards:
        (entry,) = [f for f in shard.body["files"] if f["role"] == "routes"]
        owners = [i for i, leaf in enumerate(entry["leaves"]) if not leaf.startswith("layer")]
        small += sum(g["chunks"][i][1] for g in entry["row_groups"] for i in owners)
        small += (
            2 * entry["footer"][1]
        )  # once for reading, and once for the comparison with the commit
    assert size < store.read_bytes <= size + small


def test_a_file_in_a_different_order_is_also_read(step):
    """The format does not require a file to store its row groups in the order of their numbers."""
    with patch.object(RoutesPass, "_extent", lambda self, groups: (99 - groups.start, 100)):
        assert not verify(MemoryStore(dict(step.objects))).problems
