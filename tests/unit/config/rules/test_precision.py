"""Which options for Megatron-core's optimizer and data parallelism are accepted, noted or
refused."""

import math

import pytest

from pipeline.config.actor import Actor
from pipeline.config.rules.cuda import cuda_notes, cuda_problems
from pipeline.config.rules.precision import option_problems, precision_aware
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
    ("settings", "expected"),
    [
        ({"optimizer": {"adam_eps": "small"}}, "adam_eps: found 'small', expected a number"),
        ({"optimizer": {"optimizer_cpu_offload": True}}, "fraction: found null, but"),
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
        ({"ddp": {"nccl_ub": True}, "grad_offload": True}, "grad_offload: found True with"),
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
    [("fp8", "hybrid"), ("cuda_graph_impl", "local"), ("moe_router_fusion", True),
     ("enable_autocast", True), ("use_kitchen", True), ("tp_comm_overlap", True)],
)  # fmt: skip
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
    written = actor(transformer={"attention_backend": "flash", "moe_permute_fusion": False})
    (note,) = cuda_notes(written.megatron)
    assert note.endswith("attention_backend: flash requires CUDA; on CPU the value is auto")


def test_options_that_run_on_cpu_pass():
    settings = actor(
        {"adam_eps": 1e-7, "optimizer_cpu_offload": False}, {"grad_reduce_in_fp32": False}
    )
    assert [*option_problems(settings), *cuda_problems(settings)] == []
