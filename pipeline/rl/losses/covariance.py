"""Losses that hold back the tokens which cost most entropy: Clip-Cov and KL-Cov.

A token's covariance is (log(new) - mean log(new)) (A - mean A). Which tokens are chosen depends on
all tokens of a mini-batch, so they are chosen before its micro-batches are trained
(`pipeline/rl/losses/choice.py`) and stand in `LossTokens.chosen_T`.

Source: G. Cui et al., The Entropy Mechanism of Reinforcement Learning for Reasoning Language
Models, arXiv 2505.22617, section 4. Letters: T response tokens of a micro-batch that this rank
holds.
"""

from pipeline.rl.losses.ratio import log_ratio, report, weighted
from pipeline.rl.losses.types import LossSettings, LossTokens, PolicyLoss, Tensor


def clip_cov(tokens: LossTokens, settings: LossSettings) -> PolicyLoss:
    """PPO's clipped loss without dual clip, and no loss on the chosen tokens.

    L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), 0 for the chosen ones (equation 12).
    `clipped` are the chosen tokens, as in verl.
    """
    ratio_T = log_ratio(tokens).exp()
    limited_T = ratio_T.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    loss_T = (-tokens.advantages_T * ratio_T).maximum(-tokens.advantages_T * limited_T)
    chosen_T: Tensor = tokens.chosen_T
    return PolicyLoss(weighted(tokens, loss_T * ~chosen_T), report(tokens, clipped=chosen_T))


def kl_cov(tokens: LossTokens, settings: LossSettings) -> PolicyLoss:
    """The unclipped loss, with a penalty on the chosen tokens.

    L = -A r, and -A r + ppo_kl_coef |log r| for the chosen ones (equation 14; |log r| as the
    authors' code has it). `clipped` are the chosen tokens.
    """
    log_ratio_T = log_ratio(tokens)
    penalty_T = settings.policy_loss.ppo_kl_coef * log_ratio_T.abs() * tokens.chosen_T
    loss_T = -tokens.advantages_T * log_ratio_T.exp() + penalty_T
    return PolicyLoss(weighted(tokens, loss_T), report(tokens, clipped=tokens.chosen_T))
