"""What verl and slime hold in memory, by shape, dtype and value; and the files made of it."""

from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from pipeline.cli import traces
from pipeline.store import open_store
from pipeline.traces import Geometry, Routes, TraceError
from pipeline.traces.peers import dense_routes, to_slime, to_verl, to_verl_batch
from tests.unit.traces.make import GEOMETRY, make_samples, sealed_r3

ROUTES = Routes(
    np.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]], [[0, 1], [0, 1]]], np.uint8),
    np.array([True, True, False]),
)
SPARSE = Geometry(experts=9, topk=2, layers=(1, 3))
"""Layers 0 and 2 are dense. The sample has 4 tokens, and its row 2 is not known."""

DENSE = [
    [[0, 0], [1, 2], [0, 0], [3, 4]],
    [[0, 0], [5, 6], [0, 0], [7, 8]],
    [[0, 0], [0, 1], [0, 0], [0, 1]],
]


def test_slime_gets_int32_of_every_decoder_layer_and_all_tokens_but_the_last():
    found = to_slime(ROUTES, SPARSE)
    assert found.dtype == np.int32
    assert found.shape == (3, 4, 2)
    assert found.tolist() == DENSE


def test_verl_gets_int16_with_a_row_of_zeros_for_the_last_token():
    found = to_verl(ROUTES, SPARSE)
    assert found.dtype == np.int16
    assert found.shape == (4, 4, 2)
    assert found.tolist() == [*DENSE, [[0, 0]] * 4]


def test_a_padded_batch_of_verl_has_prompts_on_the_left_and_responses_on_the_right():
    found = to_verl_batch([ROUTES, ROUTES], [1, 3], SPARSE, prompt_length=3, response_length=4)
    assert found.dtype == np.int16
    assert found.shape == (2, 7, 4, 2)
    nothing = [[0, 0]] * 4
    assert found[0].tolist() == [nothing, nothing, *DENSE, nothing, nothing]
    assert found[1].tolist() == [*DENSE, nothing, nothing, nothing, nothing]
    with pytest.raises(TraceError, match="sample 0 of 1 prompt and 3 response tokens: more than"):
        to_verl_batch([ROUTES], [1], SPARSE, prompt_length=3, response_length=2)


def test_rows_that_are_not_known_are_different_experts_or_what_was_asked_for():
    """NeMo-RL reads -1 as: route this token natively."""
    found = dense_routes(ROUTES, SPARSE, np.int16, unknown=-1)
    assert found[2].tolist() == [[0, 0], [-1, -1], [0, 0], [-1, -1]]
    assert found[:2].tolist() == DENSE[:2]


def test_dense_layers_at_the_end_must_be_counted():
    assert to_slime(ROUTES, SPARSE, num_layers=6).shape == (3, 6, 2)
    with pytest.raises(TraceError, match="num_layers is 3, but the routes have layer 3: give the"):
        to_slime(ROUTES, SPARSE, num_layers=3)


def test_ids_that_do_not_fit_are_refused():
    routes = Routes(np.array([[[0, 40_000]]], np.uint16), np.ones(1, bool))
    geometry = Geometry(experts=40_001, topk=2, layers=(0,))
    assert to_slime(routes, geometry).tolist() == [[[0, 40_000]]]
    with pytest.raises(TraceError, match="40001 experts do not fit into int16"):
        to_verl(routes, geometry)


@pytest.fixture
def exported(tmp_path):
    """Exports a step of which one sample has no reward, and some have unknown rows."""
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


def test_a_file_for_verl(exported):
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
        assert np.array_equal(found["rollout_log_probs"].numpy(), sample.logprobs_G)
        assert found["rm_scores"].tolist()[:-1] == [0.0] * (len(sample.response_tokens_G) - 1)
        assert found["rm_scores"][-1].item() == np.float32(sample.reward or 0.0)
        in_loss = sample.reward is not None and sample.routes.valid_T.all()
        assert (
            found["response_mask"].tolist() == (sample.loss_mask_G & in_loss).astype(int).tolist()
        )
    unknown = sum(not sample.routes.valid_T.all() for sample in samples.values())
    assert 0 < unknown < len(samples)
    assert "6 samples in" in output.replace("\n", " ")
    assert f"{unknown} of them have unknown rows" in " ".join(output.split())


def test_a_file_for_slime(exported):
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
        assert found["rollout_log_probs"] == sample.logprobs_G.tolist()
        assert found["reward"] == (sample.reward or 0.0)
        assert found["remove_sample"] == (sample.reward is None or not valid.all())
        assert found["status"] == {"stop": "completed", "length": "truncated"}[sample.finish_reason]


def test_num_layers_goes_with_peers_only(exported, tmp_path):
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
    assert "--num-layers goes with --format verl or slime" in " ".join(done.output.split())
