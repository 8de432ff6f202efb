"""Measure `retrace traces verify`: seconds and memory for a step of 1 M tokens x 48 MoE layers.

The step is the same as in benchmarks/reading.py: groups of 8 samples of 8,192 tokens, top-8 of 128
experts, recorded routes, four shards. A new process on one core checks the step. Its peak memory
includes the interpreter and all libraries.

    python -m benchmarks.verifying             # 1 M tokens
    python -m benchmarks.verifying --groups 4  # 262,144 tokens
"""

import argparse
import tempfile
from pathlib import Path

from benchmarks.measure import Phase, in_fresh_process, machine, one_core
from benchmarks.page import Table, arguments_of, block, publish, verdict
from benchmarks.reading import SHARDS, TOKENS, WHOLE, N, write_step
from pipeline.store import open_store
from pipeline.upkeep.verify import verify

MOST_S, MOST_MB = 15, 500
"""Limits for a million tokens of 48 layers."""


def verified(uri: str) -> tuple[list[str], int, int]:
    """Run `verify` once and return the problems, samples and bytes that it reports."""
    report = verify(open_store(uri))
    return [str(problem) for problem in report.problems], report.samples, report.size


HEADERS = ("", "limit", "found", "")


def main() -> None:
    """Write a step, and check it in a new process on one core."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--groups", type=int, default=16, help="groups of 65,536 tokens")
    arguments = arguments_of(parser)
    groups = 4 if arguments.quick else arguments.groups
    with tempfile.TemporaryDirectory(prefix="retrace-bench-") as folder:
        uri = str(Path(folder) / "run")
        write_step(open_store(uri), groups)
        with one_core():
            phase = in_fresh_process(verified, uri)
    problems, samples, size = phase.result
    if problems:
        raise SystemExit("\n".join(problems))
    tokens = groups * N * TOKENS
    title = (
        f"{samples} samples, {tokens:,} tokens x {len(WHOLE.layers)} layers, {size / 1e6:.0f} MB "
        f"in {SHARDS} shards, on one core; {phase.seconds:.1f} s by the clock:"
    )
    where = machine("pyarrow", "numpy")
    publish({"verifying": block(title, table_of(phase, tokens), where)}, arguments)


def table_of(phase: Phase, tokens: int) -> Table:
    """Return the table of the limits, scaled to this token count, and the measured values."""
    most_s = MOST_S * tokens / (1 << 20)
    seconds = (f"<= {most_s:.1f} s", f"{phase.cpu_s:.1f} s", verdict(phase.cpu_s <= most_s))
    peak_mb = phase.peak_bytes / 1e6
    memory = (f"<= {MOST_MB} MB", f"{peak_mb:,.0f} MB", verdict(peak_mb <= MOST_MB))
    rate = tokens * len(WHOLE.layers) * WHOLE.topk / phase.cpu_s / 1e6
    rows = (
        ("processor seconds", *seconds),
        ("peak resident memory", *memory),
        ("raw ids per processor second", "none", f"{rate:,.0f} MB/s", ""),
    )
    return Table(HEADERS, rows)


if __name__ == "__main__":
    main()
