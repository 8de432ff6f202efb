"""`retrace import-verl`: the written file, and the errors."""

import errno
from pathlib import Path

from typer.testing import CliRunner

import retrace
from pipeline.cli import _app


def test_a_file_is_written_once_and_the_next_command_is_named(tmp_path):
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
        f"wrote {target}; resolve its {todos} TODO lines, then run: retrace check {target}\n"
    )
    assert second.exit_code == 2
    assert second.output.startswith(f"error: {target}: this file already exists; remove it, or")


def test_a_target_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    """A missing folder is reported before the source is read."""
    source, target = tmp_path / "none.sh", tmp_path / "none/my.yaml"
    result = CliRunner().invoke(_app, ["import-verl", str(source), "-o", str(target)])
    assert result.exit_code == 2
    assert result.output == (
        f"error: {target}: the folder {target.parent} does not exist; create it, or give a "
        "different one\n"
    )

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    monkeypatch.setattr(retrace, "import_verl", lambda *_: "trainer: {}\n")
    target = tmp_path / "my.yaml"
    result = CliRunner().invoke(_app, ["import-verl", str(source), "-o", str(target)])
    assert result.exit_code == 2
    assert f"error: {target}: this file cannot be written: No space left" in result.output


def test_errors_name_the_line(tmp_path):
    script, target = tmp_path / "run.sh", tmp_path / "my.yaml"
    script.write_text("set -u\npython3 -m verl.trainer.main_ppo a=$ROOT_OF_NO_ONE\n")
    result = CliRunner().invoke(_app, ["import-verl", str(script), "-o", str(target)])
    assert result.exit_code == 2
    assert f"error: {script}, line 2: ROOT_OF_NO_ONE: unbound variable; set it" in result.output
    assert not target.exists()


def test_run_and_check_refer_to_import_verl():
    for command in ("run", "check"):
        result = CliRunner().invoke(_app, [command, "--config-name=mine", "trainer.nnodes=2"])
        assert result.exit_code == 2
        assert "retrace import-verl" in result.output
