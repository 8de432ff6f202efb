"""Settings whose values are passed on to a dataclass of Megatron-core or vLLM, field by field.

These tables contain only the fields that must not be passed on: those with their own setting, and
those that would change a run's numbers or disable replay. The dataclass itself determines which
other fields exist, and the types of their values (`unknown_fields`). `pipeline` does not import the
dataclasses, so `retrace check` asks operators.probe, and the workers check again when they start.
"""

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from pipeline.config.keys import choices, in_words
from pipeline.config.rules.rates import OPTIM
from pipeline.config.tree import RunConfig
from pipeline.errors import nearest, shown

MEGATRON = "actor_rollout_ref.actor.megatron"
OVERRIDE = f"{MEGATRON}.override_transformer_config"
KWARGS = "actor_rollout_ref.rollout.engine_kwargs.vllm"
_ROLLOUT = "actor_rollout_ref.rollout"
PACKAGES = {"megatron": "Megatron-core", "vllm": "vLLM"}
"""The names of the packages that contain the dataclasses."""
_STRICT = ConfigDict(strict=True, allow_inf_nan=False)


@dataclasses.dataclass(frozen=True)
class Overrides:
    """The fields of one dataclass that a run may not set, or that Retrace itself reads."""

    key: str
    """The setting that contains the values."""
    original: str
    """The dotted name of the dataclass."""
    owned: Mapping[str, str]
    """Fields that have their own setting, and the setting's name."""
    refused: Mapping[str, str]
    """Patterns of refused fields, and the reasons; `*` matches any characters."""
    read: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The types of the fields that Retrace itself reads."""
    typed: bool = True
    """Whether types are compared with the dataclass; vLLM's own messages about types are clear."""

    @property
    def package(self) -> str:
        """The package that contains the dataclass: megatron or vllm."""
        return self.original.partition(".")[0]

    @property
    def named(self) -> str:
        """The dataclass, as messages name it, such as `vLLM's EngineArgs`."""
        return f"{PACKAGES[self.package]}'s {self.original.rpartition('.')[2]}"

    def refusal(self, name: str) -> str | None:
        """Return why a run may not set a field, with the fix; None if it may."""
        if name in self.owned:
            return f", which has its own setting; use {self.owned[name]} instead"
        why = next((why for like, why in self.refused.items() if fnmatchcase(name, like)), None)
        return None if why is None else f"; {why}; leave it out"


def _reasons(names: Mapping[str, str]) -> dict[str, str]:
    """Return the reason for each name; `names` contains the names for each reason."""
    return {name: reason for reason, listed in names.items() for name in listed.split()}


def _under(group: str, names: str) -> dict[str, str]:
    """Return the setting for each field whose setting has the same name."""
    return {name: f"{group}.{name}" for name in names.split()}


TRANSFORMER = Overrides(
    key=OVERRIDE,
    original="megatron.core.transformer.TransformerConfig",
    owned={
        **_under(
            MEGATRON,
            "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size "
            "virtual_pipeline_model_parallel_size expert_model_parallel_size "
            "expert_tensor_parallel_size sequence_parallel",
        ),
        **dict.fromkeys(("params_dtype", "pipeline_dtype", "bf16", "fp16"), f"{MEGATRON}.dtype"),
    },
    refused=_reasons(
        {
            "the model's config.json determines it": (
                "num_layers hidden_size num_attention_heads num_query_groups kv_channels "
                "ffn_hidden_size num_moe_experts moe_router_topk moe_ffn_hidden_size "
                "moe_layer_freq moe_router_score_function moe_router_pre_softmax mtp_num_layers"
            ),
            "it is always true: losses are means over tokens": "calculate_per_token_loss",
        }
    ),
    read={
        "account_for_embedding_in_pipeline_split": bool,
        "account_for_loss_in_pipeline_split": bool,
        "num_layers_in_first_pipeline_stage": int | None,
        "num_layers_in_last_pipeline_stage": int | None,
        "recompute_granularity": Literal["full", "selective"] | None,
        "recompute_method": Literal["uniform", "block"] | None,
        "recompute_modules": list[str] | None,
        "recompute_num_layers": int | None,
    },
)

OPTIMIZER = Overrides(
    key=f"{OPTIM}.override_optimizer_config",
    original="megatron.core.optimizer.OptimizerConfig",
    owned={
        **_under(
            OPTIM,
            "lr min_lr weight_decay clip_grad main_grads_dtype exp_avg_dtype exp_avg_sq_dtype",
        ),
        **dict.fromkeys(("adam_beta1", "adam_beta2"), f"{OPTIM}.betas"),
        **dict.fromkeys(("bf16", "params_dtype"), f"{MEGATRON}.dtype"),
        "use_distributed_optimizer": f"{MEGATRON}.use_distributed_optimizer",
    },
    refused=_reasons(
        {
            "all weights have one learning rate": "decoupled_*lr",
            "weights are bfloat16 or float32": "fp16 fp8_recipe reuse_grad_buf_*",
            "the optimizer is Adam": "optimizer",
            "the weights that Adam updates are float32, as in checkpoints": "main_params_dtype",
            "weights are gathered before they are read": "overlap_param_gather*",
        }
    ),
    read={
        "adam_eps": float,
        "decoupled_weight_decay": bool,
        "optimizer_cpu_offload": bool,
        "optimizer_offload_fraction": float,
        "store_param_remainders": bool,
        "use_precision_aware_optimizer": bool,
    },
)

DDP = Overrides(
    key=f"{MEGATRON}.override_ddp_config",
    original="megatron.core.distributed.DistributedDataParallelConfig",
    owned={"use_distributed_optimizer": f"{MEGATRON}.use_distributed_optimizer"},
    refused=_reasons(
        {
            "the loss reads the output layer's weight outside its module, where Megatron-core "
            "would not wait for it": "overlap_param_gather align_param_gather",
            "losses are means over tokens, not over ranks": "average_in_collective",
            "it requires a schedule of Megatron's own training loop": "delay_wgrad_compute",
            "optimizer state is split over all data-parallel ranks": (
                "num_distributed_optimizer_instances"
            ),
            "weights are bfloat16 or float32": "fp8_param_gather reuse_grad_buf_* keep_fp8_*",
            "Megatron-FSDP is not supported; weights are split by TP, PP and EP": (
                "use_*_fsdp data_parallel_sharding_strategy outer_dp_sharding_strategy"
            ),
        }
    ),
    read={"bucket_size": int | None, "grad_reduce_in_fp32": bool, "nccl_ub": bool},
)

_CRITIC = "critic.optim"
CRITIC_OPTIMIZER = dataclasses.replace(
    OPTIMIZER,
    key=OPTIMIZER.key.replace(OPTIM, _CRITIC),
    owned={name: key.replace(OPTIM, _CRITIC) for name, key in OPTIMIZER.owned.items()},
)

ENGINE = Overrides(
    key=KWARGS,
    original="vllm.EngineArgs",
    owned={
        **_under(
            _ROLLOUT,
            "dtype enforce_eager gpu_memory_utilization max_num_batched_tokens max_num_seqs",
        ),
        "enable_return_routed_experts": f"{_ROLLOUT}.enable_rollout_routing_replay",
        "max_model_len": "data.max_prompt_length and data.max_response_length",
        "model": "actor_rollout_ref.model.path",
        "seed": "trainer.seed",
        "tensor_parallel_size": f"{_ROLLOUT}.tensor_model_parallel_size",
    },
    refused=_reasons(
        {
            "routes are stored in blocks next to those of the prefix cache, which is always on": (
                "enable_prefix_caching"
            ),
            "this argument turns the recording of routes on or off": "aux_output_config",
            "the rows of a batch that is split in two overwrite each other's routes": (
                "enable_dbo ubatch_size dbo_*"
            ),
            "keys and values that are loaded from elsewhere lack the routes of their rows": (
                "kv_transfer_config kv_offloading_* ec_*"
            ),
            "prompt rows would skip layers and have no routes there": "kv_sharing_fast_prefill",
            "engines have one pipeline stage and no context parallelism; with more, no routes "
            "would be recorded": "pipeline_parallel_size *context_parallel_size dcp_* cp_*",
            "drafted tokens are accepted several at a time, and rejected ones leave routes "
            "behind": "speculative_config spec_* diffusion_config",
            "the engine's weights and log-probs would differ from the trainer's": (
                "*quantization* model_impl model_class_overrides hf_overrides"
            ),
            "keys and values of lower precision shift log-probs away from the trainer's": (
                "kv_cache_dtype*"
            ),
            "log-probs must refer to the distribution from which the engine samples": (
                "logprobs_mode"
            ),
            "the argument changes how tokens are sampled, which the trainer cannot reproduce": (
                "logits_processors watermark_config *generation_config return_sampling_mask "
                "enable_trace_replay"
            ),
            "adapters are not supported; all weights are trained": "*lora*",
            "policies are loaded in place, from the store; weights kept elsewhere would not "
            "change": (
                "weight_transfer_config load_format model_loader_extra_config ignore_patterns "
                "pt_load_map_location offload_* cpu_offload_* *eplb*"
            ),
            "model, tokenizer and their configuration come from actor_rollout_ref.model.path": (
                "model_weights served_model_name tokenizer* hf_config_path runner convert "
                "pooler_config skip_tokenizer_init trust_remote_code config_format *revision "
                "hf_token download_dir"
            ),
            "the engine has no tokenizer: it gets and returns token ids": "reasoning_*",
            "Retrace uses its own classes here, to record routes": (
                "worker_cls worker_extension_cls scheduler_cls"
            ),
            "each engine is one process group on one machine; add engines with "
            "launch.rollout_workers": (
                "data_parallel_* *elastic_ep* nnodes node_rank master_* _api_process_*"
            ),
            "the launcher assigns each engine its GPUs": "device_ids",
        }
    ),
    typed=False,
)


def set_overrides(config: RunConfig) -> list[tuple[Overrides, Mapping[str, Any]]]:
    """Return each group of overrides that the run sets, with its values."""
    actor = config.actor_rollout_ref.actor
    groups = (
        (TRANSFORMER, actor.megatron.override_transformer_config),
        (OPTIMIZER, actor.optim.override_optimizer_config),
        (CRITIC_OPTIMIZER, config.critic.optim.override_optimizer_config),
        (DDP, actor.megatron.override_ddp_config),
        (ENGINE, config.actor_rollout_ref.rollout.engine_kwargs.vllm),
    )
    return [(group, values) for group, values in groups if values]


def refused_fields(group: Overrides, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield problems with fields that a run may not set, and with values that Retrace reads."""
    for name, value in values.items():
        if (refusal := group.refusal(name)) is not None:
            yield f"{group.key}.{name}: found {shown(value)}{refusal}"
        elif name in group.read:
            yield from _type_problems(f"{group.key}.{name}", group.read[name], value)


def unknown_fields(group: Overrides, original: type, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield problems with names and types that do not fit the dataclass itself.

    Args:
        group: The group of overrides.
        original: The dataclass of Megatron-core or vLLM.
        values: The values by field; fields that a run may not set anyway are skipped.
    """
    names = [field.name for field in dataclasses.fields(original)]
    hints = typing.get_type_hints(original) if group.typed else {}
    for name, value in values.items():
        if group.refusal(name) is not None:
            continue
        key = f"{group.key}.{name}"
        if name not in names:
            yield f"{key}: not a field of {group.named}; {nearest(name, names)}"
        elif name in hints:
            yield from _type_problems(key, _of_yaml(hints[name]), value)


def _type_problems(key: str, kind: Any, value: Any) -> Iterator[str]:
    adapter = TypeAdapter(kind, config=_STRICT)
    try:
        adapter.validate_python(value)
    except ValidationError:
        schema = adapter.json_schema()
        fix = nearest(value, choices(schema), "correct it or leave it out")
        yield f"{key}: found {shown(value)}, expected {in_words(schema)}; {fix}"


def _of_yaml(kind: Any) -> Any:
    """Return the type of the values that YAML can express, or Any if it can express none.

    Functions, enums and data types of torch become Any; Megatron-core checks their values.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in (bool, int, float, str, type(None)) or origin is Literal:
        return kind
    if origin in (typing.Union, types.UnionType):
        parts = [_of_yaml(part) for part in arguments]
        return Any if Any in parts else typing.Union[tuple(parts)]  # noqa: UP007
    if origin in (list, tuple):
        return list[_of_yaml(arguments[0])]  # type: ignore[misc]
    return Any
