"""Train, save and resume on each rank. Two runs of this program are two lives of a trainer.

    resume.py FOLDER first            train each case for three steps, with and without saving.
    resume.py FOLDER second           load the checkpoint of each case, and train its third step.
    resume.py FOLDER passing FROM     load a checkpoint from FROM in other layouts, and save it.

The first life saves after its second step. The second life also loads and saves the checkpoint in
other layouts. Each rank writes its state to FOLDER/<life>-<rank>.json. The file contains the digest
of each tensor's bits, keyed by case and tensor name.
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
from megatron.core import parallel_state

from operators.training.megatron import checkpoint, parallel
from operators.training.megatron.model import TrainedModel, build_model
from operators.training.megatron.optimizer import parts
from pipeline.config.actor import Actor, Megatron, Optim
from pipeline.store import open_store
from tests.exhaustive import sample_or_all
from tests.integration.training_model.former import save_formerly
from tests.integration.training_model.layouts import LAYOUTS, actor_of
from tests.integration.training_model.passes import train
from tests.tiny_models import VOCAB_SIZE, make_tiny

LENGTH, MICRO_BATCHES = 16, 2
FAMILIES = {
    "qwen3_moe": ("qwen3_moe_dense_first", {}),
    "qwen3_moe_tied": ("qwen3_moe", {"tie_word_embeddings": True}),
    "qwen2_moe": ("qwen2_moe", {}),
    "deepseek_v3": ("deepseek_v3", {}),
}
OPTIMIZERS = {
    layout: sample_or_all((False, True) if layout == "dp2" else (True,), (False, True))
    for layout in LAYOUTS
}
"""Whether the optimizer is distributed: the values to test, keyed by layout."""
CASES = [
    *((layout, "qwen3_moe", sharded) for layout in LAYOUTS for sharded in OPTIMIZERS[layout]),
    ("pp2", "qwen3_moe_tied", True),
    ("tp2", "qwen2_moe", True),
    ("dp2_bf16_gradients", "qwen3_moe", True),
    ("dp2", "deepseek_v3", True),
    ("tp2", "deepseek_v3", True),
]
"""(layout, family, use_distributed_optimizer)."""
ON_ONE_RANK = CASES[:2]
RESHARDED = ("tp2", "pp2_vpp2", "cp2", "ep2")
"""Layouts that load the checkpoint of dp2; dp2 then loads their checkpoint."""
RESHARDED_CASE = "dp2-qwen3_moe-True"
FORMER = "former"
"""The same checkpoint as earlier versions wrote it, with state gathered from other ranks."""
PASSING = {
    1: {"one": {}},
    4: {
        "tp2_dp2": {"tensor_model_parallel_size": 2},
        "ep2_dp4": {"expert_model_parallel_size": 2},
        "tp2_ep4": {
            "tensor_model_parallel_size": 2,
            "expert_model_parallel_size": 4,
            "expert_tensor_parallel_size": 1,
        },
        "pp2_ep2": {
            "pipeline_model_parallel_size": 2,
            "expert_model_parallel_size": 2,
        },
    },
}
"""Other layouts that load and save the checkpoint of two ranks, keyed by number of ranks."""


def main() -> None:
    """Run one life of the trainer."""
    root, life = Path(sys.argv[1]), sys.argv[2]
    if life == "passing":
        pass_through(root, Path(sys.argv[3]))
        return
    parallel.start(actor_of("dp2").megatron)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if rank == 0:
        for name, (family, overrides) in FAMILIES.items():
            seed = 0 if life == "first" else 1
            make_tiny(root / life / name, family, seed, torch.bfloat16, **overrides)
    torch.distributed.barrier()
    parallel.stop()
    results = {}
    for case in CASES if world == 2 else ON_ONE_RANK:
        name = "-".join(map(str, case))
        results |= (first_life if life == "first" else second_life)(root, name, *case)
    if life == "second" and world == 2:
        results |= reshard(root)
    (root / f"{life}-{rank}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


def first_life(root: Path, name: str, layout: str, family: str, sharded: bool) -> dict:
    """Train three steps twice, once without and once with a checkpoint after the second step.

    Args:
        root: The program's folder.
        name: The name of the case.
        layout: The layout's name.
        family: The model's folder name, a key of FAMILIES.
        sharded: The setting use_distributed_optimizer.

    Returns:
        The digests of the state after two and three steps.
    """
    actor = actor_of(layout, use_distributed_optimizer=sharded)
    parallel.start(actor.megatron)
    undisturbed = build_model(root / "first" / family, actor)
    for step in range(3):
        train_step(undisturbed, step)
    saving = build_model(root / "first" / family, actor)
    for step in range(2):
        train_step(saving, step)
    checkpoint.save(open_store(str(root / "store" / name)), 2, saving)
    if name == RESHARDED_CASE:
        save_formerly(open_store(str(root / "store" / f"{name}-{FORMER}")), 2, saving)
    found = {f"{name}/2": digests(saving)}
    train_step(saving, 2)
    found |= {f"{name}/3": digests(undisturbed), f"{name}/3 after saving": digests(saving)}
    parallel.stop()
    return found


def second_life(root: Path, name: str, layout: str, family: str, sharded: bool) -> dict:
    """Load the checkpoint into a model with other weights, and train the third step.

    Args:
        root: The program's folder.
        name: The name of the case.
        layout: The layout's name.
        family: The model's folder name, a key of FAMILIES.
        sharded: The setting use_distributed_optimizer.

    Returns:
        The digests of the state before and after loading, and after the third step.
    """
    actor = actor_of(layout, use_distributed_optimizer=sharded)
    parallel.start(actor.megatron)
    store = open_store(str(root / "store" / name))
    model = build_model(root / "second" / family, actor)
    other = digests(model)
    checkpoint.load(store, 2, model)
    found = {f"{name}/other": other, f"{name}/2": digests(model)}
    train_step(model, 2)
    found[f"{name}/3"] = digests(model)
    parallel.stop()
    return found


def reshard(root: Path) -> dict:
    """Return the state of dp2's checkpoint after another layout has loaded and saved it."""
    found = {}
    name = RESHARDED_CASE
    for layout in RESHARDED:
        between = open_store(str(root / "store" / f"{name}-{layout}"))
        saved = f"{name}-{FORMER}" if layout == "tp2" else name
        for loaded_in, source in (
            (layout, open_store(str(root / "store" / saved))),
            ("dp2", between),
        ):
            actor = actor_of(loaded_in)
            parallel.start(actor.megatron)
            model = build_model(root / "second" / "qwen3_moe", actor)
            checkpoint.load(source, 2, model)
            if source is between:
                found[f"{name}/2 by {layout}"] = digests(model)
            else:
                checkpoint.save(between, 2, model)
            parallel.stop()
    return found


def pass_through(root: Path, other: Path) -> None:
    """Load the checkpoint of two ranks in other layouts, and save it under each layout's name."""
    source = open_store(str(other / "store" / RESHARDED_CASE))
    parallel.start(actor_of("dp2").megatron)
    if torch.distributed.get_rank() == 0:
        make_tiny(root / "passing" / "qwen3_moe", "qwen3_moe_dense_first", 2, torch.bfloat16)
    torch.distributed.barrier()
    parallel.stop()
    for name, sizes in PASSING[torch.distributed.get_world_size()].items():
        actor = Actor(megatron=Megatron(**sizes), optim=Optim(lr=1e-3))
        parallel.start(actor.megatron)
        model = build_model(root / "passing" / "qwen3_moe", actor)
        checkpoint.load(source, 2, model)
        checkpoint.save(open_store(str(root / "store" / name)), 2, model)
        parallel.stop()
    torch.distributed.destroy_process_group()


def train_step(model: TrainedModel, step: int) -> None:
    """Train one optimizer step on random tokens that depend on the step and data-parallel rank."""
    data = torch.Generator().manual_seed(1000 * step + parallel_state.get_data_parallel_rank())
    train(model, torch.randint(0, VOCAB_SIZE, (MICRO_BATCHES, 1, LENGTH + 1), generator=data))


def digests(model: TrainedModel) -> dict[str, str]:
    """Return digests of weights, buffers, this rank's fp32 masters, Adam's moments and steps."""
    state = {
        f"model{index}.{name}": tensor
        for index, chunk in enumerate(model.bare_chunks)
        for name, tensor in chunk.state_dict().items()
        if isinstance(tensor, torch.Tensor)
    }
    for index, part in enumerate(parts(model.optimizer)):
        masters = [p for group in part.optimizer.param_groups for p in group["params"]]
        for number, master in enumerate(masters):
            state[f"master{index}.{number}"] = master
            for key, value in part.optimizer.state.get(master, {}).items():
                state[f"{key}{index}.{number}"] = value
    return {
        name: hashlib.sha256(
            tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
        ).hexdigest()[:16]
        for name, tensor in state.items()
    }


if __name__ == "__main__":
    main()
