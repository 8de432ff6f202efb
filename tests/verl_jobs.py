"""The settings of some verl scripts, and verl's generated YAML files.

`scripts/verl_sources.py` copies both. The YAML files are not part of this repository, so tests that
need them are marked `needs_verl`. `python -m tests.verl_jobs` writes the table of different
defaults in docs/from-verl.md, if the files are present.
"""

import json
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config.dotted import leaves
from pipeline.config.imports.defaults import VERL_DEFAULTS
from pipeline.config.keys import setting_keys
from tests.paths import ROOT

FOLDER = ROOT / "tests/unit/config/verl"
PAGE = ROOT / "docs/from-verl.md"
FILES = sorted(FOLDER.glob("ppo_megatron_trainer-*.yaml"))
"""The generated file of each version of verl, oldest first."""

needs_verl = pytest.mark.skipif(
    not FILES,
    reason="verl's generated settings files are not part of this repository; to compare with them, "
    "run python scripts/verl_sources.py CHECKOUT",
)
OTHER_DEFAULTS: dict[str, str] = {
    "data.train_files": "an example file",
    "data.val_files": "an example file",
    "data.seed": "verl's default is null; the default here fixes the prompt order",
    "actor_rollout_ref.model.path": "an example model",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "verl refuses to start without it",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "-1 means that lr_warmup_steps_ratio applies",
    "actor_rollout_ref.actor.megatron.override_transformer_config": "verl's values are "
    "attention_backend=flash and no recomputation",
    **dict.fromkeys(
        (
            f"actor_rollout_ref.{group}.log_prob_{name}"
            for group in ("rollout", "ref")
            for name in ("use_dynamic_bsz", "max_token_len_per_gpu")
        ),
        "null here and verl's interpolation both mean the actor's value",
    ),
    "actor_rollout_ref.ref.megatron.param_offload": "null here and verl's "
    "interpolation both mean the actor's value",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "rollout and training have separate GPUs",
    "actor_rollout_ref.rollout.enforce_eager": "null means verl's value on GPUs",
    "critic.optim.lr_warmup_steps": "-1 means that lr_warmup_steps_ratio applies",
    "critic.forward_max_token_len_per_gpu": "null here and verl's interpolation both mean "
    "ppo_max_token_len_per_gpu",
    **dict.fromkeys(
        (f"critic.megatron.{name}_offload" for name in ("param", "grad", "optimizer")),
        "null means the actor's value",
    ),
    **dict.fromkeys(
        (
            f"critic.{name}"
            for name in (
                "ppo_mini_batch_size",
                "ppo_micro_batch_size_per_gpu",
                "use_dynamic_bsz",
                "ppo_epochs",
                "loss_agg_mode",
                "loss_scale_factor",
            )
        ),
        "null here and verl's interpolation both mean the actor's value",
    ),
    "custom_reward_function.name": "verl has the same default in reward.custom_reward_function",
    "trainer.experiment_name": "an example name",
    "trainer.project_name": "an example name",
    "trainer.total_training_steps": "verl computes it from trainer.total_epochs",
    "trainer.device": "auto means cuda on machines with GPUs",
    "trainer.logger": "wandb is an extra and needs an account; [console,wandb] enables it",
    "trainer.default_local_dir": "checkpoints are in store.uri; this folder is for logs",
}
"""For each other setting whose default differs, the reason why an import does not write verl's
default."""
_SAME = re.compile(
    "an example|interpolation both mean|null means|refuses to start|-1 means|the same default|"
    "verl's values are"
)
"""Matches the reasons why a different default does not lead to a different job."""


@cache
def jobs() -> dict[str, list[str]]:
    """Return the arguments that each script passes to verl's trainer, keyed by script."""
    scripts: dict[str, list[str]] = json.loads((FOLDER / "jobs.json").read_text())["scripts"]
    return scripts


def newest_defaults() -> dict[str, Any]:
    """Return the unresolved settings of the newest generated file, keyed by dotted key."""
    return dict(leaves(yaml.safe_load(FILES[-1].read_text())))


def write_script(folder: Path, name: str) -> Path:
    """Write a script that passes the arguments of a job to verl's trainer.

    Args:
        folder: The folder for the script.
        name: The job's name.

    Returns:
        The path of the script.
    """
    arguments = " \\\n    ".join(map(shlex.quote, jobs()[name]))
    target = folder / Path(name).name
    target.write_text(
        f"set -xeuo pipefail\npython3 -m verl.trainer.main_ppo \\\n    {arguments} \\\n    $@\n"
    )
    return target


def other_defaults() -> str:
    """Return the settings whose defaults differ from verl's, as a table for docs/from-verl.md."""
    verl = newest_defaults()
    rows = []
    for key in setting_keys():
        reason = OTHER_DEFAULTS.get(key.name, "")
        if key.name in {**VERL_DEFAULTS, **OTHER_DEFAULTS} and not _SAME.search(reason):
            what = f"not written: {reason}" if reason else "writes verl's default"
            name = key.name.removeprefix("actor_rollout_ref.")
            theirs = _value(verl.get(key.name, ...))
            rows.append(f"| `{name}` | {theirs} | {_value(key.default)} | {what} |\n")
    return "| key | verl 0.9 | here | `import-verl` |\n|---|---|---|---|\n" + "".join(rows)


def _value(value: Any) -> str:
    if value is ...:
        return "several"
    return "null" if value is None else f"`{json.dumps(value)}`"


def render(page: str) -> str:
    """Return docs/from-verl.md with a newly generated table."""
    return re.sub(
        r"(?s)(<!-- other defaults: [^\n]*-->\n).*?(<!-- end of other defaults -->)",
        lambda marks: f"{marks[1]}\n{other_defaults()}\n{marks[2]}",
        page,
    )


if __name__ == "__main__" and FILES:
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
