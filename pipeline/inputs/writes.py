"""How much a run writes into its store, estimated before anything is written.

Pure functions of settings and sizes. Responses are taken to be as long as they may be, and routes
to be as hard to pack as random ones, so samples and routes are upper bounds.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.model.geometry import Geometry
from pipeline.rl.estimator_table import needs_baseline

if TYPE_CHECKING:  # readers of traces import this, and have no use for settings
    from pipeline.config.tree import RunConfig

_STEP = 40_000
"""Bytes of a step without its samples: plan, commits, what each Parquet file says of itself."""
_SAMPLE = 300
"""Bytes of a sample without its tokens, with its row of the manifest: ids, digests, offsets."""
_TOKEN = 8
"""Bytes of a token: id, log-probability, mask."""
_CODING = 1.1
"""Size of coded routes over their entropy, when all sets are equally likely."""
_STATE = 12
"""Bytes of a parameter in a checkpoint beside the weight: its fp32 copy and Adam's two moments."""
_WEIGHT = {"bfloat16": 2, "float32": 4}
"""Bytes of a weight, by the trainer's dtype."""
_STEPS_AHEAD = 2


@dataclass(frozen=True)
class Writes:
    """Bytes that a run writes. Example: Writes(170_000, 90_000, 1_900_000, 13_200_000, 8)."""

    samples: int
    """Per step, at most: samples, their manifest, commits."""
    routes: int
    """Per step, at most; 0: none are recorded."""
    policy: int
    """Per step."""
    checkpoint: int
    """Per checkpoint: of the policy, and of the critic."""
    save_freq: int
    """Steps from one checkpoint to the next."""

    @property
    def step(self) -> int:
        """Per step, at most, without a checkpoint."""
        return self.samples + self.routes + self.policy


def estimate(
    config: "RunConfig", geometry: Geometry | None, parameters: int, prompt_tokens: float
) -> Writes:
    """What a run with `parameters` weights writes; its prompts have `prompt_tokens` on average."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    groups = config.data.train_batch_size
    of_group = rollout.n + needs_baseline(config.algorithm.adv_estimator)
    samples, response = groups * of_group, config.data.max_response_length
    tokens = samples * (prompt_tokens + response)
    rows = 0.0
    if rollout.enable_rollout_routing_replay or actor.router_replay.mode == "R3":
        rows += groups * prompt_tokens + samples * response  # a group's prompt is stored once
    if actor.router_replay.mode == "R2":
        rows += tokens
    weight = _WEIGHT[actor.megatron.dtype]
    return Writes(
        samples=round(_STEP + samples * _SAMPLE + tokens * _TOKEN),
        routes=round(rows * row_bytes(geometry)),
        policy=parameters * weight,
        checkpoint=(1 + config.has_critic) * parameters * (weight + _STATE),
        save_freq=config.trainer.save_freq,
    )


def row_bytes(geometry: Geometry | None) -> float:
    """Bytes of one position's coded routes in all MoE layers, if all sets were equally likely."""
    if geometry is None:
        return 0.0
    bits = math.log2(math.comb(geometry.experts, geometry.topk))
    return len(geometry.layers) * bits / 8 * _CODING


def needed_bytes(writes: Writes, first: int, total: int) -> int:
    """Bytes of the next two steps from step `first` on, with the checkpoints that are due then.

    A run has `total` steps, of which the last ends with a checkpoint; before step 0 its model is
    stored.
    """
    ahead = range(first, min(first + _STEPS_AHEAD, total))
    due = sum((step + 1) % writes.save_freq == 0 or step + 1 == total for step in ahead)
    model = writes.policy if first == 0 else 0
    return model + len(ahead) * writes.step + due * writes.checkpoint
