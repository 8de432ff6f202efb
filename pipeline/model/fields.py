"""The fields of a Hugging Face config.json: their types, and the values that absent fields have.

transformers checks the types when a worker reads the file, and supplies its own defaults. This
module does both when `retrace check` reads the file, so that a later reader finds each field that
it needs. A test compares the types and defaults with the classes of transformers.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.errors import cut

Config = Mapping[str, Any]
EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""The possible names of the field that contains the number of experts. transformers 5 renames
num_experts to num_local_experts."""


@dataclass(frozen=True)
class Field:
    """The type of a field. Example: Field(int, 1) is a number of at least 1."""

    kind: type[Any]
    least: int | None = None
    null: bool = False
    """Whether the field may be null."""
    not_null: tuple[str, ...] = ()
    """The families in which the field may not be null."""

    def accepts(self, value: Any, family: str) -> bool:
        """Return whether a family's field may have a value."""
        if value is None:
            return self.null and family not in self.not_null
        if self.kind is list:
            return type(value) is list and all(type(item) is int for item in value)
        return type(value) is self.kind and (self.least is None or bool(value >= self.least))

    def __str__(self) -> str:
        names = {int: "an integer", float: "a number with a decimal point", bool: "true or false"}
        name = names.get(self.kind, "a list of integers" if self.kind is list else "a text")
        return name if self.least is None else f"{name} of at least {self.least}"


_SIZE = Field(int, 1)
_FLAG = Field(bool)
_NUMBER = Field(float)
_TOKEN = Field(int, null=True)
FIELDS = {
    **dict.fromkeys(
        ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"), _SIZE
    ),
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "num_experts_per_tok"), _SIZE),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), _SIZE),
    **dict.fromkeys(("decoder_sparse_step", "n_shared_experts", "kv_lora_rank"), _SIZE),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), _SIZE),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), Field(int, 0)),
    "first_k_dense_replace": Field(int, 0),
    "num_key_value_heads": Field(int, 1, True, ("glm4_moe", "mixtral", "qwen2_moe", "qwen3_moe")),
    "head_dim": Field(int, 1, True, ("qwen3",)),
    "q_lora_rank": Field(int, 1, True),
    "n_group": Field(int, 1, True, ("glm4_moe",)),
    "topk_group": Field(int, 1, True, ("glm4_moe",)),
    "sliding_window": Field(int, 0, True),
    "max_window_layers": Field(int),
    **dict.fromkeys(("bos_token_id", "pad_token_id"), _TOKEN),
    **dict.fromkeys(("attention_bias", "mlp_bias", "qkv_bias", "tie_word_embeddings"), _FLAG),
    **dict.fromkeys(("use_qk_norm", "use_sliding_window", "output_router_logits"), _FLAG),
    **dict.fromkeys(("norm_topk_prob", "rope_interleave", "use_cache"), _FLAG),
    **dict.fromkeys(("rms_norm_eps", "routed_scaling_factor", "router_aux_loss_coef"), _NUMBER),
    **dict.fromkeys(("initializer_range", "router_jitter_noise"), _NUMBER),
    "mlp_only_layers": Field(list, null=True),
    "hidden_act": Field(str),
}
"""The types of the fields that a family's class in transformers checks, or that Retrace reads."""

_WIDE = {"max_position_embeddings": 131_072, "num_key_value_heads": 8}
_QWEN = {"max_position_embeddings": 32_768}
DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "max_position_embeddings": 4096,
        "num_key_value_heads": 128,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "q_lora_rank": 1536,
        "v_head_dim": 128,
        "n_group": 8,
        "topk_group": 4,
    },
    "glm4_moe": {**_WIDE, "moe_intermediate_size": 1408, "n_shared_experts": 1},
    "llama": {"max_position_embeddings": 2048},
    "mixtral": _WIDE,
    "qwen2": {**_QWEN, "num_key_value_heads": 32},
    "qwen2_moe": {
        **_QWEN,
        "num_key_value_heads": 16,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    "qwen3": {**_QWEN, "num_key_value_heads": 32, "head_dim": 128},
    "qwen3_moe": {**_QWEN, "num_key_value_heads": 4, "moe_intermediate_size": 768},
}
"""The values of absent fields in transformers, keyed by family. Sizes that identify a model, such
as hidden_size, are not listed: a config.json must have them. A flag has the same default wherever
Retrace reads it."""

EXPERT_CHOICE = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
"""How DeepSeek-V3 chooses experts. Without these fields, vLLM would assume DeepSeek-V2."""


def complete(config: Config) -> Config:
    """Return a config with the values that transformers uses for absent and null fields.

    Configs of unknown families are returned unchanged.
    """
    defaults = DEFAULTS.get(str(config.get("model_type")))
    if defaults is None:
        return config
    full = {**defaults, **config}
    heads, hidden = full.get("num_attention_heads"), full.get("hidden_size")
    if full.get("num_key_value_heads") is None:
        full["num_key_value_heads"] = heads
    # In DeepSeek-V3's config, head_dim is the rotary part of a head.
    if "kv_lora_rank" not in full and full.get("head_dim") is None and heads and hidden:
        full["head_dim"] = hidden // heads
    return full


def missing_fields(config: Config) -> dict[str, Any]:
    """Return fields that vLLM and mbridge read although a config.json may lack them.

    The code of transformers computes these fields or has them fixed. Only absent and null fields
    are returned.
    """
    full = complete(config)
    fields = EXPERT_CHOICE if "kv_lora_rank" in full else {"head_dim": full.get("head_dim")}
    fields = {**fields, "architectures": [model_name(str(config["model_type"]))]}
    return {
        name: value
        for name, value in fields.items()
        if value is not None and config.get(name) is None
    }


def model_name(family: str) -> str:
    """Return the name of a family's class in transformers and vLLM."""
    return "".join(map(str.capitalize, family.split("_"))) + "ForCausalLM"


def value_problems(config: Config) -> list[str]:
    """Return the fields whose values no model can have, in the form of `training_problems`.

    Configs of unknown families have no problems. Absent fields are not checked.
    """
    family = str(config.get("model_type"))
    if family not in DEFAULTS:
        return []
    problems = [
        f"has {name}={cut(value)}, expected {FIELDS[name]}"
        for name, value in config.items()
        if name in FIELDS and not FIELDS[name].accepts(value, family)
    ]
    problems += _end_problems(config)
    problems += _rope_problems(config)
    return [f"{text}; use the config.json that came with the model" for text in problems]


def _end_problems(config: Config) -> Iterator[str]:
    ends = config.get("eos_token_id")
    if not all(type(end) is int for end in (ends if isinstance(ends, list) else [ends or 0])):
        yield f"has eos_token_id={cut(ends)}, expected an integer, a list of integers or null"


def _rope_problems(config: Config) -> Iterator[str]:
    rope: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = config.get(name) or {}
        if isinstance(value, dict):
            rope |= value
        else:
            yield f"has {name}={cut(value)}, expected an object or null"
    for fields in (config, rope):
        theta = fields.get("rope_theta", 1)
        if type(theta) not in (int, float) or theta <= 0:
            yield f"has rope_theta={cut(theta)}, expected a positive number"


def pair_problems(config: Config) -> Iterator[str]:
    """Yield the pairs of valid values that contradict each other, in the same form."""
    experts = next((config[name] for name in EXPERT_FIELDS if config.get(name) is not None), None)
    groups = config.get("n_group") or 1
    classes = [model_name(str(config["model_type"]))]
    if (found := config.get("architectures") or classes) != classes:
        yield f"has architectures={cut(found)}, expected {classes}"
    layers = ["full_attention"] * (config.get("num_hidden_layers") or 0)
    if layers and (types := config.get("layer_types")) not in (None, layers):
        yield f"has layer_types={cut(types)}, expected {len(layers)} times full_attention"
    pairs = [("num_attention_heads", "num_key_value_heads"), ("experts", "n_group")]
    if config["model_type"] == "llama":
        pairs.append(("hidden_size", "num_attention_heads"))
    sizes = {**config, "experts": experts}
    for whole, part in pairs:
        if sizes.get(whole) and sizes.get(part) and sizes[whole] % sizes[part]:
            yield f"has {part}={sizes[part]}, expected a divisor of {whole}={sizes[whole]}"
    topk = config.get("num_experts_per_tok")
    if experts and topk and topk > experts:
        yield f"has num_experts_per_tok={topk}, expected at most the number of experts, {experts}"
    if groups > 1 and not 1 <= (config.get("topk_group") or 0) <= groups:
        yield f"has topk_group={cut(config.get('topk_group'))}, expected 1 to n_group={groups}"
