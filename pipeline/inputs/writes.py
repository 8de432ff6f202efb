"""Estimate of how many bytes a run will write to its store, made before the run writes anything.

All functions are pure functions of settings and sizes. The estimate assumes responses of the
maximum length, and routes that are as hard to compress as random ones. The sizes of samples and
routes are therefore upper bounds.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.model.geometry import Geometry
from pipeline.rl.estimator_table import needs_baseline

if TYPE_CHECKING:  # readers of traces import this module and do not need settings
    from pipeline.config.tree import RunConfig

_STEP = 40_000
"""Bytes per step for the plan, the commits and the metadata of the Parquet files, excluding the
samples."""
_SAMPLE = 300
"""Bytes per sample, including its row in the manifest (ids, digests, offsets) but not its tokens.
"""
_TOKEN = 8
"""Bytes per token for its id, log-prob and mask."""
_CODING = 1.1
"""Ratio of the size of coded routes to their entropy, if all sets are equally likely."""
_STATE = 12
"""Bytes per parameter in a checkpoint, in addition to the weight itself, for the fp32 copy and
Adam's moments."""
_WEIGHT = {"bfloat16": 2, "float32": 4}
"""Bytes per weight, keyed by the trainer's dtype."""
_STEPS_AHEAD = 2


@dataclass(frozen=True)
class Writes:
    """Numbers of bytes that a run writes.

    Example: Writes(170_000, 90_000, 1_900_000, 13_200_000, 8).
    """

    samples: int
    """Maximum per step for the samples, their manifest and commits."""
    routes: int
    """Maximum per step for the routes; 0 if no routes are recorded."""
    policy: int
    """Maximum per step for the policy, which is the size of a whole policy."""
    checkpoint: int
    """Size of a checkpoint of the policy and the critic together."""
    save_freq: int
    """Steps from one checkpoint to the next."""
    whole_every: int | None = None
    """Steps from one whole policy to the next. The policies in between are differences, usually a
    few percent of a whole policy's size and at most half of it. None if every policy is whole."""
    rank_copies: int = 0
    """Size of the last policy, which the training ranks together keep under TMPDIR in order to
    write the next policy as a difference."""
    engine_copies: int = 0
    """Size of the policy that all rollout workers on a machine share (`store.policy_cache`)."""

    @property
    def step(self) -> int:
        """Maximum number of bytes per step, not counting checkpoints."""
        return self.samples + self.routes + self.policy

    def steps(self, count: int) -> int:
        """Return the maximum number of bytes in the first `count` steps of a trainer.

        Checkpoints are not counted. The first policy is whole.
        """
        whole = -(-count // (self.whole_every or 1))
        return count * self.step - (count - whole) * (self.policy - self.policy // 2)


def estimate(
    config: "RunConfig", geometry: Geometry | None, parameters: int, prompt_tokens: float
) -> Writes:
    """Estimate the bytes that a run writes.

    Args:
        config: Settings of the run.
        geometry: Experts and MoE layers; None for a dense model.
        parameters: The number of parameters in the model.
        prompt_tokens: Mean length of the prompts, in tokens.
    """
    # This import needs pydantic, which is missing where only traces are read.
    from pipeline.run.attempts import attempt_of

    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    groups = config.data.train_batch_size
    of_group = rollout.n + needs_baseline(config.algorithm.adv_estimator)
    samples, response = groups * of_group, config.data.max_response_length
    tokens = samples * (prompt_tokens + response)
    rows = 0.0
    if rollout.enable_rollout_routing_replay or actor.router_replay.mode == "R3":
        rows += groups * prompt_tokens + samples * response  # each group stores its prompt once
    if actor.router_replay.mode == "R2":
        rows += tokens
    weight = _WEIGHT[actor.megatron.dtype]
    policy = parameters * weight
    whole_every = config.store.policy_deltas.whole_every(policy)
    return Writes(
        samples=round(_STEP + samples * _SAMPLE + tokens * _TOKEN),
        routes=round(rows * row_bytes(geometry)),
        policy=policy,
        checkpoint=(1 + config.has_critic) * parameters * (weight + _STATE),
        save_freq=config.trainer.save_freq,
        whole_every=whole_every,
        rank_copies=0 if whole_every is None else policy,
        engine_copies=policy if attempt_of(config, 0).rollout_workers else 0,
    )


def row_bytes(geometry: Geometry | None) -> float:
    """Return the size in bytes of one row's coded routes, if all sets are equally likely."""
    if geometry is None:
        return 0.0
    bits = math.log2(math.comb(geometry.experts, geometry.topk))
    return len(geometry.layers) * bits / 8 * _CODING


def needed_bytes(writes: Writes, first: int, total: int) -> int:
    """Return the size in bytes of the next two steps, including the checkpoints due in them.

    If the next step is step 0, the staged model is included as well.

    Args:
        writes: Sizes of a step, a policy and a checkpoint.
        first: The next step.
        total: The number of steps of the run; the last step ends with a checkpoint.
    """
    ahead = range(first, min(first + _STEPS_AHEAD, total))
    due = sum((step + 1) % writes.save_freq == 0 or step + 1 == total for step in ahead)
    model = writes.policy if first == 0 else 0
    return model + writes.steps(len(ahead)) + due * writes.checkpoint
