"""On what a run computes: this machine's GPUs or its processors.

The one place that decides it. The launcher, `retrace check`, both kinds of worker and `retrace
doctor` ask here, so that no process falls back to the CPU by itself.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pipeline.errors import InputError
from pipeline.hardware import gpu_pool

Device = Literal["cuda", "cpu"]
KEY = "trainer.device"
_PROBE_S = 180.0
"""Importing torch from a cold network disk takes a minute and more."""
_ON_CPU = f"or compute on the CPU: {KEY}=cpu"


@dataclass(frozen=True)
class TorchFindings:
    """What torch says about CUDA. Example: TorchFindings('2.13.0', '13.0', 8, None)."""

    version: str
    built_for: str | None
    """CUDA's version; None: a build without CUDA."""
    devices: int
    error: str | None
    """Why CUDA could not be initialised."""


def choose_device(
    wanted: Literal["auto", "cuda", "cpu"], probe: Callable[[], TorchFindings] | None = None
) -> Device:
    """The device that `trainer.device` means here.

    auto: the GPUs where there are any (that CUDA_VISIBLE_DEVICES does not hide), else the CPU.
    torch is asked, by `probe`, only where GPUs are to be used. Raises InputError where they are
    there or wanted, but cannot be used.
    """
    if wanted == "cpu":
        return "cpu"
    pool = gpu_pool()
    if wanted == "auto" and not pool:
        return "cpu"
    if not pool:
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = "" if named is None else f" (CUDA_VISIBLE_DEVICES is {named!r})"
        raise InputError(
            [f"{KEY}: found cuda, but this machine has no NVIDIA GPU{hidden}; use one, {_ON_CPU}"]
        )
    problem = unusable((probe or probe_torch)(), len(pool))
    if problem is not None:
        raise InputError([f"{KEY}: found {wanted}, {problem}; {_ON_CPU}"])
    return "cuda"


def unusable(found: TorchFindings, gpus: int) -> str | None:
    """Why torch cannot use this machine's GPUs, and what to do; None: it can."""
    has = f"and this machine has {gpus} GPU{'s' * (gpus > 1)}, but"
    if found.built_for is None:
        return (
            f"{has} torch {found.version} is built without CUDA; install what GPUs need (in a "
            "checkout: make clean install DEVICE=cuda)"
        )
    if found.error is not None:
        return (
            f"{has} CUDA {found.built_for} of torch {found.version} cannot be initialised: "
            f"{found.error}; update NVIDIA's driver (nvidia-smi shows its version)"
        )
    if found.devices < gpus:
        return (
            f"{has} torch {found.version} sees {found.devices}; look at CUDA_VISIBLE_DEVICES and "
            "at what the container is given"
        )
    return None


def too_few_gpus(gpus: int, ranks: int, workers: int, tensor_parallel: int) -> str | None:
    """Why this many GPUs cannot be given to processes of which each has its own; None: they can.

    A machine of one GPU is no use otherwise, so there a single rank and engines of TP1 share it.
    """
    wanted = ranks + workers * tensor_parallel
    if wanted <= gpus or gpus == ranks == tensor_parallel == 1:
        return None
    return (
        f"GPUs of this machine: {gpus} (those of CUDA_VISIBLE_DEVICES, where it is set); the run "
        f"wants {wanted}: one for each training rank ({ranks}) and each process of an engine "
        f"({workers} rollout workers of TP{tensor_parallel}); lower trainer.n_gpus_per_node, "
        "launch.rollout_workers or actor_rollout_ref.rollout.tensor_model_parallel_size, or use a "
        "larger machine"
    )


def probe_torch() -> TorchFindings:
    """Ask torch in a process of its own, which takes seconds and keeps no GPU.

    Raises InputError where it does not answer.
    """
    command = (sys.executable, "-m", "operators.probe", "torch")
    try:
        ended = subprocess.run(
            command,
            env=os.environ | {"PYTHONSAFEPATH": "1"},
            capture_output=True,
            text=True,
            timeout=_PROBE_S,
        )
    except subprocess.TimeoutExpired as error:
        raise InputError(
            [f"{KEY}: torch did not start within {_PROBE_S:.0f} s; try python -c 'import torch'"]
        ) from error
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        raise InputError([f"{KEY}: torch cannot be imported: {last}; install it anew"])
    return TorchFindings(**json.loads(ended.stdout.splitlines()[-1]))


def keep_to(wanted: Literal["auto", "cuda", "cpu"]) -> Device:
    """Settle this process on its device; call it before torch is imported. Raises InputError.

    With the CPU, GPUs are hidden from torch, Megatron and vLLM, which would take them otherwise.
    """
    device = choose_device(wanted)
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return device
