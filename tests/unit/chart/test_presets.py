"""The run configurations that the chart installs."""

import re

import pytest

from pipeline.config.reading.load import load_config
from pipeline.config.rules.check import config_problems
from pipeline.config.rules.pods import InstalledGpus
from tests.unit.chart.objects import CHART, CI, ROOT, STORE, cluster_of

QUICKSTART = {
    "trainer.nnodes": 2,
    "trainer.logger": ["console"],  # tensorboard files would be lost with the pod
    "launch.rollout_workers": 2,
}
"""Settings in which the chart's quickstart differs from examples/quickstart.yaml."""


@pytest.mark.parametrize("values", CI, ids=lambda path: path.name)
def test_presets_are_run_configurations(render, values, tmp_path):
    objects = render("--values", values)
    cluster = cluster_of(objects)
    gpus = InstalledGpus(cluster["rollout"]["gpus"], cluster["training"]["gpus"])
    for name, text in objects["ConfigMap", "retrace-presets"]["data"].items():
        (tmp_path / name).write_text(text)
        config = load_config(tmp_path / name, ["store.uri=s3://runs"]).config
        # The quickstart must fit any installation.
        fit = InstalledGpus() if name == "quickstart.yaml" else gpus
        assert config_problems(config, None, on_cluster=fit) == [], name


def test_quickstart_has_the_settings_of_the_example(tmp_path):
    example = ROOT / "examples" / "quickstart.yaml"
    overrides = [f"{key}={value}" for key, value in QUICKSTART.items()]
    ours = load_config(CHART / "files" / "presets" / "quickstart.yaml").config
    assert ours == load_config(example, overrides).config


def test_the_minimal_values_in_the_docs_work(render, tmp_path):
    """The minimal values file in docs/kubernetes.md renders a valid preset."""
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    [block] = re.findall(r"```yaml\n(images:.*?)```", text, re.DOTALL)
    (tmp_path / "values.yaml").write_text(block)
    presets = render("--values", tmp_path / "values.yaml")["ConfigMap", "retrace-presets"]["data"]
    (tmp_path / "mine.yaml").write_text(presets["mine.yaml"])
    name = ["trainer.experiment_name=first", "store.uri=s3://team-runs/retrace"]
    config = load_config(tmp_path / "mine.yaml", name).config
    assert config_problems(config, None, on_cluster=InstalledGpus()) == []
    assert config.actor_rollout_ref.actor.router_replay.mode == "R3"


def test_presets_are_merged_by_name(render, tmp_path):
    values = tmp_path / "values.yaml"
    values.write_text(
        "presets:\n"
        "  quickstart:\n"
        "    trainer: {total_training_steps: 3}\n"
        "    actor_rollout_ref: {rollout: {n: 4}, actor: {optim: {lr: 1.0e-7}}}\n"
        "  large:\n"
        "    data: {train_files: a.parquet}\n"
        "    actor_rollout_ref: {model: {path: m}}\n"
        "    trainer: {experiment_name: large, seed: 20000000}\n"
    )
    presets = render(*STORE, "--values", values)["ConfigMap", "retrace-presets"]["data"]
    loaded = {}
    for name, text in presets.items():
        (tmp_path / name).write_text(text)
        loaded[name] = load_config(tmp_path / name).config
    quickstart = loaded["quickstart.yaml"]
    assert quickstart.trainer.total_training_steps == 3
    assert quickstart.trainer.nnodes == 2
    # Helm reads YAML 1.1, in which the key `n` means false.
    assert quickstart.actor_rollout_ref.rollout.n == 4
    assert quickstart.actor_rollout_ref.rollout.val_kwargs.n == 4
    assert quickstart.actor_rollout_ref.actor.optim.lr == 1e-7
    assert loaded["large.yaml"].trainer.seed == 20_000_000
