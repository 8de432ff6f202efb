"""What `retrace traces verify` costs: seconds and memory of a step of 1 M tokens x 48 MoE layers.

The step is that of benchmarks/reading.py: groups of 8 samples of 8,192 tokens, top-8 of 128
experts, recorded routes, four shards. A fresh process on one core checks it; its peak memory
counts the interpreter and all libraries.

    python -m benchmarks.verifying             # 1 M tokens
    python -m benchmarks.verifying --groups 4  # 262,144
"""

import argparse
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.measure import in_fresh_process, machine, one_core
from benchmarks.reading import TOKENS, WHOLE, N, write_step
from pipeline.store import open_store
from pipeline.upkeep.verify import verify


def verified(uri: str) -> tuple[list[str], int, int]:
    """Problems, samples and bytes of one `verify`."""
    report = verify(open_store(uri))
    return [str(problem) for problem in report.problems], report.samples, report.size


def main() -> None:
    """Write a step, check it, print one row."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--groups", type=int, default=16, help="groups of 65,536 tokens")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="retrace-bench-") as folder:
        uri = str(Path(folder) / "run")
        write_step(open_store(uri), arguments.groups)
        with one_core():
            phase = in_fresh_process(verified, uri)
    problems, samples, size = phase.result
    if problems:
        raise SystemExit("\n".join(problems))
    tokens = arguments.groups * N * TOKENS
    table = Table(title=f"verify of {tokens:,} tokens x {len(WHOLE.layers)} layers, one core")
    for name in ("samples", "MB", "CPU s", "wall s", "peak MB", "MB/s of ids"):
        table.add_column(name, justify="right")
    ids = tokens * len(WHOLE.layers) * WHOLE.topk
    table.add_row(
        f"{samples:,}",
        f"{size / 1e6:.0f}",
        f"{phase.cpu_s:.2f}",
        f"{phase.seconds:.2f}",
        f"{phase.peak_bytes / 1e6:.0f}",
        f"{ids / phase.cpu_s / 1e6:.0f}",
    )
    Console().print(table)
    print(machine("pyarrow", "numpy"))


if __name__ == "__main__":
    main()
