"""The geometry of a model, which settings, traces and workers share.

Dimensions: L is the number of MoE layers, K the number of experts per token (top-k), and E the
number of experts.
"""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.errors import cut

MOST_EXPERTS, MOST_TOPK, MOST_LAYER = 65_536, 64, 99_999
"""Limits of the trace format on the number of experts, on top-k, and on the index of a layer."""


@dataclass(frozen=True)
class Geometry:
    """Experts, top-k and MoE layers. Example: Geometry(experts=16, topk=4, layers=(1, 2, 3))."""

    experts: int
    """E, the number of experts in each MoE layer."""
    topk: int
    """K, the number of experts that the router chooses per token."""
    layers: tuple[int, ...]
    """The indices of the MoE layers in the model, ascending; dense layers are left out."""

    def __str__(self) -> str:
        """Return the stored form, as JSON, for messages."""
        return json.dumps(geometry_json(self))

    @property
    def dtype(self) -> type[np.uint8] | type[np.uint16]:
        """The dtype of expert ids: uint8 for up to 256 experts, uint16 for more."""
        return np.uint8 if self.experts <= 256 else np.uint16

    @property
    def row_bytes(self) -> int:
        """The size in bytes of one token's expert ids in all layers."""
        return len(self.layers) * self.topk * np.dtype(self.dtype).itemsize


def geometry_json(geometry: Geometry | None) -> dict[str, Any] | None:
    """Return a geometry in the form stored in run.json, commits and file metadata.

    Returns None for None, which is the geometry of a dense model.
    """
    if geometry is None:
        return None
    return {"experts": geometry.experts, "topk": geometry.topk, "layers": list(geometry.layers)}


def parse_geometry(value: Any) -> Geometry | None:
    """Parse the stored form of a geometry. Raises ValueError if the form is invalid."""
    if value is None:
        return None
    try:
        experts, topk, layers = value["experts"], value["topk"], tuple(value["layers"])
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"found {cut(value)}, expected an object with experts, topk and layers"
        ) from error
    numbers = all(type(n) is int and n >= 0 for n in (experts, topk, *layers))
    sizes = numbers and 0 < topk <= min(experts, MOST_TOPK) and experts <= MOST_EXPERTS
    if not sizes or not layers or list(layers) != sorted(set(layers)) or layers[-1] > MOST_LAYER:
        raise ValueError(
            f"found {cut(value)}, expected 0 < topk <= experts <= {MOST_EXPERTS}, topk <= "
            f"{MOST_TOPK}, at least one layer, and layers ascending up to {MOST_LAYER}"
        )
    return Geometry(experts, topk, layers)
