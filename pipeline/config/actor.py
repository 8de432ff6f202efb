"""Training of the policy: Megatron's layout, replay; a part of the tree."""

from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline.config.optim import Optim
from pipeline.config.section import FOR_WORKERS, NamedFunction, Section, formerly
from pipeline.rl.loss_table import LOSSES
from pipeline.rl.losses.aggregate import AggregationMode


class RouterReplay(Section):
    """Routing replay in the trainer."""

    mode: Literal["disabled", "R2", "R3"] = Field(
        "disabled",
        description="R2: replay what the trainer's log-prob pass chose. "
        "R3: replay what the rollout engine chose.",
    )
    record_file: str | None = Field(
        None, description="Path or URI: write the routes that were used there as a trace set."
    )
    replay_file: str | None = Field(
        None,
        description="Path or URI of a trace set: take samples and routes from it; "
        "no rollout worker is started.",
    )
    replay_other_weights: bool = Field(
        False,
        json_schema_extra=formerly(False),  # the sets of older runs name no weights
        description="Accept a replay_file whose policy 0 had other weights than this run's. Other "
        "routers choose other experts for the same tokens.",
    )
    native_every: int = Field(
        10,
        ge=0,
        description="R3: measure the mismatch without replay every this many steps (a second "
        "forward pass); 0: only in the first step of an attempt, which always does.",
    )
    min_agreement: float = Field(
        0.1,
        ge=0,
        le=1,
        json_schema_extra=FOR_WORKERS | formerly(0.1),
        description="Least share of rows, in each layer and each sample, where the trainer's own "
        "router would choose the recorded experts; below it the routes are unhealthy.",
    )
    on_unhealthy: Literal["fail", "warn"] = Field(
        "fail",
        json_schema_extra=FOR_WORKERS | formerly("warn"),
        description="Recorded routes that do not fit the model: fail the step before it is "
        "trained, or warn and count them. With replay_other_weights: warn in any case.",
    )
    allow_aux_loss: bool = Field(
        False,
        description="Accept an auxiliary load-balancing loss beside replay. It is computed from "
        "the router's own choice, not from the replayed one.",
    )

    @property
    def replays_recorded(self) -> bool:
        """Whether the manifest's own routes are replayed: the engine's, or those of replay_file.

        With replay_file, R2 replays what an earlier log-prob pass recorded, and records nothing
        anew.
        """
        return self.mode == "R3" or (self.mode == "R2" and self.replay_file is not None)

    @property
    def records_routes(self) -> bool:
        """Whether the trainer's log-prob pass records the routes that the update replays."""
        return self.mode == "R2" and self.replay_file is None


class Megatron(Section):
    """Parallel layout of the trainer and Megatron-core settings."""

    tensor_model_parallel_size: int = Field(1, ge=1, description="TP.")
    pipeline_model_parallel_size: int = Field(1, ge=1, description="PP.")
    virtual_pipeline_model_parallel_size: int | None = Field(
        None, ge=2, description="VPP: model chunks per pipeline stage; null: one."
    )
    context_parallel_size: int = Field(
        1, ge=1, description="CP: ranks that hold a part of each sequence."
    )
    expert_model_parallel_size: int = Field(1, ge=1, description="EP.")
    expert_tensor_parallel_size: int | None = Field(
        None, ge=1, description="Expert-TP; null: TP when EP is 1, otherwise 1."
    )
    use_remove_padding: bool = Field(
        True,
        json_schema_extra=formerly(False),
        description="Pack a micro-batch's samples back to back; false: each is padded to the "
        "longest.",
    )
    sequence_parallel: bool = Field(
        True, description="Sequence parallelism; has an effect only when TP > 1."
    )
    use_distributed_optimizer: bool = Field(
        True, description="Shard optimizer state over data-parallel ranks."
    )
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="Type of the trained weights and of the exported policy."
    )
    param_offload: bool = Field(
        False,
        json_schema_extra=formerly(False),
        description="Keep the weights in the host's memory during the passes of the reference "
        "(use_kl_loss, use_kl_in_reward) and of the critic. On a CPU it only copies.",
    )
    grad_offload: bool = Field(
        False,
        json_schema_extra=formerly(False),
        description="Free the gradients' memory during log-prob passes and the critic's.",
    )
    optimizer_offload: bool = Field(
        False,
        json_schema_extra=formerly(False),
        description="Keep the optimizer's state in the host's memory during log-prob passes and "
        "the critic's. On a CPU it only copies.",
    )
    override_ddp_config: dict[str, Any] = Field(
        default_factory=dict,
        json_schema_extra=formerly({}),
        description="Fields of Megatron-core's DistributedDataParallelConfig, as in verl: "
        "grad_reduce_in_fp32, overlap_grad_reduce, bucket_size, ...",
    )
    override_transformer_config: dict[str, Any] = Field(
        default_factory=dict,
        description="Fields of Megatron-core's TransformerConfig, as in verl: "
        "recompute_granularity, recompute_modules, moe_router_dtype, ...",
    )


class ActorLoss(Section):
    """The policy loss."""

    loss_mode: Annotated[str, NamedFunction(LOSSES)] = Field(
        "vanilla",
        json_schema_extra=formerly("vanilla"),
        description="Policy loss: [algorithms.md](algorithms.md#losses).",
    )
    clip_cov_ratio: float = Field(
        0.0002,
        gt=0,
        le=1,
        json_schema_extra=formerly(0.0002),
        description="clip_cov: share of a mini-batch's tokens that are drawn, at least one.",
    )
    clip_cov_lb: float = Field(
        1.0,
        json_schema_extra=formerly(1.0),
        description="clip_cov: tokens of a covariance above this may be drawn.",
    )
    clip_cov_ub: float = Field(
        5.0,
        json_schema_extra=formerly(5.0),
        description="clip_cov: tokens of a covariance below this may be drawn.",
    )
    kl_cov_ratio: float = Field(
        0.0002,
        gt=0,
        le=1,
        json_schema_extra=formerly(0.0002),
        description="kl_cov: share of a mini-batch's tokens that are penalised, at least one.",
    )
    ppo_kl_coef: float = Field(
        0.1,
        ge=0,
        json_schema_extra=formerly(0.1),
        description="kl_cov: weight of the penalty.",
    )


class Actor(Section):
    """Training."""

    strategy: Literal["megatron"] = Field("megatron", description="The training engine.")
    ppo_mini_batch_size: int = Field(
        32, ge=1, description="Prompts per optimizer step (each with rollout.n samples)."
    )
    ppo_micro_batch_size_per_gpu: int = Field(
        8, ge=1, description="Samples per micro-batch on each data-parallel rank."
    )
    use_dynamic_bsz: bool = Field(
        False,
        json_schema_extra=formerly(False),
        description="Cut micro-batches by tokens (ppo_max_token_len_per_gpu), not by samples.",
    )
    ppo_max_token_len_per_gpu: int = Field(
        16_384,
        ge=1,
        json_schema_extra=formerly(16_384),
        description="With use_dynamic_bsz: most tokens of a micro-batch on each rank.",
    )
    ppo_epochs: int = Field(1, ge=1, description="Passes over a step's samples.")
    clip_ratio: float = Field(0.2, gt=0, description="PPO clip range when low/high are not set.")
    clip_ratio_low: float | None = Field(None, gt=0, description="Lower clip range.")
    clip_ratio_high: float | None = Field(None, gt=0, description="Upper clip range.")
    clip_ratio_c: float = Field(
        3.0, gt=1, description="Dual clip: bound of the loss for negative advantages."
    )
    tau_pos: float = Field(
        1.0,
        gt=0,
        json_schema_extra=formerly(1.0),
        description="sapo: steepness of the gate for positive advantages.",
    )
    tau_neg: float = Field(
        1.05,
        gt=0,
        json_schema_extra=formerly(1.05),
        description="sapo: steepness of the gate for other advantages.",
    )
    policy_loss: ActorLoss = Field(default_factory=ActorLoss)
    loss_agg_mode: AggregationMode = Field(
        "token-mean",
        description="How losses of tokens become one number, over all ranks and micro-batches of a "
        "mini-batch.",
    )
    loss_scale_factor: float | None = Field(
        None,
        gt=0,
        json_schema_extra=formerly(None),
        description="seq-mean-token-sum-norm: what a sample's sum is divided by; null: "
        "data.max_response_length.",
    )
    entropy_coeff: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
    use_kl_loss: bool = Field(
        False, description="Add a KL loss to the reference policy (policy 0)."
    )
    kl_loss_coef: float = Field(0.001, ge=0, description="Weight of the KL loss.")
    kl_loss_type: Literal["low_var_kl", "kl", "mse", "abs"] = Field(
        "low_var_kl", description="Estimator of the KL (low_var_kl is k3)."
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
