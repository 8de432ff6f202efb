"""Check Retrace in its first ten minutes on a GPU, and write a page of verdicts and figures.

    .venv/bin/python -m scripts.gpu_ten_minutes [--only NAME ...] [--page FILE] [--dry-run]

The checks (gpu_checks.py) are independent: each runs in its own process, for at most two minutes,
without Prefect and without a store on the network. A check whose packages are not installed is
skipped by name. The page is docs/gpu/DATE-DEVICE.md.
"""

import argparse
import datetime
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.hardware import gpu_pool
from scripts.gpu_checks import CHECKS
from scripts.gpu_hour import run_guarded

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 120.0
"""Time limit of a check, in seconds."""


@dataclass(frozen=True)
class Result:
    """The result of a check. Example: Result("loss", "ok", "head: ms 41.2", 12.3)."""

    name: str
    verdict: str
    """ok, failed or skipped."""
    says: str
    """Figures or the reason."""
    seconds: float = 0.0


def missing(name: str) -> list[str]:
    """Return the modules that a check needs and that are not installed."""
    return [m for m in CHECKS[name].needs if not _installed(m)]


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the parent package
        return False


def run(name: str, words: Sequence[str] = ()) -> Result:
    """Run a check in its own process, which ends with all its children after LIMIT_S.

    Args:
        name: The name of the check.
        words: Further arguments of gpu_checks.py.
    """
    if lacking := missing(name):
        return Result(name, "skipped", f"not installed: {', '.join(lacking)}")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        code = run_guarded(("-m", "scripts.gpu_checks", name, *words), log, gpu_pool(), LIMIT_S)
        lines = log.read_text(errors="replace").strip().splitlines() or [""]
    seconds = time.monotonic() - started
    if code is None:
        return Result(name, "failed", f"not finished after {LIMIT_S:.0f} s", seconds)
    if code:
        return Result(name, "failed", lines[-1][-300:], seconds)
    # Processes that a check started may write after its figures.
    figures = next(json.loads(line) for line in reversed(lines) if line.startswith("{"))
    return Result(name, "ok", "; ".join(f"{k} {v}" for k, v in figures.items()), seconds)


def page(results: Sequence[Result], device: str, date: str) -> str:
    """Return the page that reports the results.

    Args:
        results: The results, in order.
        device: The name of the device.
        date: The day, such as 2026-11-29.
    """
    rows = [
        f"| {one.name} | **{one.verdict}** | {one.says.replace('|', '/')} | {one.seconds:.0f} |"
        for one in results
    ]
    count = sum(one.verdict == "failed" for one in results)
    return "\n".join(
        [
            f"# {device}, {date}",
            "",
            f"`python -m scripts.gpu_ten_minutes`: {len(results)} checks, {count} failed.",
            "",
            "| check | verdict | figures | s |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main() -> int:
    """Run the checks, write the page, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", choices=CHECKS, help="may be repeated")
    parser.add_argument("--page", type=Path, help="the page to write")
    parser.add_argument("--dry-run", action="store_true", help="print the plan only")
    arguments = parser.parse_args()
    names = arguments.only or list(CHECKS)
    if arguments.dry_run:
        for name in names:
            lacking = missing(name)
            what = (CHECKS[name].run.__doc__ or "").partition("\n")[0]
            print(f"{name}: {what}" + (f" (skipped: {', '.join(lacking)})" if lacking else ""))
        return 0
    if not gpu_pool():
        print("found no GPU, expected one; use --dry-run to see the plan", file=sys.stderr)
        return 2
    device = gpu_name()
    date = datetime.date.today().isoformat()
    name = f"{date}-{re.sub(r'[^A-Za-z0-9]+', '-', device)}.md"
    path = arguments.page or ROOT / "docs/gpu" / name
    results: list[Result] = []
    for name in names:
        results.append(run(name))
        print(f"{results[-1].name}: {results[-1].verdict}: {results[-1].says}", flush=True)
        path.write_text(page(results, device, date))  # an interruption loses nothing
    print(path)
    return int(any(one.verdict == "failed" for one in results))


def gpu_name() -> str:
    """Return the name of the first GPU, according to nvidia-smi."""
    found = subprocess.run(
        ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader"),
        capture_output=True,
        text=True,
        check=False,
    )
    return (found.stdout.strip().splitlines() or ["GPU"])[0]


if __name__ == "__main__":
    sys.exit(main())
