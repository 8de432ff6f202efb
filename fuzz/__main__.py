"""Run every target for an equal share of the time: `python -m fuzz SECONDS`.

If a target fails, the exit code is 1, and the input on which it failed is kept in fuzz/findings/.
`python -m fuzz.TARGET FILE` runs the target on that input again.
"""

import re
import subprocess
import sys
from pathlib import Path

TARGETS = ("decode", "manifest", "routes_file")
FINDINGS = Path(__file__).parent / "findings"
_RUNS = re.compile(r"Done (\d+) runs in (\d+) second")
_MEMORY_MB = 4_096  # a reader that trusts a false length would allocate more memory


def main(seconds: int) -> int:
    """Run all targets and return the number of those that failed."""
    FINDINGS.mkdir(exist_ok=True)
    failed = 0
    for target in TARGETS:
        options = {
            "-max_total_time": max(1, seconds // len(TARGETS)),
            "-rss_limit_mb": _MEMORY_MB,
            "-artifact_prefix": f"{FINDINGS}/{target}-",
        }
        command = [sys.executable, "-m", f"fuzz.{target}"]
        command += [f"{name}={value}" for name, value in options.items()]
        result = subprocess.run(command, capture_output=True, text=True, errors="replace")
        runs = _RUNS.search(result.stderr)
        if result.returncode == 0 and runs is not None:
            sys.stdout.write(f"{target}: {int(runs[1]):,} inputs in {runs[2]} s, no finding\n")
        else:
            failed += 1
            sys.stdout.write(f"{target}: FAILED\n{result.stderr[-4_000:]}\n")
        sys.stdout.flush()
    return failed


if __name__ == "__main__":
    sys.exit(min(1, main(int(sys.argv[1]))))
