"""A small simulation, whose request counts must match the performance model."""

import pytest

from benchmarks.scale.coefficients import read
from benchmarks.scale.parties import Run, Size
from benchmarks.scale.simulation import lags_of, simulate
from pipeline.traces import read_manifest

pytestmark = pytest.mark.integration


def simulated(uri: str, workers: int) -> tuple[Run, dict[str, int]]:
    """Simulate one step of `workers` workers and 4 ranks; return the run and each party's GETs."""
    size = Size(workers, 4, groups=8, n=2, steps=1, staleness=0, rollout_s=1.0, train_s=0.5)
    run, requests = simulate(size, f"{uri}/{workers}", request_s=0.02)
    return run, {party: requests.total(party=party, kind="GET") for party in ("flow", "rank")}


def test_requests_grow_with_shards_as_in_the_model(s3_uri):
    """The flow's requests grow with all shards, a rank's only with the shards that it reads.

    Simulated time passes only in sleeps, so the duration of a step does not depend on load.
    """
    of = read().measured
    few, gets_few = simulated(s3_uri, 4)
    many, gets_many = simulated(s3_uri, 8)
    heads = 1  # await_shards requests each shard at least once
    of_shard = (gets_many["flow"] - gets_few["flow"]) / 4
    assert of_shard + heads == of["seal_shard_requests"]
    for run, gets in ((few, gets_few), (many, gets_many)):
        wanted = sum(
            of["share_requests"] + of["share_shard_requests"] * shards
            for shards in run.lags.touched
        )
        of_policy = run.size.ranks  # rank 0 reads the shares of all ranks
        assert gets["rank"] == pytest.approx(wanted + of_policy, abs=run.size.ranks)
        assert len(read_manifest(run.store, 0).ids) == 16
        assert 1.5 < run.clock.now < 60.0
        assert lags_of(run.lags, 0).keys() == read().simulation["lags"].keys()
