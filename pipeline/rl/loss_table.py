"""The policy losses, under verl's names."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.rl.losses.aggregate import AggregationMode
from pipeline.rl.losses.choice import Choice, choose_clipped, choose_penalised
from pipeline.rl.losses.formulas import (
    cispo,
    clip_cov,
    dppo_kl,
    dppo_tv,
    geo_mean,
    gpg,
    gspo,
    kl_cov,
    sapo,
    vanilla,
)
from pipeline.rl.losses.types import LossFunction, LossSettings

ChoiceFunction = Callable[[Choice, LossSettings], npt.NDArray[np.bool_]]

_CLIP = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")


@dataclass(frozen=True)
class Loss:
    """A policy loss. Example: Loss(gspo, ("clip_ratio",), "seq-mean-token-mean")."""

    function: LossFunction
    reads: tuple[str, ...] = ()
    """Settings under `actor` that change the loss; settings of other losses have no effect."""
    aggregation: AggregationMode | None = None
    """The mode that the paper requires, which overrides `loss_agg_mode`; None allows any mode."""
    choose: ChoiceFunction | None = None
    """The function that chooses, from a mini-batch, the tokens that the loss drops or
    penalises; None if the loss treats all tokens equally."""


LOSSES: dict[str, Loss] = {
    "vanilla": Loss(vanilla, (*_CLIP, "clip_ratio_c")),
    "gspo": Loss(gspo, _CLIP, "seq-mean-token-mean"),
    "geo_mean": Loss(geo_mean, _CLIP, "seq-mean-token-mean"),
    "cispo": Loss(cispo, _CLIP),
    "gpg": Loss(gpg),
    "clip_cov": Loss(
        clip_cov,
        (
            *_CLIP,
            "policy_loss.clip_cov_ratio",
            "policy_loss.clip_cov_lb",
            "policy_loss.clip_cov_ub",
        ),
        choose=choose_clipped,
    ),
    "kl_cov": Loss(
        kl_cov, ("policy_loss.kl_cov_ratio", "policy_loss.ppo_kl_coef"), choose=choose_penalised
    ),
    "dppo_tv": Loss(dppo_tv, (*_CLIP, "clip_ratio_c")),
    "dppo_kl": Loss(dppo_kl, (*_CLIP, "clip_ratio_c")),
    "sapo": Loss(sapo, ("tau_pos", "tau_neg"), "seq-mean-token-mean"),
}
