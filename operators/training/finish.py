"""Finishes a step: writes R2 routes, policy N+1, metrics and, if due, a checkpoint, in this order.

Each of these results is committed only once. The routes are committed when `finish` returns. The
rest of the policy's upload, the policy's commit and the writing of the metrics follow in the
background during the next step. A step is finished when its metrics exist. The metrics come before
the checkpoint, because no process waits for a checkpoint.

A restarted trainer writes the missing objects and compares the existing ones with its own results.
On CPU, the routes and the policy's digest match the stored ones. With non-deterministic kernels,
the results may differ; the trainer then counts a deviation and logs a warning.
"""

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from operators.training.agree import agreed
from operators.training.background import Background
from operators.training.batches.step_data import StepData
from operators.training.megatron.checkpoint import CheckpointWriter
from operators.training.megatron.model import TrainedModel
from operators.training.publish.publisher import Publisher, Stored
from operators.training.rank import Rank
from operators.training.sample_metrics import manifest_metrics
from operators.training.speed import Devices
from operators.training.step import Trained
from operators.training.stored_routes import store_routes
from pipeline import progress
from pipeline.config.tree import RunConfig
from pipeline.policies.versions import WEIGHTS
from pipeline.run import keys
from pipeline.run.commit import CorruptObjectError, commit, find_commit, new_write_id, read_commit
from pipeline.run.parse import Digest, typed
from pipeline.run.uses import refuse_superseded
from pipeline.store import Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Began:
    """When a step began, as time.monotonic() values."""

    wait_s: float
    """The time at which the rank began to wait for the step."""
    train_s: float
    """The time at which the rank found the step sealed."""


@dataclass
class StepFinisher:
    """Writes the results of trained steps, and counts deviations from stored results."""

    store: Store
    rank: Rank
    model: TrainedModel
    publisher: Publisher
    checkpoints: CheckpointWriter
    background: Background
    devices: Devices
    weights: str | None
    """Weights digest of the policy that this trainer's first step trains; None if unknown."""
    attempt: int
    """Number of the trainer's attempt."""
    _drifts: int = field(default=0, init=False)
    """Number of this trainer's steps after which the stored policy's digest differed from the
    digest of the trainer's own weights. Background jobs on rank 0 increment this number."""
    _policy: Future[Stored] | None = field(default=None, init=False)
    """The stored policy of the latest step, on rank 0; None until this trainer finishes a step."""
    _save_s: float | None = field(default=None, init=False)
    """Seconds that training has waited for a checkpoint since the last metrics were written; None
    if it has not waited."""

    def finish(self, data: StepData, trained: Trained, began: Began, checkpoint_due: bool) -> None:
        """Write the results of a trained step, partly in the background; every rank must call this.

        Args:
            data: This rank's data for the step.
            trained: The results of training on the step.
            began: When the step began.
            checkpoint_due: Whether to write a checkpoint after this step.
        """
        step = data.step
        committed = agreed(lambda: find_commit(self.store, keys.metrics(step)))
        if committed is None:
            self._write_step(data, trained, began)
        else:
            self._store_policy(step + 1, _policy_digest(self.store, step, committed))
        if checkpoint_due and agreed(lambda: self.store.size(keys.checkpoint(step + 1)) is None):
            progress.say(f"writing the checkpoint of policy {step + 1}")
            started = time.monotonic()
            self.rank.offload.before_checkpoint()
            self.checkpoints.save(step + 1, self.model, self.rank.critic_model)
            self._save_s = time.monotonic() - started

    def _write_step(self, data: StepData, trained: Trained, began: Began) -> None:
        """Write the routes of an unfinished step, and start writing its policy and metrics."""
        step = data.step
        routes_drift = 0
        if trained.recorded is not None:
            progress.say(f"step {step}: writing routes")
            weights = agreed(self._weights)
            policies = None if weights is None else {step: weights}
            recorded = (data.manifest, trained.recorded, policies)
            routes_drift = store_routes(self.store, self.rank, *recorded)
        agreed(lambda: refuse_superseded(self.store, self.attempt))
        started = time.monotonic()
        there = agreed(lambda: find_commit(self.store, keys.policy(step + 1)))
        policy = self._store_policy(step + 1, None if there is None else there[WEIGHTS])
        ended = time.monotonic()
        own = {
            "resume/routes_drift": routes_drift,
            "timing_s/save_checkpoint": self._save_s,
            "timing_s/update_weights": ended - started,
            "timing_s/train": ended - began.train_s,
            "timing_s/step": ended - began.wait_s,
        }
        self._save_s = None
        if dist.get_rank() == 0:
            self.background.submit(
                f"step {step}: writing metrics",
                lambda: self._commit_metrics(data, trained, policy.result(), own),
            )

    def kl_coefficient(self, step: int) -> float:
        """Return the weight of the KL penalty in a step's reward; every rank must call this.

        If the weight is adaptive, wait for the metrics of the previous step. Raises the same errors
        as the module-level function `kl_coefficient`.
        """

        def found() -> float:
            algorithm = self.rank.config.algorithm
            if algorithm.use_kl_in_reward and algorithm.kl_ctrl.type != "fixed":
                self.background.finish()
            return kl_coefficient(self.store, self.rank.config, step)

        return agreed(found)

    def _store_policy(self, version: int, known: str | None) -> Future[Stored]:
        """Publish the weights as a policy version, or compare them with a stored digest.

        Every rank must call this. A background job on rank 0 sets the future's result.
        """
        found: Future[Stored] = Future()

        def then(stored: Stored) -> None:
            self._drifts += stored.drifted
            found.set_result(stored)

        if known is None:
            progress.say(f"writing policy {version}")
            self.publisher.publish(version, then)
        else:
            self.publisher.compare(version, known, then)
        self._policy = found
        return found

    def _weights(self) -> str | None:
        """Return the digest of the weights that are now being trained; only rank 0 may call this.

        These are the weights that the previous step produced. The method waits until their digest
        is known. Raises the error of a failed job.
        """
        if self._policy is None:
            return self.weights
        return self.background.wait_for(self._policy).ours

    def _commit_metrics(
        self, data: StepData, trained: Trained, policy: Stored, own: Mapping[str, float | None]
    ) -> None:
        config = self.rank.config
        metrics = {
            **manifest_metrics(self.store, data.step, data.columns, config.data.max_prompt_length),
            **trained.metrics,
            "reward/groups_rejected": len(data.manifest.rejected),
            "resume/policy_drift": self._drifts,
            **own,
            **policy.metrics,
        }
        epochs = config.actor_rollout_ref.actor.ppo_epochs
        metrics |= self.devices.speed(data.columns, epochs, metrics)
        body = {
            "step": data.step,
            "policy_version": data.manifest.policy_version,
            "metrics": dict(sorted(metrics.items())),
            "layout_sha256": data.layout.sha256,
            "policy_sha256": policy.sha256,
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
    """Return the weight of the KL penalty in a step's reward; 0 if the reward contains no KL.

    An adaptive weight is read from the metrics that the previous step committed, so that a
    restarted trainer continues with exactly the same weight.

    Args:
        store: The run's store.
        config: The run's settings.
        step: The step that is about to be trained.

    Raises:
        CorruptObjectError: The previous step's metrics do not contain the weight.
        ObjectMissingError: The previous step has no metrics.
    """
    algorithm = config.algorithm
    if not algorithm.use_kl_in_reward:
        return 0.0
    if step == 0 or algorithm.kl_ctrl.type == "fixed":
        return algorithm.kl_ctrl.kl_coef
    try:
        return float(typed(read_commit(store, keys.metrics(step - 1)), "next_kl_coef", float))
    except ValueError as error:
        raise CorruptObjectError(
            f"{keys.metrics(step - 1)} in {store.uri}: {error}, expected the weight of the KL "
            f"penalty in the reward of step {step} (algorithm.kl_ctrl.type=adaptive); restore the "
            "object"
        ) from error


def _policy_digest(store: Store, step: int, metrics: Mapping[str, Any]) -> str:
    """Return the policy digest in a finished step's metrics. Raises CorruptObjectError."""
    try:
        return str(typed(metrics, "policy_sha256", Digest))
    except ValueError as error:
        raise CorruptObjectError(
            f"{keys.metrics(step)} in {store.uri}: {error}, expected the digest of policy "
            f"{step + 1}, which a trainer that repeats the step compares with its own; restore the "
            "object"
        ) from error
