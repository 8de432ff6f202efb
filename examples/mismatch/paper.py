"""What the R3 paper reports: Ma et al., arXiv 2510.11370v2, October 2025.

Qwen3-30B-A3B, SGLang and Megatron, maths. Of the paper itself its abstract and introduction were
read; the figures here are those that three public summaries of the paper give alike. Hold them
against the paper before you cite them.
"""

KL_NATIVE, KL_R3, KL_DENSE = 1.535e-3, 7.5e-4, 6.4e-4
"""KL between trainer and engine per response token, k3; dense: Qwen3-8B."""

FEWER_EXTREME = 10
"""How many times fewer tokens are extreme (probabilities that differ by more than a factor of 2)
with R3 than without: "an order of magnitude"."""
EXTREME_R3 = 1e-4
"""Share of extreme tokens that training with R3 mostly stays below."""
EXTREME_COLLAPSE = 0.1
"""Share of extreme tokens that GRPO without R3 passes where it collapses, at step 60."""

ROUTERS_DIFFER, TOKENS_DIFFER = 0.10, 0.94
"""Share of tokens' layers with another set of experts in the trainer; share of tokens with one in
any of 48 layers."""

ARMS = {
    "native": "48.8, collapsed at step 120",
    "gspo": "66.8, no collapse in 180 steps",
    "r3": "68.1, no collapse in 180 steps",
    "gspo-r3": "69.0, no collapse in 180 steps",
    "tis": "not with 8 mini-steps; with 1: 66.2, collapsed at step 105 (GRPO 62.2, step 60)",
    "r3-tis": "not with 8 mini-steps; with 1: 70.1, no collapse (GRPO + R3 71.8)",
}
"""Mean score of four maths benchmarks at the best step, and collapse; 8 mini-steps a step."""

DYNAMICS = {
    "grad_norm": "lower with R3 throughout (no figures)",
    "entropy": "rises from about step 25 on with R3 (single mini-step)",
}
