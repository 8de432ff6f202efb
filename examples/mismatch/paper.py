"""Results of the R3 paper: Ma et al., arXiv 2510.11370v2, October 2025.

The paper trains Qwen3-30B-A3B on maths with SGLang and Megatron. Three public summaries of the
paper agree on the figures given here. Only the paper's abstract and introduction were read. Check
the figures against the paper before you cite them.
"""

KL_NATIVE, KL_R3, KL_DENSE = 1.535e-3, 7.5e-4, 6.4e-4
"""KL between trainer and engine per response token, estimated with k3. The dense model is
Qwen3-8B."""

FEWER_EXTREME = 10
"""The factor by which R3 lowers the number of extreme tokens: "an order of magnitude". The two
probabilities of an extreme token differ by more than a factor of 2."""
EXTREME_R3 = 1e-4
"""The share of extreme tokens that training with R3 seldom exceeds."""
EXTREME_COLLAPSE = 0.1
"""The share of extreme tokens that GRPO without R3 exceeds when it collapses, at step 60."""

ROUTERS_DIFFER, TOKENS_DIFFER = 0.10, 0.94
"""Share of a token's layers in which the trainer chooses a different set of experts, and share
of tokens with such a difference in at least one of the 48 layers."""

ARMS = {
    "native": "48.8, collapsed at step 120",
    "gspo": "66.8, no collapse in 180 steps",
    "r3": "68.1, no collapse in 180 steps",
    "gspo-r3": "69.0, no collapse in 180 steps",
    "tis": "not reported; with 1 mini-batch: 66.2, collapsed at step 105 (GRPO: 62.2, step 60)",
    "r3-tis": "not reported; with 1 mini-batch: 70.1, no collapse (GRPO + R3: 71.8)",
}
"""Mean score of four maths benchmarks at the best step, and the step of a collapse, keyed by arm.
A step has 8 mini-batches unless the text gives a different number."""

DYNAMICS = {
    "grad_norm": "is lower with R3 throughout (the paper gives no figures)",
    "entropy": "rises with R3 from about step 25 on (1 mini-batch per step)",
}
