"""The choice of a run's device, and the errors about unusable GPUs."""

import os
import subprocess
import sys

import pytest

from operators import probe
from pipeline import device
from pipeline.device import TorchFindings, choose_device, keep_to, probe_torch
from pipeline.errors import InputError

GOOD = TorchFindings("2.13.0", "13.0", 2, None)
OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 11040)."


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device, "gpu_pool", lambda: ("0", "1"))


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device, "gpu_pool", lambda: ())


def not_asked() -> TorchFindings:
    raise AssertionError("torch takes seconds to start")


def test_without_gpus_auto_is_the_cpu(no_gpu):
    assert choose_device("auto", not_asked) == choose_device("cpu", not_asked) == "cpu"


def test_with_gpus_auto_is_cuda(gpus):
    assert choose_device("auto", lambda: GOOD) == choose_device("cuda", lambda: GOOD) == "cuda"
    assert choose_device("cpu", not_asked) == "cpu"


@pytest.mark.parametrize("hidden", [None, ""])
def test_cuda_without_gpus_is_refused(no_gpu, monkeypatch: pytest.MonkeyPatch, hidden: str | None):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    with pytest.raises(InputError) as caught:
        choose_device("cuda", not_asked)
    why = "" if hidden is None else " (CUDA_VISIBLE_DEVICES is '')"
    assert caught.value.problems == (
        f"trainer.device: found cuda, but this machine has no NVIDIA GPU{why}; use a machine with "
        "GPUs, or compute on the CPU: trainer.device=cpu",
    )


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (
            TorchFindings("2.13.0+cpu", None, 0, None),
            "torch 2.13.0+cpu is built without CUDA; install the packages for GPUs (in a checkout: "
            "make clean install DEVICE=cuda)",
        ),
        (
            TorchFindings("2.13.0", "13.0", 0, OLD_DRIVER),
            f"CUDA 13.0 of torch 2.13.0 cannot be initialised: {OLD_DRIVER}; update NVIDIA's "
            "driver (nvidia-smi shows its version)",
        ),
        (
            TorchFindings("2.13.0", "13.0", 1, None),
            "torch 2.13.0 sees 1; check CUDA_VISIBLE_DEVICES and the GPUs that the container is "
            "given",
        ),
    ],
)
@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_gpus_that_cannot_be_used_raise_an_error(gpus, found: TorchFindings, says: str, wanted):
    with pytest.raises(InputError) as caught:
        choose_device(wanted, lambda: found)
    assert caught.value.problems == (
        f"trainer.device: found {wanted}, and this machine has 2 GPUs, but {says}; or compute on "
        "the CPU: trainer.device=cpu",
    )


def test_a_separate_process_queries_torch():
    import torch

    found = probe_torch()
    assert found.version == torch.__version__
    assert found.built_for == torch.version.cuda
    assert found == TorchFindings(**probe.torch_findings())


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("raise ImportError('libcudart.so.13: cannot open')", "libcudart.so.13: cannot open"),
        ("import time; time.sleep(60)", "did not start within 0 s"),
    ],
)
def test_a_torch_that_does_not_start_is_refused(
    monkeypatch: pytest.MonkeyPatch, program: str, says: str
):
    run = subprocess.run
    monkeypatch.setattr(
        subprocess, "run", lambda _, **kwargs: run([sys.executable, "-c", program], **kwargs)
    )
    if "sleep" in program:
        monkeypatch.setattr(device, "_PROBE_S", 0.1)
    with pytest.raises(InputError, match=says):
        probe_torch()


def test_a_process_restricted_to_the_cpu_sees_no_gpu(gpus, monkeypatch: pytest.MonkeyPatch):
    """Megatron and vLLM would use the GPUs that torch sees."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert keep_to("cpu") == "cpu"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(device, "probe_torch", lambda: GOOD)
    assert keep_to("auto") == "cuda"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
