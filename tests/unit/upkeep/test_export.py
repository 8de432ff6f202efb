"""Samples and routes written as files for verl and slime."""

from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from pipeline.cli import traces
from pipeline.store import open_store
from pipeline.traces.read.peers import to_verl
from tests.samples import GEOMETRY, make_samples, sealed_r3


@pytest.fixture
def exported(tmp_path):
    """Export a step in which one sample has no reward, and several samples have unknown rows."""
    torch = pytest.importorskip("torch", reason="verl and slime take torch files")
    samples = make_samples(prompts=3, n=2)
    samples[0] = replace(samples[0], reward=None, reward_error="it failed")
    samples[1] = replace(samples[1], finish_reason="length")
    run = open_store(str(tmp_path / "run"))
    sealed_r3(run, samples)

    def export(form, *more):
        out = tmp_path / form
        arguments = ["export", run.uri, "--out", str(out), "--format", form, *more]
        done = CliRunner().invoke(traces.app, arguments)
        assert done.exit_code == 0, done.output
        assert [path.name for path in out.iterdir()] == ["0.pt"]
        return torch.load(out / "0.pt"), done.output

    return export, {sample.id: sample for sample in samples}


def test_a_step_is_exported_for_verl(exported):
    export, samples = exported
    loaded, output = export("verl")
    assert sorted(loaded["ids"]) == sorted(samples)
    for id, found in zip(loaded["ids"], loaded["samples"], strict=True):
        sample = samples[id]
        assert {name: str(value.dtype) for name, value in found.items()} == {
            "prompts": "torch.int64",
            "responses": "torch.int64",
            "response_mask": "torch.int64",
            "rollout_log_probs": "torch.float32",
            "rm_scores": "torch.float32",
            "routed_experts": "torch.int16",
        }
        expected = to_verl(sample.routes, GEOMETRY)
        known = np.append(sample.routes.valid_T, True)
        assert np.array_equal(found["routed_experts"].numpy()[known], expected[known])
        assert found["prompts"].tolist() == sample.prompt_tokens_P.tolist()
        assert found["responses"].tolist() == sample.response_tokens_G.tolist()
        logprobs = np.where(sample.loss_mask_G, sample.logprobs_G, 0)
        assert np.array_equal(found["rollout_log_probs"].numpy(), logprobs)
        assert found["rm_scores"].tolist()[:-1] == [0.0] * (len(sample.response_tokens_G) - 1)
        assert found["rm_scores"][-1].item() == np.float32(sample.reward or 0.0)
        in_loss = sample.reward is not None and sample.routes.valid_T.all()
        assert (
            found["response_mask"].tolist() == (sample.loss_mask_G & in_loss).astype(int).tolist()
        )
    masked = sum(s.reward is None or not s.routes.valid_T.all() for s in samples.values())
    assert 0 < masked < len(samples)
    assert "6 samples in" in output.replace("\n", " ")
    said = f"{masked} of them are excluded from the loss: unknown rows or no reward"
    assert said in " ".join(output.split())


def test_a_step_is_exported_for_slime(exported):
    export, samples = exported
    loaded, _ = export("slime", "--num-layers", "8")
    assert loaded["rollout_id"] == 0
    assert [found["index"] for found in loaded["samples"]] == list(range(6))
    assert [found["group_index"] for found in loaded["samples"]] == [0, 0, 1, 1, 2, 2]
    for found in loaded["samples"]:
        sample = samples[found["metadata"]["id"]]
        routed = found["rollout_routed_experts"]
        assert str(routed.dtype) == "torch.int32"
        assert routed.shape == (len(found["tokens"]) - 1, 8, 4)
        valid = sample.routes.valid_T
        assert np.array_equal(routed[:, [1, 2, 5]].numpy()[valid], sample.routes.sets_TLK[valid])
        assert routed[:, [0, 3, 4, 6, 7]].count_nonzero() == 0
        assert found["tokens"] == sample.tokens_S.tolist()
        assert found["response_length"] == len(sample.response_tokens_G)
        assert found["loss_mask"] == sample.loss_mask_G.astype(int).tolist()
        logprobs = np.where(sample.loss_mask_G, sample.logprobs_G, 0)
        assert found["rollout_log_probs"] == logprobs.tolist()
        assert found["reward"] == (sample.reward or 0.0)
        assert found["remove_sample"] == (sample.reward is None or not valid.all())
        statuses = {"stop": "completed", "length": "truncated", "abort": "aborted"}
        assert found["status"] == statuses[sample.finish_reason]


def test_num_layers_is_only_for_the_formats_of_verl_and_slime(exported, tmp_path):
    arguments = [
        "export",
        str(tmp_path / "run"),
        "--out",
        str(tmp_path / "npy"),
        "--num-layers",
        "8",
    ]
    done = CliRunner().invoke(traces.app, arguments)
    assert done.exit_code == 2
    said = "--num-layers applies to --format verl or slime, not to npy"
    assert said in " ".join(done.output.split())
