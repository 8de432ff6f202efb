"""The metrics table, and metric names in older runs."""

from collections import Counter

from pipeline.metrics import page
from pipeline.metrics.former import NEGATED, RENAMED, SHARES, named_today
from pipeline.metrics.table import GROUPS, find_metric, names_of_every_step
from tests.paths import ROOT


def test_each_name_has_one_row():
    names = Counter(name for group in GROUPS for metric in group.metrics for name in metric.names)
    assert [name for name, count in names.items() if count > 1] == []


def test_a_row_is_found_by_name():
    assert find_metric("critic/rewards/mean").unit == ""
    assert (
        find_metric("critic/rewards/openai/gsm8k/mean").name == "critic/rewards/<data source>/mean"
    )
    assert find_metric("response_length/p90").unit == "tokens"
    assert find_metric("extra/format") is not None
    assert find_metric("extra/") is None
    assert find_metric("loss/policy") is None
    assert "actor/lr" in names_of_every_step()
    assert not [name for name in names_of_every_step() if "<" in name]


def test_metrics_of_older_runs_are_read_under_todays_names():
    stored = {
        "reward/mean": 0.5,
        "loss/log_ratio": 0.25,
        "response/count": 8,
        "response/aborted": 2,
    }
    stored |= {"response/truncated": None, "mismatch/kl": 1e-3, "grad_norm": None}
    today = {"critic/rewards/mean": 0.5, "actor/ppo_kl": -0.25, "response/count": 8}
    today |= {"response/aborted_ratio": 0.25, "response_length/clip_ratio": None}
    assert named_today(stored) == {**today, "mismatch/kl": 1e-3, "actor/grad_norm": None}
    assert named_today(today) == today
    assert named_today({"response/aborted": 2}) == {"response/aborted_ratio": None}


def test_former_names_are_unused_and_their_new_names_are_in_every_step():
    names = RENAMED | NEGATED | SHARES
    assert [old for old in names if find_metric(old)] == []
    assert [new for new in names.values() if new not in names_of_every_step()] == []


def test_the_page_is_generated_from_the_table():
    written = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    assert written == page.render(), "run `make docs`"
