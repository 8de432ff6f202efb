"""Tables and lines of `retrace traces`."""

from collections.abc import Sequence

from rich.table import Table

from pipeline.cli.printable import StoredTable, number_text, printable_message
from pipeline.traces import Manifest
from pipeline.upkeep.problems import Report
from pipeline.upkeep.stats import StepStats
from retrace import SealedStep, StepSample


def _share(part: int | None, whole: int) -> str:
    return "—" if part is None or not whole else f"{part / whole:.1%}"


def _number(value: float | None, form: str) -> str:
    return "—" if value is None else number_text(value, form)


def _mean(values: Sequence[float]) -> float | None:
    # The sum of large rewards would be infinite.
    return sum(value / len(values) for value in values) if values else None


def _table(title: str | None, *columns: str) -> Table:
    table = StoredTable(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in _TEXTS else "right", overflow="fold")
    return table


LESS_NEEDED = ("engine", "tokens", "kind", "policy", "rejected groups", "entropy", "load min")
"""Columns to leave out on a narrow terminal, in this order."""

_TEXTS = {"kind", "engine", "id", "text", "not trained on"}


def steps_table(title: str, steps: Sequence[SealedStep]) -> Table:
    """Return a table of the sealed steps of a run or recorded set, one per row."""
    columns = ["step", "policy", "kind", "engine", "samples", "tokens", "valid rows", "reward"]
    rejects = any(step.manifest.rejected for step in steps)
    table = _table(title, *columns, *(["rejected groups"] if rejects else []))
    for step in steps:
        number, manifest = step.number, step.manifest
        made = manifest.provenance
        both = (manifest.rows[name].to_pylist() for name in ("reward", "not_trained"))
        # A greedy baseline's reward is not one of its group's rewards.
        rewards = [r for r, reason in zip(*both, strict=True) if r is not None and not reason]
        table.add_row(
            f"{number} (pruned)" if step.pruned else str(number),
            ", ".join(map(str, manifest.policy_versions)),
            made.kind if made else "—",
            made.engine if made else "—",
            str(len(manifest.ids)),
            str(sum(manifest.rows["rows_total"].to_pylist()) + len(manifest.ids)),
            _valid_share(manifest),
            _number(_mean(rewards), ".3f"),
            *([str(len(manifest.rejected))] if rejects else []),
        )
    return table


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
    untrained = any(row["not_trained"] for row in rows)
    columns = ["id", "prompt", "response", "valid rows", "reward"]
    table = _table(title, *columns, *(["not trained on"] if untrained else []))
    for row in rows:
        table.add_row(
            row["id"],
            str(row["prompt_length"]),
            str(row["response_length"]),
            _share(row["rows_valid"], row["rows_total"]),
            row["reward_error"] or _number(row["reward"], ".3f"),
            *([row["not_trained"] or ""] if untrained else []),
        )
    return table


def answers_table(version: int, answers: Sequence[StepSample]) -> Table:
    """Return a table of the answers in a policy version's validation, one per row."""
    title = f"validation of policy {version}"
    table = _table(title, "id", "prompt", "response", "finished by", "reward")
    for one in answers:
        table.add_row(
            one.id,
            str(len(one.prompt_tokens_P)),
            str(len(one.response_tokens_G)),
            one.finish_reason,
            one.reward_error or _number(one.reward, ".3f"),
        )
    return table


def sample_table(sample: StepSample, layers: Sequence[int]) -> Table:
    """Return a table of a sample's tokens, one per row, with their experts in the given layers."""
    routes = sample.routes
    P = len(sample.prompt_tokens_P)
    table = _table(None, "position", "token", "text", "log-prob", *(f"layer {i}" for i in layers))
    for t, token in enumerate(sample.tokens_S.tolist()):
        text = repr(sample.tokenizer.text([token])) if sample.tokenizer.there else ""
        logprob = None if t < P else float(sample.logprobs_G[t - P])
        experts = ["" for _ in layers]  # the model did not process the last token
        if routes is not None and t < len(routes.valid_T):
            experts = ["not known" for _ in layers]
            if routes.valid_T[t]:
                experts = [" ".join(map(str, sets_K)) for sets_K in routes.sets_TLK[t].tolist()]
        table.add_row(str(t), str(token), text, _number(logprob, ".3f"), *experts)
    return table


def sample_lines(sample: StepSample, not_trained: str | None) -> list[str]:
    """Return lines about a sample: lengths, reward, extras and, if there is a tokenizer, texts.

    `not_trained` is the reason why the sample is not trained on, or None.
    """
    extras = "".join(f", {name} {value}" for name, value in sample.extras.items())
    lines = [
        f"{sample.id}: {len(sample.prompt_tokens_P)} prompt and {len(sample.response_tokens_G)} "
        f"response tokens, finished by {sample.finish_reason}",
        f"reward    {sample.reward_error or _number(sample.reward, '.3f')}{extras}",
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
    names = ("layer", "load min", "load max", "max / mean", "entropy", "R3 = R2", "in training")
    table = _table(None, *names)
    for layer in (*stats.layers, stats.total):
        if layer.layer is None:
            table.add_section()
        table.add_row(
            "all" if layer.layer is None else str(layer.layer),
            f"{layer.load_min:.2%}",
            f"{layer.load_max:.2%}",
            f"{layer.load_max_over_mean:.2f}",
            f"{layer.load_entropy:.3f}",
            _number(layer.agreement, ".2%"),
            _number(layer.agreement_in_training, ".2%"),
        )
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
