"""A model's operation count, compared with a count by hand, and the peak rates of devices."""

import numpy as np
import pytest

from pipeline.model.flops import forward_flops, peak_flops
from pipeline.model.widths import Widths, widths_of

TINY = {
    "model_type": "qwen3_moe",
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "intermediate_size": 16,
    "moe_intermediate_size": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "vocab_size": 10,
}


@pytest.fixture
def widths() -> Widths:
    return widths_of(TINY)


def test_operations_of_each_weight_and_of_attention(widths: Widths):
    """Each active weight takes two operations per position."""
    attention = 8 * 8 + 2 * 8 * 4 + 8 * 8  # query, key, value, output
    norms = 2 * 8 + 2 * 4
    experts = 2 * 3 * 8 * 4  # top-2 of 4
    layer = attention + norms + 8 * 4 + experts
    weights = 10 * 8 + 2 * layer
    pairs = 2 * 2 * (8 + 8)
    assert forward_flops(widths, np.array([3, 5])) == 2 * weights * 8 + pairs * (9 + 25)


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GB200", 2.5e15),
        ("NVIDIA GeForce RTX 4090", None),
        ("Tesla V100-SXM2-32GB", None),
    ],
)
def test_the_words_of_a_devices_name_select_its_peak(device: str, peak: float | None):
    assert peak_flops(device) == peak
