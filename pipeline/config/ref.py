"""The reference policy, and how log-prob passes are cut; a part of the tree."""

from pydantic import Field

from pipeline.config.section import Section, formerly


class LogProbCut(Section):
    """How the micro-batches of a log-prob pass are cut; null: as those of the updates."""

    log_prob_micro_batch_size_per_gpu: int | None = Field(
        None,
        ge=1,
        json_schema_extra=formerly(None),
        description="Samples per micro-batch of this log-prob pass on each data-parallel rank; "
        "null: actor.ppo_micro_batch_size_per_gpu.",
    )
    log_prob_use_dynamic_bsz: bool | None = Field(
        None,
        json_schema_extra=formerly(None),
        description="Cut this log-prob pass by tokens, not by samples; null: "
        "actor.use_dynamic_bsz.",
    )
    log_prob_max_token_len_per_gpu: int | None = Field(
        None,
        ge=1,
        json_schema_extra=formerly(None),
        description="Most tokens of a micro-batch of this log-prob pass, where it is cut by "
        "tokens; null: actor.ppo_max_token_len_per_gpu. In other micro-batches than the updates' "
        "log-probs round otherwise.",
    )


class RefMegatron(Section):
    """Megatron's settings of the reference; all others are the actor's."""

    param_offload: bool | None = Field(
        None,
        json_schema_extra=formerly(None),
        description="Keep the reference's weights in the host's memory between its passes "
        "(use_kl_loss, use_kl_in_reward); null: actor.megatron.param_offload. On a CPU it only "
        "copies.",
    )


class Ref(LogProbCut):
    """The reference policy (policy 0), which a KL loss or the KL in the reward compares with."""

    megatron: RefMegatron = Field(default_factory=RefMegatron)
