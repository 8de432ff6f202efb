"""Comparison of advantages and KL penalties with verl's."""

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from pipeline.rl.estimator_table import ESTIMATORS
from pipeline.rl.estimators.types import OneRank, Rollouts
from pipeline.rl.kl import StepKl, kl_estimate, next_coefficient
from scripts.compare_with_verl.batch import Batch, Row, apart, tensor


def rollouts_of(batch: Batch) -> Rollouts:
    """Return the batch as rollouts of a single rank that holds all samples."""
    return Rollouts(
        rewards_N=batch.scores_BL.sum(axis=1),
        groups_N=batch.groups_B,
        rows_X=np.arange(len(batch.groups_B)),
        lengths_X=batch.real_BL.sum(axis=1),
        mask_T=batch.flat(batch.mask_BL),
        scores_T=batch.flat(batch.scores_BL),
        ranks=OneRank(),
        values_T=batch.flat(batch.values_BL),
        baseline_N=batch.baseline_B,
    )


def estimators(core: Any) -> Iterator[Row]:
    """Yield comparisons of the advantages (for GAE, also the returns) of unmasked tokens."""
    dictionary = importlib.import_module("omegaconf").DictConfig
    for name, by_std in [("grpo", False), *((name, True) for name in ESTIMATORS)]:
        config = dictionary({"norm_adv_by_std_in_grpo": by_std, "gamma": 0.95})
        function = core.get_adv_estimator_fn(name)

        def difference(
            batch: Batch, name: str = name, config: Any = config, function: Any = function
        ) -> float:
            settings = SimpleNamespace(
                norm_adv_by_std_in_grpo=config.norm_adv_by_std_in_grpo, gamma=0.95, lam=0.9
            )
            found = ESTIMATORS[name].function(rollouts_of(batch), settings)
            more: dict[str, Any] = {"index": batch.groups_B, "config": config}
            if name == "grpo":
                more["norm_adv_by_std_in_grpo"] = config.norm_adv_by_std_in_grpo
            if name == "remax":
                more = {"reward_baselines": tensor(batch.baseline_B)}
            if name == "gae":
                more = {"values": tensor(batch.values_BL), "gamma": 0.95, "lam": 0.9}
            advantages, returns = function(
                token_level_rewards=tensor(batch.scores_BL),
                response_mask=tensor(batch.mask_BL),
                **more,
            )
            pairs: list[tuple[Any, Any]] = [(found.advantages_T, advantages)]
            if name == "gae":
                pairs.append((found.returns_T, returns))
            return max(
                apart(batch.padded(ours)[batch.mask_BL], theirs.numpy()[batch.mask_BL])
                for ours, theirs in pairs
            )

        form = "" if name != "grpo" else "with std" if by_std else "without std"
        yield Row(f"`{name}`", function.__name__, form, difference)


def kl_rows(core: Any) -> Iterator[Row]:
    """Yield comparisons of KL estimates and of the controller for the penalty's coefficient."""
    for name in ("kl", "abs", "mse", "low_var_kl"):

        def difference(batch: Batch, name: Any = name) -> float:
            new, old = tensor(batch.new_BL), tensor(batch.old_BL)
            return apart(kl_estimate(new, old, name), core.kl_penalty_forward(new, old, name))

        yield Row(f"KL `{name}`", "kl_penalty_forward", "", difference)

    def controlled(batch: Batch) -> float:
        control: Any = SimpleNamespace(type="adaptive", kl_coef=0.1, horizon=100, target_kl=0.2)
        theirs, ours = core.AdaptiveKLController(0.1, 0.2, 100), 0.1
        for kl in np.abs(batch.values_BL[0]):
            theirs.update(float(kl), 32)
            ours = next_coefficient(ours, StepKl(float(kl), 32), control)
        return apart(ours, theirs.value)

    yield Row("adaptive `kl_ctrl`", "AdaptiveKLController.update", "", controlled)
