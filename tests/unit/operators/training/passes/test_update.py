"""Mini-batches that are skipped, passes before updates, and the scale of auxiliary losses."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from operators.training.errors import UpdateError
from operators.training.passes import update as module
from operators.training.passes.compared import Compared
from operators.training.passes.objective import objective_of
from operators.training.passes.update import auxiliary_scale, update
from tests.integration.training_replay.sealed import config_of


@pytest.mark.parametrize(
    ("here", "elsewhere", "stepped"),
    [([3, 0], [0, 0], 1), ([0, 0], [0, 0], 0), ([0, 2], [5, 0], 2)],
)
def test_a_mini_batch_without_tokens_on_any_rank_is_skipped(
    monkeypatch: pytest.MonkeyPatch, here: list[int], elsewhere: list[int], stepped: int
):
    """The cases list the number of tokens in each mini-batch, on this rank and on another rank."""
    turns, others, steps = iter(here), iter(elsewhere), []

    def gradients(*_: Any) -> tuple[list[dict[str, torch.Tensor]], dict[int, Any]]:
        return [{"tokens": torch.tensor(next(turns)), "policy": torch.tensor(1.0)}], {}

    def largest(tokens: torch.Tensor, op: Any) -> None:
        assert op == torch.distributed.ReduceOp.MAX
        tokens.fill_(max(int(tokens), next(others)))

    def checked_step(_: Any) -> tuple[bool, float]:
        steps.append(1)
        return True, 1.5

    monkeypatch.setattr(module, "gradients", gradients)
    monkeypatch.setattr(module, "checked_step", checked_step)
    monkeypatch.setattr(torch.distributed, "all_reduce", largest)
    rank: Any = SimpleNamespace(
        chunks=[torch.nn.Linear(1, 1)],
        optimizer=None,
        rates=SimpleNamespace(set=lambda step: 0.1),
        skipped=SimpleNamespace(in_a_row=0),
        config=SimpleNamespace(
            actor_rollout_ref=SimpleNamespace(actor=SimpleNamespace(optim=SimpleNamespace()))
        ),
    )
    mini_batches = [SimpleNamespace(epoch=0)] * len(here)
    data: Any = SimpleNamespace(step=0, layout=SimpleNamespace(mini_batches=mini_batches))
    updates = update(rank, data, Compared({}, None), None)
    assert (len(steps), updates.empty, updates.skipped) == (stepped, len(here) - stepped, 0)
    assert len(updates.sums) == len(updates.grad_norms) == stepped


@pytest.mark.parametrize("limit", [1, 3])
def test_mini_batches_without_finite_gradients_are_counted(
    monkeypatch: pytest.MonkeyPatch, limit: int
):
    """A finite mini-batch ends a series, and one more than the limit fails."""
    assert module.MOST_SKIPPED == 3
    monkeypatch.setattr(module, "MOST_SKIPPED", limit)
    said: list[Any] = []
    monkeypatch.setattr(module.progress, "say", lambda *words: said.append(words))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    report = {"tokens": torch.tensor(2), "policy": torch.tensor(1.0)}
    monkeypatch.setattr(module, "gradients", lambda *_: ([report, report], {}))
    norms: list[float] = []
    monkeypatch.setattr(
        module, "checked_step", lambda _: ((norm := norms.pop(0)) < float("inf"), norm)
    )
    optim = SimpleNamespace(skip_nonfinite=True)
    rank: Any = SimpleNamespace(
        chunks=[torch.nn.Linear(1, 1)],
        optimizer=None,
        rates=SimpleNamespace(set=lambda step: 0.1),
        skipped=SimpleNamespace(in_a_row=0),
        config=SimpleNamespace(
            actor_rollout_ref=SimpleNamespace(actor=SimpleNamespace(optim=optim))
        ),
    )

    def updates(*of_mini_batches: float) -> Any:
        norms[:] = of_mini_batches
        mini_batches = [SimpleNamespace(epoch=0)] * len(norms)
        data: Any = SimpleNamespace(step=7, layout=SimpleNamespace(mini_batches=mini_batches))
        return update(rank, data, Compared({}, None), None)

    inf = float("inf")
    found = updates(*[inf] * limit, 1.5, inf)
    assert (found.skipped, found.empty, found.grad_norms) == (limit + 1, 0, [1.5])
    assert found.sums == [{"tokens": 4.0, "policy": 2.0}]
    assert rank.skipped.in_a_row == 1
    assert said == [("step 7: updates", limit + 2, "mini-batches")]
    with pytest.raises(UpdateError, match=r"step 7, mini-batch .*: gradient norm inf.* last"):
        updates(*[inf] * limit)
    rank.skipped.in_a_row = 0
    optim.skip_nonfinite = False
    name = r"actor_rollout_ref.actor.optim.skip_nonfinite=False"
    with pytest.raises(UpdateError, match=f"step 7, mini-batch 0: gradient norm inf.*{name}"):
        updates(inf)


@pytest.mark.parametrize(("divisor", "positions"), [(30, 40), (6, 40)])
def test_the_auxiliary_loss_is_a_mean_over_positions(divisor: int, positions: int):
    """Megatron multiplies each micro-batch's auxiliary loss by its number of positions. It divides
    the sum by the divisor of the loss, which is a number of tokens or samples."""
    of_micro_batches = [(12, 0.5), (28, 2.0)]
    assert sum(cells for cells, _ in of_micro_batches) == positions
    scale = auxiliary_scale(divisor, positions)
    made = sum(cells * loss * scale for cells, loss in of_micro_batches) / divisor
    assert made == pytest.approx((12 * 0.5 + 28 * 2.0) / 40)


REJECTS = {"preset": "bypass_ppo_clip_k3_rs"}
GSPO = {"policy_loss": {"loss_mode": "gspo"}}
CHOOSES = {"policy_loss": {"loss_mode": "kl_cov"}}


@pytest.mark.parametrize(
    ("correction", "actor", "auxiliary", "calls"),
    [
        ({}, GSPO, True, []),
        ({"preset": "bypass_ppo_clip"}, GSPO, True, []),
        ({"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}, GSPO, True, []),
        (REJECTS, {}, False, []),
        (REJECTS, {}, True, ["pass", "reject"]),
        (REJECTS, GSPO, False, ["pass", "reject"]),
        ({}, CHOOSES, False, ["pass", "choose from all"]),
        (REJECTS, CHOOSES, False, ["pass", "reject", "choose from the rest"]),
    ],
)
@pytest.mark.parametrize("last_stage", [True, False])
def test_a_pass_before_the_update_finds_the_tokens_on_whose_number_gradients_depend(
    monkeypatch: pytest.MonkeyPatch,
    correction: dict[str, Any],
    actor: dict[str, Any],
    auxiliary: bool,
    calls: list[str],
    last_stage: bool,
):
    """Only bypass_mode rejects tokens in the update.

    GSPO's loss has a different divisor from the entropy, an auxiliary loss depends on the number
    of tokens, and KL-Cov chooses tokens. All ranks run the pass, but only the last stage has
    tokens.
    """
    made: list[str] = []
    everything, rest = Compared({}, None), Compared({}, None)

    def logprobs_of(*_: Any) -> None:
        made.append("pass")

    def without_rejected(*_: Any) -> Compared:
        made.append("reject")
        return rest

    def chosen_tokens(rank: Any, data: Any, mini_batch: Any, compared: Compared, *_: Any) -> Any:
        made.append("choose from all" if compared is everything else "choose from the rest")
        return {}

    for function in (logprobs_of, without_rejected, chosen_tokens):
        monkeypatch.setattr(module, function.__name__, function)
    config = config_of(algorithm={"rollout_correction": correction}, **actor)
    rank: Any = SimpleNamespace(
        config=config,
        functions={},
        with_auxiliary_loss=auxiliary,
        position=SimpleNamespace(last_stage=last_stage),
    )
    nothing: Any = None
    compared, chosen = module._known_before(
        rank, nothing, nothing, everything, [], None, objective=objective_of(config)
    )
    assert made == (calls if last_stage else calls[:1])
    assert (compared is rest) is ("reject" in made)
    assert (chosen is not None) is any("choose" in call for call in made)
