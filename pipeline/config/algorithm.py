"""The learning algorithm; a part of the tree."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from pipeline.config.section import NamedFunction, Section, formerly
from pipeline.rl.corrections.forms import NO_BOUNDS, Correction, rejections, weight_bounds
from pipeline.rl.corrections.presets import PRESETS
from pipeline.rl.estimator_table import ESTIMATORS
from pipeline.rl.losses.kl import KlEstimator


class RolloutCorrection(Section):
    """What is done about the distance between the engine's and the trainer's distribution."""

    preset: str | None = Field(
        None,
        json_schema_extra=formerly(None),
        description="One of verl's combinations by name, such as decoupled_seq_is_rs; it sets the "
        "other settings, of which only the thresholds may be written beside it.",
    )
    rollout_is: Literal["token", "sequence", "geometric"] | None = Field(
        None,
        description="Weigh the policy loss by r = p_trainer/p_engine: of each token, its product "
        "over the sequence, or their geometric mean.",
    )
    rollout_is_threshold: float | str | None = Field(
        2.0,
        description="Of weights. One number: larger ones are cut to it. Two, as in '0.5_5.0': "
        "those outside are 0 (IcePop).",
    )
    rollout_is_batch_normalize: bool = Field(
        False,
        json_schema_extra=formerly(False),
        description="Divide weights by their mean over the step.",
    )
    rollout_rs: str | None = Field(
        None,
        json_schema_extra=formerly(None),
        description="Reject tokens or sequences, which then are not trained on: token_k1, "
        "seq_mean_k3, ... (docs/corrections.md), or several between commas.",
    )
    rollout_rs_threshold: float | str | None = Field(
        None,
        json_schema_extra=formerly(None),
        description="Of rollout_rs: one for all, or one each between commas. k1: bounds of 1/r as "
        "in '0.5_2.0', or one number u for 1/u to u; k2 and k3: the largest value.",
    )
    rollout_token_veto_threshold: float | None = Field(
        None,
        gt=0,
        lt=1,
        json_schema_extra=formerly(None),
        description="Reject sequences with a token whose r is smaller, such as 1e-4.",
    )
    bypass_mode: bool = Field(
        False,
        json_schema_extra=formerly(False),
        description="true: old log-probs are the engine's, which saves the pass that computes "
        "them; corrections are made in each update, from its own log-probs.",
    )
    loss_type: Literal["ppo_clip", "reinforce"] = Field(
        "ppo_clip",
        json_schema_extra=formerly("ppo_clip"),
        description="With bypass_mode: actor.policy_loss on the ratio to the engine, or "
        "REINFORCE with weights of rollout_is.",
    )
    uncorrected_staleness: bool = Field(
        False,
        json_schema_extra=formerly(True),
        description="true: train on samples of an older policy (trainer.max_staleness) without "
        "any correction.",
    )

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, values: Any) -> Any:
        """Lay what is written over the preset, so that run.json has each setting's value."""
        name = values.get("preset") if isinstance(values, dict) else None
        return PRESETS[name] | values if isinstance(name, str) and name in PRESETS else values

    @property
    def corrects(self) -> bool:
        """Whether anything makes up for samples of another policy."""
        of_ratio = self.bypass_mode and self.loss_type == "ppo_clip"
        return of_ratio or self.rollout_is is not None or self.rejects

    @property
    def rejects(self) -> bool:
        """Whether tokens may be rejected."""
        return self.rollout_rs is not None or self.rollout_token_veto_threshold is not None

    @property
    def correction(self) -> Correction:
        """The settings, read; the rules have refused those that cannot be."""
        forms, threshold = self.rollout_rs, self.rollout_rs_threshold
        of_weights = self.rollout_is_threshold
        return Correction(
            level=self.rollout_is,
            bounds=NO_BOUNDS if of_weights is None else weight_bounds(of_weights),
            normalized=self.rollout_is_batch_normalize,
            rejections=() if forms is None else rejections(forms, threshold),
            veto=self.rollout_token_veto_threshold,
        )


class FilterGroups(Section):
    """Dynamic sampling (DAPO): groups without variance are replaced by further prompts."""

    enable: bool = Field(
        False,
        json_schema_extra=formerly(False),
        description="true: a step is trained on data.train_batch_size groups whose samples differ "
        "in `metric`; the others stay in the store with their reason.",
    )
    metric: str | None = Field(
        None,
        json_schema_extra=formerly(None),
        description="seq_reward: the reward; score, acc: without the overlong penalty (acc: that "
        "entry of the reward function's dict, if it has one); else another entry of that dict.",
    )
    max_num_gen_batches: int = Field(
        0,
        json_schema_extra=formerly(0),
        description="Batches of data.gen_batch_size prompts that a step may sample, at most; if "
        "they do not fill it, the run ends with an error. verl's 0, no limit, is refused: a step "
        "owns a window of so many batches, whether it needs them or not.",
    )


class KlCtrl(Section):
    """The coefficient of the KL penalty in the reward (use_kl_in_reward)."""

    type: Literal["fixed", "adaptive"] = Field(
        "fixed",
        json_schema_extra=formerly("fixed"),
        description="adaptive: raised after a step whose KL is above target_kl, lowered below it.",
    )
    kl_coef: float = Field(
        0.001,
        ge=0,
        json_schema_extra=formerly(0.001),
        description="The coefficient; adaptive: that of the first step.",
    )
    horizon: int = Field(
        10_000,
        ge=1,
        json_schema_extra=formerly(10_000),
        description="adaptive: samples over which the coefficient changes by up to a fifth.",
    )
    target_kl: float = Field(
        0.1,
        gt=0,
        json_schema_extra=formerly(0.1),
        description="adaptive: the KL that is aimed at, per token.",
    )


class Algorithm(Section):
    """The learning algorithm."""

    adv_estimator: Annotated[str, NamedFunction(ESTIMATORS)] = Field(
        "grpo", description="Advantage estimator: [algorithms.md](algorithms.md#advantages)."
    )
    norm_adv_by_std_in_grpo: bool = Field(
        True, description="Divide a group's advantages by its standard deviation."
    )
    gamma: float = Field(
        1.0,
        ge=0,
        le=1,
        json_schema_extra=formerly(1.0),
        description="Discount of what follows a token: reinforce_plus_plus, gae.",
    )
    lam: float = Field(
        1.0,
        ge=0,
        le=1,
        json_schema_extra=formerly(1.0),
        description="Weight of later differences: gae.",
    )
    use_kl_in_reward: bool = Field(
        False,
        json_schema_extra=formerly(False),
        description="Subtract kl_ctrl.kl_coef times the KL to the reference policy (policy 0) from "
        "each token's score, before advantages are made.",
    )
    kl_penalty: KlEstimator = Field(
        "kl",
        json_schema_extra=formerly("kl"),
        description="Estimator of that KL (low_var_kl is k3).",
    )
    kl_ctrl: KlCtrl = Field(default_factory=KlCtrl)
    mask_truncated_samples: bool = Field(
        False,
        json_schema_extra=formerly(False),
        description="true: no loss on responses that ended at data.max_response_length; their "
        "rewards still count in their group's mean (DAPO's overlong filtering).",
    )
    rollout_correction: RolloutCorrection = Field(default_factory=RolloutCorrection)
    filter_groups: FilterGroups = Field(default_factory=FilterGroups)
