"""`retrace import-verl`."""

from typer.testing import CliRunner

from pipeline.cli import _app


def test_writes_a_file_once_and_says_what_is_next(tmp_path):
    script, target = tmp_path / "run.sh", tmp_path / "my.yaml"
    script.write_text(
        "python3 -m verl.trainer.main_ppo nonsense.x=1 algorithm.adv_estimator=grpo\n"
    )
    command = ["import-verl", str(script), "-o", str(target), "trainer.nnodes=2"]
    first, second = (CliRunner().invoke(_app, command) for _ in range(2))
    assert first.exit_code == 0
    text = target.read_text()
    assert "\n  nnodes: 2\n" in text
    todos = text.count("# TODO ")
    assert first.output == (
        f"{target} is written; decide its {todos} TODO lines, then run: retrace check {target}\n"
    )
    assert second.exit_code == 2
    assert second.output.startswith(f"error: {target}: this file is there already; remove it, or")


def test_errors_name_the_line(tmp_path):
    script, target = tmp_path / "run.sh", tmp_path / "my.yaml"
    script.write_text("set -u\npython3 -m verl.trainer.main_ppo a=$ROOT_OF_NO_ONE\n")
    result = CliRunner().invoke(_app, ["import-verl", str(script), "-o", str(target)])
    assert result.exit_code == 2
    assert f"error: {script}, line 2: ROOT_OF_NO_ONE: unbound variable; set it" in result.output
    assert not target.exists()


def test_run_and_check_point_here():
    for command in ("run", "check"):
        result = CliRunner().invoke(_app, [command, "--config-name=mine", "trainer.nnodes=2"])
        assert result.exit_code == 2
        assert "retrace import-verl" in result.output
