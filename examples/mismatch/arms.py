"""The arms of the experiment: overrides of one settings file, mismatch.yaml."""

import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SETTINGS = Path(__file__).with_name("mismatch.yaml")
STORE = "store"
"""The folder for the runs, in the experiment's folder."""
MODEL_PATH = "actor_rollout_ref.model.path"

_REPLAY = "actor_rollout_ref.actor.router_replay.mode"
_RECORD = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
_R3 = {_REPLAY: "R3", _RECORD: True}
_TIS = {
    "algorithm.rollout_correction.rollout_is": "token",
    "algorithm.rollout_correction.rollout_is_threshold": 2.0,
}
_MIS = {  # the bounds of IcePop
    "algorithm.rollout_correction.rollout_is": "token",
    "algorithm.rollout_correction.rollout_is_threshold": "0.5_5.0",
}
_GSPO = {  # the clip range and the averaging of the GSPO paper, arXiv 2507.18071
    "actor_rollout_ref.actor.policy_loss.loss_mode": "gspo",
    "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean",
    "actor_rollout_ref.actor.clip_ratio_low": 3e-4,
    "actor_rollout_ref.actor.clip_ratio_high": 4e-4,
}


@dataclass(frozen=True)
class Arm:
    """One way to train the policy. Example: Arm("native", "GRPO")."""

    name: str
    """The name of the arm. A run's name consists of this name and the seed, such as native-1."""
    label: str
    """The label in tables and plots."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Settings that differ from mismatch.yaml, by dotted key."""
    policy: str = "moe"
    """The policy that the arm trains, as make_policy.py names it: moe or dense."""
    full: bool = False
    """Whether only --full includes the arm."""


ARMS = (
    Arm("native", "GRPO"),
    Arm("tis", "GRPO + TIS", _TIS),
    Arm("gspo", "GSPO", _GSPO),
    Arm("r3", "GRPO + R3", _R3),
    Arm("dense", "GRPO, dense twin", policy="dense"),
    Arm("mis", "GRPO + MIS", _MIS, full=True),
    Arm("gspo-r3", "GSPO + R3", {**_GSPO, **_R3}, full=True),
    Arm("r2", "GRPO + R2", {_REPLAY: "R2"}, full=True),
    Arm("r3-tis", "GRPO + R3 + TIS", {**_R3, **_TIS}, full=True),
)
SEEDS = (1, 2, 3)
"""The seeds of --full; without --full, only the first is used."""


@dataclass(frozen=True)
class ArmRun:
    """A run of an arm. Example: ArmRun(ARMS[0], seed=1, out=Path("outputs/mismatch"))."""

    arm: Arm
    seed: int
    out: Path
    """The experiment's folder, with policies, store, logs and page."""

    @property
    def name(self) -> str:
        """The name of the run. Example: 'native-1'."""
        return f"{self.arm.name}-{self.seed}"

    @property
    def uri(self) -> Path:
        """The run's folder in the store."""
        return self.out / STORE / self.name

    @property
    def policy(self) -> Path:
        """The folder of policy version 0."""
        return self.out / "policy" / self.arm.policy

    def settings(self, more: dict[str, str]) -> dict[str, Any]:
        """Return the overrides of mismatch.yaml; `more` are the user's overrides for all arms."""
        return {
            "trainer.experiment_name": self.name,
            "trainer.default_local_dir": str(self.out / "local"),
            "trainer.seed": self.seed,
            "data.seed": self.seed,
            "store.uri": str(self.out / STORE),
            MODEL_PATH: str(self.policy),
            **self.arm.overrides,
            **more,
        }


def arm_runs(names: list[str], full: bool, out: Path) -> list[ArmRun]:
    """Return the experiment's runs, in order: all arms with one seed, then all with the next.

    Args:
        names: The names of the arms; an empty list selects the arms of `make mismatch`, or all arms
            if `full` is set.
        full: Whether to include all seeds.
        out: The experiment's folder.

    Raises:
        ValueError: A name is unknown.
    """
    known = {arm.name: arm for arm in ARMS}
    if unknown := [name for name in names if name not in known]:
        near = difflib.get_close_matches(unknown[0], known, 1)
        fix = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"arm {unknown[0]}: unknown; expected one of {', '.join(known)}{fix}")
    chosen = [known[name] for name in dict.fromkeys(names)] or [
        arm for arm in ARMS if full or not arm.full
    ]
    seeds = SEEDS if full else SEEDS[:1]
    return [ArmRun(arm, seed, out) for seed in seeds for arm in chosen]
