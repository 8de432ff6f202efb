"""Whether a run fits on GPUs or on this machine, from its settings and config.json alone."""

from pipeline.config.rules.layout import layout_problems
from pipeline.config.tree import RunConfig
from pipeline.errors import InputError
from pipeline.hardware import least_gpu_memory
from pipeline.inputs.machine import (
    engines_on_one_gpu,
    gpu_problems,
    machine_problems,
    this_machine,
)
from pipeline.inputs.model_folder import found_config
from pipeline.inputs.sizes.estimate import estimate_memory
from pipeline.inputs.sizes.limit import memory_problems
from pipeline.inputs.sizes.memory import Memory
from pipeline.inputs.space import space_notes, space_problems
from pipeline.inputs.writes import estimate
from pipeline.model.families import moe_geometry
from pipeline.model.widths import weight_count, widths_of
from pipeline.store import StoreError


def gpu_verdict(config: RunConfig, limit: int) -> tuple[Memory, list[str]] | None:
    """Return a run's estimate for GPUs of `limit` bytes, and the reasons why it does not fit.

    The other inputs may be absent or wrong. Returns None if config.json or the layout has problems,
    which `retrace check` reports.
    """
    hf_config = found_config(config.actor_rollout_ref.model.path)
    if hf_config is None:
        return None
    try:
        geometry = moe_geometry(hf_config)
        if layout_problems(config, hf_config):
            return None
        memory = estimate_memory(config, hf_config)
    except InputError:
        return None
    experts = 0 if geometry is None else geometry.experts
    engines = engines_on_one_gpu(config, this_machine(config))
    return memory, memory_problems(config, memory, limit, experts, engines)


def missing(config: RunConfig) -> list[str]:
    """Return what this machine lacks for a run: GPUs, memory, packages and disk space.

    Prompts are assumed to have the maximum length. If the device cannot be used at all, only GPUs
    are counted; if config.json is unusable, the checks that need it are skipped. Other checks
    report the reason.
    """
    machine = this_machine(config)
    if machine.unusable:
        return gpu_problems(config, machine)
    hf_config = found_config(config.actor_rollout_ref.model.path)
    writes = None
    try:
        if hf_config is not None:
            count = weight_count(widths_of(hf_config))
            longest = config.data.max_prompt_length
            writes = estimate(config, moe_geometry(hf_config), count, longest)
    except InputError:
        hf_config = None
    problems = machine_problems(config, writes, machine, hf_config)
    limit = least_gpu_memory() if machine.device == "cuda" else None
    if limit is not None and (verdict := gpu_verdict(config, limit)) is not None:
        problems += verdict[1]
    try:
        problems += space_problems(config, writes) or space_notes(config, writes)
    except StoreError:  # the check of the store reports it
        return problems
    return problems
