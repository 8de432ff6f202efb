"""On each rank: HF -> Megatron -> HF, logits against transformers and routers, in every layout.

round_trip.py FOLDER      under torchrun; each rank writes what it found to FOLDER/<rank>.json
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from operators.training.megatron import parallel
from operators.training.megatron.export import export_hf
from operators.training.megatron.model import (
    LoadedModel,
    TrainedModel,
    build_model,
    build_reference,
    routers,
)
from operators.training.megatron.optimizer import make_rates, parts
from operators.training.megatron.weights import load_weights
from pipeline.config.optim import Optim
from tests.exhaustive import sample_or_all
from tests.integration.training_model.layouts import LAYOUTS, actor_of
from tests.integration.training_model.passes import forward_logits
from tests.integration.training_model.refused import refusals
from tests.tiny_models import VOCAB_SIZE, make_tiny

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe_tied": ("qwen3_moe", {"tie_word_embeddings": True}),
    "qwen3_moe_dense_first": ("qwen3_moe_dense_first", {}),
    "qwen2_moe": ("qwen2_moe", {}),
    "mixtral": ("mixtral", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3_yarn": (
        "deepseek_v3",
        {
            # Moonlight has no query rank and no groups; DeepSeek-V3 has YaRN.
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "glm4_moe": ("glm4_moe", {}),
    # GLM-4.5-Air has no norms of heads; groups and two shared experts are in no published one.
    "glm4_moe_grouped": (
        "glm4_moe",
        {
            "use_qk_norm": False,
            "attention_bias": False,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_tied": ("qwen3", {"tie_word_embeddings": True}),
}
DENSE = {"llama", "qwen2", "qwen3", "qwen3_tied"}
ALONE = sample_or_all({"glm4_moe_grouped", "llama", "qwen2"}, set[str]())
"""Cases that one rank tries: their layouts are another case's, whose configuration differs."""
LENGTH = 32


def main() -> None:
    """Every case in every layout of this number of ranks."""
    root = Path(sys.argv[1])
    parallel.start(actor_of("dp2").megatron)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if rank == 0:
        for name, (family, overrides) in CASES.items():
            make_tiny(root / "float32" / name, family, **overrides)
            make_tiny(root / "bfloat16" / name, family, dtype=torch.bfloat16, **overrides)
            make_tiny(root / "other" / name, family, 1, torch.bfloat16, **overrides)
    torch.distributed.barrier()
    parallel.stop()
    found = {}
    for layout in LAYOUTS if world == 2 else ["dp2"]:
        for name in CASES:
            if (layout == "ep2" and name in DENSE) or (world == 2 and name in ALONE):
                continue
            out = root / "out" / layout / name
            found[f"{layout}/{name}/float32"] = in_float32(layout, root / "float32" / name, out)
            other, source = root / "other" / name, root / "bfloat16" / name
            found[f"{layout}/{name}/bfloat16"] = in_bfloat16(layout, other, source, out)
    if world == 1:
        found["refusals"] = refusals(root / "float32" / "qwen3_moe", root / "refused")
    (root / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def in_float32(layout: str, source: Path, out: Path) -> dict[str, Any]:
    """A model that is not trained: its logits, its routers, its export."""
    actor = actor_of(layout, dtype="float32")
    parallel.start(actor.megatron)
    model = build_reference(source, actor)
    tokens = torch.randint(2, VOCAB_SIZE, (1, LENGTH), generator=torch.Generator().manual_seed(7))
    logits = forward_logits(model, tokens)
    found: dict[str, Any] = {
        "routers": sorted(routers(model)),
        "wrong_routers": wrong_routers(model, source),
    }
    if logits is not None:
        hf = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            expected = hf(tokens).logits
        found["logits_error"] = float((logits - expected).abs().max())
        found["logits_max"] = float(expected.abs().max())
    if (
        model.config.moe_router_enable_expert_bias
        and model.config.pipeline_model_parallel_size == 1
    ):
        found["tokens_counted"] = tokens_counted(model, tokens)
    export_hf(model, source, out / "float32")
    found["different"] = different(source, out / "float32")
    parallel.stop()
    return found


def in_bfloat16(layout: str, other: Path, source: Path, out: Path) -> dict[str, Any]:
    """A trained model of other weights loads `source`, writes its weights anew from the fp32
    masters (an optimizer step of no size), and is exported."""
    actor = actor_of(layout)
    parallel.start(actor.megatron)
    model = build_model(other, actor)
    decaying_wrongly = wrong_decay(model, actor.optim)
    load_weights(model.bridge, model.bare_chunks, source)
    model.optimizer.reload_model_params()
    for chunk in model.chunks:
        chunk.zero_grad_buffer()
    for group in model.optimizer.param_groups:
        group["lr"] = 0.0
    assert model.optimizer.step()[0]
    export_hf(model, source, out / "bfloat16")
    found = {"different": different(source, out / "bfloat16"), "wrong_decay": decaying_wrongly}
    parallel.stop()
    return found


def wrong_decay(model: TrainedModel, optim: Optim) -> list[str]:
    """Parameters whose group has not the weight decay that is due to them: norms and biases none,
    unless weight_decay_on_norms."""
    names = {p: name for chunk in model.bare_chunks for name, p in chunk.named_parameters()}
    wrong = []
    for everywhere in (True, False):
        changed = {"weight_decay": 0.25, "weight_decay_on_norms": everywhere}
        make_rates(model.optimizer, optim.model_copy(update=changed)).set(0)
        seen = {}
        for part in parts(model.optimizer):
            for parameter, (group, _) in part.model_param_group_index_map.items():
                decay = part.optimizer.param_groups[group]["weight_decay"]
                seen[names[parameter]] = parameter.ndim > 1, decay
        assert {is_matrix for is_matrix, _ in seen.values()} == {True, False}
        wrong += [
            f"{name}: {decay}"
            for name, (is_matrix, decay) in seen.items()
            if decay != (0.25 if is_matrix or everywhere else 0)
        ]
    return wrong


def wrong_routers(model: LoadedModel, source: Path) -> list[int]:
    """Layers whose router has not the weights that the file has under that layer's number."""
    tensors = load_file(source / "model.safetensors")
    gates = {
        int(name.split(".")[2]): tensor
        for name, tensor in tensors.items()
        if name.endswith((".mlp.gate.weight", ".block_sparse_moe.gate.weight"))
    }
    return [layer for layer, r in routers(model).items() if not torch.equal(r.weight, gates[layer])]


def tokens_counted(model: LoadedModel, tokens: torch.Tensor) -> list[float]:
    """What the routers count for the expert bias when the last 5 of 32 tokens are padding: a row
    of padding counts nowhere. Summed over tensor-parallel ranks, by layer, divided by K."""
    padding = torch.zeros_like(tokens, dtype=torch.bool)
    padding[:, -5:] = True
    (chunk,) = model.chunks
    chunk(tokens, torch.arange(LENGTH)[None], None, padding_mask=padding)
    counted = []
    for router in routers(model).values():
        total = router.local_tokens_per_expert.sum()
        if model.config.tensor_model_parallel_size > 1:
            torch.distributed.all_reduce(total)
        counted.append(float(total) / router.topk)
        router.local_tokens_per_expert.zero_()
    return counted


def different(source: Path, target: Path) -> list[str]:
    """Names of files and tensors that are not the same in both folders; rank 0 has written."""
    torch.distributed.barrier()
    names = {path.name for path in source.iterdir()}
    wrong = sorted(names ^ {path.name for path in target.iterdir()})
    for name in sorted(names):
        if not name.endswith(".safetensors"):
            wrong += [name] * ((source / name).read_bytes() != (target / name).read_bytes())
            continue
        before, after = load_file(source / name), load_file(target / name)
        wrong += sorted(before.keys() ^ after.keys())
        wrong += [
            key
            for key in before.keys() & after.keys()
            if before[key].dtype != after[key].dtype
            or not torch.equal(before[key].view(torch.uint8), after[key].view(torch.uint8))
        ]
    return wrong


if __name__ == "__main__":
    main()
