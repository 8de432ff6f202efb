"""Corrections of the mismatch between the distribution that is trained and the one sampled from.

forms.py says what a correction does, apply.py does it to log-probs, tally.py adds up what it did
over ranks, report.py names the results, presets.py has verl's combinations.

Sources: verl's algorithm.rollout_correction (names, conventions); J. Liu et al., When speed kills
stability (2025): sequence-level weights, masked importance sampling, geometric rejection; F. Yao et
al., Your efficient RL framework secretly brings you off-policy RL training (2025): truncated
importance sampling; IcePop, Ring-1T, arXiv 2510.18855: token weights of 0 outside two bounds;
J. Schulman, Approximating KL divergence (2020): k1, k2, k3.
"""
