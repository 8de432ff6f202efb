"""Corrections for the mismatch between the trained distribution and the sampled one.

forms.py defines corrections and lists verl's combinations, apply.py applies them to log-probs, and
report.py computes metrics from the tally of all ranks (`pipeline.rl.moments`).

Sources:

- names and conventions: verl's algorithm.rollout_correction
- sequence-level weights, masked importance sampling, geometric rejection: J. Liu et al., When speed
  kills stability (2025)
- truncated importance sampling: F. Yao et al., Your efficient RL framework secretly brings you
  off-policy RL training (2025)
- token weights of 0 outside two bounds: IcePop, Ring-1T, arXiv 2510.18855
- k1, k2, k3: J. Schulman, Approximating KL divergence (2020)
"""
