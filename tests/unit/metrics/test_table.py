"""The metrics table."""

from collections import Counter

from pipeline.metrics import page
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


def test_the_page_is_generated_from_the_table():
    written = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    assert written == page.render(), "run `make docs`"
