"""The main job on a real MinIO (store, recorded set and replay), and faults of that server."""

import time
from pathlib import Path

import pytest

from pipeline.report.run_metrics import all_metrics
from pipeline.run import keys
from pipeline.run.commit import read_commit, sha256
from pipeline.store import Store, open_store
from pipeline.traces import read_manifest
from tests.integration.run.retrace_runs import ROOT, command, run, small, start, workers
from tests.integration.run.test_faults import wait_for
from tests.minio import Minio, new_place, start_minio, use
from tests.patience import PATIENCE_S
from tests.proxy import start_proxy, without

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("on_prefect_server")]

ROUTER_REPLAY = "actor_rollout_ref.actor.router_replay"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "minio"
    folder.mkdir()
    with start_minio(folder) as server:
        use(server, monkeypatch)
        yield server


def contents(store: Store) -> dict[str, str]:
    return {info.key: sha256(store.read(info.key)) for info in store.list("")}


def inputs_at(place: str) -> list[str]:
    """Copy the example's model, prompts and reward function to `place`; return their settings."""
    example = ROOT / "examples/addition"
    store = open_store(f"{place}/inputs")
    for path in (example / "train.parquet", example / "reward.py", *(example / "model").iterdir()):
        store.upload_file(str(path.relative_to(example)), path)
    return [
        f"data.train_files={place}/inputs/train.parquet",
        f"custom_reward_function.path={place}/inputs/reward.py",
        f"actor_rollout_ref.model.path={place}/inputs/model",
    ]


def test_the_main_job_runs_on_minio(tmp_path: Path, server: Minio, monkeypatch: pytest.MonkeyPatch):
    """A run records a set at s3://, and a second run that replays it has a bit-identical policy.

    The settings name the endpoint. The second run also reads its model, prompts and reward function
    from s3://. The trace commands read both places. Logs, output and objects do not contain
    the secret.
    """
    place = new_place()
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    at_minio = [f"store.uri={place}/runs", f"store.endpoint={server.url}", "store.path_style=true"]
    settings = small(tmp_path, "main", *at_minio, f"{ROUTER_REPLAY}.record_file={place}/set")
    printed = run(*settings)
    use(server, monkeypatch)
    remote = inputs_at(place)
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    assert "is valid" in command("check", "examples/quickstart.yaml", *settings, *remote)
    wrong = f"data.train_files={place}/inputs/none.parquet"
    printed_wrong = command("check", "examples/quickstart.yaml", *settings, wrong, expect=2)
    assert "data.train_files: there is no object none.parquet" in printed_wrong
    replay = f"{ROUTER_REPLAY}.replay_file={place}/set"
    replayed = small(tmp_path, "again", *at_minio, *remote, replay)
    assert f"run {place}/runs/again" in command("check", "examples/quickstart.yaml", *replayed)
    run(*replayed)
    assert f"run      {place}/runs/main" in printed

    use(server, monkeypatch)
    store, again = open_store(f"{place}/runs/main"), open_store(f"{place}/runs/again")
    assert [step.step for step in all_metrics(store)] == [0, 1]
    assert all(step.values["replay/coverage"] == 1.0 for step in all_metrics(store))
    ours, theirs = (read_commit(s, keys.policy(2))["weights_sha256"] for s in (store, again))
    assert ours == theirs
    assert list(store.debris("")) == []
    assert not workers(store.uri, "operators.rollout")

    for uri in (store.uri, f"{place}/set"):
        assert "all good" in command("traces", "verify", uri)
        assert "vllm" in command("traces", "ls", uri)
    sample = read_manifest(store, 0).ids[0]
    assert sample in command("traces", "show", store.uri, sample)
    assert "step 1, R3" in command("traces", "stats", store.uri)
    command("traces", "export", store.uri, "--out", str(tmp_path / "arrays"))
    assert (tmp_path / "arrays/000000/samples.json").exists()
    assert f"{place}/runs/main" in command("traces", "ls", f"{place}/runs", expect=2)

    secret = server.password.encode()
    logs = [path.read_bytes() for path in (tmp_path / "main").rglob("*") if path.is_file()]
    objects = [store.read(info.key) for info in store.list("") if info.key.endswith(".json")]
    assert len(logs) > 1
    assert not [text for text in (*logs, *objects, printed.encode()) if secret in text]


def test_a_run_survives_faults_of_the_store(tmp_path: Path, server: Minio):
    """A run survives an outage of MinIO, fails on revoked credentials, and can then be continued.

    MinIO stops for 20 s during a training step, and the run waits. Revoked credentials end the run
    with an error that mentions the credentials; no committed object is lost. When the credentials
    are valid again, the same command completes the run.
    """
    place = new_place()
    settings = small(
        tmp_path,
        "faults",
        f"store.uri={place}",
        "trainer.total_training_steps=3",
        "trainer.save_freq=1",
    )
    store = open_store(f"{place}/faults")
    log = tmp_path / "flow.log"
    flow = start(log, *settings)
    wait_for(store, keys.manifest(0), flow, log)
    server.stop()
    time.sleep(20)
    server.start()
    wait_for(store, keys.manifest(1), flow, log)
    assert store.size(keys.metrics(0)) is not None
    server.restart(user="second")
    assert flow.wait(PATIENCE_S) == 1
    printed = log.read_text()
    assert "giving up in 120 s" in printed  # the logged wait
    assert "restart 1 of" not in printed.partition("403")[0]  # the outage ended no worker
    assert "403 InvalidAccessKeyId" in printed
    assert "pass valid credentials" in printed
    assert "then run the same command again to continue from the last commit" in printed
    assert not workers(store.uri, "operators.rollout")
    assert not workers(store.uri, "operators.training")

    server.restart(user="first")
    before = contents(store)
    assert keys.metrics(0) in before
    run(*settings)
    after = contents(store)
    assert not {key for key in before.keys() & after.keys() if before[key] != after[key]}
    gone = before.keys() - after.keys()
    assert {key.partition("/")[0] for key in gone} <= {"policies", "checkpoints", "signs"}
    assert len(all_metrics(store)) == 3
    assert "all good" in command("traces", "verify", store.uri)


def test_a_server_that_ignores_conditions_is_refused_by_check(
    tmp_path: Path, server: Minio, monkeypatch: pytest.MonkeyPatch
):
    """`retrace check` and `retrace run` refuse the server before any worker starts."""
    with start_proxy(server.port) as proxy:
        proxy.change = lambda request: without(server, request, "if-none-match")
        settings = small(
            tmp_path, "refused", f"store.uri={new_place()}", f"store.endpoint={proxy.url}"
        )
        for name in ("check", "run"):
            printed = command(name, "examples/quickstart.yaml", *settings, expect=2)
            assert "store.uri" in printed
            assert "ignores conditional writes" in printed
