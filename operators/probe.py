"""`python -m operators.probe NAME`: print a heavy library's findings about this machine as JSON.

Each probe runs in a separate process because a heavy library takes seconds to import, caches its
findings until the process ends, and may crash the process.
"""

import importlib
import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.config.actor import Actor


def torch_findings() -> dict[str, Any]:
    """Return the fields of pipeline.device.TorchFindings."""
    import torch

    error = None
    if torch.version.cuda is not None:
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except RuntimeError as found:  # the driver is missing or too old
            error = " ".join(str(found).split())
    return {
        "version": torch.__version__,
        "built_for": torch.version.cuda,
        "devices": torch.cuda.device_count(),
        "error": error,
    }


def all_reduce() -> dict[str, Any]:
    """Check an all-reduce over the process group, and return its backend and duration in seconds.

    Run this probe with torchrun, which starts one process per rank. Raises ValueError if the sum is
    incorrect.
    """
    import torch
    import torch.distributed as dist

    device, started = sys.argv[2], time.monotonic()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=120))
    numbers_N = torch.full((1 << 20,), rank + 1.0, device=device)
    dist.all_reduce(numbers_N)
    expected = ranks * (ranks + 1) / 2
    if not bool((numbers_N == expected).all()):
        raise ValueError(
            f"the sum over {ranks} ranks is {numbers_N[0].item()}, expected {expected}"
        )
    dist.destroy_process_group()
    return {"backend": backend, "seconds": time.monotonic() - started}


def transformer_engine() -> dict[str, Any]:
    """Import Transformer Engine for PyTorch, and return Transformer Engine's version."""
    importlib.import_module("transformer_engine.pytorch")
    return {"version": importlib.import_module("transformer_engine").__version__}


def vllm() -> dict[str, Any]:
    """Return vLLM's version and platform, and an error message if vLLM cannot return routes."""
    from operators.rollout.vllm_environment import prepare_environment

    prepare_environment(enforce_eager=True)
    import vllm
    from vllm.platforms import current_platform

    on_cpu, routes = current_platform.is_cpu(), None
    try:
        if on_cpu:
            from operators.cpu.vllm_build import engine_arguments
            from pipeline.config.tree import Rollout

            engine_arguments(Rollout(), routes=True)
        else:
            arguments = importlib.import_module("vllm.engine.arg_utils").EngineArgs
            arguments(model="", enable_return_routed_experts=True)
    except Exception as error:  # noqa: BLE001 - any error is a finding
        routes = f"{type(error).__name__}: {error}"
    platform = "cpu" if on_cpu else "cuda"
    return {"version": vllm.__version__, "platform": platform, "routes": routes}


def overrides() -> dict[str, Any]:
    """Ask Megatron-core and vLLM about the fields that a run's settings override.

    The standard input contains the settings and, if the model's config.json is known to be valid,
    its folder. Megatron-core then builds its settings for this model, which fails for combinations
    that it refuses.
    """
    from pipeline.config.rules.overrides import set_overrides, unknown_fields
    from pipeline.config.tree import RunConfig

    given = json.load(sys.stdin)
    config = RunConfig.model_validate(given["settings"])
    groups = [
        (group, values)
        for group, values in set_overrides(config)
        if importlib.util.find_spec(group.package) is not None
    ]
    problems: list[str] = []
    for group, values in groups:
        module, _, name = group.original.rpartition(".")
        original = getattr(importlib.import_module(module), name)
        problems += unknown_fields(group, original, values)
    if not problems and given["folder"] and any(one.package == "megatron" for one, _ in groups):
        problems += _refusals(Path(given["folder"]), config.actor_rollout_ref.actor)
    return {"problems": problems}


def _refusals(folder: Path, actor: "Actor") -> tuple[str, ...]:
    from operators.training.megatron.model import check_fields
    from pipeline.errors import InputError

    try:
        check_fields(folder, actor)
    except (InputError, TypeError) as error:
        # The training ranks may have Transformer Engine. Without it, Megatron-core either names it
        # or compares a version that is None.
        missing = importlib.util.find_spec("transformer_engine") is None
        needs = re.search(r"transformer.?engine|\bte\b|and 'Version'", str(error), re.IGNORECASE)
        if missing and needs:
            return ()
        if isinstance(error, InputError):
            return error.problems
        raise
    return ()


PROBES: dict[str, Callable[[], dict[str, Any]]] = {
    "all-reduce": all_reduce,
    "overrides": overrides,
    "torch": torch_findings,
    "transformer-engine": transformer_engine,
    "vllm": vllm,
}

if __name__ == "__main__":
    print(json.dumps(PROBES[sys.argv[1]]()))  # noqa: T201
