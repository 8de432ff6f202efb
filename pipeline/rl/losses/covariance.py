"""Losses that restrict updates on the tokens that reduce entropy most: Clip-Cov and KL-Cov.

Both losses choose tokens by their covariance, (log(new) - mean log(new)) (A - mean A). The choice
depends on all tokens of a mini-batch, so it is made before training on the micro-batches
(`pipeline/rl/losses/choice.py`). `LossTokens.chosen_T` marks the chosen tokens.

Source: G. Cui et al., The Entropy Mechanism of Reinforcement Learning for Reasoning Language
Models, arXiv 2505.22617, section 4. Dimensions: T is the number of a micro-batch's response
tokens on this rank.
"""

from pipeline.rl.losses.ratio import log_ratio, report, weighted
from pipeline.rl.losses.types import LossSettings, LossTokens, PolicyLoss, Tensor


def clip_cov(tokens: LossTokens, settings: LossSettings) -> PolicyLoss:
    """PPO's clipped loss without dual clip, and with a loss of 0 on the chosen tokens.

    L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), and 0 for chosen tokens (equation 12).
    The report `clipped` marks the chosen tokens, as in verl.
    """
    ratio_T = log_ratio(tokens).exp()
    limited_T = ratio_T.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    loss_T = (-tokens.advantages_T * ratio_T).maximum(-tokens.advantages_T * limited_T)
    chosen_T: Tensor = tokens.chosen_T
    return PolicyLoss(weighted(tokens, loss_T * ~chosen_T), report(tokens, clipped=chosen_T))


def kl_cov(tokens: LossTokens, settings: LossSettings) -> PolicyLoss:
    """The unclipped loss with a penalty on the chosen tokens.

    L = -A r, and -A r + ppo_kl_coef |log r| for chosen tokens (equation 14, with |log r| from the
    authors' code). The report `clipped` marks the chosen tokens.
    """
    log_ratio_T = log_ratio(tokens)
    penalty_T = settings.policy_loss.ppo_kl_coef * log_ratio_T.abs() * tokens.chosen_T
    loss_T = -tokens.advantages_T * log_ratio_T.exp() + penalty_T
    return PolicyLoss(weighted(tokens, loss_T), report(tokens, clipped=tokens.chosen_T))
