"""Each check of `retrace doctor`, in environments that it must report as broken."""

import importlib.metadata
import json
import shutil
import subprocess
import sys
import threading
from collections import namedtuple
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner

from pipeline import device
from pipeline.cli import _app
from pipeline.config.reading.load import load_config
from pipeline.device import TorchFindings
from pipeline.doctor import checks
from pipeline.doctor.checks import ProbeError
from pipeline.doctor.findings import Finding, Needs, State, absent, broken, ok
from tests.paths import ROOT

QUICKSTART = load_config(ROOT / "examples/quickstart.yaml").config
NEEDED = Needs(QUICKSTART)
ON_GPUS = Needs(QUICKSTART, device="cuda")
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch):
    """Return a function that sets the answer of all probes.

    If the answer is a string, all probes fail with that string as their error.
    """

    def put(answer: dict[str, Any] | str) -> None:
        def probe(*words: str) -> dict[str, Any]:
            if isinstance(answer, str):
                raise ProbeError(answer)
            return answer

        monkeypatch.setattr(checks, "_probe", probe)
        monkeypatch.setattr(checks, "_installed", lambda package: True)

    return put


@pytest.fixture
def releases(monkeypatch: pytest.MonkeyPatch):
    """Return a function that makes only the given packages appear to be installed."""

    def put(**found: str) -> None:
        def version(name: str) -> str:
            if name.replace("-", "_") not in found:
                raise importlib.metadata.PackageNotFoundError(name)
            return found[name.replace("-", "_")]

        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(checks, "_pins", lambda: {"torch": "2.13.0", "vllm": "0.32.0"})

    return put


def test_versions_are_compared_with_the_pins(releases):
    releases(torch="2.13.0+cpu", vllm="0.31.1", prefect="3.9.1")
    found = {finding.name: finding for finding in checks.check_versions(NEEDED)}
    assert found["torch"] == ok("torch", "2.13.0+cpu")
    assert found["vllm"] == broken("vllm", "0.31.1, expected 0.32.0; pip install 'vllm==0.32.0'")
    lacking = "not installed; pip install 'retrace-moe[training]'"
    assert found["mbridge"] == broken("mbridge", lacking)
    without = {finding.name: finding for finding in checks.check_versions(Needs())}
    assert without["mbridge"] == Finding("mbridge", State.ABSENT, lacking)


def test_the_pins_come_from_the_distribution():
    pins = checks._pins()
    assert {"torch", "megatron-core", "mbridge", "prefect"} <= pins.keys()


def test_gpus_that_cannot_be_used_are_reported_as_broken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device, "gpu_pool", lambda: ("0",))
    monkeypatch.setattr(device, "probe_torch", lambda: TorchFindings("2.13.0+cpu", None, 0, None))
    finding, on = checks.check_device("auto")
    assert (finding.state, on) == (State.BROKEN, "cuda")
    assert "is built without CUDA; install the packages for GPUs" in finding.text


def test_the_findings_of_the_all_reduce(answers):
    answers({"backend": "gloo", "seconds": 0.12})
    assert checks.check_all_reduce(NEEDED) == ok("all-reduce", "2 ranks, gloo, 0.1 s")
    without = checks.check_all_reduce(ON_GPUS)
    assert without == absent("all-reduce", "not tried: no GPU", needed=False)
    answers("RuntimeError: NCCL error: unhandled system error")
    finding = checks.check_all_reduce(NEEDED)
    assert finding.state is State.BROKEN
    error = "RuntimeError: NCCL error: unhandled system error"
    assert f"2 ranks: {error}; set NCCL_DEBUG=INFO for details" in finding.text


@pytest.mark.parametrize(
    ("answer", "state", "says"),
    [
        ({"version": "2.11.0"}, State.OK, "2.11.0"),
        ({"version": "2.9.0+4a3"}, State.OK, "2.9.0+4a3"),
        ({"version": "2.15.0+x"}, State.OK, "2.15.0+x, newer than megatron-core's own >=2.9,<2.12"),
        ({"version": "1.13.0"}, State.BROKEN, "1.13.0, expected >=2.9,<2.12; pip install"),
        ("ImportError: libnvrtc.so.13", State.BROKEN, "cannot be imported: ImportError: libnvrtc"),
    ],
)
def test_the_findings_about_transformer_engine(answers, answer, state, says):
    answers(answer)
    finding = checks.check_transformer_engine(ON_GPUS)
    assert (finding.state, says in finding.text) == (state, True), finding
    assert checks.check_transformer_engine(NEEDED).state is State.OK


@pytest.mark.parametrize(
    ("answer", "needs", "says"),
    [
        ({"version": "1", "platform": "cpu", "routes": None}, NEEDED, None),
        ({"version": "1", "platform": "cuda", "routes": None}, ON_GPUS, None),
        (
            {"version": "1", "platform": "cpu", "routes": None},
            ON_GPUS,
            "built for cpu, expected cuda; pip install 'retrace-moe[rollout-cuda]'",
        ),
        (
            {"version": "1", "platform": "cpu", "routes": "RolloutError: vLLM 0.31"},
            NEEDED,
            "vllm returns no routes: RolloutError: vLLM 0.31; install the pinned vllm",
        ),
        ("ImportError: libnuma.so.1", NEEDED, "vllm cannot be imported: ImportError: libnuma.so.1"),
    ],
)
def test_the_findings_about_the_engine(answers, answer, needs, says):
    answers(answer)
    finding = checks.check_engine(needs)
    assert finding.state is (State.OK if says is None else State.BROKEN)
    assert (says or "returns routes") in finding.text


def test_missing_packages_are_reported_as_broken_only_if_needed(monkeypatch: pytest.MonkeyPatch):
    """Without settings, a missing package is not an error, because a pod may not need it."""
    monkeypatch.setattr(checks, "_installed", lambda package: False)
    for check in (checks.check_engine, checks.check_all_reduce):
        assert check(Needs()).state is State.ABSENT
        assert check(NEEDED).state is State.BROKEN
    replayed = QUICKSTART.actor_rollout_ref.actor.router_replay.model_copy(
        update={"replay_file": "set"}
    )
    actor = QUICKSTART.actor_rollout_ref.actor.model_copy(update={"router_replay": replayed})
    policy = QUICKSTART.actor_rollout_ref.model_copy(update={"actor": actor})
    config = QUICKSTART.model_copy(update={"actor_rollout_ref": policy})
    assert checks.check_engine(Needs(config)).state is State.ABSENT


def test_the_findings_about_the_store(tmp_path, monkeypatch: pytest.MonkeyPatch):
    assert checks.check_store(Needs(None, str(tmp_path / "new"))).state is State.OK
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").touch()
    assert checks.check_store(Needs(None, str(tmp_path / "file"))).state is State.BROKEN
    assert "scheme 'ftp' is not known" in checks.check_store(Needs(None, "ftp://x")).text
    monkeypatch.setattr(checks, "free_bytes", lambda uri: 1 << 20)
    full = checks.check_store(Needs(None, str(tmp_path))).text
    assert "; 1.0 MB free, expected 4.3 GB or more; free some space" in full


@pytest.fixture
def prefect(monkeypatch: pytest.MonkeyPatch):
    """A Prefect API of a different release, which requires a password."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.headers["Authorization"] == "Basic dTpw"
            self.send_response(200 if known else 401)
            self.end_headers()
            self.wfile.write(json.dumps("3.4.0" if known else "no").encode())

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{server.server_port}/api")
    monkeypatch.delenv("PREFECT_API_AUTH_STRING", raising=False)
    yield server
    server.shutdown()


def test_the_findings_about_prefect(prefect, monkeypatch: pytest.MonkeyPatch):
    assert "HTTP Error 401" in checks.check_prefect(NEEDED).text
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "u:p")
    monkeypatch.setattr(checks, "_pins", lambda: {"prefect": "3.9.1"})
    assert "serves 3.4.0, expected 3.9.1; upgrade the server" in checks.check_prefect(NEEDED).text
    monkeypatch.setattr(checks, "_pins", lambda: {"prefect": "3.4.0"})
    assert checks.check_prefect(NEEDED).state is State.OK
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    assert checks.check_prefect(NEEDED).state is State.BROKEN
    monkeypatch.delenv("PREFECT_API_URL")
    assert checks.check_prefect(NEEDED).state is State.OK


def test_the_findings_about_disk_and_shared_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(64 << 20, 0, 64 << 20))
    assert "67.1 MB free, expected 4.3 GB or more; set TMPDIR" in checks.check_scratch().text
    assert checks.check_shared_memory(ON_GPUS).text == (
        "/dev/shm has 67.1 MB, expected 1.1 GB or more; use docker run --shm-size=16g, or shmSize "
        "in the chart"
    )
    assert checks.check_shared_memory(NEEDED).state is State.OK


def test_a_failed_probe_reports_its_error(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ProbeError, match=r"KeyError: 'nothing'"):
        checks._probe("operators.probe", "nothing")
    program = "import time; time.sleep(60)"
    run = subprocess.run
    monkeypatch.setattr(
        subprocess, "run", lambda _, **kwargs: run([sys.executable, "-c", program], **kwargs)
    )
    monkeypatch.setattr(checks, "_PROBE_S", 0.1)
    with pytest.raises(ProbeError, match="no answer within 0 s"):
        checks._probe("operators.probe", "torch")


@pytest.mark.parametrize(
    ("states", "code"),
    [((State.OK, State.ABSENT), 0), ((State.OK, State.BROKEN, State.OK), 1)],
)
def test_the_command_fails_if_a_part_is_broken(monkeypatch: pytest.MonkeyPatch, states, code):
    asked: list[Needs] = []

    def found(needs: Needs):
        asked.append(needs)
        return (Finding("x", state, "y") for state in states)

    monkeypatch.setattr(checks, "all_checks", found)
    ended = CliRunner().invoke(_app, ["doctor", "s3://team/runs"])
    assert ended.exit_code == code
    assert [line.split() for line in ended.output.splitlines()] == [
        [state.value, "x", "y"] for state in states
    ]
    assert asked == [Needs(None, "s3://team/runs")]
    ended = CliRunner().invoke(_app, ["doctor", str(ROOT / "examples/quickstart.yaml")])
    assert asked[1].config == QUICKSTART
    assert CliRunner().invoke(_app, ["doctor", "gone.yaml"]).exit_code == 2


def test_the_command_accepts_overrides_only_with_settings(monkeypatch: pytest.MonkeyPatch):
    """Overrides have the same format as for `check` and `run`. Without a settings file, there is
    nothing to override."""
    asked: list[Needs] = []
    monkeypatch.setattr(checks, "all_checks", lambda needs: asked.append(needs) or ())
    example = str(ROOT / "examples/quickstart.yaml")
    words = ["trainer.n_gpus_per_node=2", "trainer.device=cpu"]
    assert CliRunner().invoke(_app, ["doctor", example, *words]).exit_code == 0
    assert asked == [Needs(load_config(example, words).config, QUICKSTART.store.uri)]
    ended = CliRunner().invoke(_app, ["doctor", "s3://team/runs", *words])
    assert ended.exit_code == 2
    assert "name a CONFIG.yaml before trainer.n_gpus_per_node=2" in ended.output
    ended = CliRunner().invoke(_app, ["doctor", example, "trainer.nnode=2"])
    assert ended.exit_code == 2
    assert "did you mean trainer.nnodes?" in ended.output


def test_all_checks_run_even_after_failures(
    answers, releases, monkeypatch: pytest.MonkeyPatch, tmp_path
):
    """A failed check must not hide the findings of the others."""
    releases()
    answers("ImportError: libcudart.so")
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    found = list(checks.all_checks(Needs(QUICKSTART, str(tmp_path))))
    names = [finding.name for finding in found]
    assert len(names) == len(set(names)) == 15
    assert [finding.name for finding in found if finding.state is State.ABSENT] == []
    absent_ones = [one for one in found if one.text.startswith("not installed")]
    assert absent_ones == [absent(one.name, one.text, needed=True) for one in absent_ones]


def test_what_the_machine_lacks_for_the_run_is_broken():
    [first, second] = checks.check_machine(Needs(QUICKSTART, missing=("too few GPUs", "no space")))
    assert (first, second) == (broken("machine", "too few GPUs"), broken("machine", "no space"))
    [found] = checks.check_machine(NEEDED)
    assert found.state is State.OK
    assert list(checks.check_machine(Needs())) == []


@pytest.mark.parametrize(
    ("name", "value", "module"),
    [
        ("moe_enable_deepep", "True", "deep_ep"),
        ("gradient_accumulation_fusion", "True", "fused_weight_gradient_mlp_cuda"),
    ],
)
def test_packages_that_settings_require_are_reported(name, value, module, monkeypatch):
    """verl's examples set these fields. On a machine without GPUs, the package is not needed."""
    key = f"actor_rollout_ref.actor.megatron.override_transformer_config.{name}"
    config = load_config(ROOT / "examples/quickstart.yaml", [f"{key}={value}"]).config
    for where, installed, state in (
        ("cuda", False, State.BROKEN),
        ("cpu", False, State.ABSENT),
        ("cuda", True, State.OK),
    ):
        monkeypatch.setattr(checks, "_installed", lambda package, here=installed: here)
        found = {one.name: one for one in checks.check_machine(Needs(config, device=where))}
        assert found[module].state is state
        assert f"{key}={value} requires" in found[module].text
