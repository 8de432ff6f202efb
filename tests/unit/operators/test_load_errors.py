"""Errors of loading a model that a restart would meet again end the run; others restart workers."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError

from operators.load_errors import LoadError, lasting_errors
from operators.rollout.types import RolloutError
from operators.training.errors import PeerError
from pipeline.errors import InputError
from pipeline.store import StoreError


@pytest.mark.parametrize(
    "error",
    [
        KeyError("layers.1.mlp.gate.e_score_correction_bias"),
        ValueError("head size 48 is not supported"),
        StrictDataclassFieldValidationError("vocab_size", TypeError("expected int, got NoneType")),
        RuntimeError("Sizes of tensors must match except in dimension 1"),
        RolloutError("the engine's model has other MoE layers"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_that_would_recur_is_lasting_and_names_its_cause(error: Exception):
    with (
        pytest.raises(LoadError, match="loading failed: ") as raised,
        lasting_errors("loading", RolloutError),
    ):
        raise error
    assert raised.value.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [
        InputError(["the model cannot be trained"]),
        OSError("no space left on device"),
        PeerError("rank 1 ended"),
        StoreError("no answer for 120 s"),
        RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"),
        torch.OutOfMemoryError("Tried to allocate 2.00 GiB; the size of the pool is 3 GiB"),
        ValueError("Free memory on device cuda:0 (3.1/79.1 GiB) on startup is less than desired"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_other_errors_are_unchanged(error: Exception):
    with pytest.raises(type(error)) as raised, lasting_errors("loading"):
        raise error
    assert raised.value is error
