"""The shape of a model's routing: the one class that settings, traces and workers share.

Letters: L MoE layers, K experts per token (top-k), E experts.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

MOST_EXPERTS, MOST_TOPK, MOST_LAYER = 65_536, 64, 99_999
"""Limits of the trace format."""


@dataclass(frozen=True)
class Geometry:
    """Shape of a routing decision. Example: Geometry(experts=16, topk=4, layers=(1, 2, 3))."""

    experts: int
    """E."""
    topk: int
    """K."""
    layers: tuple[int, ...]
    """Model indices of the MoE layers, ascending; dense layers never appear."""

    @property
    def dtype(self) -> type[np.uint8] | type[np.uint16]:
        """uint8 up to 256 experts, uint16 above: E decides the width, never the ids that occur."""
        return np.uint8 if self.experts <= 256 else np.uint16


def geometry_json(geometry: Geometry | None) -> dict[str, Any] | None:
    """The stored form of a geometry in run.json, commits and file metadata; None: a dense model."""
    if geometry is None:
        return None
    return {"experts": geometry.experts, "topk": geometry.topk, "layers": list(geometry.layers)}


def parse_geometry(value: Any) -> Geometry | None:
    """Parse the stored form. Raises ValueError when it is not a geometry."""
    if value is None:
        return None
    try:
        experts, topk, layers = value["experts"], value["topk"], tuple(value["layers"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"geometry {value!r} is not one") from error
    numbers = all(type(n) is int and n >= 0 for n in (experts, topk, *layers))
    sizes = numbers and 0 < topk <= min(experts, MOST_TOPK) and experts <= MOST_EXPERTS
    if not sizes or not layers or list(layers) != sorted(set(layers)) or layers[-1] > MOST_LAYER:
        raise ValueError(
            f"geometry {value!r}: expected 0 < topk <= experts <= {MOST_EXPERTS}, topk <= "
            f"{MOST_TOPK}, at least one layer, layers ascending up to {MOST_LAYER}"
        )
    return Geometry(experts, topk, layers)
