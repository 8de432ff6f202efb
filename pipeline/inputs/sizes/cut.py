"""The part of a model on a training rank: the layers of its pipeline stage and their weights."""

from dataclasses import dataclass

from pipeline.config.rules.layout import expert_tensor_parallel_size
from pipeline.config.tree import RunConfig
from pipeline.model.widths import Widths, layer_weights


@dataclass(frozen=True)
class Cut:
    """The sizes of a parallel layout.

    The sizes are for tensor (tp), context (cp), pipeline (pp), virtual pipeline (vpp), expert (ep)
    and expert tensor parallelism (etp). Example: Cut(ranks=16, tp=4, cp=1, pp=1, vpp=1, ep=8,
    etp=1, sequence_parallel=True).
    """

    ranks: int
    tp: int
    cp: int
    pp: int
    vpp: int
    ep: int
    etp: int
    sequence_parallel: bool

    @property
    def dense_copies(self) -> int:
        """Number of ranks with the same dense weights.

        The distributed optimizer splits the state of these weights over these ranks.
        """
        return self.ranks // (self.tp * self.pp)

    @property
    def expert_copies(self) -> int:
        """Number of ranks with the same experts."""
        return self.ranks // (self.ep * self.etp * self.pp)

    @property
    def sequence_parts(self) -> int:
        """Number of parts into which tokens are split outside attention and MLP."""
        return self.tp if self.sequence_parallel else 1


def cut_of(config: RunConfig) -> Cut:
    """Return the parallel layout of the training ranks.

    The layout has already been checked, so its sizes fit each other and the model's sizes.
    """
    megatron = config.actor_rollout_ref.actor.megatron
    tp = megatron.tensor_model_parallel_size
    return Cut(
        ranks=config.trainer.nnodes * config.trainer.n_gpus_per_node,
        tp=tp,
        cp=megatron.context_parallel_size,
        pp=megatron.pipeline_model_parallel_size,
        vpp=megatron.virtual_pipeline_model_parallel_size or 1,
        ep=megatron.expert_model_parallel_size,
        etp=expert_tensor_parallel_size(megatron),
        sequence_parallel=megatron.sequence_parallel and tp > 1,
    )


@dataclass(frozen=True)
class PipelineStage:
    """A pipeline stage. Example: PipelineStage(0, True, False, chunks=((False, True),))."""

    number: int
    first: bool
    """Whether the stage contains the embedding."""
    last: bool
    """Whether the stage contains the output layer and computes the loss."""
    chunks: tuple[tuple[bool, ...], ...]
    """For each virtual stage, whether each of its decoder layers is an MoE layer."""

    @property
    def layers(self) -> tuple[bool, ...]:
        """The layers of all chunks."""
        return tuple(moe for chunk in self.chunks for moe in chunk)


def stages_of(config: RunConfig, widths: Widths) -> list[PipelineStage]:
    """Return the pipeline stages with their layers.

    Layers are assigned as in Megatron-core's get_num_layers_to_build and
    get_transformer_layer_offset: in each chunk, every stage gets a part of the layers.
    """
    cut = cut_of(config)
    override = config.actor_rollout_ref.actor.megatron.override_transformer_config
    places: list[bool | None] = list(widths.moe_layers)  # None stands for a place without a layer
    if override.get("account_for_embedding_in_pipeline_split"):
        places.insert(0, None)
    if override.get("account_for_loss_in_pipeline_split"):
        places.append(None)
    sizes: list[int | None] = [None] * cut.pp
    if cut.pp > 1:
        sizes[0] = override.get("num_layers_in_first_pipeline_stage")
        sizes[-1] = override.get("num_layers_in_last_pipeline_stage")
    fixed = [size for size in sizes if size is not None]
    others = cut.pp - len(fixed)
    even = (len(places) - sum(fixed)) // others if others else 0
    chunks: list[list[tuple[bool, ...]]] = [[] for _ in sizes]
    start = 0
    for _ in range(cut.vpp):
        for stage, size in enumerate(sizes):
            end = start + (even if size is None else size) // cut.vpp
            chunks[stage].append(tuple(moe for moe in places[start:end] if moe is not None))
            start = end
    last = cut.pp - 1
    return [
        PipelineStage(i, i == 0, i == last, tuple(of_stage)) for i, of_stage in enumerate(chunks)
    ]


@dataclass(frozen=True)
class RankWeights:
    """The number of weights on a rank. Example: RankWeights(dense=900_000, experts=3_600_000)."""

    dense: int
    """Number of weights outside the experts."""
    experts: int

    @property
    def total(self) -> int:
        """Number of all weights."""
        return self.dense + self.experts


def rank_weights(widths: Widths, cut: Cut, stage: PipelineStage) -> RankWeights:
    """Return the number of weights on each rank of a pipeline stage.

    Args:
        widths: The model's sizes.
        cut: The parallel layout.
        stage: The pipeline stage.
    """
    table = widths.vocabulary // cut.tp * widths.hidden
    dense = experts = 0
    if stage.first:
        dense += table
    if stage.last:
        dense += widths.hidden + (0 if widths.tied and stage.first else table)
    for moe in stage.layers:
        layer = layer_weights(widths, moe)
        dense += layer.whole + layer.cut // cut.tp
        experts += layer.experts // (cut.ep * cut.etp)
    return RankWeights(dense, experts)
