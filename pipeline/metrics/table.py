"""The table of a step's metrics, with the name, unit and meaning of each.

Metrics that verl's dashboards show have verl's names; all others (mismatch, replay, resume, ...)
are specific to Retrace. `make docs` generates docs/metrics.md from this table. A test compares the
table with the metrics of real runs.

To add a metric, measure its value where it arises, with a reduction over the ranks
(operators/training/measured.py), and give it to the rank's report (`_report` in step.py). Then add
a row to its group below, and run `make docs`. `by_layer` (metric.py) names the values of a metric
in each layer. These are examples of rows:

    Metric("actor/my_number", "tokens", "The counted tokens, and the set they are from.")
    Metric("critic/values/{mean,max,min}", "", "Value of a token.", when="the run has a critic")
    Metric("extra/<name>", "", "One metric for each name in the data.", when="...")

A row without `when` describes a metric of every step; its value is None if it was not measured. A
row with `when` describes a metric that is reported only for steps in which the condition holds. The
module former.py keeps the old names of renamed metrics. `timed` (operators/training/speed.py)
measures times; `TIMES` in the same module lists the names of these metrics.
"""

from pipeline.metrics.correction_rows import CORRECTIONS, MISMATCH
from pipeline.metrics.critic_rows import CRITIC
from pipeline.metrics.metric import Group, Metric
from pipeline.metrics.policy_rows import POLICY

_MADE = "a rollout worker generated the step's samples"
_TRAINED = "Mean over mini-batches with an optimizer step; None if there are none."

GROUPS = (
    Group(
        "Rewards",
        (
            Metric(
                "critic/rewards/{mean,max,min}",
                "",
                "Reward of a sample, if any. verl subtracts the KL of `use_kl_in_reward` from the "
                "reward; Retrace reports this KL separately, as `actor/reward_kl_penalty`.",
            ),
            Metric("critic/rewards/std", "", "Standard deviation of rewards (divisor n - 1)."),
            Metric(
                "critic/score/{mean,max,min}",
                "",
                "Score from the reward function, including the penalty for overlong responses.",
            ),
            Metric(
                "critic/rewards/<data source>/mean",
                "",
                "Mean reward of the samples that were generated for the prompts of a data source.",
                when=_MADE,
            ),
            Metric(
                "critic/advantages/{mean,max,min}",
                "",
                "Advantage of a token that counts towards the loss, computed before the updates.",
            ),
            Metric(
                "reward/masked",
                "samples",
                "Samples without a reward: those that were aborted and, with "
                "`reward.on_error=mask`, those whose reward function failed.",
            ),
            Metric("reward/groups", "groups", "Groups with at least one reward."),
            Metric(
                "reward/groups_without_variance",
                "groups",
                "Groups whose rewards are all equal; their group-relative advantages are 0.",
            ),
            Metric(
                "reward/groups_rejected",
                "groups",
                "Groups that were generated but not accepted; 0 without dynamic sampling.",
            ),
            Metric(
                "reward/values_left_out",
                "values",
                "Values that the reward function returned in addition to the score, but that a "
                "trace cannot hold, such as NaN. The worker's log names them.",
                when=_MADE,
            ),
            Metric(
                "extra/<name>",
                "",
                "Mean of the number `<name>`, which the reward function returned in addition to "
                "the score (true counts as 1). Samples without this number are left out.",
                when=_MADE,
            ),
        ),
    ),
    Group(
        "Samples",
        (
            Metric("response/count", "samples", "Samples of the step."),
            Metric("response_length/{mean,max,min}", "tokens", "Length of a response."),
            Metric(
                "response_length/{p10,p50,p90,p99}",
                "tokens",
                "Interpolated quantiles of the length of a response.",
            ),
            Metric(
                "response_length/clip_ratio",
                "share",
                "Responses that the engine reported as cut off at `data.max_response_length`. verl "
                "instead counts all responses of that length.",
            ),
            Metric("response/aborted_ratio", "share", "Responses that the engine aborted."),
            Metric(
                "response/masked",
                "samples",
                "Samples excluded from the loss because of their finish reason: those that were "
                "aborted and, with `algorithm.mask_truncated_samples`, those that were cut off.",
            ),
            Metric("prompt_length/{mean,max,min}", "tokens", "Length of a sample's prompt."),
            Metric(
                "prompt_length/clip_ratio", "share", "Prompts with `data.max_prompt_length` tokens."
            ),
            Metric(
                "training/off_policy/trajectory_staleness_worst/{mean,max,min}",
                "versions",
                "Number of versions between a sample's oldest token and the policy being trained.",
            ),
        ),
    ),
    CRITIC,
    Group(
        "The actor",
        (
            Metric("actor/pg_loss", "", f"Policy loss. {_TRAINED}"),
            Metric("actor/entropy", "nats", "Mean entropy per response token during the updates."),
            Metric(
                "actor/kl_loss",
                "nats",
                "KL to the reference, estimated with `kl_loss_type`; not scaled by `kl_loss_coef`. "
                "The reference routes natively, so with R3 the KL includes the difference in "
                "routing and is above 0 even before training.",
            ),
            Metric(
                "actor/reward_kl_penalty",
                "nats",
                "KL to the reference that `use_kl_in_reward` subtracts, estimated with "
                "`kl_penalty`. With R3, it includes the difference in routing, as `actor/kl_loss` "
                "does.",
            ),
            Metric(
                "actor/reward_kl_penalty_coeff",
                "",
                "Coefficient of the KL penalty in the reward, as used in this step.",
            ),
            Metric("actor/ppo_kl", "nats", "Mean of the old log-prob minus the new log-prob."),
            Metric("actor/pg_clipfrac", "share", "Tokens whose loss was clipped."),
            Metric("actor/pg_clipfrac_lower", "share", "Tokens clipped by `clip_ratio_c`."),
            Metric("actor/tokens", "tokens", "Tokens trained on, counted once per epoch."),
            Metric(
                "policy_loss/<name>",
                "",
                "Mean over tokens of the number `<name>`.",
                when="a custom loss reports this number",
            ),
            Metric("actor/grad_norm", "", f"Gradient norm before clipping. {_TRAINED}"),
            Metric("actor/lr", "", "Learning rate of the step."),
            Metric(
                "update/skipped",
                "mini-batches",
                "Mini-batches skipped because their gradient norm was not finite.",
            ),
            Metric(
                "update/skipped_empty",
                "mini-batches",
                "Mini-batches skipped because all their tokens are masked. A mini-batch whose "
                "advantages are all 0 is not skipped: as in verl, the KL, entropy and auxiliary "
                "losses, momentum and weight decay still change the weights.",
            ),
        ),
    ),
    MISMATCH,
    CORRECTIONS,
    Group(
        "Replay",
        (
            Metric(
                "replay/coverage",
                "share",
                "Sample positions that were replayed in all MoE layers. 0 indicates an error.",
            ),
            Metric(
                "replay/agreement",
                "share",
                "Replayed rows for which the router would have chosen the same set of experts.",
            ),
            Metric(
                "replay/agreement/layer_<N>",
                "share",
                "The same share in the MoE layer with index N in the model.",
                "routes are replayed",
            ),
            Metric(
                "replay/{agreement_layer_min,agreement_sample_min}",
                "share",
                "Lowest agreement of any layer, and of any sample with at least 32 rows. None if "
                "the step replays no recorded routes.",
            ),
            Metric(
                "replay/unhealthy",
                "findings",
                "Layers and samples whose routes do not fit, plus 1 if the KL is too high. Above 0 "
                "only with `on_unhealthy=warn` or `replay_other_weights`; otherwise, a finding "
                "ends the step. None if the step replays no recorded routes.",
            ),
            Metric("replay/rows", "positions", "Replayed positions."),
            Metric(
                "replay/rows_native", "positions", "Positions without a valid row, routed natively."
            ),
            Metric("replay/rows_padding", "positions", "Padding positions."),
            Metric("replay/layers", "layers", "MoE layers in which routes were replayed."),
            Metric(
                "replay/bytes_fetched",
                "bytes",
                "Size of the recorded routes that all ranks fetched, including the footers of the "
                "files. None if the step reads no recorded routes.",
            ),
            Metric(
                "resume/policy_drift",
                "steps",
                "Steps that a restarted trainer repeated and that resulted in a different policy; "
                "0 on CPU.",
            ),
            Metric(
                "resume/routes_drift",
                "samples",
                "In R2 mode, samples whose routes differed when a restarted trainer recorded the "
                "routes again; 0 on CPU.",
            ),
        ),
    ),
    Group(
        "Time",
        (
            Metric("timing_s/gen", "s", "Generation time of the busiest rollout worker."),
            Metric(
                "timing_s/trace_write",
                "s",
                "Time for capturing, encoding and uploading traces in the busiest worker's writer "
                "thread, nearly all of it during generation.",
            ),
            Metric(
                "timing_s/trace_tail",
                "s",
                "Time that the busiest worker still spent on traces after its last token.",
            ),
            Metric(
                "time/policy_fetch_s",
                "s",
                "Time for fetching and patching the step's policy on the slowest rollout worker, "
                "nearly all of it during generation.",
            ),
            Metric(
                "time/policy_stall_s",
                "s",
                "Longest time that an engine waited for a policy that was already in the store. It "
                "covers the rest of the fetch and the loading of the policy.",
            ),
            Metric(
                "timing_s/trace_wait",
                "s",
                "Longest time that a rank waited, after the seal, for the manifest, samples and "
                "routes from the store, both before and during the passes.",
            ),
            Metric(
                "timing_s/log_probs",
                "s",
                "All passes before the updates, on the slowest rank; the next five rows list them.",
            ),
            Metric(
                "timing_s/old_log_prob", "s", "Log-prob pass with the same routing as the updates."
            ),
            Metric("timing_s/native_log_prob", "s", "The second pass without replay, if any."),
            Metric(
                "timing_s/older_log_prob",
                "s",
                "The pass with the weights that generated the samples, if any.",
            ),
            Metric("timing_s/ref", "s", "The log-prob pass of the reference, if any."),
            Metric("timing_s/values", "s", "The pass that computes the critic's values, if any."),
            Metric("timing_s/adv", "s", "Advantages and corrections, on the slowest rank."),
            Metric("timing_s/update_critic", "s", "Updates of the critic, if any."),
            Metric("timing_s/update_actor", "s", "Updates of the policy, on the slowest rank."),
            *POLICY,
            Metric(
                "timing_s/save_checkpoint",
                "s",
                "Time for which training paused to save the checkpoint of the previous step. None "
                "if no checkpoint was due.",
            ),
            Metric(
                "timing_s/train",
                "s",
                "Time from the seal of the step until training is ready for the next step. It "
                "includes all training times above, except for the checkpoint and background work.",
            ),
            Metric(
                "timing_s/step",
                "s",
                "Time from the end of the previous step to the end of this step. In the first step "
                "of an attempt, it includes the start of the engines.",
            ),
        ),
    ),
    Group(
        "Speed and memory",
        (
            Metric("perf/total_num_tokens", "tokens", "Tokens of all prompts and responses."),
            Metric("perf/time_per_step", "s", "The same as `timing_s/step`."),
            Metric(
                "perf/throughput",
                "tokens/s",
                "`perf/total_num_tokens` divided by `timing_s/step` and by the number of processes "
                "(training ranks and engines).",
            ),
            Metric(
                "perf/rollout_tokens_per_s",
                "tokens/s",
                "Response tokens of all workers, divided by `timing_s/gen`.",
            ),
            Metric(
                "perf/train_tokens_per_s",
                "tokens/s",
                "`perf/total_num_tokens` divided by `timing_s/train`.",
            ),
            Metric(
                "perf/mfu/actor",
                "share",
                "FLOP/s of the model in the updates, as a share of the bf16 peak of the ranks' "
                "GPUs. None on CPU, for unknown GPUs, and for models whose FLOPs are unknown.",
            ),
            Metric("perf/mfu/actor_infer", "share", "The same share for the log-prob pass."),
            Metric(
                "perf/{max_memory_allocated_gb,max_memory_reserved_gb}",
                "GiB",
                "Peak GPU memory since the rank started; largest value of any rank. None on CPU.",
            ),
            Metric(
                "perf/max_resident_gb",
                "GiB",
                "Peak resident memory of a process since its start; largest value of any rank.",
            ),
            Metric("perf/cpu_memory_used_gb", "GiB", "Highest memory use of any training machine."),
        ),
    ),
)
"""All metrics, in the order of docs/metrics.md."""


def find_metric(name: str) -> Metric | None:
    """Return the row of a metric; None if the table lacks it."""
    rows = [metric for group in GROUPS for metric in group.metrics if metric.covers(name)]
    # A row with the exact name takes precedence over a row with `<word>`.
    return min(rows, key=lambda metric: metric.is_open, default=None)


def names_of_every_step() -> list[str]:
    """Return the names of the metrics that every step has."""
    return [
        name
        for group in GROUPS
        for metric in group.metrics
        if not metric.when
        for name in metric.names
    ]
