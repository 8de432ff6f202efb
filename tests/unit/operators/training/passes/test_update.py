"""The passes before updates, and the scale of auxiliary losses."""

from types import SimpleNamespace
from typing import Any

import pytest

from operators.training.passes import update as module
from operators.training.passes.compared import Compared
from operators.training.passes.objective import objective_of
from operators.training.passes.update import auxiliary_scale
from tests.integration.training_replay.sealed import config_of


@pytest.mark.parametrize(("divisor", "positions"), [(30, 40), (6, 40)])
def test_the_auxiliary_loss_is_a_mean_over_positions(divisor: int, positions: int):
    """Megatron multiplies each micro-batch's auxiliary loss by its number of positions."""
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
    """Only bypass_mode rejects tokens in the update."""
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
