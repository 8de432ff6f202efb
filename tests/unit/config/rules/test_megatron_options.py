"""Options of Megatron-core's optimizer and data parallelism: what passes, what is refused."""

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
    def test_every_field_is_decided_once(self, options, original):
        """A new release with other fields fails here."""
        decided = [*options.types, *options.owned, *options.refused]
        assert sorted(decided) == sorted(field.name for field in dataclasses.fields(original))
        assert options.megatron_name == original.__name__

    def test_types_are_those_of_the_defaults(self, options, original):
        for field in dataclasses.fields(original):
            if field.name in options.types and field.default is not None:
                assert type(field.default) is options.types[field.name], field.name

    def test_settings_exist(self, options, original):
        assert {options.key, *options.owned.values()} <= all_keys().keys()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"optimizer": {"adam_epz": 1.0}}, "adam_epz: no field of Megatron-core 0.16.1's"),
        ({"optimizer": {"adam_epz": 1.0}}, "did you mean adam_eps?"),
        ({"optimizer": {"offload_fraction": 1.0}}, "did you mean optimizer_offload_fraction?"),
        ({"optimizer": {"lr": 1.0}}, "write actor_rollout_ref.actor.optim.lr instead"),
        ({"optimizer": {"optimizer": "sgd"}}, "but the optimizer is Adam"),
        ({"optimizer": {"adam_eps": "small"}}, "adam_eps: found 'small', expected a number"),
        ({"optimizer": {"pin_cpu_grads": 1}}, "pin_cpu_grads: found 1, expected true or false"),
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
        ({"ddp": {"nccl_ub": True}, "grad_offload": True}, "grad_offload: found true with"),
        ({"ddp": {"nccl_ub": None}}, "nccl_ub: found null, expected true or false"),
        ({"ddp": {"overlap_param_gather": True}}, "reads the output layer's weight outside"),
        ({"ddp": {"average_in_collective": True}}, "losses are means over tokens"),
        ({"ddp": {"grad_reduce_in_fp": True}}, "did you mean grad_reduce_in_fp32?"),
        ({"optim": {"exp_avg_dtype": "bf16"}}, f"expected fp32 unless {PRECISION}; write"),
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
            "main_grads_dtype=bf16 decides it",
        ),
    ],
)
def test_what_is_refused(settings, expected):
    (problem,) = option_problems(actor(**settings))
    assert expected in problem


def test_what_verls_scripts_write():
    """Offloaded and precision-aware, as for models of hundreds of billions of weights."""
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
def test_what_needs_cuda_is_refused_on_cpu(settings):
    (problem,) = cuda_problems(actor(**settings))
    assert "found" in problem
    assert problem.endswith("or train on GPUs")


def test_fields_that_are_replaced_on_cpu():
    from operators.training.megatron import cpu_megatron

    assert {**REPLACED, "attention_backend": AttnBackend.auto} == cpu_megatron.SETTINGS
    written = actor(transformer={"attention_backend": "flash", "moe_permute_fusion": False})
    (note,) = cuda_notes(written.megatron)
    assert note.endswith("attention_backend: flash needs CUDA; on CPU it is auto")


def test_what_runs_on_cpu():
    settings = actor(
        {"adam_eps": 1e-7, "optimizer_cpu_offload": False}, {"grad_reduce_in_fp32": False}
    )
    assert [*option_problems(settings), *cuda_problems(settings)] == []
