"""Whether recorded routes fit the model that replays them, judged before a weight is touched.

Routes can be wrong at their source while every digest fits: shifted by a token or a layer, or of
another sample. Then the router's own choice is hardly ever the recorded one, and replay moves the
trainer away from the engine instead of towards it. docs/design.md has the measurements behind the
thresholds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from operators.training.replay.counts import Counts, LayerCounts, SampleCounts, added
from pipeline.rl.mismatch import Mismatch, total_mismatch

LEAST_TOKENS = 512
"""Response tokens that a step needs for a verdict on its layers and its KL."""
LEAST_ROWS = 32
"""Replayed rows that a sample, its prompt or its response, needs for a verdict on it."""
SAMPLE_SHARE = 0.5
"""Least agreement of a sample, as a share of the step's median: samples of one step agree alike."""
KL_FACTOR, KL_MARGIN = 10.0, 1e-3
"""KL with replay may be this many times the native one, plus the margin."""

_SHOWN = 4
"""Layers and samples that a text names."""


@dataclass(frozen=True)
class Evidence:
    """What one rank knows of a replaying log-prob pass; rows and tokens of others are left out."""

    counts: Counts = field(default_factory=dict)
    samples: SampleCounts = field(default_factory=dict)
    replayed: Mismatch | None = None
    """None: reported by another rank."""
    native: Mismatch | None = None
    """Without replay; None: not measured, or reported by another rank."""


@dataclass(frozen=True)
class Health:
    """The verdict on a step's routes, equal on all ranks."""

    findings: tuple[str, ...]
    """What speaks against the routes; empty: nothing does."""
    judged: bool
    """False: too few tokens for a verdict on layers and KL."""
    tokens: int
    """Response tokens that count."""
    layer: float | None
    """Agreement of the worst layer."""
    sample: float | None
    """Agreement of the worst sample; None: none has LEAST_ROWS rows."""

    @property
    def metrics(self) -> dict[str, float | None]:
        """Metrics of the step."""
        count = len(self.findings)
        return {
            "replay/unhealthy": count if self.judged or count else None,
            "replay/agreement_layer_min": self.layer,
            "replay/agreement_sample_min": self.sample,
        }


NOT_REPLAYED = Health((), False, 0, None, None)
"""Of a step that replays nothing, or what it has just recorded."""


def judge(of_ranks: Sequence[Evidence], floor: float) -> Health:
    """Judge a step by the evidence of all ranks; `floor` is the least agreement."""
    counts = added(one.counts for one in of_ranks)
    replayed = total_mismatch(one.replayed for one in of_ranks) or Mismatch(0, 0.0, 0)
    native = total_mismatch(one.native for one in of_ranks)
    by_layer = {layer: _share(counts[layer]) for layer in sorted(counts) if counts[layer].replayed}
    by_sample = _by_sample([one.samples for one in of_ranks], len(by_layer))
    judged = replayed.tokens >= LEAST_TOKENS
    findings = []
    if judged and (low := {name: share for name, share in by_layer.items() if share < floor}):
        findings.append(f"agreement of {len(low)} of {len(by_layer)} layers: layer {_listed(low)}")
    median = float(np.median([*by_sample.values()])) if by_sample else 0.0
    of_sample = max(floor, SAMPLE_SHARE * median)
    if low_samples := {name: share for name, share in by_sample.items() if share < of_sample}:
        findings.append(
            f"agreement of {len(low_samples)} samples: {_listed(low_samples)} (expected at least "
            f"{of_sample:.1%}, median {median:.1%})"
        )
    kl, kl_native = replayed.kl, None if native is None else native.kl
    if judged and kl is not None and kl_native is not None:
        limit = KL_FACTOR * kl_native + KL_MARGIN
        if not math.isfinite(kl) or kl > limit:
            findings.append(
                f"KL between engine and trainer {kl:.2g} with replay, {kl_native:.2g} without "
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
    """Agreement by sample, the lowest of its own, its prompt's and its response's.

    A pipeline stage has counted its own layers, so a row counts once for each layer. Two samples
    of a group share a prompt and its routes: where they were exchanged, only the response shows it.
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
    """The lowest first. Example: '2 0.4%, 5 0.6%, ...'."""
    lowest = sorted(low.items(), key=lambda item: item[1])
    more = ", ..." if len(lowest) > _SHOWN else ""
    return ", ".join(f"{name} {share:.1%}" for name, share in lowest[:_SHOWN]) + more
