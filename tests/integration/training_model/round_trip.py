"""Convert models from HF to Megatron and back on each rank, in every layout.

    round_trip.py FOLDER      under torchrun; each rank writes its results to FOLDER/<rank>.json

The logits are compared with those of transformers, and the routers with the model's file.
"""

import json
import shutil
import sys
import unittest.mock
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from operators.training.agree import await_ranks
from operators.training.background import Background
from operators.training.megatron import parallel
from operators.training.megatron.model import (
    LoadedModel,
    TrainedModel,
    build_model,
    build_reference,
    routers,
)
from operators.training.megatron.optimizer import make_rates, parts
from operators.training.megatron.weights import load_weights, weight_files
from operators.training.publish.exporter import Exporter
from operators.training.publish.publisher import Publisher, PublishOptions, Stored
from pipeline.config.optim import Optim
from pipeline.model.families import FAMILIES
from pipeline.policies.fetch import fetch_policy
from pipeline.policies.versions import chain, weights_of
from pipeline.policies.weights import INDEX
from pipeline.scratch import scratch_folder
from pipeline.store import open_store
from tests.exhaustive import TEST_ALL, sample_or_all
from tests.integration.training_model.layouts import LAYOUTS, actor_of
from tests.integration.training_model.passes import device_of, forward_logits
from tests.integration.training_model.refused import refusals
from tests.tiny_models import VOCAB_SIZE, make_own, make_tiny

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
            # Like Moonlight, this case has no query rank and no groups. Like DeepSeek-V3, it has
            # YaRN.
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
    # GLM-4.5-Air does not normalise queries and keys. No published GLM-4 has groups or two shared
    # experts.
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
OWN = {f"{family}_own": family for family in ("mixtral", "glm4_moe", "deepseek_v3")}
"""Models as transformers writes them, whose config.json lacks fields that mbridge or vLLM reads."""
if TEST_ALL:
    OWN |= {f"{family}_own": family for family in FAMILIES}
DENSE = {"llama", "qwen2", "qwen3", "qwen3_tied"}
ALONE = sample_or_all({"glm4_moe_grouped", "llama", "qwen2"}, set[str]())
"""Cases for one rank only: another case covers their layouts with a different configuration."""
_EVERYWHERE = {"qwen3_moe", "qwen3_moe_tied", "deepseek_v3"}
LAID_OUT = [
    *((1, "dp2", name) for name in CASES),
    *(
        (2, layout, name)
        for layout in LAYOUTS
        for name in CASES
        if not (layout == "ep2" and name in DENSE) and name not in ALONE
        if TEST_ALL or name in _EVERYWHERE or layout in ("tp2", "pp2_uneven", "ep2")
    ),
]
"""Number of ranks, layout and case."""
EXPORTED = [("etp2", "qwen3_moe"), ("cp2", "qwen3_moe"), ("pp2", "deepseek_v3_mtp")]
"""Further layouts and cases, in which two ranks only export differences."""
LENGTH = 32
ROUND_BYTES = 100_000
"""Size in bytes of the tensors that a rank exports in one round; a model needs several rounds."""


def main() -> None:
    """Run every case in every layout for this number of ranks."""
    root = Path(sys.argv[1])
    parallel.start(actor_of("dp2").megatron)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if rank == 0:
        for name, family in OWN.items():
            make_own(root / "float32" / name, family)
        for name, (family, overrides) in CASES.items():
            make_tiny(root / "float32" / name, family, **overrides)
            make_tiny(root / "bfloat16" / name, family, dtype=torch.bfloat16, **overrides)
            make_tiny(root / "other" / name, family, 1, torch.bfloat16, **overrides)
        if world == 2:
            add_untrained(root / "bfloat16/deepseek_v3", root / "bfloat16/deepseek_v3_mtp")
    torch.distributed.barrier()
    parallel.stop()
    found = {}
    for _, layout, name in (row for row in LAID_OUT if row[0] == world):
        out = root / "out" / layout / name
        found[f"{layout}/{name}/float32"] = in_float32(layout, root / "float32" / name, out)
        other, source = root / "other" / name, root / "bfloat16" / name
        found[f"{layout}/{name}/bfloat16"] = in_bfloat16(layout, other, source, out)
    if world == 2:
        for layout, name in EXPORTED:
            out = root / "out" / layout / "further"
            of = root / "bfloat16" / name
            found[f"{layout}/{name}/exported"] = in_further(layout, of, out)
    if world == 1:
        for name in OWN:
            folder, out = root / "float32" / name, root / "out" / name
            found[f"dp2/{name}/float32"] = in_float32("dp2", folder, out)
        found["refusals"] = refusals(root / "float32" / "qwen3_moe", root / "refused")
    (root / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def in_float32(layout: str, source: Path, out: Path) -> dict[str, Any]:
    """Check the logits, routers and export of an untrained model.

    Args:
        layout: The layout's name.
        source: The folder of the model.
        out: The folder for the export.

    Returns:
        The results, keyed by name.
    """
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
    found["different"] = exported(model, source, out / "float32")
    parallel.stop()
    return found


def in_bfloat16(layout: str, other: Path, source: Path, out: Path) -> dict[str, Any]:
    """Replace a model's weights with loaded ones, rewrite them from fp32 masters, and export.

    An optimizer step with learning rate 0 rewrites the weights.

    Args:
        layout: The layout's name.
        other: The folder of the model with other weights.
        source: The folder of the model to load.
        out: The folder for the export.

    Returns:
        The results, keyed by name.
    """
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
    found = {
        "different": exported(model, source, out / "bfloat16", every=8),
        "wrong_decay": decaying_wrongly,
    }
    parallel.stop()
    return found


def in_further(layout: str, source: Path, out: Path) -> list[str]:
    """Export a model as the last of three versions (a difference), and compare it with the source.

    The size check is switched off. It refuses etp2, which trains incorrectly on two ranks, but
    these models are only loaded and exported.

    Args:
        layout: The layout's name.
        source: The folder of the model.
        out: The folder for the export.

    Returns:
        The names of files and tensors that differ.
    """
    actor = actor_of(layout)
    with unittest.mock.patch.object(parallel, "size_problems", return_value=[]):
        parallel.start(actor.megatron)
    found = exported(build_reference(source, actor), source, out, every=8)
    parallel.stop()
    return found


def add_untrained(model: Path, target: Path) -> None:
    """Copy a model and add a layer for multi-token prediction, which the trainer does not load."""
    shutil.copytree(model, target)
    tensors = load_file(target / "model.safetensors")
    drawn = torch.Generator().manual_seed(2)
    layer = f"model.layers.{json.loads((target / 'config.json').read_text())['num_hidden_layers']}"
    for name, dtype in (("eh_proj.weight", torch.bfloat16), ("enorm.weight", torch.float32)):
        tensors[f"{layer}.{name}"] = torch.randn(64, 128, generator=drawn).to(dtype)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def exported(model: LoadedModel, source: Path, out: Path, every: int | None = None) -> list[str]:
    """Publish a model as a policy version from all ranks in several rounds, and fetch it.

    Args:
        model: The model.
        source: The folder from which the model was loaded.
        out: The folder for the store and the fetched policy.
        every: The interval between whole versions; None for one whole version. If `every` is set,
            the last version is a difference from a version with changed weights, which is itself a
            difference from the model.

    Returns:
        The names of files and tensors that differ from the source, or a finding about the ranks.
    """
    store = open_store(str(out / "store"))
    version = 1 if every is None else 3
    options = PublishOptions(2 * ROUND_BYTES, 60.0, every)
    with Background() as background, scratch_folder("policy") as scratch:
        exporter = Exporter(model, source, ROUND_BYTES)
        publisher = Publisher(store, exporter, source, scratch, background, options)
        for number in range(1, version + 1):
            publisher.publish(number, lambda stored: None)
            if number < version:
                negate_some(model)
        background.finish()
        await_ranks()
        compared: list[Stored] = []
        publisher.compare(version, weights_of(store, version), compared.append)
        background.finish()
    await_ranks()
    if any(stored.drifted for stored in compared):
        return ["the comparison with the published policy found a difference"]
    sizes = [[size for file in files for _, size in file] for files in exporter.listed]
    of_ranks = [sum(of_rank) for of_rank in sizes]
    one_stage = model.config.pipeline_model_parallel_size == 1
    if one_stage and max(of_ranks) - min(of_ranks) > max(map(max, sizes)):
        return [f"the ranks of a stage write {of_ranks} bytes"]
    if torch.distributed.get_rank() == 0:
        assert len(chain(store, version)) == version
        fetch_policy(store, version, out / "fetched")
    await_ranks()
    return different(source, out / "fetched")


def negate_some(model: LoadedModel) -> None:
    """Negate one in 50 weights; a second call restores them."""
    with torch.no_grad():
        for chunk in model.bare_chunks:
            for parameter in chunk.parameters():
                parameter.view(-1)[::50] *= -1


def wrong_decay(model: TrainedModel, optim: Optim) -> list[str]:
    """Return the parameters with a wrong weight decay.

    Norms and biases must not decay, unless weight_decay_on_norms is set.
    """
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
    """Return the layers whose router differs from the file's weights for the same layer number."""
    tensors = load_file(source / "model.safetensors")
    gates = {
        int(name.split(".")[2]): tensor
        for name, tensor in tensors.items()
        if name.endswith((".mlp.gate.weight", ".block_sparse_moe.gate.weight"))
    }
    return [
        layer
        for layer, router in routers(model).items()
        if not torch.equal(router.weight.cpu(), gates[layer])
    ]


def tokens_counted(model: LoadedModel, tokens: torch.Tensor) -> list[float]:
    """Return each router's token count for the expert bias when 5 of 32 tokens are padding.

    The counts, one per layer, are summed over tensor-parallel ranks and divided by K. They must not
    include padding.
    """
    tokens = tokens.to(device_of(model))
    padding = torch.zeros_like(tokens, dtype=torch.bool)
    padding[:, -5:] = True
    (chunk,) = model.chunks
    positions = torch.arange(LENGTH, device=tokens.device)
    chunk(tokens, positions[None], None, padding_mask=padding)
    counted = []
    for router in routers(model).values():
        total = router.local_tokens_per_expert.sum()
        if model.config.tensor_model_parallel_size > 1:
            torch.distributed.all_reduce(total)
        counted.append(float(total) / router.topk)
        router.local_tokens_per_expert.zero_()
    return counted


def different(source: Path, target: Path) -> list[str]:
    """Return the names of files and tensors that differ between two folders.

    The weights may be divided into files differently.
    """
    others = [{p.name for p in of.iterdir() if not is_cut(p)} for of in (source, target)]
    wrong = sorted(others[0] ^ others[1])
    wrong += [
        n for n in others[0] & others[1] if (source / n).read_bytes() != (target / n).read_bytes()
    ]
    before, after = tensors_of(source), tensors_of(target)
    wrong += sorted(before.keys() ^ after.keys())
    wrong += [
        key
        for key in before.keys() & after.keys()
        if before[key].dtype != after[key].dtype
        or not torch.equal(before[key].view(torch.uint8), after[key].view(torch.uint8))
    ]
    return wrong


def is_cut(path: Path) -> bool:
    """Return whether a file depends on how the weights are divided into files."""
    return path.suffix == ".safetensors" or path.name == INDEX


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return a folder's tensors, keyed by name, each from the file that the index names."""
    of_names = weight_files(folder)
    of_files = {file: load_file(folder / file) for file in set(of_names.values())}
    return {name: of_files[file][name] for name, file in of_names.items()}


if __name__ == "__main__":
    main()
