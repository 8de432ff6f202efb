"""Rows of the metrics table for corrections and for the mismatch that they correct.

docs/corrections.md explains the metrics in detail.
"""

from pipeline.metrics.metric import Group, Metric

_WEIGHED = "`rollout_is` is set"
_REJECTED = "`rollout_rs` or `rollout_token_veto_threshold` is set"
_OF_FORM = "`rollout_rs` contains `<form>`"
_VETOED = "`rollout_token_veto_threshold` is set"
_P = "rollout_corr/"
_FORM = f"{_P}rollout_rs_<form>_"
_SEQ = "{seq_mean,seq_std,seq_max,seq_min,seq_max_deviation,seq_fraction_high,seq_fraction_low}"
_QUANTILES = "{q01,q05,q50,q95,q99}"

_APART = (
    "Measured with `max_staleness=1`, every `native_every` steps; None in all other steps, and in "
    "the first step of an attempt."
)

MISMATCH = Group(
    "Mismatch between engine and trainer",
    (
        Metric(
            "mismatch/kl",
            "nats",
            "k3 estimate of KL(engine, trainer) over the response tokens of the step, from the "
            "log-prob pass that uses the same routing as the updates.",
        ),
        Metric(
            "mismatch/kl_native",
            "nats",
            "The same KL, measured without replay. With recorded routes (R3, `replay_file`), it is "
            "measured in a second pass, every `native_every` steps and in the first step of each "
            "attempt. It is also measured if the KL with replay is far above its latest value.",
        ),
        Metric(
            "mismatch/extreme_share",
            "share",
            "Tokens whose engine and trainer probabilities differ by more than a factor of 2.",
        ),
        Metric("mismatch/extreme_share_native", "share", "The same share, without replay."),
        Metric(
            "mismatch/kl_engine",
            "nats",
            "KL between the engine and the trainer with the weights that generated the "
            f"samples, without replay: the engine's mismatch alone. {_APART}",
        ),
        Metric(
            "mismatch/kl_staleness",
            "nats",
            "KL between the trainer with the weights that generated the samples and the "
            f"trainer at the step's start, without replay: staleness alone. {_APART}",
        ),
        Metric(
            "mismatch/{extreme_share_engine,extreme_share_staleness}",
            "share",
            "For the same two comparisons: tokens whose two probabilities differ by more than a "
            "factor of 2. None in the same steps.",
        ),
    ),
)

CORRECTIONS = Group(
    "Corrections",
    (
        Metric(
            f"{_P}{{kl,k3_kl}}",
            "",
            "KL(engine, trainer) per token, estimated with k1 and with k3. "
            "[corrections.md](corrections.md#metrics) explains all metrics in this section.",
        ),
        Metric(
            f"{_P}dropped_fraction",
            "share",
            "Tokens left out of the loss because a log-prob is NaN or infinite: the trainer's, or "
            "the engine's if a correction or `bypass_mode` uses it.",
        ),
        Metric(
            f"{_P}{{training_ppl,rollout_ppl}}",
            "",
            "Mean perplexity (at most e^20) of the sequences under the trainer, and the engine.",
        ),
        Metric(
            f"{_P}{{training_log_ppl,rollout_log_ppl}}",
            "",
            "Mean log-perplexity of the sequences under the trainer, and under the engine.",
        ),
        Metric(
            f"{_P}{{log_ppl_diff,log_ppl_abs_diff}}",
            "",
            "Mean, and mean absolute value, of the trainer's log-perplexity minus the engine's.",
        ),
        Metric(
            f"{_P}{{log_ppl_diff_max,log_ppl_diff_min}}",
            "",
            "Largest and smallest value of the trainer's log-perplexity minus the engine's.",
        ),
        Metric(
            f"{_P}ppl_ratio",
            "",
            "Mean, over sequences, of the trainer's perplexity divided by the engine's.",
        ),
        Metric(
            f"{_P}{{chi2_token,chi2_seq}}",
            "",
            "Mean of r^2 - 1, where r is p_trainer / p_engine of a token or, for `chi2_seq`, the "
            "product of these ratios over a sequence.",
        ),
        Metric(
            f"{_P}ratio_token_{_QUANTILES}",
            "",
            "Quantiles, over tokens, of r = p_trainer / p_engine.",
        ),
        Metric(
            f"{_P}ratio_seq_{_QUANTILES}",
            "",
            "Quantiles, over sequences, of the product of r over a sequence.",
        ),
        Metric(
            f"{_P}rollout_is_mean", "", "Mean importance weight; None if `rollout_is` is not set."
        ),
        Metric(
            f"{_P}rollout_is_{{std,max,min}}",
            "",
            "Standard deviation and extremes of the weights.",
            _WEIGHED,
        ),
        Metric(
            f"{_P}rollout_is_eff_sample_size",
            "share",
            "Effective sample size of the weights: (sum w)^2 / (n sum w^2).",
            _WEIGHED,
        ),
        Metric(
            f"{_P}{{rollout_is_ratio_fraction_high,rollout_is_ratio_fraction_low}}",
            "share",
            "Weights above the upper bound, and weights below the lower bound.",
            _WEIGHED,
        ),
        Metric(
            f"{_P}rollout_is_{_SEQ}",
            "",
            "Statistics of the sequences' mean weights: mean, standard deviation, extremes, "
            "largest deviation from 1, and shares outside the bounds.",
            _WEIGHED,
        ),
        Metric(
            f"{_P}rollout_is_oob_ratio",
            "share",
            "Tokens with weight 0.",
            "`rollout_is_threshold` has two bounds",
        ),
        Metric(
            f"{_P}rollout_is_batch_norm_factor",
            "",
            "The mean weight, by which all weights were divided.",
            "`rollout_is_batch_normalize` is true",
        ),
        Metric(f"{_P}rollout_rs_masked_fraction", "share", "Rejected tokens.", _REJECTED),
        Metric(
            f"{_P}{{rollout_rs_seq_masked_fraction,rollout_rs_seq_rejected_fraction}}",
            "share",
            "Sequences with at least one rejected token, and sequences with only rejected tokens.",
            _REJECTED,
        ),
        Metric(
            f"{_P}rollout_is_veto_fraction", "share", "Sequences that the veto rejects.", _VETOED
        ),
        Metric(
            f"{_P}rollout_is_catastrophic_token_fraction",
            "share",
            "Tokens whose r is below the veto's threshold.",
            _VETOED,
        ),
        Metric(
            f"{_FORM}{{mean,std,max,min}}",
            "",
            "Mean, standard deviation and extremes of the form's statistic. A form is a criterion "
            "for rejection, such as token_k1.",
            _OF_FORM,
        ),
        Metric(
            f"{_FORM}{{fraction_high,fraction_low}}",
            "share",
            "Values of the statistic above the form's upper bound, and values below the form's "
            "lower bound.",
            _OF_FORM,
        ),
        Metric(
            f"{_FORM}{_SEQ}",
            "",
            "The same numbers as in the two rows above, but for each sequence's mean of the "
            "statistic. `max_deviation` is the largest absolute value of these means.",
            _OF_FORM,
        ),
        Metric(
            f"{_FORM}{{masked_fraction,seq_masked_fraction}}",
            "share",
            "Tokens that the form rejects, and sequences in which the form rejects a token.",
            _OF_FORM,
        ),
    ),
)
