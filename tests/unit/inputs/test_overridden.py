"""Fields that settings override are checked by the installed packages, or noted."""

from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.inputs import machine
from tests.unit.config.settings import MEGATRON, OVERRIDE, ROLLOUT, load

DDP = f"{MEGATRON}.override_ddp_config.nccl_ub=true"
FIELDS = (f"{OVERRIDE}.moe_permute_fusion=true", f"{ROLLOUT}.engine_kwargs.vllm.block_size=16")


@pytest.fixture
def asked(monkeypatch) -> list[tuple[Any, ...]]:
    """Collects the arguments of each probe, which reports a problem."""
    calls: list[tuple[Any, ...]] = []

    def ask(*arguments: Any) -> dict[str, Any]:
        calls.append(arguments)
        return {"problems": ["a problem"]}

    monkeypatch.setattr(machine, "ask", ask)
    return calls


def installed(monkeypatch, *packages: str) -> None:
    monkeypatch.setattr(
        machine, "find_spec", lambda name: SimpleNamespace() if name in packages else None
    )


def test_installed_packages_are_asked_once(tmp_path, monkeypatch, asked):
    installed(monkeypatch, "megatron", "vllm")
    config = load(tmp_path, *FIELDS, DDP).config
    assert machine.override_problems(config, tmp_path) == ["a problem"]
    [(name, key, packages, given)] = asked
    assert (name, key, packages) == ("overrides", OVERRIDE, "megatron and vllm")
    assert given["folder"] == str(tmp_path)
    assert list(machine.override_notes(config, on_cluster=False)) == []


def test_a_run_without_overrides_asks_nothing(tmp_path, monkeypatch, asked):
    installed(monkeypatch, "megatron", "vllm")
    assert machine.override_problems(load(tmp_path).config, None) == asked == []


@pytest.mark.parametrize("on_cluster", [True, False])
def test_fields_that_only_a_worker_can_check_are_noted(tmp_path, monkeypatch, asked, on_cluster):
    installed(monkeypatch, *(["megatron", "vllm"] if on_cluster else []))
    config = load(tmp_path, *FIELDS).config
    trainer, engine = machine.override_notes(config, on_cluster)
    assert trainer.startswith(f"{OVERRIDE}: its fields are checked when the workers start")
    assert engine.startswith(f"{ROLLOUT}.engine_kwargs.vllm: its fields are checked when the")
    if not on_cluster:
        assert machine.override_problems(config, None) == asked == []
