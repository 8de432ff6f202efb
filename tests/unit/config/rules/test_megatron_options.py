"""Which options for Megatron-core's optimizer and data parallelism are accepted, noted or
refused."""

import dataclasses
import math

import pytest
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.enums import AttnBackend

from pipeline.config.actor import Actor
from pipeline.config.keys import all_keys
from pipeline.config.rules.cuda import REPLACED, cuda_notes, cuda_problems
from pipeline.config.rules.megatron_options import (
    DDP,
    OPTIMIZER,
    option_problems,
    precision_aware,
)
from tests.unit.config.settings import OVERRIDE

PRECISION = "actor_rollout_ref.actor.optim.use_precision_aware_optimizer"


def actor(optimizer=None, ddp=None, transformer=None, optim=None, **megatron) -> Actor:
    return Actor.model_validate(
        {
            "optim": {"override_optimizer_config": optimizer or {}, **(optim or {})},
            "megatron": {
                "override_ddp_config": ddp or {},
                "override_transformer_config": transformer or {},
                **megatron,
            },
        }
    )


@pytest.mark.parametrize(
    ("options", "original"), [(OPTIMIZER, OptimizerConfig), (DDP, DistributedDataParallelConfig)]
)
class TestTables:
    def test_every_field_is_in_exactly_one_table(self, options, original):
        """This test fails if a new release of Megatron-core has different fields."""
        decided = [*options.types, *options.owned, *options.refused]
        assert sorted(decided) == sorted(field.name for field in dataclasses.fields(original))
        assert options.megatron_name == original.__name__

    def test_types_match_the_defaults(self, options, original):
        for field in dataclasses.fields(original):
            if field.name in options.types and field.default is not None:
                assert type(field.default) is options.types[field.name], field.name

    def test_settings_exist(self, options, original):
        assert {options.key, *options.owned.values()} <= all_keys().keys()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"optimizer": {"adam_epz": 1.0}}, "adam_epz: not a field of Megatron-core 0.16.1's"),
        ({"optimizer": {"adam_epz": 1.0}}, "did you mean adam_eps?"),
        ({"optimizer": {"offload_fraction": 1.0}}, "did you mean optimizer_offload_fraction?"),
        ({"optimizer": {"lr": 1.0}}, "use actor_rollout_ref.actor.optim.lr instead"),
        ({"optimizer": {"optimizer": "sgd"}}, "but the optimizer is Adam"),
        ({"optimizer": {"adam_eps": "small"}}, "adam_eps: found 'small', expected a number"),
        (
            {"optimizer": {"pin_cpu_grads": 1}},
            "found 1, expected true or false; correct it or leave",
        ),
        ({"optimizer": {"optimizer_cpu_offload": True}}, "fraction: found null, but"),
        ({"optimizer": {"optimizer_offload_fraction": 1.0}}, "without optimizer_cpu_offload"),
        (
            {"optimizer": {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 2.0}},
            "expected a share from 0 to 1",
        ),
        ({"ddp": {"bucket_size": "large"}}, "bucket_size: found 'large', expected an integer or"),
        ({"optimizer": {"adam_eps": -1}}, "adam_eps: found -1, expected a number > 0"),
        ({"optimizer": {"adam_eps": 0.0}}, "adam_eps: found 0.0, expected a number > 0"),
        ({"optimizer": {"adam_eps": math.inf}}, "adam_eps: found inf, expected a number"),
        (
            {
                "optimizer": {
                    "optimizer_cpu_offload": True,
                    "optimizer_offload_fraction": 1.0,
                    "decoupled_weight_decay": False,
                }
            },
            "decoupled_weight_decay: found False with optimizer_cpu_offload",
        ),
        (
            {
                "optimizer": {"use_precision_aware_optimizer": False},
                "optim": {"use_precision_aware_optimizer": True},
            },
            f"use_precision_aware_optimizer: found False, but {PRECISION} is true",
        ),
        (
            {"ddp": {"bucket_size": 0, "overlap_grad_reduce": True}},
            "bucket_size: found 0, expected an integer >= 1 or null",
        ),
        ({"ddp": {"bucket_size": -5}}, "bucket_size: found -5, expected an integer >= 1"),
        ({"ddp": {"bucket_size": 1000}}, "no effect without overlap_grad_reduce"),
        ({"ddp": {"nccl_ub": True}, "grad_offload": True}, "grad_offload: found True with"),
        ({"ddp": {"nccl_ub": None}}, "nccl_ub: found null, expected true or false"),
        ({"ddp": {"overlap_param_gather": True}}, "reads the output layer's weight outside"),
        ({"ddp": {"average_in_collective": True}}, "losses are means over tokens"),
        ({"ddp": {"grad_reduce_in_fp": True}}, "did you mean grad_reduce_in_fp32?"),
        ({"optim": {"exp_avg_dtype": "bf16"}}, f"expected fp32 unless {PRECISION}=true; write"),
        (
            {"optim": {"use_precision_aware_optimizer": True}, "dtype": "float32"},
            "dtype is float32; write false",
        ),
        (
            {
                "optim": {"use_precision_aware_optimizer": True},
                "use_distributed_optimizer": False,
            },
            "use_distributed_optimizer is false; write true",
        ),
        (
            {
                "optim": {"use_precision_aware_optimizer": True, "main_grads_dtype": "bf16"},
                "ddp": {"grad_reduce_in_fp32": True},
            },
            "main_grads_dtype=bf16 determines it",
        ),
    ],
)
def test_invalid_options_are_refused(settings, expected):
    (problem,) = option_problems(actor(**settings))
    assert expected in problem


def test_options_of_verls_scripts_pass():
    """Scripts for models with hundreds of billions of parameters use an offloaded, precision-aware
    optimizer."""
    settings = actor(
        {
            "use_precision_aware_optimizer": True,
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": 1,
            "overlap_cpu_optimizer_d2h_h2d": True,
            "decoupled_weight_decay": True,
        },
        {"grad_reduce_in_fp32": True, "overlap_grad_reduce": True, "bucket_size": 40_000_000},
    )
    assert option_problems(settings) == []
    assert precision_aware(settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"optim": {"use_precision_aware_optimizer": True}},
        {"optimizer": {"use_precision_aware_optimizer": True}},
        {"optimizer": {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}},
        {"ddp": {"overlap_grad_reduce": True}},
        {"optimizer": {"pin_cpu_grads": True}},
        {"optimizer": {"pin_cpu_params": True}},
        {"optimizer": {"store_param_remainders": True}},
        {"transformer": {"cp_comm_type": "p2p"}},
        {"ddp": {"nccl_ub": True}},
        {"transformer": {"cpu_offloading": True, "cpu_offloading_num_layers": 1}},
        {"transformer": {"fine_grained_activation_offloading": True}},
    ],
)
def test_options_that_require_cuda_are_refused_on_cpu(settings):
    (problem,) = cuda_problems(actor(**settings))
    assert "found" in problem
    assert problem.endswith("or train on GPUs")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fp8", "hybrid"),
        ("fp8", "e4m3"),
        ("fp4", "e2m1"),
        ("symmetric_ar_type", "two_shot"),
        ("cuda_graph_impl", "local"),
        ("cuda_graph_impl", "transformer_engine"),
        ("batch_invariant_mode", True),
        ("defer_embedding_wgrad_compute", True),
        ("delay_wgrad_compute", True),
        ("disable_bf16_reduced_precision_matmul", True),
        ("enable_autocast", True),
        ("enable_cuda_graph", True),
        ("external_cuda_graph", True),
        ("fused_single_qkv_rope", True),
        ("memory_efficient_layer_norm", True),
        ("moe_enable_deepep", True),
        ("moe_router_fusion", True),
        ("overlap_moe_expert_parallel_comm", True),
        ("tp_comm_overlap", True),
        ("use_kitchen", True),
        ("use_kitchen_attention", True),
        ("use_te_activation_func", True),
        ("use_te_rng_tracker", True),
    ],
)
def test_fields_of_kernels_that_require_cuda_are_refused_on_cpu(field, value):
    """On CPU, layers ignore most of these fields; with the others, the model cannot be built."""
    (problem,) = cuda_problems(actor(transformer={field: value}))
    assert problem.startswith(f"{OVERRIDE}.{field}: found {value!r}, but ")
    assert problem.endswith("; leave it out, or train on GPUs")


@pytest.mark.parametrize(
    "fields",
    [
        {"fp8": None, "fp4": None, "symmetric_ar_type": None, "cuda_graph_impl": "none"},
        {"tp_comm_overlap": False, "enable_autocast": False, "moe_router_fusion": False},
        {"fp8_recipe": "blockwise", "fp8_margin": 1},
    ],
)
def test_values_without_an_effect_on_any_device_pass_on_cpu(fields):
    """Fields such as fp8_recipe have an effect only with fp8."""
    assert list(cuda_problems(actor(transformer=fields))) == []


def test_fields_that_are_replaced_on_cpu_are_noted():
    from operators.training.megatron import cpu_megatron

    assert {**REPLACED, "attention_backend": AttnBackend.auto} == cpu_megatron.SETTINGS
    written = actor(transformer={"attention_backend": "flash", "moe_permute_fusion": False})
    (note,) = cuda_notes(written.megatron)
    assert note.endswith("attention_backend: flash requires CUDA; on CPU the value is auto")


def test_options_that_run_on_cpu_pass():
    settings = actor(
        {"adam_eps": 1e-7, "optimizer_cpu_offload": False}, {"grad_reduce_in_fp32": False}
    )
    assert [*option_problems(settings), *cuda_problems(settings)] == []
