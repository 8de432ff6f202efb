"""A damaged step or run is reported on its own line, and the others are still shown."""

import pytest
from typer.testing import CliRunner

import retrace
from pipeline.cli import traces, whole_runs
from pipeline.cli.runs import for_steps
from pipeline.run import keys
from pipeline.store import Store, open_store
from tests.samples import GEOMETRY, R3, make_samples
from tests.stored_runs import whole_run, write_step


@pytest.fixture
def run(tmp_path) -> Store:
    """A run with three steps; the manifest of the second step is damaged."""
    store = open_store(str(tmp_path / "store" / "run"))
    for step in range(3):
        retrace.traces.write_step(store, step, make_samples(step=step), GEOMETRY, R3)
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
def test_a_damaged_step_that_the_user_names_is_refused(run, tmp_path, command):
    more = ["--out", tmp_path / "out"] if command == "export" else []
    assert "error: steps/000001" in outcome(command, run.uri, "--step", 1, *more, expect=2)


@pytest.mark.parametrize("command", ["ls", "stats", "export", "verify"])
def test_a_step_that_lost_its_manifest_is_named(run, tmp_path, command):
    """The samples of steps 1 and 3 are committed. Only step 3 may still be in progress."""
    for step in (1, 3):
        manifest = tmp_path / "store" / "run" / keys.manifest(step)
        if step == 3:
            retrace.traces.write_step(run, step, make_samples(step=step), GEOMETRY, R3)
        manifest.unlink()
    more = ["--out", tmp_path / "out"] if command == "export" else []
    found = outcome(command, run.uri, *more, expect=1)
    why = "step 2 is sealed, and this step has steps/000001/rollout/00000.json"
    assert f"{keys.manifest(1)}: no such object, but {why}" in found
    assert keys.manifest(3) not in found
    if command == "export":
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["000000", "000002"]


@pytest.mark.parametrize("command", ["ls", "stats", "export", "verify"])
@pytest.mark.parametrize("lost", [keys.manifest(1), keys.trainer_routes(1)])
def test_a_trained_step_that_lost_an_object_is_named(tmp_path, command, lost):
    store = open_store(str(tmp_path / "store"))
    whole_run(store, tmp_path, "R2")
    write_step(store, 1, "R2")
    store.delete(lost)
    more = ["--out", tmp_path / "out"] if command == "export" else []
    found = outcome(command, store.uri, *more, expect=1)
    assert f"{lost}: no such object" in found or f"{lost} in {store.uri}: no such object" in found
    if command != "verify":
        assert "error: step 1: " in found


def test_an_error_names_its_step_once(capsys):
    def work(step: int) -> None:
        raise retrace.TraceError(f"step {step} of a run: its samples were removed")

    assert for_steps([3], work)
    assert capsys.readouterr().err == "error: step 3 of a run: its samples were removed\n"


def test_the_other_runs_are_listed(tmp_path):
    for name in ("one", "two"):
        retrace.traces.write_step(open_store(str(tmp_path / name)), 0, make_samples(), GEOMETRY, R3)
    (tmp_path / "one" / "run.json").write_text("{}")
    result = CliRunner().invoke(whole_runs.app, ["ls", str(tmp_path)])
    assert result.exit_code == 1, result.output
    lines = [line.split() for line in result.output.splitlines()]
    states = {line[0]: line[1] for line in lines if line and line[0] in ("one", "two")}
    assert states == {"one": "damaged", "two": "recorded"}
    assert "one: run.json" in result.output
