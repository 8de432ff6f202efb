"""Settings of the learning algorithm."""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from pipeline.config.section import Count, NamedFunction, Section
from pipeline.rl.corrections.forms import NO_BOUNDS, PRESETS, Correction, rejections, weight_bounds
from pipeline.rl.estimator_table import ESTIMATORS
from pipeline.rl.kl import KlEstimator


class RolloutCorrection(Section):
    """Corrections for the mismatch between the trainer's and the engine's probabilities."""

    preset: str | None = Field(
        None,
        description="Name of one of verl's presets for the settings in this group, such as "
        "decoupled_seq_is_rs. Of the settings that the preset determines, only the thresholds may "
        "be set to other values.",
    )
    rollout_is: Literal["token", "sequence", "geometric"] | None = Field(
        None,
        description="Weight the policy loss by r = p_trainer/p_engine. token: by each token's r; "
        "sequence: by the product of r over the sequence; geometric: by the geometric mean of r "
        "over the sequence.",
    )
    rollout_is_threshold: float | str | None = Field(
        2.0,
        description="Bounds on the weights. One number: larger weights are reduced to it. Two "
        "numbers, as in '0.5_5.0': weights outside this range become 0 (IcePop).",
    )
    rollout_is_batch_normalize: bool = Field(
        False,
        description="Divide the weights by their mean over the step.",
    )
    rollout_rs: str | None = Field(
        None,
        description="Criteria for rejecting tokens or sequences, such as token_k1 or seq_mean_k3 "
        "(docs/corrections.md). Rejected tokens and sequences are not trained on. Separate several "
        "criteria with commas.",
    )
    rollout_rs_threshold: float | str | None = Field(
        None,
        description="Thresholds for rollout_rs: one for all its criteria, or one for each, "
        "separated by commas. k1: bounds on 1/r, as in '0.5_2.0', or a single number u for the "
        "range from 1/u to u. k2 and k3: the largest value that passes.",
    )
    rollout_token_veto_threshold: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Reject sequences that contain a token whose r is below this value, for "
        "example 1e-4.",
    )
    bypass_mode: bool = Field(
        False,
        description="true: use the engine's log-probs as old log-probs, and skip the pass that "
        "would compute them. Each update then computes the correction from its own log-probs.",
    )
    loss_type: Literal["ppo_clip", "reinforce"] = Field(
        "ppo_clip",
        description="Loss if bypass_mode is true. ppo_clip: actor.policy_loss, with the ratio of "
        "the trainer's to the engine's probabilities; reinforce: REINFORCE with the weights of "
        "rollout_is.",
    )
    uncorrected_staleness: bool = Field(
        False,
        description="true: train on samples that an older policy version generated "
        "(trainer.max_staleness), without any correction.",
    )

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, values: Any) -> Any:
        """Add the preset's values for the settings that the user did not set.

        run.json then contains every value.
        """
        name = values.get("preset") if isinstance(values, dict) else None
        return PRESETS[name] | values if isinstance(name, str) and name in PRESETS else values

    @property
    def corrects(self) -> bool:
        """Whether any setting uses the log-probs of the rollout to correct the update."""
        of_ratio = self.bypass_mode and self.loss_type == "ppo_clip"
        return of_ratio or self.rollout_is is not None or self.rejects

    @property
    def rejects(self) -> bool:
        """Whether tokens or sequences may be rejected."""
        return self.rollout_rs is not None or self.rollout_token_veto_threshold is not None

    @property
    def correction(self) -> Correction:
        """The parsed settings; the rules have already refused invalid ones."""
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
    """Dynamic sampling (DAPO): groups whose samples do not differ in `metric` are replaced."""

    enable: bool = Field(
        False,
        description="true: train each step on data.train_batch_size groups whose samples differ "
        "in `metric`. Rejected groups stay in the store with the reason for their rejection.",
    )
    metric: str | None = Field(
        None,
        description="Value that must differ among a group's samples. seq_reward: the reward; "
        "score: the reward without the overlong penalty; acc: the entry `acc` of the dict that "
        "the reward function returns, or score if the dict has no such entry; any other name: the "
        "dict's entry of that name.",
    )
    max_num_gen_batches: int = Field(
        0,
        description="Maximum number of batches, of data.gen_batch_size prompts each, that a step "
        "samples. If these batches do not fill the step, the run ends with an error. The value 0 "
        "(no limit in verl) is refused, because each step reserves a window of this many batches, "
        "even if it needs fewer.",
    )


class KlCtrl(Section):
    """The coefficient of the KL penalty in the reward (use_kl_in_reward)."""

    type: Literal["fixed", "adaptive"] = Field(
        "fixed",
        description="fixed: the coefficient is constant; adaptive: it rises after a step whose KL "
        "is above target_kl, and falls after a step whose KL is below target_kl.",
    )
    kl_coef: NonNegativeFloat = Field(
        0.001, description="The coefficient; adaptive: its value in the first step."
    )
    horizon: Count = Field(
        10_000,
        description="adaptive: number of samples over which the coefficient changes by at most a "
        "fifth.",
    )
    target_kl: PositiveFloat = Field(0.1, description="adaptive: the target KL per token.")


class Algorithm(Section):
    """The learning algorithm."""

    adv_estimator: Annotated[str, NamedFunction(ESTIMATORS)] = Field(
        "grpo",
        description="The advantage estimator; see [algorithms.md](algorithms.md#advantages).",
    )
    norm_adv_by_std_in_grpo: bool = Field(
        True,
        description="Divide a group's advantages by the standard deviation of the group's scores.",
    )
    gamma: float = Field(
        1.0,
        ge=0,
        le=1,
        description="reinforce_plus_plus, gae: discount factor for later rewards.",
    )
    lam: float = Field(
        1.0,
        ge=0,
        le=1,
        description="gae: weight of the temporal differences at later tokens.",
    )
    use_kl_in_reward: bool = Field(
        False,
        description="Subtract kl_ctrl.kl_coef times the KL to the reference policy (policy 0) from "
        "each token's score, before advantages are computed. With R3, this KL includes the "
        "difference in routing, as with use_kl_loss.",
    )
    kl_penalty: KlEstimator = Field(
        "kl",
        description="Estimator of the KL that use_kl_in_reward subtracts; k1, k2 and k3 mean kl, "
        "mse and low_var_kl.",
    )
    kl_ctrl: KlCtrl = Field(default_factory=KlCtrl)
    mask_truncated_samples: bool = Field(
        False,
        description="true: exclude from the loss all responses that were cut off at "
        "data.max_response_length; their rewards still count in their group's mean (DAPO's "
        "overlong filtering).",
    )
    rollout_correction: RolloutCorrection = Field(default_factory=RolloutCorrection)
    filter_groups: FilterGroups = Field(default_factory=FilterGroups)
