"""A check that recorded routes fit the model that replays them, before any weight changes.

Routes can be incorrect at their source even if every digest matches. For example, they may be
shifted by a token or a layer, or taken from a different sample. The recorded set of experts then
often has less than half of its experts in common with the router's own choice (a foreign set), and
replay moves the trainer away from the engine instead of towards it. Correct routes rarely have
foreign sets, even if the policy has changed since it sampled. So a few rows are enough for a
verdict. docs/design.md describes the measurements behind the limits.

Dimensions: N samples; L MoE layers; P parts (prompt, response, both); B blocks of all samples; C
counts (see `OfSample`); S shares: of different and of foreign sets; U units, each a layer or part.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from operators.training.replay.counts import BLOCK, OfSample, SampleCounts
from pipeline.rl.mismatch import Mismatch, total_mismatch

_FALSE_ALARM = 1e-6
"""Maximum probability that a step with correct routes is refused by chance."""
FOREIGN_SHARE, FOREIGN_OF_STEP = 0.05, 0.005
"""Maximum share of foreign sets: in a layer or in a part of a sample, and in all layers of the
step."""
AGREEMENT_SHARE = 0.7
"""Minimum agreement of a part of a sample in all layers, as a share of the usual agreement."""
_INDEPENDENT = 4
"""Maximum number of layers that count as independent evidence on a row."""
KL_FACTOR, KL_MARGIN, KL_SUM = 10.0, 1e-3, 0.5
"""The KL with replay may be at most KL_FACTOR times the native KL, plus KL_MARGIN. The sum over the
tokens may additionally exceed this by KL_SUM."""
LEAST_ROWS = 32
"""Minimum number of replayed rows of a sample for the metric of the lowest agreement."""

Counts = npt.NDArray[np.int32]
Shares = npt.NDArray[np.float64]

_PARTS = ("prompt", "response", "all rows")
_SHOWN = 4
"""Maximum number of layers or samples that a finding lists."""


@dataclass(frozen=True)
class Evidence:
    """One rank's results from a log-prob pass with replay, for its own rows and tokens."""

    layers: tuple[int, ...] = ()
    """The rank's MoE layers, by their index in the model."""
    samples: SampleCounts = field(default_factory=dict)
    """Counts for the rank's own rows and layers; empty if another rank counts them."""
    replayed: Mismatch | None = None
    """Mismatch with replay; None if another rank reports it."""
    native: Mismatch | None = None
    """Mismatch without replay; None if not measured, or if another rank reports it."""


@dataclass(frozen=True)
class WrongRoutes:
    """A layer or a part of a sample whose recorded sets do not fit the model."""

    layer: int | None
    """The layer; None for all layers together."""
    sample: str | None
    """The sample; None for all samples together."""
    rows: str
    """'prompt', 'response', 'all rows' or a range of positions, such as '8..15'."""
    sets: int
    agreeing: int
    foreign: int
    limits: tuple[float, float]
    """The minimum share of agreeing sets and the maximum share of foreign sets."""

    def __str__(self) -> str:
        names = [] if self.sample is None else [self.sample]
        names += ["all layers" if self.layer is None else f"layer {self.layer}"]
        least, most = self.limits
        return (
            f"{', '.join([*names, self.rows])}: of {self.sets} sets, "
            f"{self.agreeing / self.sets:.1%} agree (expected at least {least:.1%}) and "
            f"{self.foreign / self.sets:.1%} are foreign (expected at most {most:.1%})"
        )


@dataclass(frozen=True)
class Health:
    """The verdict on a step's recorded routes, the same on all ranks."""

    layers: tuple[WrongRoutes, ...] = ()
    """Layers that do not fit, with their most conspicuous part; the most conspicuous layer first.
    """
    samples: tuple[WrongRoutes, ...] = ()
    """Samples that do not fit, likewise."""
    kl: tuple[float, float] | None = None
    """KL with and without replay if the former is too high."""
    tokens: int = 0
    """Number of response tokens that the KL is measured on."""
    layer: float | None = None
    """Lowest agreement of a layer; None if nothing was replayed."""
    sample: float | None = None
    """Lowest agreement of a sample's prompt, response or both; None if none has LEAST_ROWS rows."""
    evidence: float | None = None
    """The strongest evidence against any layer or sample, as a share of the evidence that refuses
    it; None if nothing was replayed."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reasons to refuse the routes; empty if the routes are healthy."""
        found = []
        for name, findings in (("layers", self.layers), ("samples", self.samples)):
            if findings:
                more = "; ..." if len(findings) > _SHOWN else ""
                listed = "; ".join(map(str, findings[:_SHOWN]))
                found.append(f"{name} ({len(findings)}): {listed}{more}")
        if self.kl is not None:
            replayed, native = self.kl
            found.append(
                f"KL between engine and trainer is {replayed:.2g} with replay, {native:.2g} without"
            )
        return tuple(found)

    @property
    def metrics(self) -> dict[str, float | None]:
        """The step's metrics, keyed by name."""
        count = len(self.layers) + len(self.samples) + (self.kl is not None)
        return {
            "replay/unhealthy": None if self.evidence is None else count,
            "replay/agreement_layer_min": self.layer,
            "replay/agreement_sample_min": self.sample,
        }


NOT_REPLAYED = Health()
"""The health of a step that replays nothing, or only the routes that it has just recorded."""


def judge(of_ranks: Sequence[Evidence], floor: float) -> Health:
    """Return the verdict on a step's routes.

    Args:
        of_ranks: The results of all ranks.
        floor: Minimum agreement of a layer or sample.
    """
    replayed = total_mismatch(one.replayed for one in of_ranks) or Mismatch(0, 0.0, 0)
    native = total_mismatch(one.native for one in of_ranks)
    kl = None
    if native is not None and native.kl is not None and kl_too_high(replayed, native.kl):
        kl = (replayed.kl or 0.0, native.kl)
    layers = sorted({layer for one in of_ranks for layer in one.layers})
    samples = _samples(of_ranks, layers)
    if not samples:
        return Health(kl=kl, tokens=replayed.tokens)
    sets_NLPC = _with_totals(np.stack([of.sets_LPC for of in samples.values()]))
    sets_LPC = sets_NLPC.sum(axis=0)
    block_BC = np.concatenate([of.block_BC for of in samples.values()])

    of_step_LS = np.tile([1.0 - floor, FOREIGN_SHARE], (len(layers) + 1, 1))
    of_step_LS[-1, 1] = FOREIGN_OF_STEP
    of_samples_LPS = _limits(sets_NLPC, floor)
    weights_L1 = np.ones((len(layers) + 1, 1))
    weights_L1[-1] = min(_INDEPENDENT / len(layers), 1.0)
    nats_LP = _evidence(sets_LPC, of_step_LS[:, None]) * weights_L1
    nats_NLP = _evidence(sets_NLPC, of_samples_LPS) * weights_L1
    of_block_S = np.array([1.0, FOREIGN_SHARE])
    nats_B = _evidence(block_BC, of_block_S) * weights_L1[-1]
    enough = math.log(2 * (nats_LP.size + nats_NLP.size + nats_B.size) / _FALSE_ALARM)

    names, ids = [*layers, None], [*samples]
    places = [(n, b) for n, of in enumerate(samples.values()) for b in range(len(of.block_BC))]
    of_layers = [
        (nats_LP[i, p], _finding((names[i], None, _PARTS[p]), sets_LPC[i, p], of_step_LS[i]))
        for i, p in np.argwhere(nats_LP > enough)
    ]
    of_samples = []
    for n, i, p in np.argwhere(nats_NLP > enough):
        place, limits_S = (names[i], ids[n], _PARTS[p]), of_samples_LPS[i, p]
        of_samples.append((nats_NLP[n, i, p], _finding(place, sets_NLPC[n, i, p], limits_S)))
    for row in np.flatnonzero(nats_B > enough):
        n, b = places[row]
        place = (None, ids[n], f"rows {b * BLOCK}..{b * BLOCK + BLOCK - 1}")
        of_samples.append((nats_B[row], _finding(place, block_BC[row], of_block_S)))
    of_layer, of_sample = _lowest(sets_NLPC)
    one_layer = [item for item in of_layers if item[1].layer is not None]
    return Health(
        layers=_strongest(one_layer or of_layers),  # all layers together if no single one is wrong
        samples=_strongest(of_samples),
        kl=kl,
        tokens=replayed.tokens,
        layer=of_layer,
        sample=of_sample,
        evidence=max(float(nats.max()) for nats in (nats_LP, nats_NLP, nats_B)) / enough,
    )


def kl_too_high(replayed: Mismatch, native_kl: float) -> bool:
    """Return whether the KL with replay is too high, given the native KL per token."""
    limit = replayed.tokens * (KL_FACTOR * native_kl + KL_MARGIN) + KL_SUM
    return not math.isfinite(replayed.kl_sum) or replayed.kl_sum > limit


def _samples(of_ranks: Sequence[Evidence], layers: Sequence[int]) -> dict[str, OfSample]:
    """Add up the counts of each sample over the ranks; `layers` are the layers of all ranks.

    Each pipeline stage counts its own layers, and each context-parallel rank its own rows.
    """
    total: dict[str, OfSample] = {}
    for one in of_ranks:
        own = [layers.index(layer) for layer in one.layers]
        for id, of in one.samples.items():
            if id not in total:
                shape = (len(layers), *of.sets_LPC.shape[1:])
                total[id] = OfSample(np.zeros(shape, np.int32), np.zeros_like(of.block_BC))
            total[id].sets_LPC[own] += of.sets_LPC
            total[id].block_BC[:] += of.block_BC
    return total


def _with_totals(sets_NLPC: Counts) -> Counts:
    """Append both parts together to P, and all layers together to L."""
    sets_NLPC = np.concatenate([sets_NLPC, sets_NLPC.sum(axis=2, keepdims=True)], axis=2)
    return np.concatenate([sets_NLPC, sets_NLPC.sum(axis=1, keepdims=True)], axis=1)


def _shares(counts_C: Counts) -> Shares:
    """Return the shares of different and of foreign sets; 0 without sets."""
    shares_S: Shares = counts_C[..., 1:] / np.maximum(counts_C[..., :1], 1)
    return shares_S


def _limits(sets_NLPC: Counts, floor: float) -> Shares:
    """Return the maximum shares in parts of samples, [L, P, S].

    A changed policy lowers the agreement of all samples, so a sample is compared with the upper
    quartile over the samples. The quartile is right even if the routes of most samples are wrong.
    In a single layer, agreement has no limit: if a response repeats a token whose experts have
    nearly equal scores, none of its sets may agree in this layer.
    """
    limits_LPS = np.full((*sets_NLPC.shape[1:3], 2), (1.0, FOREIGN_SHARE))
    for p in range(len(_PARTS)):
        all_NC = sets_NLPC[:, -1, p]
        agreement_N = 1.0 - _shares(all_NC[all_NC[:, 0] > 0])[:, 0]
        usual = float(np.quantile(agreement_N, 0.75)) if len(agreement_N) else 0.0
        limits_LPS[-1, p, 0] = 1.0 - max(AGREEMENT_SHARE * usual, floor)
    return limits_LPS


def _evidence(counts_C: Counts, limits_S: Shares) -> Shares:
    """Return the evidence that a share is above its limit, in nats.

    If sets were independent, a share at or below the limit would produce n nats with a probability
    of at most exp(-n) (Chernoff's bound).
    """
    shares_S = _shares(counts_C)
    with np.errstate(divide="ignore", invalid="ignore"):
        nats_S = _entropy(shares_S, limits_S) + _entropy(1.0 - shares_S, 1.0 - limits_S)
    nats: Shares = np.where(shares_S > limits_S, nats_S * counts_C[..., :1], 0.0).max(axis=-1)
    return nats


def _entropy(shares_S: Shares, limits_S: Shares) -> Shares:
    return np.where(shares_S > 0, shares_S * np.log(shares_S / limits_S), 0.0)


def _finding(
    place: tuple[int | None, str | None, str], counts_C: Counts, limits_S: Shares
) -> WrongRoutes:
    sets, different, foreign = (int(count) for count in counts_C)
    limits = (1.0 - float(limits_S[0]), float(limits_S[1]))
    return WrongRoutes(*place, sets, sets - different, foreign, limits)


def _strongest(found: Sequence[tuple[float, WrongRoutes]]) -> tuple[WrongRoutes, ...]:
    """Return the finding with most evidence on each layer or sample, in the order of evidence."""
    of: dict[object, WrongRoutes] = {}
    for _, finding in sorted(found, key=lambda item: -item[0]):
        of.setdefault(finding.layer if finding.sample is None else finding.sample, finding)
    return tuple(of.values())


def _lowest(sets_NLPC: Counts) -> tuple[float | None, float | None]:
    """Return the lowest agreement of a layer, and of a part of a sample with enough rows."""
    layers = sets_NLPC.shape[1] - 1
    of_layers, of_samples = sets_NLPC.sum(axis=0)[:-1, -1], sets_NLPC[:, -1].reshape(-1, 3)
    many = of_samples[of_samples[:, 0] >= LEAST_ROWS * layers]
    lowest = (1.0 - _shares(sets_XC)[:, 0] for sets_XC in (of_layers, many))
    of_layer, of_sample = (float(of_X.min()) if len(of_X) else None for of_X in lowest)
    return of_layer, of_sample
