"""The cores, memory and GPUs that this process may use, within the limits of its container."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")
_DEVICES = Path("/dev")
_SMI_S = 60.0


def core_count() -> int:
    """Return the number of cores that this process may use, given its affinity and quotas."""
    cores = len(os.sched_getaffinity(0))
    for text in _limits("cpu.max"):
        quota, period = text.split()
        if quota != "max":
            cores = min(cores, int(quota) // int(period))
    return max(1, cores)


def memory_size() -> int:
    """Return the machine's memory in bytes, or the lowest limit of the process's control groups."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *(int(text) for text in _limits("memory.max") if text != "max")])


def gpu_pool() -> tuple[str, ...]:
    """Return the GPUs that workers on this machine may use, named as in CUDA_VISIBLE_DEVICES.

    These are the GPUs that the variable lists, or all GPUs if it is not set. `pipeline.device`
    checks whether torch can use them.
    """
    count = _gpu_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return tuple(str(index) for index in range(count))
    if not count:
        return ()
    pool: list[str] = []
    for name in (part.strip() for part in named.split(",")):
        if name in ("", "-1") or (name.isdigit() and int(name) >= count):
            break  # CUDA ignores this device, which does not exist, and all devices after it
        pool.append(name)
    return tuple(pool)


def _gpu_count() -> int:
    """Return the number of GPUs, counted from the driver's device files.

    If there are no such files, as on WSL, the GPUs that nvidia-smi lists are counted.
    """
    if files := len(list(_DEVICES.glob("nvidia[0-9]*"))):
        return files
    return sum(line.startswith("GPU ") for line in _smi("-L"))


def least_gpu_memory() -> int | None:
    """Return the memory of this machine's smallest GPU in bytes; None if it is unknown."""
    sizes = _smi("--query-gpu=memory.total", "--format=csv,noheader,nounits")
    return min((int(size) << 20 for size in sizes if size.strip().isdigit()), default=None)


def _smi(*arguments: str) -> list[str]:
    """Return the lines that nvidia-smi prints; [] if it is not there or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        ended = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=_SMI_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return ended.stdout.splitlines()


def _limits(name: str) -> Iterator[str]:
    """Yield the values of a limit in this process's control group and in all parent groups.

    Groups without the limit are skipped. Only control groups of version 2 are read. A container
    sees its own group at the top of the hierarchy.
    """
    lines = _OWN_GROUP.read_text().splitlines() if _OWN_GROUP.exists() else []
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    group = _CONTROL_GROUPS / own
    for folder in (group, *group.parents):
        if folder.is_relative_to(_CONTROL_GROUPS) and (folder / name).exists():
            yield (folder / name).read_text().strip()
