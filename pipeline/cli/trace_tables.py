"""Tables and lines of `retrace traces`."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rich.table import Table

from pipeline.cli.printable import number_text, printable_message, stored_table
from pipeline.traces import Manifest
from pipeline.upkeep.problems import Report
from pipeline.upkeep.stats import LayerStats, StepStats
from retrace import SealedStep, StepSample


def _share(part: int | None, whole: int) -> str:
    return "—" if part is None or not whole else f"{part / whole:.1%}"


LESS_NEEDED = ("engine", "tokens", "kind", "policy", "rejected groups", "entropy", "load min")
"""Columns to leave out on a narrow terminal, in this order."""

_TEXTS = {"kind", "engine", "id", "text", "not trained on"}


def steps_table(title: str, steps: Sequence[SealedStep]) -> Table:
    """Return a table of the sealed steps of a run or recorded set, one per row."""
    columns: dict[str, Callable[[SealedStep], str]] = {
        "step": lambda one: f"{one.number} (pruned)" if one.pruned else str(one.number),
        "policy": lambda one: ", ".join(map(str, one.manifest.policy_versions)),
        "kind": lambda one: made.kind if (made := one.manifest.provenance) else "—",
        "engine": lambda one: made.engine if (made := one.manifest.provenance) else "—",
        "samples": lambda one: str(len(one.manifest.ids)),
        "tokens": lambda one: str(
            sum(one.manifest.rows["rows_total"].to_pylist()) + len(one.manifest.ids)
        ),
        "valid rows": lambda one: _valid_share(one.manifest),
        "reward": lambda one: number_text(_mean_reward(one.manifest), ".3f"),
    }
    if any(step.manifest.rejected for step in steps):
        columns["rejected groups"] = lambda one: str(len(one.manifest.rejected))
    return stored_table(steps, columns, _TEXTS, title)


def _mean_reward(manifest: Manifest) -> float | None:
    # A greedy baseline's reward is not one of its group's rewards.
    both = (manifest.rows[name].to_pylist() for name in ("reward", "not_trained"))
    rewards = [r for r, reason in zip(*both, strict=True) if r is not None and not reason]
    # The sum of large rewards would be infinite.
    return sum(reward / len(rewards) for reward in rewards) if rewards else None


def _valid_share(manifest: Manifest) -> str:
    """Return the share of valid rows; a dash for R2, because only `stats` reads R2 routes."""
    columns = manifest.rows.select(["rows_valid", "rows_total"]).to_pydict()
    if None in columns["rows_valid"]:
        return "—"
    return _share(sum(columns["rows_valid"]), sum(columns["rows_total"]))


def samples_table(manifest: Manifest, pruned: bool) -> Table:
    """Return a table of a step's samples, one per row."""
    title = f"step {manifest.step}" + (", pruned" if pruned else "")
    rows = manifest.rows.to_pylist()
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "id": lambda row: row["id"],
        "prompt": lambda row: str(row["prompt_length"]),
        "response": lambda row: str(row["response_length"]),
        "valid rows": lambda row: _share(row["rows_valid"], row["rows_total"]),
        "reward": lambda row: row["reward_error"] or number_text(row["reward"], ".3f"),
    }
    if any(row["not_trained"] for row in rows):
        columns["not trained on"] = lambda row: row["not_trained"] or ""
    return stored_table(rows, columns, _TEXTS, title)


def answers_table(version: int, answers: Sequence[StepSample]) -> Table:
    """Return a table of the answers in a policy version's validation, one per row."""
    title = f"validation of policy {version}"
    columns: dict[str, Callable[[StepSample], str]] = {
        "id": lambda one: one.id,
        "prompt": lambda one: str(len(one.prompt_tokens_P)),
        "response": lambda one: str(len(one.response_tokens_G)),
        "finished by": lambda one: one.finish_reason,
        "reward": lambda one: one.reward_error or number_text(one.reward, ".3f"),
    }
    return stored_table(answers, columns, _TEXTS, title)


def sample_table(sample: StepSample, layers: Sequence[int]) -> Table:
    """Return a table of a sample's tokens, one per row, with their experts in the given layers."""
    routes, tokens, P = sample.routes, sample.tokens_S.tolist(), len(sample.prompt_tokens_P)

    def text(t: int) -> str:
        return repr(sample.tokenizer.text([tokens[t]])) if sample.tokenizer.there else ""

    def experts(index: int, t: int) -> str:
        if routes is None or t >= len(routes.valid_T):
            return ""  # the model did not process the last token
        known = routes.valid_T[t]
        return " ".join(map(str, routes.sets_TLK[t, index].tolist())) if known else "not known"

    columns: dict[str, Callable[[int], str]] = {
        "position": str,
        "token": lambda t: str(tokens[t]),
        "text": text,
        "log-prob": lambda t: "—" if t < P else number_text(float(sample.logprobs_G[t - P]), ".3f"),
        **{f"layer {layer}": partial(experts, index) for index, layer in enumerate(layers)},
    }
    return stored_table(range(len(tokens)), columns, _TEXTS)


def sample_lines(sample: StepSample, not_trained: str | None) -> list[str]:
    """Return lines about a sample: lengths, reward, extras and, if there is a tokenizer, texts.

    `not_trained` is the reason why the sample is not trained on, or None.
    """
    extras = "".join(f", {name} {value}" for name, value in sample.extras.items())
    lines = [
        f"{sample.id}: {len(sample.prompt_tokens_P)} prompt and {len(sample.response_tokens_G)} "
        f"response tokens, finished by {sample.finish_reason}",
        f"reward    {sample.reward_error or number_text(sample.reward, '.3f')}{extras}",
    ]
    if sample.branch_of is not None:
        lines.append(f"branch of {sample.branch_of}")
    if not_trained is not None:
        lines.append(f"not trained on: {printable_message(not_trained)}")
    if sample.tokenizer.there:
        lines += [f"prompt    {sample.prompt_text!r}", f"response  {sample.response_text!r}"]
    return lines


STATS_NOTE = (
    "load: an expert's share of the layer's choices; max / mean and entropy: 1 means an even load; "
    "R3 = R2: share of rows in which engine and trainer recorded the same experts; in training: "
    "share of rows in which the trainer's own choice was the replayed set; all: lowest and highest "
    "load, mean of the other columns",
    "bytes per token and layer are few if experts are few, if sets recur, or if a group's samples "
    "share a prompt, whose repeated routes compress well",
)


def stats_line(stats: StepStats) -> str:
    """Return a line that names the step, its samples and the size of its routes."""
    left_out = f" ({stats.not_trained} not trained on)" if stats.not_trained else ""
    size = f"{stats.bytes_per_token_layer:.2f} bytes per token and layer"
    if stats.rejected:
        left_out += f" and {stats.rejected} rejected groups"
        size += ", counting the bytes of the rejected groups but not their tokens"
    return (
        f"step {stats.step}, {stats.kind}: {stats.samples} samples{left_out}, valid rows "
        f"{_share(stats.rows_valid, stats.rows_total)} of {stats.rows_total}, {size}"
    )


def stats_table(stats: StepStats) -> Table:
    """Return a table of a step's statistics, one layer per row."""
    columns: dict[str, Callable[[LayerStats], str]] = {
        "layer": lambda one: "all" if one.layer is None else str(one.layer),
        "load min": lambda one: f"{one.load_min:.2%}",
        "load max": lambda one: f"{one.load_max:.2%}",
        "max / mean": lambda one: f"{one.load_max_over_mean:.2f}",
        "entropy": lambda one: f"{one.load_entropy:.3f}",
        "R3 = R2": lambda one: number_text(one.agreement, ".2%"),
        "in training": lambda one: number_text(one.agreement_in_training, ".2%"),
    }
    table = stored_table((*stats.layers, stats.total), columns, _TEXTS)
    table.rows[-2].end_section = True  # a line above the totals
    return table


def seen(report: Report) -> str:
    """Return a line with the number of checked objects of each kind; zeros are omitted."""
    counts = {
        "of them pruned": report.pruned,
        "samples": report.samples,
        "inputs": report.inputs,
        "policies": report.policies,
        "checkpoints": report.checkpoints,
        "validation shards": report.validations,
        "files": report.files,
        "bytes": report.size,
    }
    some = [f"{n:,} {name}" for name, n in counts.items() if n]
    return ", ".join([f"checked: {report.steps:,} sealed steps", *some])
