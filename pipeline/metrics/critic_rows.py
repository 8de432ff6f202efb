"""The rows of PPO's critic in the table of metrics."""

from pipeline.metrics.metric import Group, Metric

_CRITIC = "`algorithm.adv_estimator` is gae"

CRITIC = Group(
    "The critic",
    (
        Metric("critic/vf_loss", "", "Clipped value loss. Mean over mini-batches.", when=_CRITIC),
        Metric(
            "critic/vf_clipfrac",
            "share",
            "Tokens whose value loss the clip range changed.",
            when=_CRITIC,
        ),
        Metric("critic/vpred_mean", "", "Mean value in the updates.", when=_CRITIC),
        Metric(
            "critic/values/{mean,max,min}",
            "",
            "Value of the text before a token, at the step's start.",
            when=_CRITIC,
        ),
        Metric(
            "critic/returns/{mean,max,min}",
            "",
            "What the critic learns to predict: the value plus the advantage before whitening.",
            when=_CRITIC,
        ),
        Metric(
            "critic/vf_explained_var",
            "",
            "1 - var(returns - values) / (var(returns) + 1e-5), at the step's start.",
            when=_CRITIC,
        ),
        Metric(
            "critic/grad_norm",
            "",
            "Before clipping, of all ranks. Mean over mini-batches.",
            when=_CRITIC,
        ),
        Metric("critic/lr", "", "The step's learning rate of the critic.", when=_CRITIC),
        Metric(
            "critic/{skipped,skipped_empty}",
            "mini-batches",
            "Without an optimizer step of the critic: its gradients were not finite; no token "
            "counted.",
            when=_CRITIC,
        ),
        Metric(
            "critic/replay/coverage",
            "share",
            "Rows of the critic's routers that had the actor's routes: 0 where they choose for "
            "themselves (`critic.replay_routes`).",
            when=_CRITIC,
        ),
        Metric(
            "critic/replay/agreement",
            "share",
            "Of those, where the critic's router would have chosen the same experts.",
            when=_CRITIC,
        ),
    ),
)
