"""Settings for the reference policy, and for splitting log-prob passes into micro-batches."""

from pydantic import Field

from pipeline.config.section import Count, Section


class LogProbCut(Section):
    """How a log-prob pass is split into micro-batches; null means the same as in the updates."""

    log_prob_micro_batch_size_per_gpu: Count | None = Field(
        None,
        description="Samples per micro-batch of the log-prob pass on each data-parallel rank; "
        "null: actor.ppo_micro_batch_size_per_gpu.",
    )
    log_prob_use_dynamic_bsz: bool | None = Field(
        None,
        description="Split the log-prob pass by token count instead of by number of samples; "
        "null: actor.use_dynamic_bsz.",
    )
    log_prob_max_token_len_per_gpu: Count | None = Field(
        None,
        description="Maximum number of tokens per micro-batch of the log-prob pass, if the pass "
        "is split by token count; null: actor.ppo_max_token_len_per_gpu. If the pass is split "
        "differently from the updates, its log-probs differ slightly from those of the updates, "
        "because of rounding.",
    )


class RefMegatron(Section):
    """Megatron's settings for the reference policy. All other settings have the actor's values."""

    param_offload: bool | None = Field(
        None,
        description="Keep the reference policy's weights in host memory between its passes "
        "(use_kl_loss, use_kl_in_reward); null: actor.megatron.param_offload. On a CPU, this "
        "setting copies the weights but saves no memory.",
    )


class Ref(LogProbCut):
    """The reference policy (policy 0), used for the KL loss and the KL in the reward."""

    megatron: RefMegatron = Field(default_factory=RefMegatron)
