"""Rules for advantage estimators and the KL in the reward: contradictions."""

from collections.abc import Iterator

from pipeline.config.tree import RunConfig
from pipeline.rl.estimator_table import ESTIMATORS

_ESTIMATOR = "algorithm.adv_estimator"


def estimator_problems(config: RunConfig) -> Iterator[str]:
    """Yield problems with settings that the estimator or an adaptive KL coefficient cannot use."""
    name, samples = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n
    estimator = ESTIMATORS.get(name)
    if estimator is not None and "group" in estimator.needs and samples == 1:
        free = ", ".join(name for name, one in ESTIMATORS.items() if "group" not in one.needs)
        yield (
            f"{_ESTIMATOR}: found {name}, which compares the samples of a prompt, but with "
            "actor_rollout_ref.rollout.n=1 every advantage would be 0; write n=2 or more, "
            f"or an estimator that does not compare samples ({free})"
        )
    control, most = config.algorithm.kl_ctrl, config.data.train_batch_size * samples
    if config.algorithm.use_kl_in_reward and control.type == "adaptive":
        if 5 * control.horizon <= most:
            yield (
                f"algorithm.kl_ctrl.horizon: found {control.horizon}, but a step of {most} samples "
                "may lower the coefficient by a fifth of samples / horizon, to 0 or below; write "
                f"more than {most // 5}, such as 10000"
            )
        if not control.kl_coef:
            yield (
                "algorithm.kl_ctrl.kl_coef: found 0.0, but kl_ctrl.type=adaptive multiplies it, so "
                "it would stay 0; write a value above 0, such as 0.001, or type=fixed"
            )
