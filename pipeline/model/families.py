"""The list of model families, and facts from a model's Hugging Face config.json.

A config is either the content of a config.json, written by transformers 5 or an older version, or
the result of `to_dict()` on a transformers config. This module handles fields whose names or places
differ between these forms.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pipeline.errors import InputError
from pipeline.model.fields import EXPERT_CHOICE, EXPERT_FIELDS, Config, pair_problems
from pipeline.model.geometry import Geometry


def _no_problems(config: Config) -> Iterator[str]:
    return iter(())


def _sigmoid_problems(config: Config, groups: int, of_them: int) -> Iterator[str]:
    """Yield the problems with a model whose routers have sigmoid scores.

    `groups` is the default of n_group, the number of groups. `of_them` is the default of
    topk_group, the number of groups that a token may use.
    """
    topk, of_them = config.get("num_experts_per_tok", 8), config.get("topk_group", of_them)
    if not config.get("norm_topk_prob", True) and topk > 1:
        yield "has norm_topk_prob=False, but Megatron-core always normalises sigmoid scores"
    if (config.get("n_group", groups) or 1) > 1 and topk // of_them != 2:
        yield (
            f"has num_experts_per_tok={topk} and topk_group={of_them}, expected twice as many "
            "experts as groups: transformers ranks groups by their best 2 experts, Megatron-core "
            f"by {topk // of_them}"
        )


def _deepseek_problems(config: Config) -> Iterator[str]:
    """Yield the problems with a DeepSeek-V3 model.

    Published files omit fields whose values are the defaults of transformers.
    """
    yield from _sigmoid_problems(config, groups=8, of_them=4)
    if not config.get("rope_interleave", True):
        yield "has rope_interleave=False, but Megatron-core's latent attention interleaves"
    for name, only in EXPERT_CHOICE.items():
        if (found := config.get(name)) not in (None, only):
            yield f"has {name}={found!r}, but transformers and Megatron-core always use {only!r}"


def _glm_problems(config: Config) -> Iterator[str]:
    yield from _sigmoid_problems(config, groups=1, of_them=1)


def _every_layer(config: Config, layer: int) -> bool:
    return True


def _always(config: Config) -> bool:
    return True


def _never(config: Config) -> bool:
    return False


def _has_qkv_bias(config: Config) -> bool:
    return bool(config.get("qkv_bias", True))


def _has_attention_bias(config: Config) -> bool:
    return bool(config.get("attention_bias", False))


def _uses_head_norms(config: Config) -> bool:
    return bool(config.get("use_qk_norm", False))


def _qwen_moe_layer(config: Config, layer: int) -> bool:
    every = _need(config, "decoder_sparse_step", default=1)
    return layer not in (config.get("mlp_only_layers") or []) and (layer + 1) % every == 0


def _deepseek_moe_layer(config: Config, layer: int) -> bool:
    dense_first = _need(config, "first_k_dense_replace")
    every = _need(config, "moe_layer_freq", default=1)
    return layer >= dense_first and layer % every == 0


def _glm_moe_layer(config: Config, layer: int) -> bool:
    return layer >= _need(config, "first_k_dense_replace", default=1)


@dataclass(frozen=True)
class Family:
    """A model_type that both vLLM (for sampling) and Megatron-core (for training) support."""

    moe_layer: Callable[[Config, int], bool] | None
    """A function that returns whether the layer with a given index is a MoE layer, following the
    family's model code in transformers; None for a dense family."""
    rope_types: tuple[str, ...] = ("default",)
    """The kinds of rotary embedding that the trainer passes to Megatron-core."""
    rotary_share: bool = False
    """Whether the trainer passes partial_rotary_factor, the rotated share of each head, to
    Megatron-core."""
    window_needs_switch: bool = False
    """Whether sliding_window has an effect only if use_sliding_window is true."""
    qkv_bias: Callable[[Config], bool] = _never
    """A function that returns whether queries, keys and values have a bias."""
    untrained_biases: tuple[str, ...] = ()
    """Fields that add biases to the layers in transformers or vLLM, but not in Megatron-core."""
    head_norms: Callable[[Config], bool] = _never
    """A function that returns whether each head's queries and keys have a norm."""
    expert_bias: bool = False
    """Whether routers have sigmoid scores, and a bias that affects the choice of experts."""
    latent: bool = False
    """Whether the family has multi-head latent attention."""
    has: str = ""
    """The special features of the family's layers, for the documentation."""
    problems: Callable[[Config], Iterator[str]] = _no_problems
    """A function that yields further differences from Megatron-core, as texts in the form that
    `training_problems` returns."""

    @property
    def moe(self) -> bool:
        """Whether layers may be MoE layers."""
        return self.moe_layer is not None


FAMILIES = {
    "deepseek_v3": Family(
        _deepseek_moe_layer,
        rope_types=("default", "yarn"),
        untrained_biases=("attention_bias",),
        expert_bias=True,
        latent=True,
        problems=_deepseek_problems,
        has="latent attention, dense first layers, shared experts, groups, expert bias",
    ),
    "glm4_moe": Family(
        _glm_moe_layer,
        rotary_share=True,
        expert_bias=True,
        problems=_glm_problems,
        qkv_bias=_has_attention_bias,
        head_norms=_uses_head_norms,
        has="dense first layers, shared experts, expert bias, partial rotary embedding",
    ),
    "llama": Family(None, untrained_biases=("attention_bias", "bias", "mlp_bias", "qkv_bias")),
    "mixtral": Family(_every_layer),
    "qwen2": Family(None, window_needs_switch=True, qkv_bias=_always),
    "qwen2_moe": Family(
        _qwen_moe_layer,
        window_needs_switch=True,
        qkv_bias=_has_qkv_bias,
        has="a gated shared expert, dense layers if config.json lists them",
    ),
    "qwen3": Family(
        None,
        window_needs_switch=True,
        untrained_biases=("attention_bias",),
        head_norms=_always,
    ),
    "qwen3_moe": Family(
        _qwen_moe_layer,
        window_needs_switch=True,
        untrained_biases=("attention_bias",),
        head_norms=_always,
        has="dense layers if config.json lists them",
    ),
}
"""All families that a run may use, keyed by model_type."""

REFUSED_FAMILIES = {
    "deepseek_v2": "it ranks each group of experts by its best expert, whereas Megatron-core uses "
    "several experts of the group",
    "deepseek_v32": "its attention selects the tokens that it attends to",
    "gpt_oss": "its attention has sinks, and its experts have biases",
    "kimi_k2": "transformers has no class for it, and code that comes with a model is never run",
    "llama4": "its scores scale the experts' input, and its attention is split into chunks",
    "minimax_m2": "its norms of queries and keys span all heads",
    "olmoe": "its norms of queries and keys span all heads",
    "qwen3_next": "most of its layers are gated delta nets",
    "qwen3_vl_moe": "only text models are supported",
}
"""The reasons why certain families are refused, keyed by model_type."""

REFUSED_OTHER = "no test covers the conversion of its weights to Megatron-core and back"
"""The reason why all other families are refused."""

_PATH = "actor_rollout_ref.model.path"


def training_problems(config: Config) -> list[str]:
    """Return the reasons why Megatron-core cannot train a model exactly; empty if it can.

    Each reason continues a sentence that begins with the config's path. Example: "has
    sliding_window=64, expected null; ...".
    """
    name = config.get("model_type")
    family = FAMILIES.get(str(name))
    if family is None:
        return [
            f"has model_type={name!r}, which cannot be trained: "
            f"{REFUSED_FAMILIES.get(str(name), REFUSED_OTHER)}; expected one of "
            f"{', '.join(FAMILIES)}"
        ]
    problems = []
    if config.get("quantization_config"):
        problems.append(
            "has a quantization_config, expected unquantized weights; convert the weights to "
            "bfloat16 first"
        )
    wrong = {
        "rope_type": (rope_type(config), family.rope_types),
        "partial_rotary_factor": (
            1.0 if family.rotary_share else _partial_rotary_factor(config),
            (1.0,),
        ),
        "sliding_window": (_sliding_window(config, family), (None,)),
        "hidden_act": (config.get("hidden_act", "silu"), ("silu",)),
    }
    for field in family.untrained_biases:
        wrong[field] = (config.get(field) or False, (False,))
    for field, (found, expected) in wrong.items():
        if found not in expected:
            right = " or ".join("null" if value is None else str(value) for value in expected)
            problems.append(
                f"has {field}={found!r}, expected {right}: the trainer would ignore it; use "
                "a different model"
            )
    found_wrong = (*family.problems(config), *pair_problems(config))
    problems += [f"{problem}; use a different model" for problem in found_wrong]
    return problems


def rope_type(config: Config) -> str:
    """Return the kind of rotary embedding; `default` is plain RoPE."""
    rope = _rope(config)
    return str(rope.get("rope_type", rope.get("type", "default")))


def _rope(config: Config) -> Config:
    # transformers 5 writes rope_parameters. Older files have rope_scaling, which is null for plain
    # RoPE.
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _partial_rotary_factor(config: Config) -> Any:
    return _rope(config).get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0


def _sliding_window(config: Config, family: Family) -> Any:
    if family.window_needs_switch and not config.get("use_sliding_window", False):
        return None
    return config.get("sliding_window") or None


def moe_geometry(hf_config: Config) -> Geometry | None:
    """Return the geometry of a model; None for a dense model.

    Raises InputError if the family is unknown, or if a required field is missing or invalid.
    """
    family = FAMILIES.get(str(hf_config.get("model_type")))
    if family is None:
        raise InputError([f"{_PATH}: config.json {training_problems(hf_config)[0]}"])
    is_moe = family.moe_layer
    if is_moe is None:
        return None
    number = _need(hf_config, "num_hidden_layers")
    experts = _experts(hf_config)
    if experts == 0:
        return None
    layers = tuple(layer for layer in range(number) if is_moe(hf_config, layer))
    if not layers:
        return None
    return Geometry(experts, _need(hf_config, "num_experts_per_tok"), layers)


def expert_width(hf_config: Config) -> str:
    """Return the field of config.json that contains the width of an expert.

    Mixtral's config has it under the name that other families use for dense layers.
    """
    return "moe_intermediate_size" if "moe_intermediate_size" in hf_config else "intermediate_size"


def _experts(hf_config: Config) -> int:
    there = [name for name in EXPERT_FIELDS if hf_config.get(name) is not None]
    return _number(hf_config, there[0] if there else "num_local_experts")


def _need(hf_config: Config, name: str, default: int | None = None) -> int:
    if hf_config.get(name) is None and default is not None:
        return default
    return _number(hf_config, name)


def _number(hf_config: Config, name: str) -> int:
    value = hf_config.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(
            [
                f"{_PATH}: config.json has {name}={value!r}, expected an "
                "integer; use the config.json that came with the model"
            ]
        )
    return value
