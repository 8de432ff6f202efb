"""The end of a step, in this order: R2 routes, policy N+1, checkpoint if due, metrics.

Each is a commit that exists once. A restarted trainer makes what is missing, and compares what
exists with its own result: routes and the digest of the policy are equal on CPU; where kernels are
not deterministic, a difference is counted and logged as a warning.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from operators.training.agree import agreed
from operators.training.batches.step_data import StepData
from operators.training.megatron import checkpoint
from operators.training.megatron.export import export_hf
from operators.training.megatron.model import TrainedModel
from operators.training.rank import Rank
from operators.training.sample_metrics import manifest_metrics
from operators.training.speed import Devices, Stopwatch
from operators.training.step import Trained
from operators.training.step_metrics import agreement_by_layer
from operators.training.stored_routes import store_routes
from pipeline import progress
from pipeline.config.tree import RunConfig
from pipeline.run import keys, parse
from pipeline.run.amendments import refuse_amended
from pipeline.run.commit import CorruptObjectError, commit, find_commit, new_write_id, read_commit
from pipeline.run.policy import digests_of, publish_policy, stored_digest
from pipeline.scratch import scratch_folder
from pipeline.store import Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Began:
    """When a step began, by time.monotonic()."""

    wait_s: float
    """The rank began to wait for it."""
    train_s: float
    """It was found sealed."""


@dataclass
class StepFinisher:
    """Writes the results of trained steps to the store, and counts deviations from stored ones."""

    store: Store
    rank: Rank
    model: TrainedModel
    source: Path
    """Folder with the model's HF config and tokenizer."""
    devices: Devices
    weights: str | None
    """Weights digest of the policy that the next step trains; None: unknown at the start."""
    amendments: int
    """How many amendments of the run this trainer knows."""
    drifts: int = 0
    """Policies since this trainer's start whose stored digest differs."""

    def finish(self, data: StepData, trained: Trained, began: Began, checkpoint_due: bool) -> None:
        """Write the results of a trained step; all ranks call."""
        step = data.step
        committed = agreed(lambda: find_commit(self.store, keys.metrics(step)))
        if committed is not None:
            self._publish(step + 1, _policy_digest(self.store, step, committed))
            return
        routes_drift = 0
        if trained.recorded is not None:
            progress.say(f"step {step}: writing routes")
            policies = None if self.weights is None else {step: self.weights}
            recorded = (data.manifest, trained.recorded, policies)
            routes_drift = store_routes(self.store, self.rank, *recorded)
        # A later start may have amended an estimator or a loss that no policy was made with.
        agreed(lambda: refuse_amended(self.store, self.amendments))
        watch = Stopwatch()
        with watch.of("timing_s/update_weights"):
            policy_sha256 = self._publish(step + 1, None)
        if checkpoint_due and agreed(lambda: self.store.size(keys.checkpoint(step + 1)) is None):
            progress.say(f"writing the checkpoint of policy {step + 1}")
            with watch.of("timing_s/save_checkpoint"):
                self.rank.offload.before_checkpoint()
                checkpoint.save(self.store, step + 1, self.model, self.rank.critic_model)
        if dist.get_rank() == 0:
            drift = {"resume/policy_drift": self.drifts, "resume/routes_drift": routes_drift}
            self._commit_metrics(data, trained, began, policy_sha256, drift | watch.times_s)
        dist.barrier()

    def _publish(self, policy_version: int, known: str | None) -> str:
        """Store the weights as a policy version, or compare them with the stored version.

        `known` is the digest of a version whose step is complete; nothing is written then, even if
        the version itself was removed. All ranks call. Returns the digest of the stored version.
        """
        progress.say(f"writing policy {policy_version}")
        with scratch_folder("policy") as folder:
            export_hf(self.model, self.source, folder)
            stored, ours = agreed(lambda: _digests(self.store, folder, policy_version, known))
        self.weights = ours
        self.drifts += stored != ours
        return stored

    def _commit_metrics(
        self,
        data: StepData,
        trained: Trained,
        began: Began,
        policy_sha256: str,
        own: Mapping[str, float],
    ) -> None:
        config, now = self.rank.config, time.monotonic()
        metrics = {
            **manifest_metrics(self.store, data.step, data.columns, config.data.max_prompt_length),
            **trained.metrics,
            "reward/groups_rejected": len(data.manifest.rejected),
            "timing_s/save_checkpoint": None,
            **own,
            "timing_s/train": now - began.train_s,
            "timing_s/step": now - began.wait_s,
        }
        epochs = config.actor_rollout_ref.actor.ppo_epochs
        metrics |= self.devices.speed(data.columns, epochs, metrics)
        body = {
            "step": data.step,
            "policy_version": data.manifest.policy_version,
            "metrics": dict(sorted(metrics.items())),
            "layout_sha256": data.layout.sha256,
            "policy_sha256": policy_sha256,
            "agreement_by_layer": agreement_by_layer(trained.counts),
            "next_kl_coef": trained.next_kl_coef,
        }
        commit(self.store, keys.metrics(data.step), body, new_write_id())
        shown = (
            "critic/rewards/mean",
            "actor/pg_loss",
            "actor/grad_norm",
            "mismatch/kl",
            "replay/coverage",
        )
        numbers = [f"{key} {metrics[key]:.4g}" for key in shown if metrics[key] is not None]
        logger.info("step %d: %s", data.step, ", ".join(numbers))


def kl_coefficient(store: Store, config: RunConfig, step: int) -> float:
    """The weight of the KL in a step's reward; 0 without one.

    An adaptive one is read from what the step before has committed, so that a restarted trainer
    goes on with the same bits. Raises CorruptObjectError, ObjectMissingError.
    """
    algorithm = config.algorithm
    if not algorithm.use_kl_in_reward:
        return 0.0
    if step == 0 or algorithm.kl_ctrl.type == "fixed":
        return algorithm.kl_ctrl.kl_coef
    try:
        return parse.field(read_commit(store, keys.metrics(step - 1)), "next_kl_coef", parse.real)
    except ValueError as error:
        raise CorruptObjectError(
            f"{keys.metrics(step - 1)} in {store.uri}: {error}, expected the coefficient of the KL "
            f"in the reward of step {step} (algorithm.kl_ctrl.type=adaptive); restore the object"
        ) from error


def _policy_digest(store: Store, step: int, metrics: Mapping[str, Any]) -> str:
    """The digest of the policy that a complete step left. Raises CorruptObjectError."""
    try:
        return parse.field(metrics, "policy_sha256", parse.digest)
    except ValueError as error:
        raise CorruptObjectError(
            f"{keys.metrics(step)} in {store.uri}: {error}, expected the digest of policy "
            f"{step + 1}, with which a trainer that trains the step again compares its own; "
            "restore the object"
        ) from error


def _digests(store: Store, folder: Path, policy_version: int, known: str | None) -> tuple[str, str]:
    """Weights digests of the stored policy version, made if it is missing, and of our own."""
    if known is None:
        body = find_commit(store, keys.policy(policy_version))
        if body is None:
            committed = publish_policy(store, policy_version, folder)
            body = committed.body
            if committed.ours:
                return stored_digest(body), stored_digest(body)
        known = stored_digest(body)
    found = digests_of(folder)
    ours = found.weights
    if known == found.files:  # stored by an older version, which took it of the files
        known = ours
    if known != ours:
        logger.warning(
            "policy %d has digest %s in the store, training its step again gave %s: rollouts are "
            "of the stored one (counted as resume/policy_drift)",
            policy_version,
            known,
            ours,
        )
    return known, ours
