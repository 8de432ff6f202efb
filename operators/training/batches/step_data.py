"""A rank's data for a sealed step: its own samples, and their routes in the rank's layers.

For the samples of other ranks, the rank reads only a few small columns of the manifest. The layout
needs the groups and lengths of all samples. Advantages need all rewards, because a group's samples
may be on several ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from operators.training.batches.layout import Layout, LayoutRules, make_layout
from operators.training.errors import ReplayError
from pipeline.config.actor import Megatron
from pipeline.config.critic import over_actor
from pipeline.config.rules.budget import OF_CRITIC, Pass, budget, passes_of
from pipeline.config.tree import RunConfig
from pipeline.errors import InputError
from pipeline.model.geometry import Geometry
from pipeline.store import Store
from pipeline.traces import Manifest, RouteStream, SampleStream, SealedManifest
from pipeline.traces.format.manifest import BASELINE

_COLUMNS = (
    *("group", "policy_version", "prompt_length", "response_length"),
    *("reward", "not_trained", "rows_total", "rows_valid"),
)


@dataclass(frozen=True)
class StepData:
    """One rank's data for a sealed step."""

    manifest: Manifest
    """Manifest rows of this data-parallel rank's samples, in the order of the layout."""
    columns: pa.Table
    """The columns listed in _COLUMNS, for all samples."""
    rewards_N: npt.NDArray[np.float64]
    """Rewards of all samples; NaN if the sample is not trained on."""
    groups_N: npt.NDArray[np.int64]
    """For each sample, the number of its group."""
    layouts: Mapping[Pass, Layout]
    """Layout of each pass of the step. A sample is on the same rank in all of them. The passes of a
    model have the same mini-batches, cut into different micro-batches. The first pass to read the
    samples is `log_prob`."""
    ids: Mapping[int, str]
    """Ids of this rank's samples, keyed by row of the manifest."""
    samples: SampleStream
    """This data-parallel rank's samples, which a thread prefetches."""
    untrained: frozenset[str]
    """Ids of this data-parallel rank's samples that are not trained on."""
    routes: RouteStream | None
    """Recorded routes to replay in this rank's layers, which a thread prefetches; None if nothing
    is replayed."""
    read_rows: set[int] = field(default_factory=set)
    """Manifest rows whose routes have reached the ranks that need them."""

    @property
    def step(self) -> int:
        """The step's number."""
        return self.manifest.step

    @property
    def layout(self) -> Layout:
        """Layout of the updates."""
        return self.layouts["update"]

    @property
    def wait_s(self) -> float:
        """Seconds that sample and route look-ups have spent waiting for reads."""
        return self.samples.wait_s + (self.routes.wait_s if self.routes else 0.0)

    def close(self) -> None:
        """Stop reading samples and routes."""
        self.samples.close()
        if self.routes is not None:
            self.routes.close()


def load_step(
    store: Store,
    sealed: SealedManifest,
    config: RunConfig,
    rules: LayoutRules,
    dp_rank: int,
    geometry: Geometry | None,
) -> StepData:
    """Load a rank's part of a sealed step.

    Samples and routes are still being read in the background when this function returns.

    Args:
        store: The run's store.
        sealed: The manifest of the sealed step.
        config: The settings in force.
        rules: The layout rules for the updates.
        dp_rank: Index of this data-parallel rank.
        geometry: MoE layers of this rank; None for a dense model.

    Raises:
        ReplayError: The manifest has no routes, or its routes belong to a different model.
        InputError: A sample is too long for a micro-batch.
        StoreError: The store cannot be read.
        TraceError: Stored data are damaged.
    """
    replays = config.actor_rollout_ref.actor.router_replay.replays_recorded
    if replays and geometry is not None:
        _check_geometry(sealed.head, geometry)
    columns = sealed.columns(_COLUMNS)
    groups_N = group_codes(columns)
    lengths_N = columns["rows_total"].to_numpy()
    made: dict[LayoutRules, Layout] = {}
    layouts: dict[Pass, Layout] = {}
    rank_N = None
    for one in passes_of(config):
        of_one = pass_rules(rules, config, one)
        _check_lengths(sealed, lengths_N, of_one, budget(config, one).tokens_key)
        if of_one not in made:
            lengths = lengths_N.astype(np.int64)
            made[of_one] = make_layout(sealed.head.step, groups_N, lengths, of_one, rank_N)
        layouts[one] = made[of_one]
        rank_N = layouts["update"].rank_N
    rows = layouts["log_prob"].rows(dp_rank)
    manifest = sealed.select(rows)
    routes = None
    if replays and geometry is not None:
        routes = RouteStream(store, manifest, geometry.layers)
    rewards_N = trained_rewards(columns)
    return StepData(
        manifest=manifest,
        columns=columns,
        rewards_N=rewards_N,
        groups_N=groups_N,
        layouts=layouts,
        ids=dict(zip(rows.tolist(), manifest.ids, strict=True)),
        samples=SampleStream(store, manifest),
        untrained=frozenset(np.array(manifest.ids, object)[np.isnan(rewards_N[rows])]),
        routes=routes,
    )


def trained_rewards(columns: pa.Table) -> npt.NDArray[np.float64]:
    """Return the rewards of all samples, float64 [N]; NaN if the sample is not trained on."""
    rewards_N: npt.NDArray[np.float64] = columns["reward"].to_numpy(zero_copy_only=False)
    rewards_N = rewards_N.astype(np.float64)
    rewards_N[pc.is_valid(columns["not_trained"]).to_numpy()] = np.nan
    return rewards_N


def group_baselines(
    columns: pa.Table, groups_N: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64] | None:
    """Return, for each sample, the baseline of its group: the reward of the group's greedy sample.

    Args:
        columns: Columns of all samples.
        groups_N: For each sample, the number of its group.

    Returns:
        float64 [N]; NaN if the group has no baseline reward. None if the step has no baselines.
    """
    greedy_N = pc.equal(columns["not_trained"], BASELINE).fill_null(False).to_numpy()
    if not greedy_N.any():
        return None
    rewards_N = columns["reward"].to_numpy(zero_copy_only=False).astype(np.float64)
    of_group = np.full(groups_N.max() + 1, np.nan)
    of_group[groups_N[greedy_N]] = rewards_N[greedy_N]
    found: npt.NDArray[np.float64] = of_group[groups_N]
    return found


def _check_lengths(
    sealed: SealedManifest, lengths_N: npt.NDArray[np.int64], rules: LayoutRules, key: str
) -> None:
    """Raise InputError for a sample that is too long for a micro-batch.

    A sample can be too long only if it was recorded by a run with different settings.
    """
    if rules.max_tokens is None or (longest := int(lengths_N.max(initial=0))) <= rules.max_tokens:
        return
    (id,) = sealed.select([int(lengths_N.argmax())]).ids
    ranks = rules.context_parallel
    each = f" on each of {ranks} context-parallel ranks" if ranks > 1 else ""
    raise InputError(
        [
            f"step {sealed.head.step}, sample {id}: it has {longest} positions, but a micro-batch "
            f"holds at most {key}={rules.max_tokens // ranks}{each}; start a new run with "
            f"{key}={-(-longest // ranks)} or more"
        ]
    )


def group_codes(columns: pa.Table) -> npt.NDArray[np.int64]:
    """Return, for each sample, the number of its group: int64 [N]."""
    combined = columns["group"].unify_dictionaries().combine_chunks()
    codes: npt.NDArray[np.int64] = combined.indices.to_numpy().astype(np.int64)
    return codes


def layout_rules(config: RunConfig, data_parallel: int) -> LayoutRules:
    """Return the layout rules that a config sets for the updates."""
    actor = config.actor_rollout_ref.actor
    megatron = actor.megatron
    limits = budget(config, "update")
    return LayoutRules(
        seed=config.trainer.seed,
        mini_batch_groups=actor.ppo_mini_batch_size,
        micro_batch_samples=limits.samples,
        epochs=actor.ppo_epochs,
        data_parallel=data_parallel,
        micro_batch_multiple=megatron.pipeline_model_parallel_size
        if megatron.virtual_pipeline_model_parallel_size
        else 1,
        sequence_slices=megatron.tensor_model_parallel_size if megatron.sequence_parallel else 1,
        context_parallel=megatron.context_parallel_size,
        packed=megatron.use_remove_padding,
        max_tokens=limits.tokens,
        same_shape=_same_shape(megatron),
    )


def pass_rules(rules: LayoutRules, config: RunConfig, of: Pass) -> LayoutRules:
    """Return the layout rules for a pass.

    Args:
        rules: The layout rules for the updates.
        config: Settings; each pass has its own micro-batch limits.
        of: The pass; the rules for the critic's passes use the critic's mini-batches and epochs.
    """
    limits = budget(config, of)
    rules = replace(rules, micro_batch_samples=limits.samples, max_tokens=limits.tokens)
    if of not in OF_CRITIC:
        return rules
    critic = over_actor(config.critic, config.actor_rollout_ref.actor)
    return replace(rules, mini_batch_groups=critic.ppo_mini_batch_size, epochs=critic.ppo_epochs)


def _same_shape(megatron: Megatron) -> Literal["no", "ranks", "all"]:
    if megatron.pipeline_model_parallel_size > 1:
        return "all"
    return "ranks" if megatron.expert_model_parallel_size > 1 else "no"


def without_loss(config: RunConfig) -> frozenset[str]:
    """Return the finish reasons of incomplete samples, whose tokens are excluded from the loss."""
    cut = {"length"} if config.algorithm.mask_truncated_samples else set()
    return frozenset({"abort", *cut})


def valid_rows(columns: pa.Table) -> tuple[int, int]:
    """Return the number of rows with a valid recording and the total number of rows."""
    valid, total = (pc.sum(columns[name]).as_py() or 0 for name in ("rows_valid", "rows_total"))
    return valid, total


def _check_geometry(manifest: Manifest, geometry: Geometry) -> None:
    found = manifest.geometry
    if found is None:
        raise ReplayError(
            f"step {manifest.step}: the manifest has no routes to replay; start a new run (another "
            "trainer.experiment_name) with either "
            "actor_rollout_ref.rollout.enable_rollout_routing_replay=True or "
            "actor_rollout_ref.actor.router_replay.mode=disabled"
        )
    missing = sorted(set(geometry.layers) - set(found.layers))
    if missing or (found.experts, found.topk) != (geometry.experts, geometry.topk):
        raise ReplayError(
            f"step {manifest.step}: the routes have {found.experts} experts, top-{found.topk}, "
            f"layers {list(found.layers)}; this rank's routers have {geometry.experts} experts, "
            f"top-{geometry.topk}, layers {list(geometry.layers)}. The routes belong to a "
            "different model"
        )
