"""The choice of the device on which a run computes: this machine's GPUs or its CPU.

Only this module chooses the device. The launcher, `retrace check`, both kinds of worker and
`retrace doctor` use it, so that no process falls back to the CPU unnoticed.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.errors import InputError
from pipeline.hardware import gpu_pool

Device = Literal["cuda", "cpu"]
KEY = "trainer.device"
_PROBE_S = 180.0
"""Time limit in seconds; importing torch from a cold network disk takes a minute or more."""
_ON_CPU = f"or compute on the CPU: {KEY}=cpu"


@dataclass(frozen=True)
class TorchFindings:
    """The state of CUDA as torch sees it. Example: TorchFindings('2.13.0', '13.0', 8, None)."""

    version: str
    built_for: str | None
    """The CUDA version for which torch was built; None for a build without CUDA."""
    devices: int
    error: str | None
    """The error if CUDA could not be initialised."""


def choose_device(
    wanted: Literal["auto", "cuda", "cpu"], probe: Callable[[], TorchFindings] | None = None
) -> Device:
    """Return the device that `trainer.device` selects on this machine.

    `auto` selects the GPUs that CUDA_VISIBLE_DEVICES allows, or the CPU if there are none. `probe`
    returns torch's findings; it is called only if the GPUs are to be used. Raises InputError if the
    GPUs cannot be used, or if the setting is `cuda` and the machine has none.
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
            [
                f"{KEY}: found cuda, but this machine has no NVIDIA GPU{hidden}; use a machine "
                f"with GPUs, {_ON_CPU}"
            ]
        )
    problem = unusable((probe or probe_torch)(), len(pool))
    if problem is not None:
        raise InputError([f"{KEY}: found {wanted}, {problem}; {_ON_CPU}"])
    return "cuda"


def unusable(found: TorchFindings, gpus: int) -> str | None:
    """Return why torch cannot use this machine's GPUs, with a fix; None if it can."""
    has = f"and this machine has {gpus} GPU{'s' * (gpus > 1)}, but"
    if found.built_for is None:
        return (
            f"{has} torch {found.version} is built without CUDA; install the packages for GPUs (in "
            "a checkout: make clean install DEVICE=cuda)"
        )
    if found.error is not None:
        return (
            f"{has} CUDA {found.built_for} of torch {found.version} cannot be initialised: "
            f"{found.error}; update NVIDIA's driver (nvidia-smi shows its version)"
        )
    if found.devices < gpus:
        return (
            f"{has} torch {found.version} sees {found.devices}; check CUDA_VISIBLE_DEVICES and the "
            "GPUs that the container is given"
        )
    return None


def too_few_gpus(gpus: int, ranks: int, workers: int, tensor_parallel: int) -> str | None:
    """Return why there are too few GPUs to give each process its own; None if there are enough.

    On a machine with one GPU, a single training rank shares it with engines that use one GPU each.
    Otherwise, a run would not be possible on such a machine.

    Args:
        gpus: The number of GPUs in this machine.
        ranks: The number of training ranks.
        workers: The number of rollout workers.
        tensor_parallel: The number of GPUs that each rollout worker's engine uses.
    """
    wanted = ranks + workers * tensor_parallel
    if wanted <= gpus or gpus == ranks == tensor_parallel == 1:
        return None
    return (
        f"GPUs on this machine: {gpus} (those in CUDA_VISIBLE_DEVICES, if it is set); the run "
        f"needs {wanted}: one for each training rank ({ranks}) and each process of an engine "
        f"({workers} rollout workers of TP{tensor_parallel}); lower trainer.n_gpus_per_node, "
        "launch.rollout_workers or actor_rollout_ref.rollout.tensor_model_parallel_size, or use a "
        "larger machine"
    )


def probe_torch() -> TorchFindings:
    """Return torch's findings, collected in a separate process so that the caller occupies no GPU.

    Raises InputError if torch does not start in time or cannot be imported.
    """
    return TorchFindings(**ask("torch", KEY, "torch"))


def ask(name: str, key: str, library: str, given: object = None) -> dict[str, Any]:
    """Return the findings of a probe (operators.probe), which runs in a separate process.

    Args:
        name: The probe's name.
        key: The setting that needs the findings; messages begin with it.
        library: The library that the probe imports, as messages name it.
        given: The input of the probe.

    Raises:
        InputError: The library does not start in time or cannot be imported.
    """
    try:
        ended = subprocess.run(
            (sys.executable, "-m", "operators.probe", name),
            env=os.environ | {"PYTHONSAFEPATH": "1"},
            input=json.dumps(given),
            capture_output=True,
            text=True,
            timeout=_PROBE_S,
        )
    except subprocess.TimeoutExpired as error:
        raise InputError(
            [
                f"{key}: {library} did not start within {_PROBE_S:.0f} s; try python -c 'import "
                f"{library}'"
            ]
        ) from error
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        raise InputError([f"{key}: {library} cannot be imported: {last}; install it again"])
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def keep_to(wanted: Literal["auto", "cuda", "cpu"]) -> Device:
    """Restrict this process to the device that the setting selects.

    Call this function before torch is imported.

    If the device is the CPU, the GPUs are hidden from torch, Megatron and vLLM, which would
    otherwise use them. Raises InputError, like `choose_device`.
    """
    device = choose_device(wanted)
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return device
