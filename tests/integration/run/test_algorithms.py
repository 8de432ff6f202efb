"""Every algorithm trains the quickstart for two steps on samples from the real engine and reward.

One run with ReMax and trainer.max_staleness=1 generates both steps with policy 0. Runs with other
algorithms would generate the same responses, apart from the greedy samples, which only ReMax uses.
All algorithms therefore train on this run's steps, in two processes.
"""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline.report.run_metrics import all_metrics
from pipeline.store import Store, open_store
from pipeline.traces import read_manifest
from pipeline.traces.format.manifest import BASELINE
from tests.integration.run.algorithm_cases import BASE, CASES, SHARED
from tests.integration.run.retrace_runs import command, run, small
from tests.integration.torchrun import run_ranks
from tests.prefect_server import PrefectServer
from tests.unit.rl.reference import estimators as papers
from tests.unit.rl.reference.batch import Batch, Sample

pytestmark = pytest.mark.integration

PARTS = 2
"""The number of processes that share the cases."""

CORRECTION = "rollout_corr"
REJECTED = f"{CORRECTION}/rollout_rs_seq_masked_fraction"
ONLY_HERE = [
    ("gae", "critic/vf_loss"),
    ("kl loss", "actor/kl_loss"),
    ("kl in reward", "actor/reward_kl_penalty"),
    ("adaptive kl in reward", "actor/reward_kl_penalty"),
    ("decoupled_token_icepop", f"{CORRECTION}/rollout_is_oob_ratio"),
    ("decoupled_seq_is_rs", REJECTED),
    ("decoupled_geo_rs", REJECTED),
    ("bypass_pg_geo_rs_seq_tis", REJECTED),
]
"""Metrics that are measured in a case, but not in the base case."""
NOT_HERE = [
    ("loss gspo", "actor/pg_clipfrac_lower"),
    ("loss cispo", "actor/pg_clipfrac_lower"),
    ("loss clip_cov", "actor/pg_clipfrac_lower"),
    ("loss kl_cov", "actor/pg_clipfrac_lower"),
    ("loss gpg", "actor/pg_clipfrac"),
    ("loss sapo", "actor/pg_clipfrac"),
    ("bypass_pg_is", "actor/pg_clipfrac"),
    ("bypass_pg_geo_rs_seq_tis", "actor/pg_clipfrac"),
    ("disabled", f"{CORRECTION}/rollout_is_mean"),
    ("decoupled_geo_rs", f"{CORRECTION}/rollout_is_mean"),
    ("bypass_ppo_clip", f"{CORRECTION}/rollout_is_mean"),
    ("R2", "replay/bytes_fetched"),
    ("native", "replay/coverage"),
]
"""Metrics that are measured in the base case, but not in this case."""
LOG_PROBS = ("actor/entropy", "actor/ppo_kl", "mismatch/kl", f"{CORRECTION}/training_log_ppl")
PAPERS = SimpleNamespace(norm_adv_by_std_in_grpo=True, gamma=1.0, lam=1.0)
"""The quickstart's estimator settings."""


@pytest.fixture(scope="module")
def recorded(prefect_server: PrefectServer, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Return the store of a quickstart run with ReMax."""
    folder = tmp_path_factory.mktemp("recorded")
    settings = ("algorithm.adv_estimator=remax", "trainer.max_staleness=1", *SHARED)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PREFECT_API_URL", prefect_server.url)
        run(*small(folder, "remax", *settings))
    return open_store(f"{folder}/store/remax")


@pytest.fixture(scope="module")
def found(recorded: Store, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the metrics of all cases, and the digests of the weights."""
    folder = tmp_path_factory.mktemp("algorithms")
    program = "tests.integration.run.algorithms"

    def part(number: int) -> dict[str, Any]:
        results = folder / f"{number}.json"
        run_ranks(program, 1, recorded.uri, results, str(number), str(PARTS))
        return json.loads(results.read_text())

    with ThreadPoolExecutor(PARTS) as processes:
        return {case: of for some in processes.map(part, range(PARTS)) for case, of in some.items()}


def test_remax_trains_on_greedy_samples_of_the_engine(recorded: Store, found: dict[str, Any]):
    """The processes of this test train the first step exactly as the run did."""
    for step in range(2):
        rows = read_manifest(recorded, step).rows.to_pylist()
        greedy = [row["group"] for row in rows if row["not_trained"] == BASELINE]
        assert sorted(greedy) == sorted({row["group"] for row in rows})
        assert {row["policy_version"] for row in rows} == {0}
        assert {row["reward"] for row in rows} == {0.0, 1.0}
    of_run, here = all_metrics(recorded)[0].values, found["remax"]["metrics"][0]
    for name in ("critic/advantages/mean", "actor/pg_loss", "actor/grad_norm", *LOG_PROBS):
        assert here[name] == pytest.approx(of_run[name], rel=0.01, abs=1e-4), name
    command("traces", "verify", recorded.uri)


@pytest.mark.parametrize("case", CASES)
def test_an_algorithm_trains(found: dict[str, Any], case: str):
    """Both steps change the weights, and losses, gradient norms and log-probs are finite."""
    assert len(set(found[case]["digests"])) == 3
    for metrics in found[case]["metrics"]:
        assert all(math.isfinite(value) for value in metrics.values() if value is not None)
        assert None not in [metrics[name] for name in ("actor/pg_loss", *LOG_PROBS)]
        assert metrics["actor/grad_norm"] > 0
        assert metrics["update/skipped"] == metrics["update/skipped_empty"] == 0


def test_each_algorithm_has_its_own_results(found: dict[str, Any]):
    weights: dict[str, list[str]] = {}
    for case in CASES:
        weights.setdefault(found[case]["digests"][2], []).append(case)
    assert [cases for cases in weights.values() if len(cases) > 1] == []


@pytest.mark.parametrize("name", [name for name in papers.ESTIMATORS if name != "gae"])
def test_advantages_equal_the_papers_formula(recorded: Store, found: dict[str, Any], name: str):
    """This holds for all estimators except GAE, which depends on the critic's values."""
    for step, metrics in enumerate(found[name]["metrics"]):
        batch = batch_of(read_manifest(recorded, step).rows.to_pylist())
        expected = np.concatenate(papers.ESTIMATORS[name](batch, PAPERS))
        for what in ("mean", "max", "min"):
            value = getattr(expected, what)()
            assert metrics[f"critic/advantages/{what}"] == pytest.approx(value, abs=1e-4)


def batch_of(rows: list[dict[str, Any]]) -> Batch:
    """Return the trained samples of a step in the form that the papers' formulas take."""
    baselines = {row["group"]: row["reward"] for row in rows if row["not_trained"] == BASELINE}
    groups = list(baselines)
    batch = []
    for row in rows:
        if row["not_trained"] is None:
            zeros_L = np.zeros(row["response_length"])
            scores_L = zeros_L.copy()
            scores_L[-1] = row["reward"]
            numbers = dict.fromkeys(
                ("new_L", "old_L", "engine_L", "values_L", "advantages_L", "weights_L"), zeros_L
            )
            sample = Sample(
                group=groups.index(row["group"]),
                reward=row["reward"],
                baseline=baselines[row["group"]],
                mask_L=zeros_L == 0,
                scores_L=scores_L,
                **numbers,
            )
            batch.append(sample)
    return batch


@pytest.mark.parametrize(("case", "name"), [*ONLY_HERE, *NOT_HERE])
def test_metrics_show_which_algorithm_trained(found: dict[str, Any], case: str, name: str):
    for metrics, of_base in zip(found[case]["metrics"], found[BASE]["metrics"], strict=True):
        measured = [values.get(name) is not None for values in (metrics, of_base)]
        assert measured == ([True, False] if (case, name) in ONLY_HERE else [False, True])


def test_settings_of_an_algorithm_have_the_documented_size(found: dict[str, Any]):
    def both(case: str, name: str) -> list[float]:
        return [metrics[name] for metrics in found[case]["metrics"]]

    for case in ("loss clip_cov", "loss kl_cov"):  # the share of tokens that they choose
        assert both(case, "actor/pg_clipfrac") == pytest.approx([0.2, 0.2], abs=0.01)
    coefficient = "actor/reward_kl_penalty_coeff"
    assert both("kl in reward", coefficient) == [0.1, 0.1]
    first, second = both("adaptive kl in reward", coefficient)
    assert first == 0.1
    assert second < 0.1  # the KL is below its target
    sums, means = (both(f"seq-mean-token-{how}", "actor/grad_norm") for how in ("sum", "mean"))
    assert [a / b > 5 for a, b in zip(sums, means, strict=True)] == [True, True]
