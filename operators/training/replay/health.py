"""A check that recorded routes fit the model that replays them, before any weight changes.

Routes can be incorrect at their source even if every digest matches. For example, they may be
shifted by a token or a layer, or taken from a different sample. The router's own choice then rarely
agrees with the recording, and replay moves the trainer away from the engine instead of towards it.
docs/design.md describes the measurements behind the thresholds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from operators.training.replay.counts import Counts, LayerCounts, SampleCounts, added
from pipeline.rl.mismatch import Mismatch, total_mismatch

LEAST_TOKENS = 512
"""Minimum number of response tokens for a verdict on a step's layers and KL."""
LEAST_ROWS = 32
"""Minimum number of replayed rows for a verdict on a sample, its prompt or its response."""
SAMPLE_SHARE = 0.5
"""Minimum agreement of a sample, as a share of the median over the step's samples.

The agreement is normally similar for all samples of a step."""
KL_FACTOR, KL_MARGIN = 10.0, 1e-3
"""The KL with replay may be at most KL_FACTOR times the native KL, plus KL_MARGIN."""

_SHOWN = 4
"""Maximum number of layers or samples that a finding lists."""


@dataclass(frozen=True)
class Evidence:
    """One rank's results from a log-prob pass with replay, for its own rows and tokens."""

    counts: Counts = field(default_factory=dict)
    samples: SampleCounts = field(default_factory=dict)
    replayed: Mismatch | None = None
    """Mismatch with replay; None if another rank reports it."""
    native: Mismatch | None = None
    """Mismatch without replay; None if not measured, or if another rank reports it."""


@dataclass(frozen=True)
class Health:
    """The verdict on a step's recorded routes, the same on all ranks."""

    findings: tuple[str, ...]
    """Reasons to refuse the routes; empty if the routes are healthy."""
    judged: bool
    """False if the step has too few tokens for a verdict on layers and KL."""
    tokens: int
    """Number of response tokens that the KL is measured on."""
    layer: float | None
    """Agreement of the worst layer; None if no layer replayed a row."""
    sample: float | None
    """Agreement of the worst sample; None if every sample has fewer than LEAST_ROWS rows."""

    @property
    def metrics(self) -> dict[str, float | None]:
        """The step's metrics, keyed by name."""
        count = len(self.findings)
        return {
            "replay/unhealthy": count if self.judged or count else None,
            "replay/agreement_layer_min": self.layer,
            "replay/agreement_sample_min": self.sample,
        }


NOT_REPLAYED = Health((), False, 0, None, None)
"""The health of a step that replays nothing, or only the routes that it has just recorded."""


def judge(of_ranks: Sequence[Evidence], floor: float) -> Health:
    """Return the verdict on a step's routes.

    Args:
        of_ranks: The results of all ranks.
        floor: Minimum agreement of a layer or sample.
    """
    counts = added(one.counts for one in of_ranks)
    replayed = total_mismatch(one.replayed for one in of_ranks) or Mismatch(0, 0.0, 0)
    native = total_mismatch(one.native for one in of_ranks)
    by_layer = {layer: _share(counts[layer]) for layer in sorted(counts) if counts[layer].replayed}
    by_sample = _by_sample([one.samples for one in of_ranks], len(by_layer))
    judged = replayed.tokens >= LEAST_TOKENS
    findings = []
    if judged and (low := {name: share for name, share in by_layer.items() if share < floor}):
        findings.append(
            f"agreement too low in {len(low)} of {len(by_layer)} layers: layer {_listed(low)}"
        )
    median = float(np.median([*by_sample.values()])) if by_sample else 0.0
    of_sample = max(floor, SAMPLE_SHARE * median)
    if low_samples := {name: share for name, share in by_sample.items() if share < of_sample}:
        findings.append(
            f"agreement too low in {len(low_samples)} of {len(by_sample)} samples: "
            f"{_listed(low_samples)} (median {median:.1%}, expected at least {of_sample:.1%})"
        )
    kl, kl_native = replayed.kl, None if native is None else native.kl
    if judged and kl is not None and kl_native is not None:
        limit = KL_FACTOR * kl_native + KL_MARGIN
        if not math.isfinite(kl) or kl > limit:
            findings.append(
                f"KL between engine and trainer is {kl:.2g} with replay, {kl_native:.2g} without "
                f"(expected at most {limit:.2g})"
            )
    return Health(
        findings=tuple(findings),
        judged=judged,
        tokens=replayed.tokens,
        layer=min(by_layer.values(), default=None),
        sample=min(by_sample.values(), default=None),
    )


def _share(count: LayerCounts) -> float:
    return count.agreeing / count.replayed


def _by_sample(of_ranks: Sequence[SampleCounts], layers: int) -> dict[str, float]:
    """Return each sample's lowest agreement: in its prompt, its response, or both together.

    Each pipeline stage counts its own layers, so a row is counted once for each layer. Samples of a
    group share a prompt and its routes. If the routes of two such samples were swapped, only the
    agreement of the responses would be low.
    """
    total: dict[str, np.ndarray] = {}
    for samples in of_ranks:
        for id, parts in samples.items():
            total[id] = total[id] + parts if id in total else parts
    found = {}
    for id, parts in total.items():
        all_parts = [*parts, parts.sum(axis=0)]
        shares = [agree / rows for rows, agree in all_parts if rows >= LEAST_ROWS * layers > 0]
        if shares:
            found[id] = float(min(shares))
    return found


def _listed(low: Mapping[str, float] | Mapping[int, float]) -> str:
    """Return the lowest agreements as text, in ascending order. Example: '2 0.4%, 5 0.6%, ...'."""
    lowest = sorted(low.items(), key=lambda item: item[1])
    more = ", ..." if len(lowest) > _SHOWN else ""
    return ", ".join(f"{name} {share:.1%}" for name, share in lowest[:_SHOWN]) + more
