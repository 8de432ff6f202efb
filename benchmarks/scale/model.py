"""A step's traffic and time, computed from coefficients, a model and the number of GPUs.

Clusters grow by weak scaling: a step has `samples_per_gpu` samples per GPU, so it takes as long on
4,096 GPUs as on 512. Costs that grow with the cluster therefore stand out. A quarter of the GPUs
train, or more if the model needs more. Rollout and training overlap (max_staleness=1), so a step
takes as long as the longer of the two.

Each `Cost` is a function of a `Step`; `LIMITS` lists the maximum costs. This module does not read
from any store.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from benchmarks.scale.coefficients import Coefficients
from pipeline.threads import AT_ONCE

NODE = 8
"""GPUs per node."""
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
PART = 8 << 20
"""Bytes per part of an upload, and per GET (pipeline.store.s3_upload, s3_ranges)."""
GB = 1e9


@dataclass(frozen=True)
class Model:
    """Shape of a model. Example: Model('Qwen3-30B-A3B', 30.5e9, 3.3e9, 48, 128, 8, 8, 2, 1)."""

    name: str
    weights: float
    active: float
    """Number of weights that a token uses."""
    layers: int
    """Number of MoE layers."""
    experts: int
    topk: int
    training_gpus: int
    """Minimum number of 141 GB GPUs for training (docs/sizes.md)."""
    engine_gpus: int
    """Number of GPUs that a rollout engine needs to compute in bfloat16."""
    readers: int
    """Training ranks that read the same samples (tensor parallelism)."""


MODELS = (
    Model("OLMoE-1B-7B", 6.9e9, 1.3e9, 16, 64, 8, 4, 1, 1),
    Model("Qwen3-30B-A3B", 30.5e9, 3.3e9, 48, 128, 8, 8, 2, 1),
    Model("Qwen3-235B-A22B", 235.1e9, 22e9, 94, 128, 8, 32, 8, 4),
    Model("DeepSeek-V3", 671.0e9, 37e9, 58, 256, 8, 128, 16, 2),
)


@dataclass(frozen=True)
class Step:
    """One step of a run that trains a model on a number of GPUs."""

    model: Model
    gpus: int
    of: Coefficients

    @cached_property
    def ranks(self) -> int:
        """Number of training ranks."""
        return max(self.model.training_gpus, self.gpus // 4)

    @property
    def fits(self) -> bool:
        """Whether enough GPUs remain for an engine besides those used for training."""
        return self.gpus - self.ranks >= self.model.engine_gpus

    @property
    def workers(self) -> int:
        """Number of rollout workers, each with one engine and one shard."""
        return (self.gpus - self.ranks) // self.model.engine_gpus

    @property
    def rollout_nodes(self) -> int:
        """Number of rollout nodes. Each node fetches a policy once; its engines share it.

        An engine that spans two nodes needs a copy on both.
        """
        return math.ceil((self.gpus - self.ranks) / NODE)

    @property
    def samples(self) -> float:
        """Number of samples in a step."""
        return self.gpus * self.of.assumed["samples_per_gpu"]

    @property
    def tokens(self) -> float:
        """Number of tokens in a sample."""
        return self.of.assumed["prompt_tokens"] + self.of.assumed["response_tokens"]

    @property
    def rollout_s(self) -> float:
        """Seconds that a rollout takes."""
        rate = self.of.assumed["rollout_tokens_per_gpu_s"] * 3.3e9 / self.model.active
        made = self.samples * self.of.assumed["response_tokens"]
        return made / (rate * (self.gpus - self.ranks))

    @property
    def train_s(self) -> float:
        """Seconds for the log-prob pass and update, at 8 operations per active weight and token."""
        operations = 8 * self.model.active * self.samples * self.tokens
        return operations / (self.of.assumed["training_flops_per_gpu"] * self.ranks)

    @property
    def seconds(self) -> float:
        """Seconds that a step takes, excluding access to the store."""
        return max(self.rollout_s, self.train_s)

    @property
    def route_bytes(self) -> float:
        """Size in bytes of a step's routes."""
        sets = math.log2(math.comb(self.model.experts, self.model.topk)) / 8
        stored = sets * self.of.measured["routes_over_entropy"]
        return self.samples * self.tokens * self.model.layers * stored

    @property
    def trace_bytes(self) -> float:
        """Size in bytes of a step's routes and samples."""
        return (
            self.route_bytes + self.samples * self.tokens * self.of.measured["sample_token_bytes"]
        )

    @property
    def policy_bytes(self) -> float:
        """Size in bytes of a whole policy in bfloat16."""
        return 2 * self.model.weights

    @property
    def difference_bytes(self) -> float:
        """Size in bytes of a policy stored as the difference from the previous version."""
        return self.policy_bytes * self.of.measured["difference_share"]

    @property
    def checkpoint_bytes(self) -> float:
        """Size in bytes of a checkpoint: weights in bfloat16, a float32 copy and two moments."""
        return 14 * self.model.weights

    @property
    def shards_of_rank(self) -> float:
        """Maximum number of shards that contain a rank's samples, which may come from any shard."""
        of_rank = self.samples * self.model.readers / self.ranks
        return min(self.workers, of_rank)

    @property
    def manifest_bytes(self) -> float:
        """Size in bytes of manifest.json."""
        return self.workers * self.of.measured["manifest_shard_bytes"]


Cost = Callable[[Step], float]


def _sent(step: Step, size: float, processes: float) -> float:
    """Seconds for some processes to send bytes, limited by processors or by S3's rate of PUTs."""
    of = step.of
    alone = size / processes / GB * of.measured["upload_cpu_s_per_gb"]
    return max(alone, size / PART / of.assumed["prefix_puts_s"])


def _fetched(step: Step, size: float, part: int = PART) -> float:
    """Seconds until each rollout node has a copy, limited by processors, link or S3's GETs."""
    of, all_nodes = step.of, size * step.rollout_nodes
    alone = size / GB * of.measured["fetch_cpu_s_per_gb"] / of.assumed["fetch_cores_per_node"]
    link = size / of.assumed["node_bytes_s"]
    gets = all_nodes / part / of.assumed["prefix_gets_s"]
    return max(alone, link, gets)


def export_serial(step: Step) -> float:
    """Seconds for one rank to gather, hash twice and upload a policy (former design)."""
    return step.policy_bytes / GB / step.of.assumed["serial_export_gb_s"]


def fetch_serial(step: Step) -> float:
    """Seconds for a worker to fetch a policy one file after another (former design)."""
    return step.policy_bytes / GB / step.of.assumed["serial_fetch_gb_s"]


def export_whole(step: Step) -> float:
    """Seconds for all ranks to upload their parts of a whole policy."""
    return _sent(step, step.policy_bytes, step.ranks)


def export_difference(step: Step) -> float:
    """Seconds for all ranks to digest and code their parts; the upload of the result overlaps."""
    of = step.of.measured
    own = step.policy_bytes / step.ranks / GB
    return max(
        own * of["update_cpu_s_per_gb"],
        _sent(step, step.difference_bytes, step.ranks),
    )


def fetch_whole(step: Step) -> float:
    """Seconds for all rollout nodes to fetch a whole policy."""
    return _fetched(step, step.policy_bytes)


def fetch_whole_large(step: Step) -> float:
    """Seconds for all rollout nodes to fetch a whole policy with GETs of 64 MiB."""
    return _fetched(step, step.policy_bytes, 64 << 20)


def fetch_difference(step: Step) -> float:
    """Seconds for all rollout nodes to fetch a difference, patch their copy and check digests."""
    of = step.of
    patched = (
        step.policy_bytes
        / GB
        * (of.measured["apply_cpu_s_per_gb"] + of.measured["sha256_cpu_s_per_gb"])
    )
    return max(patched / of.assumed["fetch_cores_per_node"], _fetched(step, step.difference_bytes))


def checkpoint(step: Step) -> float:
    """Seconds for all ranks to upload their parts of a checkpoint."""
    return _sent(step, step.checkpoint_bytes, step.ranks)


def seal(step: Step, at_once: int = AT_ONCE) -> float:
    """Seconds from the last shard to the manifest: parallel requests, and processor time.

    Each shard needs a HEAD (does it exist?) and GETs of its commit and of the footer and columns of
    its samples file.
    """
    of = step.of
    asked = step.workers * of.measured["seal_shard_requests"] * of.assumed["request_s"] / at_once
    flow = of.simulation["flow"]
    worked = step.workers * flow["cpu_s"] / flow["shards"]
    return asked + worked + step.samples * of.measured["seal_sample_cpu_s"]


def seal_in_turn(step: Step) -> float:
    """Seconds from the last shard to the manifest with one request at a time (former design)."""
    return seal(step, 1)


def shares(step: Step, at_once: int = AT_ONCE) -> float:
    """Seconds for rank 0 to read all ranks' shares: a HEAD and a GET each, `at_once` at a time."""
    return 2 * step.ranks * step.of.assumed["request_s"] / at_once


def shares_in_turn(step: Step) -> float:
    """Seconds for rank 0 to read all ranks' shares one after another (former design)."""
    return shares(step, 1)


def gets_of_shares(step: Step) -> float:
    """Number of GETs that all ranks together send to read their samples of a step."""
    of = step.of.measured
    own = of["share_requests"] + of["share_shard_requests"] * step.shards_of_rank
    return step.ranks * own


def read_share(step: Step) -> float:
    """Seconds from the seal to a rank's first samples, limited by its requests or by S3's GETs."""
    of = step.of
    asked = gets_of_shares(step) / step.ranks * of.assumed["request_s"]
    return max(asked / 2, gets_of_shares(step) / of.assumed["prefix_gets_s"])  # two streams


def polls_ahead(step: Step) -> float:
    """HEADs per second from ranks that look for the next step while they train the current one."""
    of = step.of
    return step.ranks / (of.measured["ahead_pause_s"] + of.assumed["request_s"])


def polls_of_workers(step: Step, pending: float = 0.0) -> float:
    """HEADs per second from workers when all of them wait for a plan or a policy.

    Each worker also polls for the plans of `pending` validations that are due by its step.
    """
    of = step.of
    asked = of.measured["worker_keys"] + pending
    return step.workers * asked / (of.measured["longest_pause_s"] + asked * of.assumed["request_s"])


def polls_for_all_validations(step: Step) -> float:
    """HEADs per second from workers that poll for all pending validations (former design)."""
    return polls_of_workers(step, step.of.assumed["validations_pending"])


@dataclass(frozen=True)
class Limit:
    """A design, its cost and the maximum cost."""

    design: str
    cost: Cost
    most: Cost
    """Function that returns the maximum cost."""
    what: str
    """The maximum cost in words."""


def _share_of_step(step: Step) -> float:
    return step.of.assumed["share_of_step"] * step.seconds


def _gets(step: Step) -> float:
    return step.of.assumed["prefix_gets_s"]


def _one_step(step: Step) -> float:
    return step.seconds


def _until_next(step: Step) -> float:
    return step.of.assumed["save_freq"] * step.seconds


_TENTH = "a tenth of a step"
_HIDDEN = "one step (the download overlaps with it)"
_RATE = "5,500 requests per second"

LIMITS = (
    Limit("policy up: one rank, serial (former)", export_serial, _share_of_step, _TENTH),
    Limit("policy up: whole, all ranks", export_whole, _share_of_step, _TENTH),
    Limit("policy up: difference, all ranks", export_difference, _share_of_step, _TENTH),
    Limit("policy up: shares one by one (former)", shares_in_turn, _share_of_step, _TENTH),
    Limit("policy up: shares, 16 in parallel", shares, _share_of_step, _TENTH),
    Limit("policy down: serial, no overlap (former)", fetch_serial, _share_of_step, _TENTH),
    Limit("policy down: whole, GETs of 8 MiB", fetch_whole, _one_step, _HIDDEN),
    Limit("policy down: whole, GETs of 64 MiB", fetch_whole_large, _one_step, _HIDDEN),
    Limit("policy down: difference", fetch_difference, _one_step, _HIDDEN),
    Limit(
        "checkpoint up: all ranks", checkpoint, _until_next, "the 20 steps between two checkpoints"
    ),
    Limit("seal: shard by shard (former)", seal_in_turn, _share_of_step, _TENTH),
    Limit("seal: 16 shards in parallel", seal, _share_of_step, _TENTH),
    Limit("ranks read their samples", read_share, _share_of_step, _TENTH),
    Limit("polls: every rank looks ahead", polls_ahead, _gets, _RATE),
    Limit("polls: 40 validations pending (former)", polls_for_all_validations, _gets, _RATE),
    Limit("polls: all workers wait", polls_of_workers, _gets, _RATE),
)


def stops_at(limit: Limit, model: Model, of: Coefficients, most_gpus: int = 1 << 17) -> int | None:
    """Find the smallest number of GPUs, doubling from 8, at which a design exceeds its limit.

    Args:
        limit: The design and its limit.
        model: Model to train.
        of: Coefficients of the model.
        most_gpus: Largest number of GPUs to try.

    Returns:
        The number of GPUs; None if the design stays within its limit.
    """
    gpus = GPUS[0]
    while gpus <= most_gpus:
        step = Step(model, gpus, of)
        if step.fits and limit.cost(step) > limit.most(step):
            return gpus
        gpus *= 2
    return None
