"""PPO's loss for runs whose results must be equal bit for bit; gpu_hour.py selects this file.

Each training rank runs this file before it builds the model. The file selects deterministic
kernels, because other GPU kernels add numbers in an arbitrary order. The loss also reports which
log-probs differ from those at the step's start. Unlike a mean difference, this number does not
become 0 if differences cancel.
"""

import os
from dataclasses import replace

import torch

from pipeline.rl.loss_table import LOSSES
from pipeline.rl.losses.types import LossSettings, LossTokens, PolicyLoss

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # Transformer Engine's attention
torch.use_deterministic_algorithms(True, warn_only=True)


def exact(tokens: LossTokens, settings: LossSettings) -> PolicyLoss:
    """Return PPO's loss, and report whether each token's log-prob changed within the step."""
    made = LOSSES["vanilla"].function(tokens, settings)
    changed_T = tokens.logprobs_T.detach() != tokens.old_T
    return replace(made, reports={**made.reports, "changed": changed_T})
