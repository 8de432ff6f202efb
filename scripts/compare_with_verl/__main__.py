"""Compare estimators, losses and corrections with verl's own functions.

`python -m scripts.compare_with_verl [CHECKOUT]` prints a table: which of verl's functions was
called, and the largest difference over random batches. CHECKOUT is a folder of verl's sources;
without it verl is the installed one. verl needs packages that this project does not (ray,
transformers, tensordict, omegaconf, codetiming, orjson, ...): make an environment of its own with
them, torch and pydantic, and run the program in it, from this repository's root.

Both sides get the same numbers in float64, where verl's functions take them: what is compared is
the arithmetic, not the rounding. Batches are ragged, and some of their tokens do not count. They
leave out what is decided otherwise here (docs/algorithms.md): groups of one sample, and responses
whose last token does not count. A difference above 1e-6 ends the program with 1.
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
    """Print the table; 1 where a function differs."""
    if checkout is not None:
        sys.path.insert(0, checkout)
    core = importlib.import_module("verl.trainer.ppo.core_algos")
    helper = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
    actor = importlib.import_module("verl.workers.config").ActorConfig
    print(f"verl {importlib.import_module('verl').__version__}{_commit(checkout)}, ", end="")
    print(f"{BATCHES} random batches\n")
    print("| here | forms | verl's function | largest difference |\n|---|---|---|---|")
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
