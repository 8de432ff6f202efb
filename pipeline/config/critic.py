"""Settings of PPO's critic: a second model with a value head, trained along with the policy."""

from pydantic import Field, PositiveFloat

from pipeline.config.actor import Actor
from pipeline.config.optim import Optim
from pipeline.config.section import Count, Section
from pipeline.rl.losses.aggregate import AggregationMode


class CriticOptim(Optim):
    """The critic's Adam optimizer, with its own learning rates."""

    lr: PositiveFloat = Field(1e-5, description="Learning rate after warm-up.")


class CriticMegatron(Section):
    """Megatron's settings for the critic. Other settings, such as TP, have the actor's values."""

    param_offload: bool | None = Field(
        None,
        description="Keep the critic's weights in host memory except during the critic's "
        "passes; null: actor.megatron.param_offload. On a CPU, this setting "
        "copies the weights but saves no memory.",
    )
    grad_offload: bool | None = Field(
        None,
        description="Free the memory of the critic's gradients except during the critic's "
        "updates; null: actor.megatron.grad_offload.",
    )
    optimizer_offload: bool | None = Field(
        None,
        description="Keep the state of the critic's optimizer in host memory except during the "
        "critic's updates; null: actor.megatron.optimizer_offload. On a CPU, this setting copies "
        "the state but saves no memory.",
    )


class Critic(Section):
    """PPO's critic (`algorithm.adv_estimator=gae`): a second model that predicts token values.

    The critic has the same shape, layout and ranks as the actor. It starts from the actor's
    weights, with a new value head.
    """

    optim: CriticOptim = Field(default_factory=CriticOptim)
    megatron: CriticMegatron = Field(default_factory=CriticMegatron)
    ppo_mini_batch_size: Count | None = Field(
        None,
        description="Prompts per optimizer step (each with rollout.n samples); null: the actor's "
        "value.",
    )
    ppo_micro_batch_size_per_gpu: Count | None = Field(
        None,
        description="Samples per micro-batch on each data-parallel rank; null: the actor's value.",
    )
    use_dynamic_bsz: bool | None = Field(
        None,
        description="Form micro-batches by token count (ppo_max_token_len_per_gpu), not by number "
        "of samples; null: the actor's value.",
    )
    ppo_max_token_len_per_gpu: Count = Field(
        32_768,
        description="With use_dynamic_bsz: maximum number of tokens per micro-batch on each rank.",
    )
    forward_micro_batch_size_per_gpu: Count | None = Field(
        None,
        description="Samples per micro-batch in the pass that computes values; null: "
        "ppo_micro_batch_size_per_gpu.",
    )
    forward_max_token_len_per_gpu: Count | None = Field(
        None,
        description="Maximum number of tokens per micro-batch in the pass that computes values, if "
        "that pass is split by token count; null: ppo_max_token_len_per_gpu.",
    )
    ppo_epochs: Count | None = Field(
        None, description="Number of passes over a step's samples; null: the actor's value."
    )
    cliprange_value: PositiveFloat = Field(
        0.5,
        description="Maximum change in a token's value since the start of the step. If the change "
        "is larger, the value loss is clipped.",
    )
    loss_agg_mode: AggregationMode | None = Field(
        None,
        description="How token losses are combined into one number; null: the actor's mode.",
    )
    loss_scale_factor: Count | None = Field(
        None,
        description="seq-mean-token-sum-norm: the divisor of each sample's sum; null: the actor's "
        "value.",
    )
    replay_routes: bool = Field(
        False,
        description="true: replay the actor's routes (actor.router_replay) in the critic's passes "
        "as well; false: the critic's routers choose the experts.",
    )


def over_actor(critic: Critic, actor: Actor) -> Actor:
    """Return the actor's settings, overridden by the critic's settings that are not null.

    The functions that build, wrap and train a model take an Actor. To apply them to the critic,
    pass this function's result.
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
