"""The log-prob passes of a step, and the steps in which the passes must replay all routes."""

from types import SimpleNamespace
from typing import Any

import pytest

from operators.training import step as module
from operators.training.replay.counts import LayerCounts
from operators.training.replay.health import NOT_REPLAYED
from operators.training.step import must_replay, train_step
from tests.integration.training_replay.sealed import config_of

REPLAYED = {"update epoch 0": {1: LayerCounts(8, 0, 0, 8)}}


@pytest.mark.parametrize("mode", ["disabled", "R2", "R3"])
def test_while_only_the_critic_is_trained_passes_may_route_natively(mode: str):
    """R2 records in the log-prob pass, and bypass_mode omits the pass in which R3 would replay."""
    config = config_of(
        router_replay={"mode": mode},
        algorithm={"adv_estimator": "gae"},
        trainer={"critic_warmup": 2},
    )
    assert must_replay(config, 1, {}) is False
    for step in (1, 2):
        assert must_replay(config, step, REPLAYED) is (mode != "disabled")
    assert must_replay(config, 2, {}) is (mode != "disabled")


class ComparedError(Exception):
    """Ends a step after its log-prob passes."""


def passes_of(monkeypatch: pytest.MonkeyPatch, config: Any, step: int, first: bool) -> Any:
    """Return the log-prob passes of a step, and the pass whose log-probs are the old log-probs."""
    passes: list[str] = []

    def pass_of(name: str) -> Any:
        def run(*_: Any) -> Any:
            passes.append(name)
            return SimpleNamespace(logprobs=name)

        return run

    def compare(rank: Any, data: Any, old: Any, *_: Any) -> None:
        raise ComparedError(old)

    for name in ("native", "replaying"):
        monkeypatch.setattr(module, f"{name}_pass", pass_of(name))
    monkeypatch.setattr(module, "await_ranks", lambda: None)
    monkeypatch.setattr(module, "_examine", lambda _, __, sweeps, *___: (sweeps, NOT_REPLAYED))
    monkeypatch.setattr(module, "compare", compare)
    rank: Any = SimpleNamespace(
        config=config,
        chunks=[],
        reference=None,
        critic=None,
        offload=SimpleNamespace(before_log_probs=lambda: None),
    )
    replays = config.actor_rollout_ref.actor.router_replay.replays_recorded
    data: Any = SimpleNamespace(
        step=step,
        ids={},
        samples=SimpleNamespace(await_all=lambda ids: None),
        routes={} if replays else None,
        layout=SimpleNamespace(epoch=lambda number: []),
    )
    with pytest.raises(ComparedError) as caught:
        train_step(rank, data, 0.0, first)
    return passes, caught.value.args[0]


@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize(
    ("native_every", "step", "first", "measures"),
    [
        (2, 3, False, False),
        (2, 4, False, True),
        (2, 3, True, True),
        (0, 0, False, False),
        (0, 0, True, True),
    ],
)
def test_a_native_pass_runs_in_the_first_step_and_every_native_every_steps(
    monkeypatch: pytest.MonkeyPatch,
    bypass: bool,
    native_every: int,
    step: int,
    first: bool,
    measures: bool,
):
    """With bypass_mode, the pass that replays runs only in these steps."""
    config = config_of(
        router_replay={"mode": "R3", "native_every": native_every},
        algorithm={"rollout_correction": {"bypass_mode": bypass}},
    )
    passes, old = passes_of(monkeypatch, config, step, first)
    replays = measures or not bypass
    assert passes == ["replaying"] * replays + ["native"] * measures
    assert old == (None if bypass else "replaying")


def test_without_replay_bypass_mode_omits_the_pass(monkeypatch: pytest.MonkeyPatch):
    for bypass, expected in ((False, (["native"], "native")), (True, ([], None))):
        config = config_of(algorithm={"rollout_correction": {"bypass_mode": bypass}})
        assert passes_of(monkeypatch, config, 0, True) == expected
