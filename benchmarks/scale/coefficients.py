"""The coefficients of the model: benchmarks/scale/coefficients.json as typed numbers."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("coefficients.json")


@dataclass(frozen=True)
class Coefficients:
    """Inputs of the model."""

    measured: dict[str, float]
    """Values, keyed by name; each name ends with the unit."""
    assumed: dict[str, float]
    """Limits of services and speeds of clusters, which cannot be measured on one machine."""
    simulation: dict[str, Any]
    """The result of the simulation: counts of requests, lags, memory."""
    machine: dict[str, str]
    """Descriptions of the machines used, keyed by part of the file."""


def content() -> dict[str, Any]:
    """Return the content of the file."""
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def read() -> Coefficients:
    """Read the file and return its typed numbers."""
    found = content()
    return Coefficients(
        {name: of["value"] for name, of in found["measured"].items()},
        {name: of["value"] for name, of in found["assumed"].items()},
        found["simulation"],
        found["machine"],
    )


def write_part(name: str, part: dict[str, Any]) -> None:
    """Replace one part of the file."""
    found = content() | {name: part}
    FILE.write_text(json.dumps(found, indent=2) + "\n")
