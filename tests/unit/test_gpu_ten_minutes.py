"""The checks of the first ten minutes on a GPU: their plan, their verdicts, and tiny runs here."""

import json
import subprocess
import sys

import pytest

from scripts import gpu_checks, gpu_ten_minutes
from scripts.gpu_checks import CHECKS, Check, UnexpectedError
from scripts.gpu_ten_minutes import Result, missing, page, run
from tests.paths import ROOT


def test_a_dry_run_lists_every_check_and_what_it_lacks(monkeypatch, capsys):
    monkeypatch.setitem(CHECKS, "loss", Check(gpu_checks.loss, ("torch", "no_such_package.part")))
    monkeypatch.setattr(sys, "argv", ["gpu_ten_minutes", "--dry-run"])
    assert gpu_ten_minutes.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == list(CHECKS)
    assert "(skipped: no_such_package.part)" in lines[list(CHECKS).index("loss")]


def test_a_check_without_its_packages_is_skipped_by_name(monkeypatch):
    monkeypatch.setitem(CHECKS, "loss", Check(gpu_checks.loss, ("no_such_package",)))
    assert missing("loss") == ["no_such_package"]
    assert run("loss") == Result("loss", "skipped", "not installed: no_such_package")


@pytest.mark.parametrize(
    ("code", "lines", "verdict", "says"),
    [
        (0, 'a log line\n{"ms": 1.5, "GB": 2}\nanother', "ok", "ms 1.5; GB 2"),
        (1, "Traceback\nunexpected: 3 of 9 tensors differ", "failed", "3 of 9 tensors differ"),
        (None, "", "failed", "not finished after 120 s"),
    ],
)
def test_the_verdict_of_a_check(monkeypatch, code, lines, verdict, says):
    def finished(words, log, devices, limit_s):
        assert words == ("-m", "scripts.gpu_checks", "versions")
        log.write_text(lines)
        return code

    monkeypatch.setattr(gpu_ten_minutes, "run_guarded", finished)
    found = run("versions")
    assert (found.verdict, says in found.says) == (verdict, True), found


def test_the_page_has_a_row_for_each_check():
    made = page([Result("loss", "ok", "a | b", 3.2), Result("load", "failed", "x")], "H100", "day")
    assert made.startswith("# H100, day\n")
    assert "2 checks, 1 failed" in made
    assert "| loss | **ok** | a / b | 3 |\n| load | **failed** | x | 0 |\n" in made


def test_two_cores_of_transformer_engine_are_a_fault(monkeypatch):
    monkeypatch.setattr(gpu_checks.importlib.metadata, "version", lambda name: "2.11.0")
    with pytest.raises(UnexpectedError, match="both cores of Transformer Engine"):
        gpu_checks.versions(True)


def test_without_a_gpu_nothing_runs(monkeypatch, capsys):
    monkeypatch.setattr(gpu_ten_minutes, "gpu_pool", lambda: ())
    monkeypatch.setattr(sys, "argv", ["gpu_ten_minutes"])
    assert gpu_ten_minutes.main() == 2
    assert "found no GPU" in capsys.readouterr().err


@pytest.mark.integration
@pytest.mark.parametrize("name", ["trainer", "replay", "loss", "export"])
def test_a_tiny_check_gives_figures(name):
    done = subprocess.run(
        [sys.executable, "-m", "scripts.gpu_checks", name, "--tiny"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures
    if name == "trainer":
        assert figures["equal tensors"] > 100
