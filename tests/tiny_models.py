"""Tiny random checkpoints of the supported model families, with a small byte-level tokenizer.

The model classes of transformers write the checkpoints, so that an engine, the trainer and an
independent forward pass read the same files. The weights vary more than in a model's usual
initialisation. With the usual weights, routers could not distinguish experts, and every row would
be a near-tie.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 512
END, PAD, START = "<|end|>", "<|pad|>", "<|start|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|start|>' + message.role + '\n' + message.content "
    "+ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}"
    "{% endif %}"
)

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "eos_token_id": 0,
    "pad_token_id": 1,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_QWEN_EXPERTS: dict[str, Any] = {
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
_QWEN2_SHAPE = {key: value for key, value in _SHAPE.items() if key != "head_dim"}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_SHAPE},
    "qwen2": {"model_type": "qwen2", **_QWEN2_SHAPE, "num_attention_heads": 2},
    "qwen3": {"model_type": "qwen3", **_SHAPE},
    "qwen3_moe": {"model_type": "qwen3_moe", **_SHAPE, **_QWEN_EXPERTS},
    "qwen3_moe_dense_first": {
        "model_type": "qwen3_moe",
        **_SHAPE,
        **_QWEN_EXPERTS,
        "mlp_only_layers": [0],
    },
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        **_QWEN2_SHAPE,
        "num_attention_heads": 2,  # vLLM's CPU attention requires a head size divisible by 32
        **_QWEN_EXPERTS,
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": 64,
    },
    "mixtral": {
        "model_type": "mixtral",
        **_SHAPE,
        "intermediate_size": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "bos_token_id": None,
    },
    "glm4_moe": {
        "model_type": "glm4_moe",
        **_SHAPE,
        "rope_parameters": {**_SHAPE["rope_parameters"], "partial_rotary_factor": 0.5},
        "moe_intermediate_size": 32,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "use_qk_norm": True,
        "num_mtp_layers": 0,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **{key: value for key, value in _SHAPE.items() if key != "head_dim"},
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 512,  # plus qk_rope_head_dim; vLLM's MLA kernels require the sum 576
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "bos_token_id": None,
        "num_mtp_layers": 0,
        # Every published config sets the next two fields. vLLM reads them; transformers does not.
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
}
"""The config of each family; `model_type` is the name in transformers."""


def make_tiny(
    folder: Path,
    family: str,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Path:
    """Write a checkpoint (config, safetensors, tokenizer) to `folder` and return the folder.

    The same arguments always lead to the same weights.

    Args:
        folder: The folder to write to.
        family: The name in FAMILIES.
        seed: The seed of the weights.
        dtype: The type of the stored weights.
        overrides: Fields of the family's config. transformers raises an error for unknown fields.
    """
    return _write(folder, tiny_config(family, **overrides), seed, dtype)


def _write(folder: Path, config: Any, seed: int, dtype: torch.dtype) -> Path:
    generator = torch.Generator().manual_seed(seed)
    factory: Any = AutoModelForCausalLM  # not typed
    model = factory.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict().items()):
            _fill(name, tensor, generator)
    model.to(dtype).save_pretrained(folder)
    make_tokenizer(folder)
    return folder


_OWN: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "moe_intermediate_size": 32,
        "n_routed_experts": 16,
        "q_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "first_k_dense_replace": 1,
    },
    "glm4_moe": {"moe_intermediate_size": 32, "n_routed_experts": 16},
    "llama": {},
    "mixtral": {},
    "qwen2": {},
    "qwen2_moe": {
        "moe_intermediate_size": 32,
        "num_experts": 16,
        "shared_expert_intermediate_size": 64,
    },
    "qwen3": {},
    "qwen3_moe": {"moe_intermediate_size": 32, "num_experts": 16},
}
"""The sizes by which a family's class in transformers is made tiny; other fields keep defaults."""


def make_own(folder: Path, family: str, dtype: torch.dtype = torch.float32) -> Path:
    """Write a checkpoint exactly as transformers writes one, and return the folder.

    `config.json` has only the fields that transformers writes by itself: some are null, and some
    that vLLM or mbridge read are absent. The weights are drawn as in `make_tiny`.
    """
    sizes = {name: _SHAPE[name] for name in ("vocab_size", "hidden_size", "intermediate_size")}
    config = AutoConfig.for_model(
        family,
        **sizes,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        **_OWN[family],
    )
    return _write(folder, config, 0, dtype)


def tiny_config(family: str, **overrides: Any) -> Any:
    """Return the family's config for transformers."""
    settings = {**copy.deepcopy(FAMILIES[family]), **overrides}
    return AutoConfig.for_model(settings.pop("model_type"), **settings)


def make_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Write the tokenizer with its chat template to `folder` and return it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END, PAD, START],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    corpus = ["the quick brown fox jumps over the lazy dog", "1 + 2 = 3", "user assistant system"]
    tokenizer.train_from_iterator(corpus * 4, trainer)
    make: Any = PreTrainedTokenizerFast  # not typed
    wrapped: PreTrainedTokenizerFast = make(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    wrapped.save_pretrained(folder)
    return wrapped


def _fill(name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
    if name.endswith("e_score_correction_bias"):
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.05)
    elif tensor.ndim < 2:
        if not name.endswith("bias"):  # norms
            tensor.copy_(1 + torch.randn(tensor.shape, generator=generator) * 0.05)
    else:
        wide = {"embed_tokens.weight": 1.0, "gate.weight": 0.5}
        std = next((s for end, s in wide.items() if name.endswith(end)), 0.08)
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * std)
