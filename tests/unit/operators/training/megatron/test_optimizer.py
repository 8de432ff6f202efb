"""Learning rates, weight decay, and optimizer options."""

import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from megatron.core.optimizer import optimizer_config as megatron_config

from operators.training.megatron import optimizer as module
from operators.training.megatron.optimizer import (
    ddp_config,
    make_rates,
    optimizer_config,
    wrap_for_training,
)
from pipeline.config.actor import Actor
from pipeline.config.optim import Optim
from pipeline.errors import InputError

STYLES = {
    "constant": [0.2, 0.6, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
    "linear": [0.2, 0.6, 1.0, 0.775, 0.55, 0.325, 0.1, 0.1],
    "cosine": [
        *(0.2, 0.6),
        *(0.1 + 0.9 * (1 + math.cos(math.pi * share)) / 2 for share in (0, 0.25, 0.5, 0.75, 1)),
        0.1,
    ],
    "inverse-square-root": [0.2, 0.6, *(math.sqrt(2 / step) for step in (2, 3, 4, 5, 6)), 0.1],
    "WSD": [0.2, 0.6, 1.0, 1.0, 1.0, 0.55, 0.1, 0.1],
}
"""Rates for steps 0 to 7: a warm-up from 0.2 over two steps, then a decay from 1.0 to 0.1 at step
6."""


def rates_of(groups: list[dict] | None = None, **optim):
    optimizer = SimpleNamespace(param_groups=[{}] if groups is None else groups)
    return make_rates(optimizer, Optim.model_validate(optim))


@pytest.mark.parametrize("style", STYLES)
def test_each_style_has_its_rates(style):
    groups = [{}, {"wd_mult": 0.0}]
    rates = rates_of(
        groups,
        lr=1.0,
        lr_warmup_init=0.2,
        lr_warmup_steps=2,
        lr_decay_style=style,
        lr_decay_steps=6,
        min_lr=0.1,
        lr_wsd_decay_style="linear",
        lr_wsd_decay_steps=2 if style == "WSD" else None,
    )
    found = []
    for step in range(8):
        found.append(rates.set(step))
        assert [group["lr"] for group in groups] == [found[-1]] * 2
    assert found == pytest.approx(STYLES[style])
    assert rates.set(3) == found[3], "a restart in the middle has the same rate"


def test_a_run_without_a_schedule_warms_up_from_zero():
    rates = rates_of(lr=1.0, lr_warmup_steps=4)
    assert [rates.set(step) for step in range(6)] == [0, 0.25, 0.5, 0.75, 1, 1]
    assert rates_of(lr=1.0).set(0) == 1.0


@pytest.mark.parametrize("everywhere", [True, False])
def test_norms_and_biases_decay_only_if_configured(everywhere):
    """Megatron marks norms and biases with wd_mult, which the optimizer itself does not read."""
    groups = [{"wd_mult": 1.0, "weight_decay": 0.5}, {"wd_mult": 0.0, "weight_decay": 0.5}]
    rates_of(groups, weight_decay=0.5, weight_decay_on_norms=everywhere).set(0)
    assert [group["weight_decay"] for group in groups] == [0.5, 0.5 if everywhere else 0.0]


def actor(optim: dict | None = None, **megatron) -> Actor:
    return Actor.model_validate({"optim": optim or {}, "megatron": megatron})


PRECISE = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"}


class FusedAdam:
    """The signature of Transformer Engine's FusedAdam, which Megatron-core inspects."""

    def __init__(
        self, params, master_weight_dtype, exp_avg_dtype, exp_avg_sq_dtype, use_decoupled_grad
    ):
        raise NotImplementedError


@pytest.fixture
def transformer_engine(monkeypatch):
    """Install stubs for the parts of Transformer Engine that Megatron-core uses here."""
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    optimizers = ModuleType("transformer_engine.pytorch.optimizers")
    optimizers.FusedAdam = FusedAdam
    monkeypatch.setitem(sys.modules, optimizers.__name__, optimizers)
    monkeypatch.setattr(megatron_config, "is_te_min_version", lambda version: True)


class TestOptions:
    def test_overrides_reach_megatron(self):
        options = {"adam_eps": 1e-7, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 1}
        settings = actor(
            {"override_optimizer_config": options},
            override_ddp_config={"grad_reduce_in_fp32": False, "bucket_size": 1000},
        )
        adam = optimizer_config(settings)
        assert {name: getattr(adam, name) for name in options} == options
        assert not ddp_config(settings).grad_reduce_in_fp32
        assert ddp_config(settings).bucket_size == 1000

    @pytest.mark.parametrize("gradients", ["fp32", "bf16"])
    def test_lower_precision_sets_the_dtypes(self, transformer_engine, gradients):
        settings = actor(PRECISE | {"main_grads_dtype": gradients})
        adam = optimizer_config(settings)
        assert adam.use_precision_aware_optimizer
        assert (adam.exp_avg_dtype, adam.exp_avg_sq_dtype) == (torch.bfloat16, torch.float32)
        assert adam.main_grads_dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[gradients]
        assert ddp_config(settings).grad_reduce_in_fp32 == (gradients == "fp32")

    def test_a_rank_on_the_cpu_refuses_options_that_need_cuda(self):
        with pytest.raises(InputError, match="use_precision_aware_optimizer: found True, but"):
            wrap_for_training([], SimpleNamespace(), actor(PRECISE))

    @pytest.mark.parametrize("count", [1, 2])
    def test_overlapped_gradients_set_no_sync_func(self, monkeypatch, count):
        """Megatron's schedules call no_sync_func so that only the last micro-batch sends
        gradients."""

        class Wrapped:
            def __init__(self, config, settings, chunk, disable_bucketing):
                assert settings.overlap_grad_reduce
                self.no_sync = f"no_sync of {chunk}"

            def broadcast_params(self):
                pass

        monkeypatch.setattr(module.without_cuda, "ON_CPU", False)
        monkeypatch.setattr(module, "DistributedDataParallel", Wrapped)
        made = SimpleNamespace(scale_loss=None)
        monkeypatch.setattr(module, "get_megatron_optimizer", lambda config, chunks: made)
        config = SimpleNamespace(no_sync_func=None)
        settings = actor(override_ddp_config={"overlap_grad_reduce": True})
        wrap_for_training(["a", "b"][:count], config, settings)
        both = ["no_sync of a", "no_sync of b"]
        assert config.no_sync_func == ("no_sync of a" if count == 1 else both)
