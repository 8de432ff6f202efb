"""What this process may use of its machine: cores, memory and GPUs, container limits included."""

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
    """Cores that this process may run on: its affinity, and the CPU quota of its control groups."""
    cores = len(os.sched_getaffinity(0))
    for text in _limits("cpu.max"):
        quota, period = text.split()
        if quota != "max":
            cores = min(cores, int(quota) // int(period))
    return max(1, cores)


def memory_size() -> int:
    """Bytes of memory: the machine's, or the lowest limit of this process's control groups."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *(int(text) for text in _limits("memory.max") if text != "max")])


def gpu_pool() -> tuple[str, ...]:
    """The GPUs that workers of this machine may use, as CUDA_VISIBLE_DEVICES names them.

    Those of that variable where it is set, else all. Whether torch can use them is another question
    (pipeline.device).
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
            break  # CUDA sees what stands before a device that is not there
        pool.append(name)
    return tuple(pool)


def _gpu_count() -> int:
    """GPUs by the device files of NVIDIA's driver; on WSL, which has none, by nvidia-smi."""
    files = len(list(_DEVICES.glob("nvidia[0-9]*")))
    program = shutil.which("nvidia-smi")
    if files or program is None:
        return files
    try:
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=_SMI_S)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def _limits(name: str) -> Iterator[str]:
    """A limit of this process's control group and of those around it, where they set it.

    Of control groups version 2. A container sees its own at the top.
    """
    lines = _OWN_GROUP.read_text().splitlines() if _OWN_GROUP.exists() else []
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    group = _CONTROL_GROUPS / own
    for folder in (group, *group.parents):
        if folder.is_relative_to(_CONTROL_GROUPS) and (folder / name).exists():
            yield (folder / name).read_text().strip()
