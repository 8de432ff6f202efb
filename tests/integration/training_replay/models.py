"""Models for tests of routing."""

from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.tiny_models import make_tiny


def make_aligned(folder: Path) -> Path:
    """Make a Qwen3-MoE model whose routers see only the token's embedding, and prefer expert 15.

    In every layer, attention and experts add nothing, and norms have weights of 1.
    """
    make_tiny(folder, "qwen3_moe")
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name.endswith("norm.weight"):
            tensor.fill_(1.0)
        elif name.endswith("embed_tokens.weight"):
            tensor += 2.0  # a direction that all tokens share
        elif name.endswith("mlp.gate.weight"):
            tensor[15] = 1.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_biased(folder: Path) -> Path:
    """Make a model like DeepSeek-V3: the first layer is dense, and routers have an expert bias."""
    return make_tiny(folder, "deepseek_v3")
