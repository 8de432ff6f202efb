"""On each rank: HF -> Megatron -> HF and logits against transformers, in every layout.

round_trip.py FOLDER      (under torchrun; prints one line of JSON per case on rank 0)
"""

import json
import sys
import time
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from operators.training import export, model, parallel
from tests.integration.training_model.layouts import LAYOUTS, actor_of
from tests.tiny_models import VOCAB_SIZE, make_tiny

CASES = {
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe_tied": ("qwen3_moe", {"tie_word_embeddings": True}),
    "qwen3_moe_dense_first": ("qwen3_moe_dense_first", {}),
    "qwen2_moe": ("qwen2_moe", {}),
    "mixtral": ("mixtral", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "qwen3": ("qwen3", {}),
}
LENGTH = 32


def main() -> None:
    """Every case in every layout of this world size."""
    root = Path(sys.argv[1])
    names = sys.argv[2].split(",") if len(sys.argv) > 2 else list(CASES)
    parallel.start(actor_of("dp2").megatron)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if rank == 0:
        for name in names:
            family, overrides = CASES[name]
            make_tiny(root / "float32" / name, family, **overrides)
            make_tiny(root / "bfloat16" / name, family, dtype=torch.bfloat16, **overrides)
    torch.distributed.barrier()
    parallel.stop()
    for layout in LAYOUTS if world == 2 else ["dp2"]:
        for dtype in ("float32", "bfloat16"):
            actor = actor_of(layout, dtype=dtype)
            parallel.start(actor.megatron)
            for name in names:
                started = time.monotonic()
                found = check(root / dtype / name, root / "out" / f"{layout}-{dtype}-{name}", actor)
                case = {"case": name, "layout": layout, "dtype": dtype, **found}
                case["s"] = round(time.monotonic() - started, 2)
                # Logits are on the last rank, which tells the first.
                cases = [None] * world
                torch.distributed.all_gather_object(cases, case)
                if rank == 0:
                    merged = {**cases[0], **cases[-1], "different": case["different"]}
                    sys.stdout.write(json.dumps(merged) + "\n")
            parallel.stop()
    torch.distributed.destroy_process_group()


def check(source: Path, target: Path, actor) -> dict:
    """Load, compare logits (fp32), export, compare files."""
    training = actor.megatron.dtype == "bfloat16"
    built = model.build_model(source, actor, training=training)
    found = {"different": None, "layers": sorted(model.routers(built))}
    if not training:
        tokens = torch.randint(
            2, VOCAB_SIZE, (1, LENGTH), generator=torch.Generator().manual_seed(7)
        )
        logits = logits_of(built, tokens)
        if logits is not None:
            hf = AutoModelForCausalLM.from_pretrained(
                source, dtype=torch.float32, attn_implementation="eager"
            )
            with torch.no_grad():
                reference = hf(tokens).logits
            found |= {
                "logits": float((logits - reference).abs().max()),
                "of": float(reference.abs().max()),
            }
    export.export_hf(built, source, target)
    if torch.distributed.get_rank() == 0:
        found["different"] = different(source, target)
    return found


def logits_of(built: model.TrainedModel, tokens: torch.Tensor) -> torch.Tensor | None:
    """Whole logits on the last pipeline stage, None elsewhere."""
    several = len(built.chunks) > 1

    def step(_, chunk):
        output = chunk(tokens, torch.arange(tokens.shape[1])[None], None)
        return output, lambda logits, non_loss_data: gather_from_tensor_model_parallel_region(
            logits
        )

    with torch.no_grad():
        results = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[None] * len(built.chunks) if several else None,
            model=built.chunks if several else built.chunks[0],
            num_microbatches=parallel_state.get_pipeline_model_parallel_world_size(),
            seq_length=tokens.shape[1],
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        )
    return results[0].float() if results else None


def different(source: Path, target: Path) -> list[str]:
    """Names of files and tensors that are not the same in both folders."""
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
