"""Models for looking into routing."""

from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.tiny_models import make_tiny


def make_aligned(folder: Path) -> Path:
    """A Qwen3-MoE whose routers see the token's embedding alone, in every layer, and prefer
    expert 15: attention and experts add nothing, norms have no weight.
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
    """A DeepSeek-V3-shaped model: its first layer is dense, its routers have an expert bias."""
    return make_tiny(folder, "deepseek_v3")
