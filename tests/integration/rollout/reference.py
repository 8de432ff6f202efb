"""An independent forward pass: transformers in float32, with the same weights and tokens.

Dimensions: T rows (positions 0..S-2), L MoE layers, K experts per token, E experts, V tokens in the
vocabulary.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

NEAR_TIE = 1e-4
"""Scores that differ by less than this form a near-tie: either choice is then correct."""


@dataclass(frozen=True)
class Reference:
    sets_TLK: np.ndarray
    """The top-k expert ids of each MoE layer's router, ascending."""
    near_tie_TL: np.ndarray
    """Whether the k-th score and the next one differ by less than NEAR_TIE."""
    logits_TV: torch.Tensor

    def logprobs_of(self, response_G, temperature: float) -> np.ndarray:
        """Return the log-probs of the last G tokens at a temperature, float32 [G]."""
        response = torch.tensor(np.asarray(response_G, np.int64))
        logits_GV = self.logits_TV[-len(response) :] / temperature
        return logits_GV.log_softmax(-1).gather(1, response[:, None])[:, 0].numpy()


class ReferenceModel:
    """A Hugging Face checkpoint that is loaded and run with transformers."""

    def __init__(self, folder: Path):
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        layers = self._model.model.layers
        self._gates = {
            i: layer.mlp.gate for i, layer in enumerate(layers) if hasattr(layer.mlp, "gate")
        }

    @property
    def layers(self) -> tuple[int, ...]:
        """Model indices of the MoE layers."""
        return tuple(sorted(self._gates))

    def __call__(self, tokens_S) -> Reference:
        """Compute the forward pass over all tokens except the last."""
        found = {}

        def keep(layer, gate):
            def hook(module, inputs, output):
                logits, _, chosen = output
                found[layer] = (np.sort(chosen.numpy(), -1), _near_tie(gate, logits, chosen))

            return gate.register_forward_hook(hook)

        hooks = [keep(layer, gate) for layer, gate in self._gates.items()]
        ids = torch.tensor(np.asarray(tokens_S, np.int64)[None, :-1])
        with torch.no_grad():
            logits_TV = self._model(ids).logits[0]
        for hook in hooks:
            hook.remove()
        ordered = [found[layer] for layer in self.layers]
        if not ordered:
            return Reference(np.zeros((0, 0, 0)), np.zeros((0, 0)), logits_TV)
        sets, ties = zip(*ordered, strict=True)
        return Reference(np.stack(sets, 1), np.stack(ties, 1), logits_TV)


def _near_tie(gate, logits, chosen) -> np.ndarray:
    """Return, for each row, whether the scores that decide its experts contain a near-tie."""
    scores = logits.float()
    tie = torch.zeros(len(scores), dtype=torch.bool)
    if hasattr(gate, "e_score_correction_bias"):
        # DeepSeek-V3 and GLM-4 choose by biased sigmoid scores, and only within the best groups.
        scores = scores.sigmoid() + gate.e_score_correction_bias
    if getattr(gate, "num_group", 1) > 1:
        grouped = scores.view(len(scores), gate.num_group, -1)
        best = grouped.topk(2, -1)[0].sum(-1)
        ranked = best.sort(-1, descending=True)[0]
        tie |= ranked[:, gate.topk_group - 1] - ranked[:, gate.topk_group] < NEAR_TIE
        takes_part = best >= ranked[:, gate.topk_group - 1 : gate.topk_group]
        scores = grouped.masked_fill(~takes_part[..., None], -torch.inf).flatten(1)
    worst = scores.gather(1, chosen).min(-1)[0]
    others = scores.scatter(1, chosen, -torch.inf).max(-1)[0]
    return (tie | (worst - others < NEAR_TIE)).numpy()
