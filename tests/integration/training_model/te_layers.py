"""Build models from Transformer Engine's layers, as on GPUs, using a stub that cannot compute.

    te_layers.py FOLDER      under torchrun; writes FOLDER/found.json

The results list, for each family, the parameters of Megatron's model with their shapes, and the HF
weights that differ after a round trip through mbridge.
"""

import os
import sys

from tests.transformer_engine_stub import install

os.environ["CUDA_VISIBLE_DEVICES"] = ""
install()

import json  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from operators.cpu import without_cuda  # noqa: E402
from operators.training.megatron import parallel  # noqa: E402
from operators.training.megatron.model import build_reference  # noqa: E402
from operators.training.megatron.weights import NamedForBridge  # noqa: E402
from pipeline.config.actor import Actor  # noqa: E402
from tests.tiny_models import make_tiny  # noqa: E402

FAMILIES = (
    "qwen3_moe",
    "qwen3_moe_dense_first",
    "qwen2_moe",
    "mixtral",
    "deepseek_v3",
    "glm4_moe",
    "qwen3",
)


def be_on_gpu() -> None:
    """Take the GPU branches; calls to CUDA are already redirected to the CPU."""
    without_cuda.ON_CPU = False


def look(family: str, folder: Path, actor: Actor) -> dict[str, Any]:
    """Build a model of a family, and return its parameters, layers and round-trip result.

    Args:
        family: The family of models.
        folder: A folder for the HF model.
        actor: The training settings.
    """
    for name in [name for name in os.environ if name.startswith("NVTE_")]:
        del os.environ[name]  # set for the previous model, whose attention uses different kernels
    make_tiny(folder, family)
    model = build_reference(folder, actor)
    [chunk] = model.bare_chunks
    config = model.config
    weights = dict(model.bridge.export_weights([NamedForBridge(chunk)]))
    before = load_file(folder / "model.safetensors")
    return {
        "parameters": {name: list(p.shape) for name, p in chunk.named_parameters()},
        "kinds": sorted(
            {type(m).__name__ for m in chunk.modules() if type(m).__name__.startswith("TE")}
        ),
        "grouped": config.moe_grouped_gemm,
        "dispatcher": config.moe_token_dispatcher_type,
        "different": sorted(
            name
            for name in before.keys() | weights.keys()
            if name not in before
            or name not in weights
            or not torch.equal(before[name].float(), weights[name].float())
        ),
    }


def main(folder: Path) -> None:
    actor = Actor.model_validate({"megatron": {"dtype": "float32"}})
    parallel.start(actor.megatron)
    be_on_gpu()
    found = {family: look(family, folder / family, actor) for family in FAMILIES}
    (folder / "found.json").write_text(json.dumps(found))
    parallel.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
