"""Branches that are taken only on GPUs; fakes replace missing GPUs."""

import json
import os
from types import SimpleNamespace
from typing import Any

import pytest

from tests.large_models import hf_config


def test_ranks_join_over_nccl(monkeypatch: pytest.MonkeyPatch):
    """Each rank selects a GPU by its local rank from the GPUs that are assigned to its gang."""
    import torch

    from operators.cpu import without_cuda
    from operators.training.megatron import parallel

    called: list[Any] = []

    class JoinedError(Exception):
        pass

    def join(backend: str, *_: Any, **__: Any) -> None:
        called.append(backend)
        raise JoinedError

    monkeypatch.setattr(without_cuda, "ON_CPU", False)
    monkeypatch.setattr(torch.cuda, "set_device", called.append)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.distributed, "init_process_group", join)
    monkeypatch.setitem(os.environ, "LOCAL_RANK", "3")
    with pytest.raises(JoinedError):
        parallel.start(SimpleNamespace())
    assert called == [3, "nccl"]


def test_copies_of_gpu_tensors_are_pinned(monkeypatch: pytest.MonkeyPatch):
    """The GPU's copy engine needs pinned pages; copies of CPU tensors do not."""
    import torch

    from operators.training import offload

    pinned: list[bool] = []
    empty = torch.empty

    def allocate(size: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        pinned.append(pin_memory)
        return empty(size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", allocate)
    monkeypatch.setattr(offload, "_bytes", lambda _: torch.zeros(8, dtype=torch.uint8))
    for kind in ("cuda", "cpu"):
        storage: Any = SimpleNamespace(
            nbytes=lambda: 8,
            data_ptr=lambda: 1,
            device=SimpleNamespace(type=kind),
            resize_=lambda _: None,
        )
        tensor: Any = SimpleNamespace(untyped_storage=lambda storage=storage: storage)
        offload.Offloaded(lambda tensor=tensor: [tensor], keep=True).to_host()
    assert pinned == [True, False]


def test_the_share_of_a_gpus_peak_speed_is_a_metric(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """Two ranks, each with an H100, train on 2,000 tokens in total and spend half of the time on
    updates."""
    import pyarrow as pa
    import torch

    from operators.training.speed import find_devices
    from pipeline.model.flops import forward_flops

    (tmp_path / "config.json").write_text(json.dumps(hf_config("qwen3-30b-a3b")))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    devices = find_devices(2, 1, tmp_path)
    assert devices.peak == 989e12
    columns = pa.table({"rows_total": [999, 999]})
    names = ("timing_s/step", "timing_s/train", "timing_s/update_actor", "timing_s/old_log_prob")
    times = dict(zip(names, (10.0, 8.0, 5.0, 2.0), strict=True))
    found = devices.speed(columns, 1, {"perf/total_num_tokens": 2000.0, **times})
    forward = forward_flops(devices.widths, columns["rows_total"].to_numpy())
    assert found["perf/mfu/actor"] == pytest.approx(3 * forward / 5 / (2 * 989e12))
    assert found["perf/mfu/actor_infer"] == pytest.approx(forward / 2 / (2 * 989e12))


def engine_on_gpus() -> Any:
    from operators.rollout.engine import RolloutEngine

    engine = object.__new__(RolloutEngine)
    engine._on_cpu = False
    return engine


def test_on_gpus_the_engines_workers_load_some_tensors(tmp_path):
    engine, called = engine_on_gpus(), []
    header = json.dumps({name: {} for name in ("a.b", "a.c", "d.e")}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    engine._tensors = frozenset({"a.b", "a.c", "d.e"})

    def rpc(what, args=(), kwargs=None):
        called.append((what if isinstance(what, str) else what.__name__, args, kwargs))

    engine._llm = SimpleNamespace(
        collective_rpc=rpc, reset_prefix_cache=lambda: True, update_weight_version=called.append
    )
    engine.load(tmp_path, 3, {"a.c"})
    engine.load(tmp_path, 4, {"a.c", "d.e"})
    whole = ("reload_weights", (), {"weights_path": str(tmp_path)})
    assert called == [("load_tensors", (str(tmp_path), ["a.b", "a.c"]), None), "3", whole, "4"]
