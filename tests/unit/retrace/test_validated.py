"""The answers of a validation, opened from a run and shown on the command line."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

import retrace
from pipeline.cli import _app
from pipeline.run.plan import publish_plan
from pipeline.store import open_store
from pipeline.traces.format.ids import VALIDATION
from tests.samples import make_validation_plan, same_sample, without_routes, write_run
from tests.stored_runs import SAMPLES, write_validation

VALIDATED = [
    replace(sample, id=VALIDATION + sample.id, group=VALIDATION + sample.group)
    for sample in without_routes(SAMPLES)
]


@pytest.fixture
def run(tmp_path):
    store = open_store(str(tmp_path / "run"))
    write_run(store, SAMPLES, "R3")
    publish_plan(store, make_validation_plan())
    for shard in range(2):
        write_validation(store, shard)
    return retrace.open_run(tmp_path / "run")


def test_a_validation_has_its_answers(run):
    """They are the written samples, shard by shard, without routes."""
    validation = run.validation(0)
    assert validation.rewards == len(validation.samples) == len(VALIDATED)
    assert sum(one.reward for one in validation.samples) / 6 == pytest.approx(validation.reward)
    by_id = {sample.id: sample for sample in VALIDATED}
    for one in validation.samples:
        assert one.id.startswith(VALIDATION)
        assert one.routes is None
        assert same_sample(one, by_id[one.id])
        assert validation.sample(one.id) == one
    with pytest.raises(retrace.TraceError, match="val-000000/99/0"):
        validation.sample("val-000000/99/0")


def test_a_validation_that_is_not_finished_is_named(run):
    with pytest.raises(retrace.TraceError, match="no finished validation of policy 7"):
        run.validation(7)


def test_answers_are_listed_and_shown(run):
    listed = CliRunner().invoke(_app, ["traces", "ls", run.uri, "--validation", "0"])
    assert listed.exit_code == 0, listed.output + str(listed.exception)
    for sample in VALIDATED:
        assert sample.id in listed.stdout
    shown = CliRunner().invoke(_app, ["traces", "show", run.uri, VALIDATED[0].id])
    assert shown.exit_code == 0
    assert f"{VALIDATED[0].reward:.3f}" in shown.stdout
