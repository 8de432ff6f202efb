"""The rows of corrections and of the distance that they correct; docs/corrections.md explains."""

from pipeline.metrics.metric import Group, Metric

_WEIGHED = "`rollout_is` is set"
_REJECTED = "`rollout_rs` or the veto is set"
_VETOED = "the veto is set"
_P = "rollout_corr/"
_FORM = f"{_P}rollout_rs_<form>_"
_SEQ = "{seq_mean,seq_std,seq_max,seq_min,seq_max_deviation,seq_fraction_high,seq_fraction_low}"
_QUANTILES = "{q01,q05,q50,q95,q99}"

CORRECTIONS = Group(
    "Corrections",
    (
        Metric(f"{_P}{{kl,k3_kl}}", "", "KL(engine, trainer) per token, by k1 and k3."),
        Metric(
            f"{_P}{{training_ppl,rollout_ppl}}", "", "Perplexity of a sequence: trainer, engine."
        ),
        Metric(f"{_P}{{training_log_ppl,rollout_log_ppl}}", "", "Its logarithm."),
        Metric(f"{_P}{{log_ppl_diff,log_ppl_abs_diff}}", "", "Trainer's minus engine's; its size."),
        Metric(f"{_P}{{log_ppl_diff_max,log_ppl_diff_min}}", "", "Its largest and smallest."),
        Metric(f"{_P}ppl_ratio", "", "Trainer's perplexity by the engine's."),
        Metric(f"{_P}{{chi2_token,chi2_seq}}", "", "Mean of r^2 - 1, of tokens, of sequences."),
        Metric(f"{_P}ratio_token_{_QUANTILES}", "", "Quantiles of r = p_trainer / p_engine."),
        Metric(f"{_P}ratio_seq_{_QUANTILES}", "", "Of its product over a sequence."),
        Metric(f"{_P}rollout_is_mean", "", "Importance weight; None without `rollout_is`."),
        Metric(f"{_P}rollout_is_{{std,max,min}}", "", "Of the weights.", _WEIGHED),
        Metric(f"{_P}rollout_is_eff_sample_size", "share", "(sum w)^2 / (n sum w^2).", _WEIGHED),
        Metric(
            f"{_P}{{rollout_is_ratio_fraction_high,rollout_is_ratio_fraction_low}}",
            "share",
            "Over the upper bound of weights, under the lower.",
            _WEIGHED,
        ),
        Metric(f"{_P}rollout_is_{_SEQ}", "", "Of the mean weight of a sequence.", _WEIGHED),
        Metric(f"{_P}rollout_is_oob_ratio", "share", "Tokens of weight 0.", "it has two bounds"),
        Metric(
            f"{_P}rollout_is_batch_norm_factor",
            "",
            "What weights are divided by.",
            "`rollout_is_batch_normalize` is true",
        ),
        Metric(f"{_P}rollout_rs_masked_fraction", "share", "Tokens rejected.", _REJECTED),
        Metric(
            f"{_P}{{rollout_rs_seq_masked_fraction,rollout_rs_seq_rejected_fraction}}",
            "share",
            "Sequences of which some, all tokens are rejected.",
            _REJECTED,
        ),
        Metric(f"{_P}rollout_is_veto_fraction", "share", "Sequences vetoed.", _VETOED),
        Metric(
            f"{_P}rollout_is_catastrophic_token_fraction",
            "share",
            "Tokens under its threshold.",
            _VETOED,
        ),
        Metric(f"{_FORM}{{mean,std,max,min}}", "", "The statistic of a form.", _REJECTED),
        Metric(f"{_FORM}{{fraction_high,fraction_low}}", "share", "Outside its bounds.", _REJECTED),
        Metric(f"{_FORM}{_SEQ}", "", "Its statistic of sequences.", _REJECTED),
        Metric(
            f"{_FORM}{{masked_fraction,seq_masked_fraction}}",
            "share",
            "Tokens that it rejects; sequences that lose one.",
            _REJECTED,
        ),
    ),
)
