"""Floating-point operations of a model, and how many a GPU makes at most: for MFU.

MFU is that of PaLM (arXiv 2204.02311, appendix B): the operations that the model needs, whatever
is recomputed, padded or left out, by those that the devices could have made. As there, and in verl,
every position attends to all positions of its sample, and all of them have logits.

Letters: N samples.
"""

import numpy as np
import numpy.typing as npt

from pipeline.model.widths import Widths, layer_weights

PEAK_FLOPS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L20": 119.5e12,
    "L4": 121e12,
}
"""Dense bfloat16 operations per second, by words of NVIDIA's device name (its data sheets)."""

BACKWARD_AND_FORWARD = 3
"""A training pass has thrice the operations of a forward pass: the backward pass is two."""


def peak_flops(device: str) -> float | None:
    """What a GPU makes at most; None: not in the table. Example of a name: 'NVIDIA H200'."""
    words = device.replace("-", " ").split()
    for name, peak in PEAK_FLOPS.items():
        if set(name.split()) <= set(words):
            return peak
    return None


def forward_flops(widths: Widths, lengths_N: npt.NDArray[np.int64]) -> float:
    """Operations of a forward pass over samples of these positions."""
    lengths_N = lengths_N.astype(np.float64)
    weights = widths.vocabulary * widths.hidden  # the output layer; an embedding is a look-up
    for moe in widths.moe_layers:
        layer = layer_weights(widths, moe)
        weights += layer.whole + layer.cut
        weights += layer.experts * widths.topk // widths.experts if moe else 0
    attention = 2 * len(widths.moe_layers) * (widths.query + widths.attended)
    return float(2 * weights * lengths_N.sum() + attention * (lengths_N**2).sum())
