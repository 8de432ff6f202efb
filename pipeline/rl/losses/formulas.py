"""The policy losses of each token, and the loss of PPO's critic.

In the formulas, new and old are a token's probabilities under the weights being trained and under
those at the step's start, r is new / old, A is the advantage, and sg[x] is x without gradient. A
loss is returned before masking and averaging. `loss_table` lists the policy losses by name.

Dimensions: T is the number of a micro-batch's response tokens on this rank, concatenated; S is the
    number of the micro-batch's samples.
"""

from dataclasses import dataclass

from pipeline.rl.losses.types import LossSettings, LossTokens, PolicyLoss, Tensor

LARGEST_LOG_RATIO = 20.0
"""Bound on |log r|, to prevent overflow, as in verl."""
_LARGEST_OF_SAMPLE = 10.0
"""verl's upper bound on the log-ratio of a sample, to prevent overflow."""
_EPSILON = 1e-8
"""verl's guard against a logarithm of 0."""


def log_ratio(tokens: LossTokens) -> Tensor:
    """Return log(new / old) of each token, clamped."""
    difference_T = tokens.logprobs_T - tokens.old_T
    return difference_T.clamp(min=-LARGEST_LOG_RATIO, max=LARGEST_LOG_RATIO)


def _weighted(tokens: LossTokens, loss_T: Tensor, **reports_T: Tensor) -> PolicyLoss:
    """Multiply losses by the importance weights of a mismatch correction, if one is configured.

    Every loss reports the log-ratio in addition to its own reports.
    """
    weighted_T = loss_T if tokens.weights_T is None else loss_T * tokens.weights_T
    return PolicyLoss(weighted_T, {**reports_T, "log_ratio": log_ratio(tokens)})


def _in_range(ratio_T: Tensor, settings: LossSettings) -> Tensor:
    return ratio_T.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)


def vanilla(tokens: LossTokens, settings: LossSettings) -> PolicyLoss:
    """PPO's clipped loss with dual clip.

    L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)). The loss is L, or
    min(L, -A clip_ratio_c) where A < 0. It is multiplied by the token's importance weight, if
    weights are configured.

    Source: PPO, arXiv 1707.06347; dual clip, arXiv 1912.09729; asymmetric range, DAPO,
    arXiv 2503.14476. The arithmetic is that of verl's compute_policy_loss_vanilla.
    """
    advantages_T = tokens.advantages_T
    ratio_T = log_ratio(tokens).exp()
    free_T = -advantages_T * ratio_T
    limited_T = -advantages_T * _in_range(ratio_T, settings)
    clipped_T = free_T.maximum(limited_T)
    bound_T = -advantages_T * settings.clip_ratio_c
    negative_T = advantages_T < 0
    return _weighted(
        tokens,
        clipped_T.minimum(bound_T).where(negative_T, clipped_T),
        clipped=limited_T > free_T,
        dual_clipped=(clipped_T > bound_T) & negative_T,
    )


def reinforce(tokens: LossTokens, settings: LossSettings) -> PolicyLoss:
    """REINFORCE with importance weights: L = -A w log(new), with no gradient through the weight w.

    This is the loss of bypass_mode with loss_type=reinforce. w is p_trainer / p_engine of the token
    or its sequence, clipped by rollout_is_threshold; without rollout_is, w is 1. `tokens.old_T`
    contains the engine's log-probs. The loss itself is not clipped.

    Source: R. J. Williams, Simple statistical gradient-following algorithms (1992); J. Liu et al.,
    When speed kills stability (2025); verl's compute_policy_loss_reinforce.
    """
    return _weighted(tokens, -tokens.advantages_T * tokens.logprobs_T)


def gpg(tokens: LossTokens, settings: LossSettings) -> PolicyLoss:
    """The policy gradient without a ratio or clipping: L = -A log(new).

    Source: X. Chu et al., GPG: A Simple and Strong Reinforcement Learning Baseline for Model
    Reasoning, arXiv 2504.02546, equation 5. The paper's scaling of the advantages (alpha) is part
    of the advantage estimator `gpg`.
    """
    return _weighted(tokens, -tokens.logprobs_T * tokens.advantages_T)


def cispo(tokens: LossTokens, settings: LossSettings) -> PolicyLoss:
    """CISPO's loss, which clips the weight of a token rather than its update.

    L = -sg[clip(r, 1 - clip_low, 1 + clip_high)] A log(new). Every token has a gradient, even if
    its ratio r is out of range. The paper clips r only from above, which clip_ratio_low=1 achieves.

    Source: MiniMax-M1, arXiv 2506.13585, equations 4 and 5; verl's compute_policy_loss_cispo.
    """
    ratio_T = log_ratio(tokens).exp().detach()
    clipped_T = _in_range(ratio_T, settings)
    loss_T = -clipped_T * tokens.advantages_T * tokens.logprobs_T
    return _weighted(tokens, loss_T, clipped=ratio_T != clipped_T)


def dppo_tv(tokens: LossTokens, settings: LossSettings) -> PolicyLoss:
    """DPPO with binary total variation: no loss on tokens whose probability moved too far.

    L = -A sg[min(r, clip_ratio_c)] log(new). L is 0 where new - old > clip_high (A > 0) or
    old - new > clip_low (A <= 0), because the update would increase this difference between the
    probabilities. The paper truncates r at 20; clip_ratio_c has verl's default of 3.

    Source: DPPO, arXiv 2602.04879, section 4; verl's compute_policy_loss_dppo_tv.
    """
    moved_T = (tokens.logprobs_T.exp() - tokens.old_T.exp()).detach()
    rising_T, falling_T = moved_T <= settings.clip_high, moved_T >= -settings.clip_low
    return _dppo(tokens, settings, rising_T, falling_T)


def dppo_kl(tokens: LossTokens, settings: LossSettings) -> PolicyLoss:
    """DPPO with a binary KL divergence, which distinguishes only the sampled token from the others.

    The loss has the form of `dppo_tv`. It is 0 for tokens whose divergence KL(old || new) is above
    clip_high (A > 0) or clip_low (A <= 0), if the update would increase the divergence.

    Source: DPPO, arXiv 2602.04879, section 4; verl's compute_policy_loss_dppo_kl.
    """
    new_T, old_T = tokens.logprobs_T.exp().detach(), tokens.old_T.exp()
    others_T = ((1.0 - old_T + _EPSILON) / (1.0 - new_T + _EPSILON)).log()
    kl_T = old_T * (tokens.old_T - tokens.logprobs_T.detach()) + (1.0 - old_T) * others_T
    rising_T = (kl_T <= settings.clip_high) | (new_T <= old_T)
    falling_T = (kl_T <= settings.clip_low) | (new_T >= old_T)
    return _dppo(tokens, settings, rising_T, falling_T)


def _dppo(
    tokens: LossTokens, settings: LossSettings, rising_T: Tensor, falling_T: Tensor
) -> PolicyLoss:
    ratio_T = log_ratio(tokens).exp().detach()
    kept_T = rising_T.where(tokens.advantages_T > 0, falling_T)
    truncated_T = ratio_T.clamp(max=settings.clip_ratio_c)
    return _weighted(
        tokens,
        -tokens.advantages_T * truncated_T * tokens.logprobs_T * kept_T,
        clipped=~kept_T,
        dual_clipped=(ratio_T > settings.clip_ratio_c) & kept_T,
    )


def sapo(tokens: LossTokens, settings: LossSettings) -> PolicyLoss:
    """SAPO's loss, whose gradient fades instead of being clipped.

    L = -A (4 / tau) sigmoid(tau (r - 1)), where tau is tau_pos if the advantage A is positive and
    tau_neg otherwise. At r = 1, the gradient is that of -A r; it fades as r moves away from 1.
    Tokens are averaged per sample (seq-mean-token-mean).

    Source: SAPO, arXiv 2511.20347, equations 5 and 6; verl's compute_policy_loss_sapo.
    """
    ratio_T = log_ratio(tokens).exp()
    advantages_T = tokens.advantages_T
    tau_T = advantages_T.new_full(advantages_T.shape, settings.tau_pos)
    tau_T = tau_T.where(advantages_T > 0, settings.tau_neg)
    gate_T = (tau_T * (ratio_T - 1.0)).sigmoid() * (4.0 / tau_T)
    return _weighted(tokens, -gate_T * advantages_T)


def clip_cov(tokens: LossTokens, settings: LossSettings) -> PolicyLoss:
    """Clip-Cov: PPO's clipped loss without dual clip, and with a loss of 0 on the chosen tokens.

    L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), and 0 for chosen tokens (equation 12).
    The report `clipped` marks the chosen tokens, as in verl. `choice.choose_clipped` chooses them
    from the entire mini-batch.

    Source: G. Cui et al., The Entropy Mechanism of Reinforcement Learning for Reasoning Language
    Models, arXiv 2505.22617, section 4.
    """
    ratio_T = log_ratio(tokens).exp()
    limited_T = _in_range(ratio_T, settings)
    loss_T = (-tokens.advantages_T * ratio_T).maximum(-tokens.advantages_T * limited_T)
    chosen_T: Tensor = tokens.chosen_T
    return _weighted(tokens, loss_T * ~chosen_T, clipped=chosen_T)


def kl_cov(tokens: LossTokens, settings: LossSettings) -> PolicyLoss:
    """KL-Cov: the unclipped loss with a penalty on the tokens of `choice.choose_penalised`.

    L = -A r, and -A r + ppo_kl_coef |log r| for chosen tokens (equation 14, with |log r| from the
    authors' code). The report `clipped` marks the chosen tokens. Source: as in `clip_cov`.
    """
    log_ratio_T = log_ratio(tokens)
    penalty_T = settings.policy_loss.ppo_kl_coef * log_ratio_T.abs() * tokens.chosen_T
    loss_T = -tokens.advantages_T * log_ratio_T.exp() + penalty_T
    return _weighted(tokens, loss_T, clipped=tokens.chosen_T)


def gspo(tokens: LossTokens, settings: LossSettings) -> PolicyLoss:
    """GSPO-token's loss, which clips the geometric mean of a sample's probability ratios.

    Let s = exp(mean over the sample's tokens of log r). For each token t, let
    s_t = sg[s] new_t / sg[new_t]. The value of s_t is s, but its gradient comes only from token t.
    Then L_t = max(-A_t s_t, -A_t clip(s_t, 1 - clip_low, 1 + clip_high)).

    GSPO's loss per sample is max(-A s, -A clip(s)). If all tokens of a sample have the same
    advantage and their losses are averaged per sample (seq-mean-token-mean), L has the same
    gradient as GSPO's loss.

    Source: C. Zheng et al., Group Sequence Policy Optimization, arXiv 2507.18071, equations 5 to 7
    and 13 to 14; the bound on s comes from verl's compute_policy_loss_gspo.
    """
    log_ratio_T = tokens.logprobs_T - tokens.old_T
    of_sample_T = tokens.samples.spread(tokens.samples.mean(log_ratio_T.detach()))
    log_s_T = of_sample_T + tokens.logprobs_T - tokens.logprobs_T.detach()
    s_T = log_s_T.clamp(max=_LARGEST_OF_SAMPLE).exp()
    free_T = -tokens.advantages_T * s_T
    limited_T = -tokens.advantages_T * _in_range(s_T, settings)
    return _weighted(tokens, free_T.maximum(limited_T), clipped=limited_T > free_T)


def geo_mean(tokens: LossTokens, settings: LossSettings) -> PolicyLoss:
    """GMPO's loss, which weights a sample by the geometric mean of its tokens' clipped ratios.

    With x = log r and c = clip(x, -clip_low, clip_high), each token contributes min(x, c) where
    A > 0 and max(x, c) where A < 0, so that A times the contribution is the smaller of A x and A c.
    Let R be the exponential of the mean of these contributions over the sample. The sample's loss
    is L = -mean(A) R. Each token of the sample has the loss L, so that the mean over the tokens is
    L again (seq-mean-token-mean). The clip range applies to the logarithm.

    The paper assumes one advantage per sample; this function uses the mean over the tokens. As in
    verl, the sample's loss is multiplied by the geometric mean of its tokens' importance weights,
    and a weight of 0 counts as 1e-10.

    Source: Y. Zhao et al., Geometric-Mean Policy Optimization, arXiv 2507.20673, equation 4 and
    algorithm 1; verl's compute_policy_loss_geo_mean. verl averages over all samples of a
    micro-batch; this loss omits samples without a token in the loss.
    """
    samples, advantages_T = tokens.samples, tokens.advantages_T
    log_ratio_T = tokens.logprobs_T - tokens.old_T
    limited_T = log_ratio_T.clamp(-settings.clip_low, settings.clip_high)
    sign_T = advantages_T.sign()
    taken_T = sign_T * (sign_T * log_ratio_T).minimum(sign_T * limited_T)
    ratio_S = samples.mean(taken_T).clamp(max=_LARGEST_OF_SAMPLE).exp()
    loss_S = -samples.mean(advantages_T) * ratio_S
    if tokens.weights_T is not None:
        loss_S = loss_S * samples.mean((tokens.weights_T + 1e-10).log()).exp()
    beyond_T = log_ratio_T != limited_T
    reports = {
        "clipped": beyond_T & (advantages_T > 0),
        "dual_clipped": beyond_T & (advantages_T < 0),
        "log_ratio": log_ratio(tokens),
    }
    return PolicyLoss(samples.spread(loss_S), reports)


@dataclass(frozen=True)
class ValueLoss:
    """The clipped value loss, [T], and the clipped tokens."""

    loss_T: Tensor
    clipped_T: Tensor
    """Whether the clip range changed a token's loss, bool (verl's vf_clipfrac)."""


def value_loss(values_T: Tensor, old_T: Tensor, returns_T: Tensor, cliprange: float) -> ValueLoss:
    """The critic's clipped loss, max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) / 2.

    Source: Schulman et al., openai/baselines ppo2 (2017); examined by Engstrom et al.,
    arXiv 2005.12729. The arithmetic is that of verl's compute_value_loss.

    Args:
        values_T: The values v under the weights being trained, with gradient, float32.
        old_T: The values v_old at the step's start.
        returns_T: The returns R.
        cliprange: The clip range c.
    """
    limited_T = values_T.maximum(old_T - cliprange).minimum(old_T + cliprange)
    free_T = (values_T - returns_T).square()
    clipped_T = (limited_T - returns_T).square()
    return ValueLoss(0.5 * free_T.maximum(clipped_T), clipped_T > free_T)
