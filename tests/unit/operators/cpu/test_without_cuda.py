"""Megatron's calls to CUDA, on machines without GPUs."""

import pytest
import torch

from operators.cpu import matmul, without_cuda


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda"), "cpu", None])
def test_tensors_for_a_gpu_are_created_on_the_cpu(device):
    with without_cuda._CudaFactoriesOnCpu():
        zeros_2 = torch.zeros(2, dtype=torch.int32, device=device)
        assert zeros_2.cuda() is zeros_2
    assert zeros_2.tolist() == [0, 0]
    assert (zeros_2.dtype, zeros_2.device.type) == (torch.int32, "cpu")


def test_megatron_is_not_adapted_on_gpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(without_cuda, "ON_CPU", False)
    monkeypatch.setattr(without_cuda, "_adapted", False)
    monkeypatch.setattr(matmul, "prepare", lambda: pytest.fail("adapted"))
    without_cuda.adapt()
    assert without_cuda._adapted is False
