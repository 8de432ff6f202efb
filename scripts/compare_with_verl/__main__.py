"""Compare estimators, losses and corrections with verl's own functions.

`python -m scripts.compare_with_verl [CHECKOUT]` prints a table of verl's functions. For each
function, the table shows the largest difference from Retrace's function over random batches.
CHECKOUT is a folder with verl's sources; without it, the program uses the installed verl. verl
needs packages that this project does not need (ray, transformers, tensordict, omegaconf,
codetiming, orjson, ...). Create a separate environment with these packages, torch and pydantic. Run
the program in this environment, from this repository's root.

Both functions receive the same numbers, in float64 if verl's function accepts it, so that the
comparison is not affected by rounding. Responses differ in length, and some of their tokens are
masked. The batches leave out two cases in which Retrace deliberately differs from verl
(docs/algorithms.md): groups of one sample, and responses whose last token is masked. If a
difference exceeds 1e-6, the exit code is 1.
"""

import importlib
import subprocess
import sys
from itertools import groupby
from pathlib import Path

from scripts.compare_with_verl.batch import make_batch
from scripts.compare_with_verl.corrections import corrections
from scripts.compare_with_verl.estimators import estimators, kl_rows
from scripts.compare_with_verl.losses import losses, values

BATCHES = 50
TOLERANCE = 1e-6


def main(checkout: str | None = None) -> int:
    """Print the table and return the exit code: 1 if a function differs."""
    if checkout is not None:
        sys.path.insert(0, checkout)
    core = importlib.import_module("verl.trainer.ppo.core_algos")
    helper = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
    actor = importlib.import_module("verl.workers.config").ActorConfig
    print(f"verl {importlib.import_module('verl').__version__}{_commit(checkout)}, ", end="")
    print(f"{BATCHES} random batches\n")
    print("| in Retrace | variants | verl's function | largest difference |\n|---|---|---|---|")
    worst = 0.0
    rows = (
        *estimators(core),
        *kl_rows(core),
        *losses(core, actor),
        *values(core),
        *corrections(helper),
    )
    for _, of_one in groupby(rows, key=lambda row: row.ours):
        forms = list(of_one)
        found = max(row.difference(make_batch(seed)) for row in forms for seed in range(BATCHES))
        worst = max(worst, found)
        named = "; ".join(dict.fromkeys(row.form for row in forms))
        print(f"| {forms[0].ours} | {named} | `{forms[0].theirs}` | {found:.1e} |")
    return int(not worst <= TOLERANCE)


def _commit(checkout: str | None) -> str:
    if checkout is None or not Path(checkout, ".git").exists():
        return ""
    command = ("git", "-C", checkout, "rev-parse", "HEAD")
    return (
        f" ({subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()})"
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
