"""Write the tables of benchmarks/scale.md, computed from benchmarks/scale/coefficients.json.

python -m tests.scale_page
"""

from typing import Any

from benchmarks.page import Table, block, with_blocks
from benchmarks.scale import model as of_scale
from benchmarks.scale.coefficients import Coefficients, content, read
from benchmarks.scale.model import LIMITS, MODELS, Model, Step, stops_at
from pipeline.threads import AT_ONCE
from tests.paths import ROOT

PAGE = ROOT / "benchmarks" / "scale.md"
KEYS = {
    "Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Qwen3-235B-A22B": "qwen3-235b-a22b",
    "DeepSeek-V3": "deepseek-v3",
}
"""Names in tests.large_models of the models whose config.json is in tests/data/models."""
ONLY_SHOWN = ("poll_cpu_s", "manifest_sample_bytes")
"""Coefficients that the page shows but no formula uses."""
GPUS = (8, 64, 512, 1024, 4096)
"""The GPU counts in the tables of traffic and time; the performance model covers more counts."""


def bytes_text(size: float) -> str:
    """Return a size in a readable unit, such as '61 GB' or '1.3 TB'."""
    units = (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    unit, factor = next((u for u in units if size >= u[1]), units[-1])
    return f"{size / factor:.1f} {unit}" if size < 9.95 * factor else f"{size / factor:,.0f} {unit}"


def seconds_text(seconds: float) -> str:
    """Return seconds, rounded for readers, such as '0.2', '3.4' or '120'."""
    return f"{seconds:,.0f}" if seconds >= 10 else f"{seconds:.1f}"


def coefficients_table(kind: str) -> Table:
    """Return the table of the coefficients of one kind: 'measured' or 'assumed'."""
    rows = [(f"`{name}`", f"{of['value']:,g}", of["why"]) for name, of in content()[kind].items()]
    return Table(("coefficient", "value", "meaning"), tuple(rows))


def steps(of: Coefficients) -> list[Step]:
    """Return a step of each model on each number of GPUs on which the model fits."""
    found = [Step(model, gpus, of) for model in MODELS for gpus in GPUS]
    return [step for step in found if step.fits]


def traffic_table(of: Coefficients) -> Table:
    """Return the table of the bytes that a step moves."""
    rows = []
    for step in steps(of):
        read_back = step.route_bytes * step.model.readers
        down = step.rollout_nodes
        rows.append(
            (
                *_place(step),
                f"{step.samples:,.0f}",
                bytes_text(step.trace_bytes),
                bytes_text(read_back),
                bytes_text(step.policy_bytes),
                bytes_text(step.policy_bytes * down),
                bytes_text(step.difference_bytes),
                bytes_text(step.difference_bytes * down),
                bytes_text(step.checkpoint_bytes),
                bytes_text(step.manifest_bytes),
            )
        )
    headers = (
        *("model", "GPUs", "ranks, workers", "samples", "traces up", "routes down"),
        *("policy up", "down", "difference up", "down", "checkpoint", "manifest.json"),
    )
    return Table(headers, tuple(rows))


def time_table(of: Coefficients) -> Table:
    """Return the table of how long each part of a step takes; times above the limit are bold."""
    shown = {
        "seal": "seal: 16 shards in parallel",
        "read": "ranks read their samples",
        "shares": "policy up: shares, 16 in parallel",
        "whole up": "policy up: whole, all ranks",
        "whole down": "policy down: whole, GETs of 8 MiB",
        "difference up": "policy up: difference, all ranks",
        "difference down": "policy down: difference",
        "checkpoint": "checkpoint up: all ranks",
    }
    limits = {limit.design: limit for limit in LIMITS}
    rows = []
    for step in steps(of):
        cells = []
        for design in shown.values():
            limit = limits[design]
            text = seconds_text(limit.cost(step))
            cells.append(f"**{text}**" if limit.cost(step) > limit.most(step) else text)
        rate = of_scale.polls_ahead(step) + of_scale.polls_of_workers(step)
        rows.append((*_place(step), seconds_text(step.seconds), *cells, f"{rate:,.0f}"))
    names = ("model", "GPUs", "ranks, workers", "step", *shown, "polls/s")
    return Table(names, tuple(rows))


def limits_table(of: Coefficients) -> Table:
    """Return the table of the cluster sizes at which each design exceeds its limit."""
    rows = []
    for limit in LIMITS:
        found = [_stop(stops_at(limit, model, of), model) for model in MODELS]
        rows.append((limit.design, limit.what, *found))
    return Table(("design", "limit", *(model.name for model in MODELS)), tuple(rows))


def _stop(gpus: int | None, model: Model) -> str:
    if gpus is None:
        return "never"
    least = next(n for n in of_scale.GPUS if Step(model, n, read()).fits)
    return f"{gpus:,}" if gpus > least else f"**{gpus:,}**"


def simulation_table(found: dict[str, Any]) -> Table:
    """Return the table of the simulated run's requests, in total and per simulated second."""
    seconds = found["simulated_s"]
    rows = []
    for party, counts in found["requests"].items():
        rates = [f"{n:,} ({n / seconds:,.1f})" for n in counts.values()]
        rows.append((party, *rates))
    peaks = [f"{n:,}" for n in found["peaks"].values()]
    kinds = tuple(next(iter(found["requests"].values())))
    return Table(("requests (per second)", *kinds), (*rows, ("busiest second", *peaks)))


def lags_table(found: dict[str, Any]) -> Table:
    """Return the table of the last step's lags and of the flow's memory and processor time."""
    flow = found["flow"]
    names = {
        "last_shard_to_seal": "from the last shard to the seal",
        "seal_to_trainer": "from the seal until rank 0 notices it",
        "share_read": "reading by the slowest rank",
        "shares_to_policy": "from all shares to the policy's commit",
        "worker_start_median": "from when both plan and policy exist until a worker starts, median",
        "worker_start_last": "the same, last worker",
        "metrics_to_flow": "from the policy until the flow reads the metrics",
    }
    computed = {name: f"{seconds:.1f} s" for name, seconds in lags_by_model(read()).items()}
    rows = [
        (names[name], f"{seconds:.1f} s", computed.get(name, ""))
        for name, seconds in found["lags"].items()
    ]
    memory = (
        f"{flow['peak_bytes'] / 1e6:,.0f} MB ({flow['imports_bytes'] / 1e6:,.0f} MB without a run)"
    )
    rows += [
        ("the flow's memory", memory, ""),
        ("the flow's processor time for a step's seal", f"{flow['cpu_s']:.1f} s", ""),
    ]
    return Table(("", "simulated", "predicted by the performance model"), tuple(rows))


def lags_by_model(of: Coefficients) -> dict[str, float]:
    """Return the simulated run's lags in seconds, computed with the performance model's formulas.

    In the simulation, the two streams of a rank send their requests one after another.
    """
    found, request_s = of.simulation, of.assumed["request_s"]
    shards, ranks = found["size"]["workers"], found["size"]["ranks"]
    asked = of.measured["share_requests"]
    asked += of.measured["share_shard_requests"] * found["shards_of_rank"]
    of_seal = shards * of.measured["seal_shard_requests"] * request_s / AT_ONCE
    return {
        "last_shard_to_seal": of_seal + found["flow"]["cpu_s"],
        "share_read": asked * request_s,
        "shares_to_policy": 2 * ranks * request_s / AT_ONCE,
    }


def _place(step: Step) -> tuple[str, str, str]:
    return step.model.name, f"{step.gpus:,}", f"{step.ranks:,}, {step.workers:,}"


def blocks() -> dict[str, str]:
    """Return the text of all generated blocks, keyed by name."""
    of = read()
    found = {
        "measured": block(coefficients_table("measured"), of.machine["measured"]),
        "assumed": block(coefficients_table("assumed")),
        "traffic": block(traffic_table(of)),
        "time": block(time_table(of)),
        "limits": block(limits_table(of)),
    }
    if of.simulation:
        tables = simulation_table(of.simulation), lags_table(of.simulation)
        found["simulation"] = block(*tables, of.simulation["machine"])
    return found


def render() -> str:
    """Return the page with tables that are computed from the current coefficients."""
    return with_blocks(PAGE.read_text(), blocks())


if __name__ == "__main__":
    PAGE.write_text(render())
