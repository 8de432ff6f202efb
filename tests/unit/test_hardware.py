"""The cores, memory and GPUs that containers and batch systems leave to a process."""

import os
from pathlib import Path

import pytest

from pipeline import hardware
from pipeline.hardware import core_count, gpu_pool, memory_size


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Control groups without limits, for a process in jobs/job_7 on a machine with 64 cores."""
    groups = tmp_path / "cgroup"
    (groups / "jobs/job_7").mkdir(parents=True)
    (tmp_path / "own").write_text("1:cpu:/other\n0::/jobs/job_7\n")
    monkeypatch.setattr(hardware, "_CONTROL_GROUPS", groups)
    monkeypatch.setattr(hardware, "_OWN_GROUP", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    return groups


def test_without_limits_the_full_machine_is_available(groups: Path):
    for folder in (groups, groups / "jobs"):
        (folder / "memory.max").write_text("max\n")
        (folder / "cpu.max").write_text("max 100000\n")
    assert core_count() == 64
    assert memory_size() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize("where", [".", "jobs", "jobs/job_7"])
def test_the_lowest_limit_of_all_groups_counts(groups: Path, where: str):
    """A container's limit is in the top group. A batch system's limit is in a group above the
    process's own group."""
    for folder in (groups, groups / "jobs", groups / "jobs/job_7"):
        (folder / "memory.max").write_text(f"{3 << 20}\n")
        (folder / "cpu.max").write_text("800000 100000\n")
    (groups / where / "memory.max").write_text(f"{2 << 20}\n")
    (groups / where / "cpu.max").write_text("350000 100000\n")
    assert core_count() == 3
    assert memory_size() == 2 << 20


def test_a_part_of_a_core_counts_as_one_core(groups: Path):
    (groups / "cpu.max").write_text("50000 100000\n")
    assert core_count() == 1


@pytest.mark.parametrize(
    ("named", "pool"),
    [
        (None, ("0", "1", "2")),
        ("2, 0", ("2", "0")),
        ("GPU-8932f937,MIG-1b2c", ("GPU-8932f937", "MIG-1b2c")),
        ("", ()),
        ("-1", ()),
        ("1,3,0", ("1",)),
    ],
)
def test_the_gpus_are_those_that_the_user_selects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str | None, pool: tuple[str, ...]
):
    for file in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / file).touch()
    monkeypatch.setattr(hardware, "_DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert gpu_pool() == pool


def test_a_machine_without_gpus_ignores_the_selection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(hardware, "_DEVICES", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert gpu_pool() == ()


@pytest.mark.parametrize(
    ("program", "pool"),
    [
        ("echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)'; echo 'GPU 1: NVIDIA H200'", ("0", "1")),
        ("echo 'No devices were found'", ()),
        ("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", ()),
    ],
)
def test_without_device_files_nvidia_smi_lists_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, pool: tuple[str, ...]
):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{program}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setattr(hardware, "_DEVICES", tmp_path / "dev")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_pool() == pool
