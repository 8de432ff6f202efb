"""The one table of a step's metrics: every name, its unit, what it means.

Names that verl's dashboards have are verl's; the others (mismatch, replay, resume, ...) are ours.
docs/metrics.md is generated from here (`make docs`), and a test holds the table to what runs really
write.

To add a metric, write it into the step's `metrics` (operators/training/step_metrics.py, or a dict
that is merged into `Trained.metrics`), add a row to its group below, and `make docs`:

    Metric("actor/my_number", "tokens", "What is counted, over what.")
    Metric("critic/values/{mean,max,min}", "", "Of the critic's values.", when="with a critic")
    Metric("extra/<name>", "", "One for each name that the data bring along.", when="...")

Without `when`, every step has the key, with None where it was not measured; with `when`, only such
a step has it. What is renamed keeps its old name in former.py. Times come from a Stopwatch
(operators/training/speed.py); their names stand in `_TIMES` of step_metrics.py.
"""

from pipeline.metrics.correction_rows import CORRECTIONS
from pipeline.metrics.critic_rows import CRITIC
from pipeline.metrics.metric import Group, Metric

_MADE = "a rollout worker made the step's samples"
_SWEPT = "over the response tokens of the step"
_TRAINED = (
    "Mean over mini-batches; those without an optimizer step are left out, None where none had one."
)

GROUPS = (
    Group(
        "Rewards",
        (
            Metric(
                "critic/rewards/{mean,max,min}",
                "",
                "Reward of a sample; those without one are left out. verl subtracts the KL of "
                "`use_kl_in_reward`, which is `actor/reward_kl_penalty` here.",
            ),
            Metric("critic/rewards/std", "", "Its standard deviation (of the samples: n - 1)."),
            Metric(
                "critic/score/{mean,max,min}",
                "",
                "What the reward function said, with the penalty of overlong responses.",
            ),
            Metric(
                "critic/rewards/<data source>/mean",
                "",
                "Mean of the samples that were made for the prompts of a data source.",
                when=_MADE,
            ),
            Metric(
                "critic/advantages/{mean,max,min}",
                "",
                "Advantage of a token that counts, before the updates.",
            ),
            Metric(
                "reward/masked", "samples", "Without a reward: `reward.on_error=mask`, aborted."
            ),
            Metric("reward/groups", "groups", "Groups with at least one reward."),
            Metric(
                "reward/groups_without_variance",
                "groups",
                "Groups whose rewards are all equal: with group-relative advantages they teach "
                "nothing.",
            ),
            Metric(
                "reward/groups_rejected",
                "groups",
                "Groups that were made and not accepted (dynamic sampling); 0 without it.",
            ),
            Metric(
                "extra/<name>",
                "",
                "Mean of a number that the reward function returned beside the score (true counts "
                "as 1), over the samples that have it.",
                when=_MADE,
            ),
        ),
    ),
    Group(
        "Samples",
        (
            Metric("response/count", "samples", "Samples of the step."),
            Metric("response_length/{mean,max,min}", "tokens", "Length of a response."),
            Metric("response_length/{p10,p50,p90,p99}", "tokens", "Quantiles of it, interpolated."),
            Metric(
                "response_length/clip_ratio",
                "share",
                "Responses that were cut at `data.max_response_length` (the engine's reason; verl "
                "takes those of that length).",
            ),
            Metric("response/aborted_ratio", "share", "Responses that the engine gave up."),
            Metric(
                "response/masked",
                "samples",
                "Without loss, because of how generation ended: aborted, or cut with "
                "`algorithm.mask_truncated_samples`.",
            ),
            Metric("prompt_length/{mean,max,min}", "tokens", "Length of a sample's prompt."),
            Metric(
                "prompt_length/clip_ratio", "share", "Prompts of `data.max_prompt_length` tokens."
            ),
            Metric(
                "training/off_policy/trajectory_staleness_worst/{mean,max,min}",
                "versions",
                "How many versions the policy of a sample's oldest token is behind the one that is "
                "trained.",
            ),
        ),
    ),
    CRITIC,
    Group(
        "The actor",
        (
            Metric("actor/pg_loss", "", f"Policy loss. {_TRAINED}"),
            Metric("actor/entropy", "nats", "Per response token, as it changes with the updates."),
            Metric(
                "actor/kl_loss",
                "nats",
                "KL to the reference by `kl_loss_type`, before its coefficient.",
            ),
            Metric(
                "actor/reward_kl_penalty",
                "nats",
                "KL to the reference by `kl_penalty`, which `use_kl_in_reward` takes from scores.",
            ),
            Metric("actor/reward_kl_penalty_coeff", "", "Its coefficient in this step."),
            Metric("actor/ppo_kl", "nats", "Mean of old minus new log-prob."),
            Metric("actor/pg_clipfrac", "share", "Tokens whose loss was clipped."),
            Metric("actor/pg_clipfrac_lower", "share", "Tokens clipped by `clip_ratio_c`."),
            Metric("actor/tokens", "tokens", "Tokens trained on, each once an epoch."),
            Metric(
                "policy_loss/<name>", "", "Mean over tokens.", when="a loss of yours reports it"
            ),
            Metric("actor/grad_norm", "", f"Gradient norm before clipping. {_TRAINED}"),
            Metric("actor/lr", "", "Learning rate of the step."),
            Metric(
                "update/skipped",
                "mini-batches",
                "Without an optimizer step, because their gradient norm was not finite.",
            ),
            Metric(
                "update/skipped_empty",
                "mini-batches",
                "Without an optimizer step, because none of their tokens counts (masked, or "
                "without an advantage).",
            ),
        ),
    ),
    Group(
        "Mismatch between engine and trainer",
        (
            Metric(
                "mismatch/kl",
                "nats",
                f"k3 estimate of KL(engine, trainer), {_SWEPT}, log-prob pass as trained.",
            ),
            Metric(
                "mismatch/kl_native",
                "nats",
                "The same from a second pass without replay, every `native_every` steps and in the "
                "first of each attempt.",
            ),
            Metric(
                "mismatch/extreme_share",
                "share",
                "Tokens whose probabilities differ by more than a factor of 2.",
            ),
            Metric("mismatch/extreme_share_native", "share", "The same without replay."),
        ),
    ),
    CORRECTIONS,
    Group(
        "Replay",
        (
            Metric(
                "replay/coverage",
                "share",
                "Positions of the samples that were replayed, in every MoE layer; 0 is an error.",
            ),
            Metric(
                "replay/agreement",
                "share",
                "Replayed rows where the router would have chosen the same set.",
            ),
            Metric(
                "replay/{agreement_layer_min,agreement_sample_min}",
                "share",
                "The lowest of a layer, and of a sample of 32 rows or more, where recorded routes "
                "are replayed.",
            ),
            Metric(
                "replay/unhealthy",
                "findings",
                "What spoke against the recorded routes (layers, samples, KL); more than 0 only "
                "with `on_unhealthy=warn` or `replay_other_weights`; None: not judged.",
            ),
            Metric("replay/rows", "positions", "Replayed."),
            Metric("replay/rows_native", "positions", "Routed natively for want of a row."),
            Metric("replay/rows_padding", "positions", "Padding."),
            Metric("replay/layers", "layers", "MoE layers that were replayed."),
            Metric(
                "replay/bytes_fetched",
                "bytes",
                "Recorded routes that all ranks fetched, footers of their files included; None "
                "where none are read.",
            ),
            Metric(
                "resume/policy_drift",
                "steps",
                "Trained again after a restart with another policy as the result; 0 on CPU.",
            ),
            Metric(
                "resume/routes_drift",
                "samples",
                "R2: whose routes a restart recorded otherwise than the store has them; 0 on CPU.",
            ),
        ),
    ),
    Group(
        "Time",
        (
            Metric("timing_s/gen", "s", "Generation, of the busiest rollout worker."),
            Metric(
                "timing_s/trace_write",
                "s",
                "What the writer's thread of the busiest worker spent on capture, encoding and "
                "upload, nearly all of it beside generation.",
            ),
            Metric("timing_s/trace_tail", "s", "What a worker still took after its last token."),
            Metric(
                "timing_s/trace_wait",
                "s",
                "How long the slowest rank stood still for the store after the seal: manifest, "
                "samples and routes, before the first pass and in all passes.",
            ),
            Metric(
                "timing_s/log_probs",
                "s",
                "All passes before the updates, of the slowest rank; they are the next three.",
            ),
            Metric("timing_s/old_log_prob", "s", "The log-prob pass as it is trained."),
            Metric("timing_s/native_log_prob", "s", "The second one without replay, if there is."),
            Metric("timing_s/ref", "s", "The reference's, if there is one."),
            Metric("timing_s/values", "s", "The critic's pass, if there is one."),
            Metric("timing_s/adv", "s", "Advantages and corrections, of the slowest rank."),
            Metric("timing_s/update_critic", "s", "Updates of the critic, if there is one."),
            Metric("timing_s/update_actor", "s", "Updates, of the slowest rank."),
            Metric("timing_s/update_weights", "s", "Storing the new policy."),
            Metric("timing_s/save_checkpoint", "s", "Storing a checkpoint; None: none was due."),
            Metric("timing_s/train", "s", "From the sealed step to its metrics: all of the above."),
            Metric(
                "timing_s/step",
                "s",
                "From the end of the step before to this one's; the first step of an attempt "
                "includes the start of the engines.",
            ),
        ),
    ),
    Group(
        "Speed and memory",
        (
            Metric("perf/total_num_tokens", "tokens", "Prompts and responses of the step."),
            Metric("perf/time_per_step", "s", "`timing_s/step`."),
            Metric(
                "perf/throughput",
                "tokens/s",
                "`total_num_tokens` by time per step and process (training ranks and engines).",
            ),
            Metric(
                "perf/rollout_tokens_per_s",
                "tokens/s",
                "Response tokens of all workers by `timing_s/gen`.",
            ),
            Metric(
                "perf/train_tokens_per_s", "tokens/s", "`total_num_tokens` by `timing_s/train`."
            ),
            Metric(
                "perf/mfu/actor",
                "share",
                "Model FLOPs of the updates by the peak of the ranks' GPUs in bf16; None on CPU "
                "and on GPUs that are not in the table.",
            ),
            Metric("perf/mfu/actor_infer", "share", "The same of the log-prob pass."),
            Metric(
                "perf/{max_memory_allocated_gb,max_memory_reserved_gb}",
                "GiB",
                "GPU memory of the fullest rank since its start; None on CPU.",
            ),
            Metric(
                "perf/max_resident_gb",
                "GiB",
                "Memory of the largest rank's process, at its peak since its start.",
            ),
            Metric("perf/cpu_memory_used_gb", "GiB", "Used on the fullest machine with ranks."),
        ),
    ),
)
"""All metrics, in the order of docs/metrics.md."""


def find_metric(name: str) -> Metric | None:
    """The row of a metric; None: the table lacks it."""
    rows = [metric for group in GROUPS for metric in group.metrics if metric.covers(name)]
    # A name that is spelt out stands before one that any text fits.
    return min(rows, key=lambda metric: metric.is_open, default=None)


def names_of_every_step() -> list[str]:
    """The metrics that no step lacks."""
    return [
        name
        for group in GROUPS
        for metric in group.metrics
        if not metric.when
        for name in metric.names
    ]
