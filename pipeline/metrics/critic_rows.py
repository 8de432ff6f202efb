"""Rows of the metrics table for PPO's critic."""

from pipeline.metrics.metric import Group, Metric

_CRITIC = "`algorithm.adv_estimator` is gae"

CRITIC = Group(
    "The critic",
    (
        Metric("critic/vf_loss", "", "Clipped value loss: mean over mini-batches.", when=_CRITIC),
        Metric(
            "critic/vf_clipfrac",
            "share",
            "Tokens whose value loss was clipped.",
            when=_CRITIC,
        ),
        Metric(
            "critic/vpred_mean",
            "",
            "Mean of the values that the critic predicts during its updates.",
            when=_CRITIC,
        ),
        Metric(
            "critic/values/{mean,max,min}",
            "",
            "Predicted value of the text before a token, at the start of the step.",
            when=_CRITIC,
        ),
        Metric(
            "critic/returns/{mean,max,min}",
            "",
            "Target of the critic: a token's value plus its advantage before whitening.",
            when=_CRITIC,
        ),
        Metric(
            "critic/vf_explained_var",
            "",
            "Explained variance at the start of the step: 1 - var(returns - values) / "
            "(var(returns) + 1e-5).",
            when=_CRITIC,
        ),
        Metric(
            "critic/grad_norm",
            "",
            "Norm of the critic's gradients over all ranks, before clipping: mean over "
            "mini-batches.",
            when=_CRITIC,
        ),
        Metric("critic/lr", "", "Learning rate of the critic in this step.", when=_CRITIC),
        Metric(
            "critic/{skipped,skipped_empty}",
            "mini-batches",
            "Mini-batches that the critic's optimizer skipped because the gradients were not "
            "finite (`skipped`) or no token was included in the loss (`skipped_empty`).",
            when=_CRITIC,
        ),
        Metric(
            "critic/replay/coverage",
            "share",
            "Rows for which the critic's routers replayed the actor's routes; 0 without "
            "`critic.replay_routes`.",
            when=_CRITIC,
        ),
        Metric(
            "critic/replay/agreement",
            "share",
            "Replayed rows for which the critic's router would have chosen the same experts.",
            when=_CRITIC,
        ),
    ),
)
