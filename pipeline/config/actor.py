"""Settings for training the policy: losses, Megatron's layout and routing replay."""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from pipeline.config.optim import Optim
from pipeline.config.section import FOR_WORKERS, PLACE, Count, NamedFunction, Section, Share
from pipeline.rl.loss_table import LOSSES
from pipeline.rl.losses.aggregate import AggregationMode


class RouterReplay(Section):
    """Routing replay in the trainer."""

    mode: Literal["disabled", "R2", "R3"] = Field(
        "disabled",
        description="R2: replay the routes that the trainer's log-prob pass recorded. "
        "R3: replay the routes that the rollout engine recorded.",
    )
    record_file: Annotated[str | None, PLACE] = Field(
        None,
        description="Path or URI to which the routes used in training are written, as a recorded "
        "set.",
    )
    replay_file: Annotated[str | None, PLACE] = Field(
        None,
        description="Path or URI of a recorded set that supplies the samples and routes. With "
        "this setting, no rollout worker is started.",
    )
    replay_other_weights: bool = Field(
        False,
        description="Accept a replay_file from a run whose policy 0 had different weights. The "
        "file's routes may differ from those that this run's routers would choose.",
    )
    native_every: NonNegativeInt = Field(
        10,
        description="With recorded routes (R3, replay_file): interval, in steps, at which the "
        "mismatch without replay is also measured. Each measurement takes a second forward pass. "
        "The first step of an attempt always includes a measurement, and so does a step whose "
        "mismatch is far above the latest measurement; with 0, no other step does. "
        "In every mode with trainer.max_staleness=1: interval, in steps, at which engine mismatch "
        "and staleness are measured separately (docs/corrections.md).",
    )
    min_agreement: Annotated[float, FOR_WORKERS] = Field(
        0.1,
        ge=0,
        le=1,
        description="Minimum share of rows, in each layer and in each sample, for which the "
        "trainer's own router would choose the recorded experts. If the share is lower in any "
        "layer or sample, the routes are unhealthy (see on_unhealthy). Other limits are fixed "
        "(docs/replay.md).",
    )
    on_unhealthy: Annotated[Literal["fail", "warn"], FOR_WORKERS] = Field(
        "fail",
        description="Reaction to recorded routes that do not fit the model. fail: end the step "
        "with an error before training; warn: log a warning and count the findings "
        "(replay/unhealthy). With replay_other_weights, the reaction is always warn.",
    )
    allow_aux_loss: bool = Field(
        False,
        description="Accept an auxiliary load-balancing loss together with replay. The loss is "
        "computed from the router's own choice of experts, not from the replayed choice.",
    )

    @property
    def replays_recorded(self) -> bool:
        """Whether the trainer replays the manifest's routes: the engine's or replay_file's.

        With replay_file, R2 replays the routes that an earlier log-prob pass recorded, and records
        no new routes.
        """
        return self.mode == "R3" or (self.mode == "R2" and self.replay_file is not None)

    @property
    def records_routes(self) -> bool:
        """Whether the trainer's log-prob pass records the routes that the update replays."""
        return self.mode == "R2" and self.replay_file is None


class Megatron(Section):
    """The trainer's parallel layout and the settings of Megatron-core."""

    tensor_model_parallel_size: Count = Field(1, description="Tensor-parallel size (TP).")
    pipeline_model_parallel_size: Count = Field(1, description="Pipeline-parallel size (PP).")
    virtual_pipeline_model_parallel_size: int | None = Field(
        None, ge=2, description="Model chunks per pipeline stage (VPP); null: 1."
    )
    context_parallel_size: Count = Field(
        1, description="Context-parallel size (CP): number of ranks that share each sequence."
    )
    expert_model_parallel_size: Count = Field(1, description="Expert-parallel size (EP).")
    expert_tensor_parallel_size: Count | None = Field(
        None, description="Tensor-parallel size of the experts; null: TP if EP is 1, otherwise 1."
    )
    use_remove_padding: bool = Field(
        True,
        description="true: pack a micro-batch's samples back to back; false: pad each sample to "
        "the length of the longest one.",
    )
    sequence_parallel: bool = Field(
        True, description="Use sequence parallelism; this has an effect only if TP > 1."
    )
    use_distributed_optimizer: bool = Field(
        True, description="Shard the optimizer state over the data-parallel ranks."
    )
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="Data type of the trained weights and of the exported policy."
    )
    param_offload: bool = Field(
        False,
        description="Keep the weights in host memory during the passes of the reference policy "
        "(use_kl_loss, use_kl_in_reward) and of the critic. On a CPU, this setting "
        "copies the weights but saves no memory.",
    )
    grad_offload: bool = Field(
        False,
        description="Free the gradients' memory during log-prob passes and the critic's passes.",
    )
    optimizer_offload: bool = Field(
        False,
        description="Keep the optimizer's state in host memory during log-prob passes and the "
        "critic's passes. On a CPU, this setting copies the state but saves no memory.",
    )
    override_ddp_config: dict[str, Any] = Field(
        default_factory=dict,
        description="Fields of Megatron-core's DistributedDataParallelConfig, as in verl, such as "
        "grad_reduce_in_fp32, overlap_grad_reduce and bucket_size.",
    )
    override_transformer_config: dict[str, Any] = Field(
        default_factory=dict,
        description="Fields of Megatron-core's TransformerConfig, as in verl, such as "
        "recompute_granularity, recompute_modules and moe_router_dtype.",
    )


class ActorLoss(Section):
    """The policy loss."""

    loss_mode: Annotated[str, NamedFunction(LOSSES)] = Field(
        "vanilla",
        description="The policy loss; see [algorithms.md](algorithms.md#losses).",
    )
    clip_cov_ratio: Share = Field(
        0.0002,
        description="clip_cov: share of a mini-batch's tokens that is drawn at random and left "
        "out of the loss; always at least one token.",
    )
    clip_cov_lb: float = Field(
        1.0,
        description="clip_cov: only tokens with a covariance above this value may be drawn.",
    )
    clip_cov_ub: float = Field(
        5.0,
        description="clip_cov: only tokens with a covariance below this value may be drawn.",
    )
    kl_cov_ratio: Share = Field(
        0.0002,
        description="kl_cov: share of a mini-batch's tokens that is penalised; always at least "
        "one token.",
    )
    ppo_kl_coef: NonNegativeFloat = Field(0.1, description="kl_cov: weight of the penalty.")


class Actor(Section):
    """Training of the policy."""

    strategy: Literal["megatron"] = Field("megatron", description="The training engine.")
    ppo_mini_batch_size: Count = Field(
        32, description="Prompts per optimizer step (each with rollout.n samples)."
    )
    ppo_micro_batch_size_per_gpu: Count = Field(
        8, description="Samples per micro-batch on each data-parallel rank."
    )
    use_dynamic_bsz: bool = Field(
        False,
        description="Form micro-batches by token count (ppo_max_token_len_per_gpu), not by number "
        "of samples.",
    )
    ppo_max_token_len_per_gpu: Count = Field(
        16_384,
        description="With use_dynamic_bsz: maximum number of tokens per micro-batch on each rank.",
    )
    ppo_epochs: Count = Field(1, description="Number of passes over a step's samples.")
    clip_ratio: PositiveFloat = Field(
        0.2,
        description="PPO clip range. clip_ratio_low and clip_ratio_high take this value if they "
        "are null.",
    )
    clip_ratio_low: PositiveFloat | None = Field(
        None, description="Clip range below a ratio of 1; null: clip_ratio."
    )
    clip_ratio_high: PositiveFloat | None = Field(
        None, description="Clip range above a ratio of 1; null: clip_ratio."
    )
    clip_ratio_c: float = Field(
        3.0,
        gt=1,
        description="Dual clip: for a negative advantage A, the loss is at most -A times this "
        "value.",
    )
    tau_pos: PositiveFloat = Field(
        1.0, description="sapo: steepness of the gate for positive advantages."
    )
    tau_neg: PositiveFloat = Field(
        1.05, description="sapo: steepness of the gate for all other advantages."
    )
    policy_loss: ActorLoss = Field(default_factory=ActorLoss)
    loss_agg_mode: AggregationMode = Field(
        "token-mean",
        description="How the token losses of a mini-batch, from all ranks and micro-batches, are "
        "combined into one number.",
    )
    loss_scale_factor: PositiveFloat | None = Field(
        None,
        description="seq-mean-token-sum-norm: the divisor of each sample's sum; null: "
        "data.max_response_length.",
    )
    entropy_coeff: NonNegativeFloat = Field(0.0, description="Weight of the entropy bonus.")
    use_kl_loss: bool = Field(
        False,
        description="Add a term to the loss: the KL to the reference policy (policy 0). The "
        "reference routes natively, so with R3 the KL includes the difference in routing.",
    )
    kl_loss_coef: NonNegativeFloat = Field(0.001, description="Weight of the KL loss.")
    kl_loss_type: Literal["low_var_kl", "kl", "mse", "abs"] = Field(
        "low_var_kl", description="Estimator of the KL; k1, k2 and k3 mean kl, mse and low_var_kl."
    )
    optim: Optim = Field(default_factory=Optim)
    megatron: Megatron = Field(default_factory=Megatron)
    router_replay: RouterReplay = Field(default_factory=RouterReplay)

    @property
    def clip_low(self) -> float:
        """The clip range below a ratio of 1."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        """The clip range above a ratio of 1."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high
