"""The log-prob passes of a step, and the steps in which the passes must replay all routes."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from operators.training import step as module
from operators.training.errors import ReplayError
from operators.training.rank import Native
from operators.training.replay.counts import LayerCounts, OfSample
from operators.training.replay.health import NOT_REPLAYED
from operators.training.step import must_replay, train_step
from pipeline.rl.mismatch import Mismatch
from tests.integration.training_replay.sealed import config_of

REPLAYED = {"update epoch 0": {1: LayerCounts(8, 0, 0, 8)}}


@pytest.mark.parametrize("mode", ["disabled", "R2", "R3"])
def test_while_only_the_critic_is_trained_passes_may_route_natively(mode: str):
    """R2 records in the log-prob pass, and bypass_mode omits the pass in which R3 would replay.

    A pass that does replay must replay all routes.
    """
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
    """With bypass_mode, the pass that replays runs only in these steps. The old log-probs are then
    the engine's, not those of this pass."""
    config = config_of(
        router_replay={"mode": "R3", "native_every": native_every},
        algorithm={"rollout_correction": {"bypass_mode": bypass}},
    )
    passes, old = passes_of(monkeypatch, config, step, first)
    replays = measures or not bypass
    assert passes == ["replaying"] * replays + ["native"] * measures
    assert old == (None if bypass else "replaying")


class Examined:
    """A step whose recorded routes are examined on one rank, given its KLs.

    Attributes:
        rank: The rank, with the latest native KL.
        ran: The passes that ran.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, latest: float, **kls: float) -> None:
        self.ran: list[str] = []

        def native_pass(*_: Any) -> Any:
            self.ran.append("native")
            return SimpleNamespace(logprobs="native")

        def mismatch(_: Any, __: Any, logprobs: str | None) -> Mismatch | None:
            return None if logprobs is None else Mismatch(1000, 1000 * kls[logprobs], 0)

        monkeypatch.setattr(module, "native_pass", native_pass)
        monkeypatch.setattr(module, "_mismatch", mismatch)
        monkeypatch.setattr(module, "_say", lambda *_: None)
        monkeypatch.setattr(module, "gathered", lambda value: [value])
        self.rank: Any = SimpleNamespace(
            position=SimpleNamespace(speaks_for_rows=True), chunks=[], native=Native(latest)
        )

    def examine(self, reaction: str) -> Any:
        """Return the results of the passes and the verdict."""
        self.rank.config = config_of(router_replay={"mode": "R3", "on_unhealthy": reaction})
        routes = OfSample(np.full((1, 2, 3), (9, 0, 0), np.int32), np.zeros((1, 3), np.int32))
        trained: Any = SimpleNamespace(
            logprobs="replayed", counts={1: LayerCounts()}, samples={"7/0/0": routes}
        )
        sweeps = module._Sweeps(trained, None, None, None, None, {}, None)
        data: Any = SimpleNamespace(step=7)
        return module._examine(self.rank, data, sweeps, trained, {})


@pytest.mark.parametrize(("latest", "runs"), [(1e-2, False), (0.0, True)])
def test_a_native_pass_runs_if_the_kl_is_too_high_for_the_latest_native_kl(
    monkeypatch: pytest.MonkeyPatch, latest: float, runs: bool
):
    """The KL may be high because the policy has changed since the latest measurement."""
    step = Examined(monkeypatch, latest, replayed=1e-2, native=2e-2)
    sweeps, health = step.examine("fail")
    assert step.ran == ["native"] * runs
    assert sweeps.native == ("native" if runs else None)
    assert health.metrics["replay/unhealthy"] == 0
    assert step.rank.native.kl == (2e-2 if runs else latest)


def test_a_kl_far_above_the_native_kl_is_refused_or_counted(monkeypatch: pytest.MonkeyPatch):
    step = Examined(monkeypatch, 1.4e-4, replayed=2.95, native=1.4e-4)
    with pytest.raises(ReplayError, match=r"step 7: .*0\.00014 without"):
        step.examine("fail")
    assert step.ran == ["native"]
    _, health = step.examine("warn")
    assert health.metrics["replay/unhealthy"] == 1


def test_without_replay_bypass_mode_omits_the_pass(monkeypatch: pytest.MonkeyPatch):
    for bypass, expected in ((False, (["native"], "native")), (True, ([], None))):
        config = config_of(algorithm={"rollout_correction": {"bypass_mode": bypass}})
        assert passes_of(monkeypatch, config, 0, True) == expected
