"""PPO's critic: a second model with a value head, trained beside the policy; a part of the tree."""

from typing import Literal

from pydantic import Field

from pipeline.config.actor import Actor
from pipeline.config.optim import Optim
from pipeline.config.section import Section, formerly


class CriticOptim(Optim):
    """The critic's Adam, with rates of its own."""

    lr: float = Field(1e-5, gt=0, description="Learning rate after warm-up.")
    weight_decay_on_norms: bool = Field(
        False,
        json_schema_extra=formerly(False),
        description="true: norms and biases (parameters of one dimension) decay too.",
    )
    skip_nonfinite: bool = Field(
        True,
        json_schema_extra=formerly(True),
        description="A mini-batch whose gradient norm is not finite: skip its optimizer step and "
        "count it (critic/skipped), but end the run after 3 in a row; false: end the run at once.",
    )


class CriticMegatron(Section):
    """Megatron's settings of the critic; all others, the parallel layout first, are the actor's."""

    param_offload: bool | None = Field(
        None,
        description="Keep the critic's weights in the host's memory while no pass of the critic "
        "needs them; null: actor.megatron.param_offload. On a CPU it only copies.",
    )
    grad_offload: bool | None = Field(
        None,
        description="Free the memory of the critic's gradients but for its updates; null: "
        "actor.megatron.grad_offload.",
    )
    optimizer_offload: bool | None = Field(
        None,
        description="Keep the state of the critic's optimizer in the host's memory but for its "
        "updates; null: actor.megatron.optimizer_offload. On a CPU it only copies.",
    )


class Critic(Section):
    """PPO's critic (`algorithm.adv_estimator=gae`): a model of the actor's shape, layout and ranks
    whose output is one value per token. It starts from the actor's weights with a new value head.
    """

    optim: CriticOptim = Field(default_factory=CriticOptim)
    megatron: CriticMegatron = Field(default_factory=CriticMegatron)
    ppo_mini_batch_size: int | None = Field(
        None,
        ge=1,
        description="Prompts per optimizer step (each with rollout.n samples); null: the actor's.",
    )
    ppo_micro_batch_size_per_gpu: int | None = Field(
        None,
        ge=1,
        description="Samples per micro-batch on each data-parallel rank; null: the actor's.",
    )
    use_dynamic_bsz: bool | None = Field(
        None,
        description="Cut micro-batches by tokens (ppo_max_token_len_per_gpu), not by samples; "
        "null: the actor's.",
    )
    ppo_max_token_len_per_gpu: int = Field(
        32_768,
        ge=1,
        description="With use_dynamic_bsz: most tokens of a micro-batch on each rank.",
    )
    forward_micro_batch_size_per_gpu: int | None = Field(
        None,
        ge=1,
        description="Samples per micro-batch of the pass that computes values; null: "
        "ppo_micro_batch_size_per_gpu.",
    )
    forward_max_token_len_per_gpu: int | None = Field(
        None,
        ge=1,
        description="Most tokens of a micro-batch of the pass that computes values, where it is "
        "cut by tokens; null: ppo_max_token_len_per_gpu.",
    )
    ppo_epochs: int | None = Field(
        None, ge=1, description="Passes over a step's samples; null: the actor's."
    )
    cliprange_value: float = Field(
        0.5,
        gt=0,
        description="How far a value may move from that of the step's beginning before the loss "
        "stops to follow.",
    )
    loss_agg_mode: (
        Literal[
            "token-mean",
            "seq-mean-token-sum",
            "seq-mean-token-mean",
            "seq-mean-token-sum-norm",
        ]
        | None
    ) = Field(None, description="How token losses become one number; null: the actor's.")
    loss_scale_factor: int | None = Field(
        None,
        ge=1,
        description="seq-mean-token-sum-norm: the divisor of each sample's sum; null: the actor's.",
    )
    replay_routes: bool = Field(
        False,
        description="Replay the actor's routes (actor.router_replay) in the critic's passes too. "
        "false: the critic's routers choose for themselves.",
    )


def over_actor(critic: Critic, actor: Actor) -> Actor:
    """The critic's settings where the actor has one of the same name, and else the actor's own.

    What builds, wraps, cuts and trains a model takes an Actor; this is the critic's.
    """
    own = {
        name: value
        for name in Critic.model_fields.keys() & Actor.model_fields.keys() - {"megatron"}
        if (value := getattr(critic, name)) is not None
    }
    kept = {
        name: value
        for name in CriticMegatron.model_fields
        if (value := getattr(critic.megatron, name)) is not None
    }
    return actor.model_copy(update={**own, "megatron": actor.megatron.model_copy(update=kept)})
