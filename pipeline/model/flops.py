"""Floating-point operations of a model and peak rates of GPUs, for model FLOPs utilization (MFU).

MFU is defined as in PaLM (arXiv 2204.02311, appendix B): the operations that the model requires,
divided by the operations that the devices could have performed in the same time. Recomputation,
padding and omitted work do not change the number of required operations. As in PaLM and verl, the
count assumes that each position attends to all positions of its sample, and that all positions have
logits.

Dimensions: N is the number of samples.
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
"""Dense bfloat16 operations per second from NVIDIA's data sheets, keyed by words in the device's
name."""

BACKWARD_AND_FORWARD = 3
"""The cost of a forward pass plus a backward pass, in units of a forward pass. The backward pass
counts as two forward passes."""


def peak_flops(device: str) -> float | None:
    """Return a GPU's peak rate in operations per second; None if unknown.

    Example of `device`: 'NVIDIA H200'.
    """
    words = device.replace("-", " ").split()
    for name, peak in PEAK_FLOPS.items():
        if set(name.split()) <= set(words):
            return peak
    return None


def forward_flops(widths: Widths, lengths_N: npt.NDArray[np.int64]) -> float:
    """Return the number of operations in a forward pass over samples of the given lengths."""
    lengths_N = lengths_N.astype(np.float64)
    weights = widths.vocabulary * widths.hidden  # the output layer; the embedding is a look-up
    for moe in widths.moe_layers:
        layer = layer_weights(widths, moe)
        weights += layer.whole + layer.cut
        weights += layer.experts * widths.topk // widths.experts if moe else 0
    attention = 2 * len(widths.moe_layers) * (widths.query + widths.attended)
    return float(2 * weights * lengths_N.sum() + attention * (lengths_N**2).sum())
