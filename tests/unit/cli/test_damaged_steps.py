"""A step or run that cannot be read is a line of its own; the others are shown."""

import pytest
from typer.testing import CliRunner

import retrace
from pipeline.cli import traces, whole_runs
from pipeline.run import keys
from pipeline.store import Store, open_store
from tests.samples import GEOMETRY, R3, make_samples


@pytest.fixture
def run(tmp_path) -> Store:
    """Three steps; the manifest of the second is damaged."""
    store = open_store(str(tmp_path / "store" / "run"))
    for step in range(3):
        retrace.write_step(store, step, make_samples(step=step), GEOMETRY, R3)
    manifest = tmp_path / "store" / "run" / keys.manifest(1)
    manifest.write_bytes(manifest.read_bytes().replace(b'"step": 1', b'"step": 7'))
    assert b'"step": 7' in manifest.read_bytes()
    return store


def outcome(*arguments: object, expect: int) -> str:
    result = CliRunner().invoke(traces.app, [str(a) for a in arguments])
    assert result.exit_code == expect, result.output
    return " ".join(result.output.split())


def test_the_other_steps_are_listed(run):
    found = outcome("ls", run.uri, expect=1)
    assert "error: step 1: steps/000001/manifest.json" in found
    assert [f"│ {step} │ 0 │" in found for step in range(3)] == [True, False, True]


def test_the_other_steps_are_measured(run):
    found = outcome("stats", run.uri, expect=1)
    assert "error: step 1: steps/000001/manifest.json" in found
    assert [f"step {step}, R3" in found for step in range(3)] == [True, False, True]


@pytest.mark.parametrize("form", ["npy", "slime"])
def test_the_other_steps_are_exported(run, tmp_path, form):
    if form == "slime":
        pytest.importorskip("torch")
    out = tmp_path / "out"
    found = outcome("export", run.uri, "--out", out, "--format", form, expect=1)
    assert "error: step 1: steps/000001/manifest.json" in found
    names = {"npy": ["000000", "000002"], "slime": ["0.pt", "2.pt"]}[form]
    assert sorted(path.name for path in out.iterdir()) == names


@pytest.mark.parametrize("command", ["ls", "stats", "export"])
def test_a_step_that_was_asked_for_is_refused(run, tmp_path, command):
    more = ["--out", tmp_path / "out"] if command == "export" else []
    assert "error: steps/000001" in outcome(command, run.uri, "--step", 1, *more, expect=2)


def test_the_other_runs_are_listed(tmp_path):
    for name in ("one", "two"):
        retrace.write_step(open_store(str(tmp_path / name)), 0, make_samples(), GEOMETRY, R3)
    (tmp_path / "one" / "run.json").write_text("{}")
    result = CliRunner().invoke(whole_runs.app, ["ls", str(tmp_path)])
    assert result.exit_code == 1, result.output
    lines = [line.split() for line in result.output.splitlines()]
    states = {line[0]: line[1] for line in lines if line and line[0] in ("one", "two")}
    assert states == {"one": "damaged", "two": "recorded"}
    assert "one: run.json" in result.output
