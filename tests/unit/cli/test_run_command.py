"""`retrace run` up to the flow's first step, with stand-ins for Prefect's decorator and the steps.

tests/integration/run tests the whole command.
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli.run import run_run
from pipeline.config.tree import RunConfig
from pipeline.flows import local, server
from pipeline.inputs.stage import StagedRun
from pipeline.inputs.tokenizer import ChatTokenizer
from pipeline.launch.base import StageFailedError, StageLastingError
from pipeline.run import keys
from retrace import starting
from tests.tiny_models import make_tiny
from tests.unit.inputs.small_inputs import verl_rows, write_inputs, write_prompts


def test_prompts_are_tokenised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The check tokenises the prompts, and the flow stages the result.

    Prefect stores a flow's parameters, so the flow gets the settings but not the prompts.
    """
    settings = write_inputs(tmp_path, make_tiny(tmp_path / "model", "qwen3_moe"))
    write_prompts(tmp_path / "val.parquet", verl_rows(3))
    tokenised: list[int] = []
    encode = ChatTokenizer.encode

    def counting(self: ChatTokenizer, texts: list[str]) -> list[list[int]]:
        tokenised.append(len(texts))
        return encode(self, texts)

    parameters: list[Any] = []

    def flow(**_: object) -> Callable[[Callable[..., str]], Callable[..., str]]:
        def decorate(function: Callable[..., str]) -> Callable[..., str]:
            def call(*arguments: Any) -> str:
                parameters.extend(arguments)
                return function(*arguments)

            return call

        return decorate

    driven: list[StagedRun] = []
    monkeypatch.setattr(ChatTokenizer, "encode", counting)
    monkeypatch.setattr(local, "flow", flow)
    monkeypatch.setattr(server, "prefect_server", lambda *_: nullcontext(nullcontext()))
    monkeypatch.setattr(local, "drive", lambda run, *_: driven.append(run))
    # Without this, the variables would stay in this process's environment.
    monkeypatch.setattr(starting, "_PREFECT", {})

    assert run_run(settings, [f"data.val_files={tmp_path}/val.parquet"]) == 0
    assert tokenised == [10, 3]
    [run] = driven
    assert (run.prompt_count, run.val_prompt_count) == (10, 3)
    assert run.store.size(keys.run_json()) is not None
    [config] = parameters
    assert isinstance(config, RunConfig)


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (StageLastingError("the reward raised"), "Fix the cause, then run the same command again"),
        (StageFailedError("connection lost"), "Run the same command again to continue"),
    ],
)
def test_the_advice_after_a_failure_depends_on_its_cause(
    error: Exception, advice: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """After a lasting error, the user must fix the cause, because the error would recur."""

    class Ready:
        too_small = ()

        def run(self) -> None:
            raise error

    program = sys.modules[run_run.__module__]  # a command has the same name as the module
    monkeypatch.setattr(program, "checked", lambda path, overrides: Ready())
    assert run_run(Path("my.yaml"), []) == 1
    text, last = capsys.readouterr().err.splitlines()
    assert text == f"failed: {error}"
    assert last.startswith(advice)
