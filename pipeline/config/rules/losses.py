"""Rules for the policy loss and its aggregation over tokens."""

from collections.abc import Iterator

from pipeline.config.actor import Actor
from pipeline.rl.loss_table import LOSSES

_ACTOR = "actor_rollout_ref.actor"
NORM = "seq-mean-token-sum-norm"


def loss_problems(actor: Actor) -> Iterator[str]:
    """Yield contradictions among the settings of the loss."""
    chosen = actor.policy_loss
    if chosen.clip_cov_lb >= chosen.clip_cov_ub:
        yield (
            f"{_ACTOR}.policy_loss.clip_cov_lb: found {chosen.clip_cov_lb}, expected less than "
            f"clip_cov_ub={chosen.clip_cov_ub}, so that the values of some tokens can "
            "be between the two bounds; write a smaller value"
        )
    if actor.loss_scale_factor is not None and actor.loss_agg_mode != NORM:
        yield (
            f"{_ACTOR}.loss_scale_factor: found {actor.loss_scale_factor}, but only "
            f"{_ACTOR}.loss_agg_mode={NORM} divides by it, and the mode is {actor.loss_agg_mode}; "
            f"write null, or loss_agg_mode={NORM}"
        )


def loss_notes(actor: Actor) -> Iterator[str]:
    """Yield a note if, as in verl, the loss has a fixed mode that overrides loss_agg_mode."""
    loss = LOSSES.get(actor.policy_loss.loss_mode)
    if loss is None or loss.aggregation in (None, actor.loss_agg_mode):
        return
    others = [
        name
        for name, used in (("entropy", actor.entropy_coeff), ("KL loss", actor.use_kl_loss))
        if used
    ]
    rest = f"; {actor.loss_agg_mode} applies to the {' and the '.join(others)}" if others else ""
    yield (
        f"{_ACTOR}.loss_agg_mode: the loss {actor.policy_loss.loss_mode} is always aggregated "
        f"with {loss.aggregation}, as in verl{rest}"
    )
