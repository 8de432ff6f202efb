"""Runs in a bucket are listed like runs in a folder, and removed completely."""

import pytest

import retrace
from pipeline.run import keys
from pipeline.run.attempts import end_attempt
from pipeline.run.commit import commit, new_write_id
from tests.attempts import make_attempt
from tests.samples import make_samples, sealed_r3, write_run

pytestmark = pytest.mark.integration


def test_runs_in_a_bucket_are_listed_and_removed(s3_uri):
    for name in ("first", "second"):
        store = retrace.open_store(f"{s3_uri}/{name}")
        write_run(store, make_samples(), "R3")
        sealed_r3(store, make_samples())
        end_attempt(store, make_attempt(store, 0, 1), "finished", "")
    first = retrace.open_store(f"{s3_uri}/first")
    unfinished = first.upload(keys.clock(new_write_id()))
    unfinished.write(b"x" * (9 << 20))  # the first part is being sent
    objects = list(first.list(""))
    found = {run.name: run for run in retrace.list_runs(s3_uri)}
    assert set(found) == {"first", "second"}
    assert found["first"].size == sum(info.size for info in objects)
    commit(first, keys.removal(), {}, new_write_id())  # the state after an interrupted removal
    assert next(iter(retrace.list_runs(s3_uri))).state == "half removed"
    assert retrace.remove_run(f"{s3_uri}/first") >= found["first"].size
    assert [run.name for run in retrace.list_runs(s3_uri)] == ["second"]
    assert list(first.list("")) == list(first.debris("")) == []
