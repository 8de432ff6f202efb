"""The objects that a training rank keeps for the duration of the run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer import TransformerConfig

from operators.training.errors import ReplayError
from operators.training.megatron.model import (
    TrainedModel,
    build_critic,
    build_model,
    build_reference,
    routers,
)
from operators.training.megatron.optimizer import Rates, make_rates
from operators.training.megatron.parallel import RankPosition
from operators.training.megatron.schedules import Chunk
from operators.training.offload import (
    ModelParts,
    Offload,
    OlderWeights,
    make_offload,
    model_parts,
)
from operators.training.replay.hooks import Router
from pipeline.config.actor import Actor
from pipeline.config.critic import over_actor
from pipeline.config.rules.transformer_rules import has_auxiliary_loss
from pipeline.config.tree import RunConfig
from pipeline.model.geometry import Geometry


@dataclass
class Skipped:
    """Counts the mini-batches that ended without an optimizer step.

    The count is the same on all ranks.
    """

    in_a_row: int = 0
    """Number of consecutive mini-batches that this process has skipped so far."""


@dataclass
class Native:
    """The latest measurement with native routing, the same on all ranks."""

    kl: float = 0.0
    """KL per token. The first step of an attempt with recorded routes measures it."""


@dataclass(frozen=True)
class TrainedCritic:
    """The critic on a training rank: a model with the actor's shape and parallel layout."""

    model: TrainedModel
    settings: Actor
    """The critic's settings in the actor's form."""
    rates: Rates
    routers: Mapping[int, Router]
    """The critic's MoE routers, keyed by their layer's index in the model. The layers are the same
    as the actor's."""
    skipped: Skipped = field(default_factory=Skipped)


@dataclass(frozen=True)
class Rank:
    """One training rank."""

    config: RunConfig
    position: RankPosition
    chunks: Sequence[DistributedDataParallel]
    """Chunks of the trained model: one, or one per virtual pipeline stage."""
    optimizer: MegatronOptimizer
    rates: Rates
    reference: Sequence[Chunk] | None
    """Chunks of the reference policy, which never replays routes; None if it is not needed."""
    routers: Mapping[int, Router]
    """The trained model's MoE routers on this rank, keyed by their layer's index in the model."""
    geometry: Geometry | None
    """Geometry of this rank's MoE layers; None for a dense model."""
    with_padding_mask: bool
    """Whether padding must be masked for an expert bias or an auxiliary loss."""
    with_auxiliary_loss: bool
    """Whether the routers have their own loss (load balancing, z-loss)."""
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Users' functions, keyed by the setting that names them."""
    critic: TrainedCritic | None = None
    """The critic; None if the advantage estimator needs no values."""
    offload: Offload = field(default_factory=Offload)
    older: OlderWeights = field(default_factory=OlderWeights)
    skipped: Skipped = field(default_factory=Skipped)
    native: Native = field(default_factory=Native)

    @property
    def device(self) -> torch.device:
        """The device on which this rank computes."""
        device: torch.device = next(self.chunks[0].parameters()).device
        return device

    @property
    def critic_model(self) -> TrainedModel | None:
        """The critic's model; None if the run has no critic."""
        return None if self.critic is None else self.critic.model


def make_rank(
    config: RunConfig,
    position: RankPosition,
    folder: Path,
    functions: Mapping[str, Callable[..., Any]] | None = None,
) -> tuple[Rank, TrainedModel]:
    """Build the policy from HF weights, and the reference and the critic if the settings need them.

    Args:
        config: The run's settings.
        position: This rank's place in the parallel layout.
        folder: The HF model.
        functions: Users' estimators and losses, keyed by the setting that names them.

    Returns:
        The rank, and its trained model.

    Raises:
        InputError: The model or a setting does not allow training or replay.
        ReplayError: Replay is on, but the model has no MoE layers.
    """
    actor = config.actor_rollout_ref.actor
    model = build_model(folder, actor)
    reference = build_reference(folder, actor) if config.has_reference else None
    critic = make_critic(config, folder) if config.has_critic else None
    of_rank = routers(model)
    geometry = None
    if model.config.num_moe_experts:
        geometry = Geometry(
            model.config.num_moe_experts, model.config.moe_router_topk, tuple(sorted(of_rank))
        )
    elif actor.router_replay.replays_recorded or actor.router_replay.records_routes:
        raise ReplayError(
            "actor_rollout_ref.actor.router_replay.mode is "
            f"{actor.router_replay.mode}, but the model has no MoE layers; start a new run "
            "(another trainer.experiment_name) with mode=disabled"
        )
    rank = Rank(
        config=config,
        position=position,
        chunks=model.chunks,
        optimizer=model.optimizer,
        rates=make_rates(model.optimizer, actor.optim),
        reference=None if reference is None else reference.chunks,
        routers=of_rank,
        geometry=geometry,
        with_padding_mask=padding_mask_needed(model.config),
        with_auxiliary_loss=has_auxiliary_losses(model.config),
        functions=functions or {},
        critic=critic,
        offload=make_offload(
            config.actor_rollout_ref,
            model.chunks,
            model.optimizer,
            None if reference is None else reference.chunks,
            None if critic is None else _parts_of(critic),
        ),
    )
    return rank, model


def make_critic(config: RunConfig, folder: Path) -> TrainedCritic:
    """Build the critic from the policy's HF weights, with a new value head. Raises InputError."""
    settings = over_actor(config.critic, config.actor_rollout_ref.actor)
    model = build_critic(folder, settings, config.trainer.seed)
    return TrainedCritic(
        model, settings, make_rates(model.optimizer, settings.optim), routers(model)
    )


def _parts_of(critic: TrainedCritic) -> ModelParts:
    return model_parts(critic.settings.megatron, critic.model.chunks, critic.model.optimizer)


def padding_mask_needed(config: TransformerConfig) -> bool:
    """Return whether part of the model counts tokens per expert, so that padding must be masked."""
    return bool(config.moe_router_enable_expert_bias) or has_auxiliary_losses(config)


def has_auxiliary_losses(config: TransformerConfig) -> bool:
    """Return whether the routers add auxiliary losses to the policy's loss."""
    return bool(config.moe_z_loss_coeff) or has_auxiliary_loss(vars(config))
