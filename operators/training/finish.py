"""The end of a step, in this order: R2 routes, policy N+1, checkpoint if due, metrics.

Each is a commit that exists once. A trainer that comes back makes what is missing, and compares
what is there with what it would have made: routes and the digest of the policy are equal on CPU;
where kernels are not deterministic a difference is counted and warned about.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch.distributed as dist

from operators.training import checkpoint
from operators.training.agree import agreed
from operators.training.data import StepData
from operators.training.export import export_hf
from operators.training.metrics import agreement_by_layer, manifest_metrics
from operators.training.model import TrainedModel
from operators.training.rank import Rank
from operators.training.step import Trained
from operators.training.stored_routes import store_routes
from pipeline.store import Store, keys
from pipeline.store.commit import DataFile, commit, find_commit, new_attempt, sha256_of_file
from pipeline.store.policy import policy_digest, publish_policy

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Published:
    """A policy version in the store, and whether this trainer would have made another one."""

    sha256: str
    drifted: bool


def finish_step(
    store: Store,
    rank: Rank,
    model: TrainedModel,
    source: Path,
    data: StepData,
    trained: Trained,
    started: float,
    checkpoint_due: bool,
    drifts: int,
) -> int:
    """Write what a trained step leaves; all ranks call.

    `source` has the model's HF config and tokenizer; `started` is when the step was found
    (time.monotonic()); `drifts` counts the policies since this trainer's start that the store has
    with another digest. Returns that number, with this step's.
    """
    step = data.step
    committed = agreed(lambda: find_commit(store, keys.metrics(step)))
    if committed is not None:
        published = publish(store, model, source, step + 1, committed["policy_sha256"])
        return drifts + published.drifted
    routes_drift = 0
    if trained.recorded is not None:
        routes_drift = store_routes(store, rank, step, trained.recorded)
    published = publish(store, model, source, step + 1, None)
    drifts += published.drifted
    if checkpoint_due and agreed(lambda: store.size(keys.checkpoint(step + 1)) is None):
        checkpoint.save(store, step + 1, model)
    if dist.get_rank() == 0:
        resumed = {"resume/policy_drift": drifts, "resume/routes_drift": routes_drift}
        _commit_metrics(store, data, trained, published.sha256, resumed, started)
    dist.barrier()
    return drifts


def _commit_metrics(
    store: Store,
    data: StepData,
    trained: Trained,
    policy_sha256: str,
    resumed: Mapping[str, float],
    started: float,
) -> None:
    metrics = {
        **manifest_metrics(store, data.step, data.columns),
        **trained.metrics,
        **resumed,
        "time/train_s": time.monotonic() - started,
    }
    body = {
        "step": data.step,
        "policy_version": data.manifest.policy_version,
        "metrics": dict(sorted(metrics.items())),
        "layout_sha256": data.layout.sha256,
        "policy_sha256": policy_sha256,
        "agreement_by_layer": agreement_by_layer(trained.counts),
    }
    commit(store, keys.metrics(data.step), body, new_attempt())
    shown = ("reward/mean", "loss/policy", "grad_norm", "mismatch/kl", "replay/coverage")
    numbers = [f"{key} {metrics[key]:.4g}" for key in shown if metrics[key] is not None]
    logger.info("step %d: %s", data.step, ", ".join(numbers))


def publish(
    store: Store, model: TrainedModel, source: Path, policy_version: int, known: str | None
) -> Published:
    """Store the weights as a policy version, or compare them with the one that is there.

    `known`: the digest of a version that is committed for good; nothing is written then, even if
    the version itself is gone. All ranks call; the result is equal on all.
    """
    with TemporaryDirectory(prefix="retrace-policy-") as folder:
        export_hf(model, source, Path(folder))
        return agreed(lambda: _publish(store, Path(folder), policy_version, known))


def _publish(store: Store, folder: Path, policy_version: int, known: str | None) -> Published:
    files = [
        DataFile(path.name, path.stat().st_size, sha256_of_file(path))
        for path in sorted(folder.glob("*.safetensors"))
    ]
    ours = policy_digest(files)
    if known is None:
        body = find_commit(store, keys.policy(policy_version))
        if body is None:
            body = publish_policy(store, policy_version, folder).body
        known = str(body["sha256"])
    if known != ours:
        logger.warning(
            "policy %d has digest %s in the store, training its step again gave %s: rollouts are "
            "of the stored one (counted as resume/policy_drift)",
            policy_version,
            known,
            ours,
        )
    return Published(known, known != ours)
