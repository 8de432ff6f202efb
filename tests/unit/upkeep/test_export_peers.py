"""Exported steps satisfy the rules of verl's and slime's own loaders.

The rules come from verl-project/verl at 1dda039b and THUDM/slime at 624b824a, restated here as
assertions. Each assertion names the function that would fail.
"""

import errno
import io
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from pipeline.cli import traces
from pipeline.run.commit import new_write_id
from pipeline.store import open_store
from pipeline.traces import (
    Geometry,
    Provenance,
    Sample,
    TraceError,
    VersionSpan,
    new_sample,
    seal,
    to_slime,
    to_verl,
    write_shard,
    write_step,
)
from pipeline.upkeep import export as exporting
from pipeline.upkeep.export import export, export_for

torch = pytest.importorskip("torch", reason="verl and slime take torch files")

GEOMETRY = Geometry(experts=16, topk=4, layers=(1, 2, 5))
MADE_BY = Provenance("R3", 3, "sglang 0.5.15")
LAYERS = 6
"""Decoder layers: 0, 3 and 4 are dense."""


def a_sample(prompt: str, k: int, G: int, *, P: int = 3, routed: bool = True, **changes) -> Sample:
    rng = np.random.default_rng([len(prompt), k, G])
    experts = rng.random((P + G - 1, 3, 16)).argsort(axis=-1)[..., :4]
    tokens = rng.integers(0, 100, P), rng.integers(0, 100, G)
    values = {"logprobs": -rng.random(G), "versions": 3, "reward": float(k), "seed": k}
    made = new_sample(0, prompt, k, *tokens, experts if routed else None, **values)
    return replace(made, **changes)


def a_step() -> dict[str, Sample]:
    """Return a step of conversation turns, branches, and failed, truncated or aborted samples."""
    turns = np.array([1, 1, 0, 0, 0, 1, 1], bool)
    logprobs = np.where(turns, np.float32(-0.5), np.float32(np.nan))
    resumed = (VersionSpan(2, 0, 3), VersionSpan(3, 3, 7))
    multi = a_sample("turns", 0, 7, loss_mask_G=turns, logprobs_G=logprobs, version_spans=resumed)
    known = np.where(turns, np.float32(-0.5), np.float32(-9.0))
    failed = {"reward": None, "reward_error": "it raised"}
    lost = a_sample("cut", 1, 5)
    lost.routes.valid_T[4:] = False
    nan = np.full(5, np.nan, np.float32)
    branch = {"id": "000000/turns/0.1", "branch_of": "000000/turns/0"}
    samples = [
        multi,
        a_sample("turns", 1, 7, loss_mask_G=turns, logprobs_G=known, reward=1e300),
        replace(a_sample("turns", 0, 4), **branch),
        a_sample("cut", 0, 5, finish_reason="length"),
        replace(lost, finish_reason="abort", logprobs_G=nan),
        a_sample("failed", 0, 5, logprobs_G=nan, **failed),
        a_sample("failed", 1, 5, loss_mask_G=np.zeros(5, bool), logprobs_G=nan),
        a_sample("silent", 0, 0, finish_reason="abort"),
        a_sample("silent", 1, 0, P=1, finish_reason="abort"),
    ]
    return {sample.id: sample for sample in samples}


UNTRAINED = {"000000/cut/1", "000000/failed/0"}
"""The samples of `a_step` with an unknown row or without a reward."""


@pytest.fixture
def exported(tmp_path):
    def export(form, samples, geometry=GEOMETRY):
        store = open_store(str(tmp_path / "run"))
        write_step(store, 0, list(samples.values()), geometry, geometry and MADE_BY)
        out = tmp_path / form
        arguments = ["export", store.uri, "--out", str(out), "--format", form]
        done = CliRunner().invoke(traces.app, arguments)
        assert done.exit_code == 0, done.output
        return torch.load(out / "0.pt"), " ".join(done.output.split())

    return export


def slime_takes(loaded: dict, routes: bool = True) -> None:
    """Check what `RolloutManager._convert_samples_to_train_data` (slime/ray/rollout.py)
    requires."""
    samples = loaded["samples"]
    # "if samples[0].rollout_log_probs is not None": then the log-probs of all samples are used
    assert len({"rollout_log_probs" in sample for sample in samples}) == 1
    for sample in samples:
        # Sample.from_dict (slime/utils/types.py): a known status, and no unknown fields
        assert sample["status"] in {"pending", "completed", "truncated", "aborted", "failed"}
        assert len(sample["loss_mask"]) == sample["response_length"]
        # _post_process_rewards puts them into a float32 tensor
        assert isinstance(sample["reward"], float)
        assert torch.isfinite(torch.tensor(sample["reward"], dtype=torch.float))
        if "rollout_log_probs" in sample:
            logprobs = torch.as_tensor(sample["rollout_log_probs"], dtype=torch.float32)
            # slice_log_prob_with_cp (slime/backends/megatron_utils/cp_utils.py)
            assert len(logprobs) == sample["response_length"]
            mask = torch.tensor(sample["loss_mask"], dtype=torch.float32)
            # loss.py: train_rollout_logprob_abs_diff and vanilla_tis_function
            assert torch.isfinite((torch.exp(-0.7 - logprobs) * mask).sum())
            # Sample.append_response_tokens: tokens that were not generated have 0.0
            assert (logprobs[mask == 0] == 0.0).all()
        if routes:
            experts = torch.as_tensor(sample["rollout_routed_experts"])
            # validate_rollout_routed_experts_for_replay (slime/observability/rollout_data_utils.py)
            # and prepare_routed_experts_for_routing_replay (slime/backends/megatron_utils)
            assert experts.shape == (len(sample["tokens"]) - 1, LAYERS, GEOMETRY.topk)
            assert all(torch.count_nonzero(experts[:, layer]) for layer in GEOMETRY.layers)


def verl_takes(loaded: dict, routes: bool = True) -> None:
    """Check what `list_of_dict_to_tensordict` (verl/utils/tensordict_utils.py) requires.

    The requirements of the functions that read the batch are also checked.
    """
    samples = loaded["samples"]
    assert len(loaded["ids"]) == len(samples)
    assert {frozenset(sample) for sample in samples} == {frozenset(samples[0])}
    for sample in samples:
        P, G = len(sample["prompts"]), len(sample["responses"])
        # AgentLoopOutput.as_dict (agent_loop.py): rm_scores[-1] = reward
        assert G > 0
        assert sample["rm_scores"].shape == sample["response_mask"].shape == (G,)
        assert torch.isfinite(sample["rm_scores"]).all()
        assert not sample["rm_scores"][:-1].any()
        assert set(sample["response_mask"].tolist()) <= {0, 1}
        if "rollout_log_probs" in sample:
            logprobs = sample["rollout_log_probs"]
            assert logprobs.shape == (G,)
            # rollout_corr_helper: log-ratios of the entire batch, before they are masked
            assert torch.isfinite(torch.exp(torch.full_like(logprobs, -0.7) - logprobs)).all()
        if routes:
            # align_r3_router_replay_data (verl/utils/megatron/router_replay_utils.py)
            assert sample["routed_experts"].shape == (P + G, LAYERS, GEOMETRY.topk)
            assert not sample["routed_experts"][-1].any()


def test_slime_accepts_a_step_of_turns_failures_and_branches(exported):
    samples = a_step()
    loaded, said = exported("slime", samples)
    slime_takes(loaded)
    found = {sample["metadata"]["id"]: sample for sample in loaded["samples"]}
    assert samples.keys() - found.keys() == {"000000/silent/1"}  # one token
    for part in ("8 samples in", "2 of them are excluded", "1 left out"):
        assert part in said
    assert found["000000/turns/0"]["weight_versions"] == ["2", "3"]
    assert {id for id, sample in found.items() if sample["remove_sample"]} == UNTRAINED
    statuses = {"stop": "completed", "length": "truncated", "abort": "aborted"}
    for index, (id, sample) in enumerate(found.items()):
        wanted = samples[id]
        assert sample["index"] == index
        assert sample["status"] == statuses[wanted.finish_reason]
        assert sample["tokens"] == wanted.tokens_S.tolist()
        assert sample["loss_mask"] == wanted.loss_mask_G.astype(int).tolist()
        known_G = wanted.loss_mask_G & np.isfinite(wanted.logprobs_G)
        assert sample["rollout_log_probs"] == np.where(known_G, wanted.logprobs_G, 0).tolist()
        assert sample["reward"] == min(wanted.reward or 0.0, float(np.finfo(np.float32).max))
        experts = to_slime(wanted.routes, GEOMETRY)
        assert str(sample["rollout_routed_experts"].dtype) == "torch.int32"
        assert np.array_equal(sample["rollout_routed_experts"].numpy(), experts)
    # validate_rollout_id_annotated (slime/observability/rollout_data_utils.py): siblings share
    # their rollout_id
    rollouts = {id: sample["rollout_id"] for id, sample in found.items()}
    assert rollouts["000000/turns/0.1"] == rollouts.pop("000000/turns/0")
    assert len(set(rollouts.values())) == len(rollouts)


def test_verl_accepts_a_step_of_turns_failures_and_branches(exported):
    samples = a_step()
    loaded, said = exported("verl", samples)
    verl_takes(loaded)
    found = dict(zip(loaded["ids"], loaded["samples"], strict=True))
    assert samples.keys() - found.keys() == {"000000/silent/0", "000000/silent/1"}  # no response
    for part in ("7 samples in", "2 of them are excluded", "2 left out"):
        assert part in said
    dtypes = dict.fromkeys(("prompts", "responses", "response_mask"), "torch.int64")
    dtypes |= dict.fromkeys(("rollout_log_probs", "rm_scores"), "torch.float32")
    for id, sample in found.items():
        wanted = samples[id]
        assert {name: str(value.dtype) for name, value in sample.items()} == {
            **dtypes,
            "routed_experts": "torch.int16",
        }
        assert np.array_equal(sample["routed_experts"].numpy(), to_verl(wanted.routes, GEOMETRY))
        assert sample["prompts"].tolist() == wanted.prompt_tokens_P.tolist()
        assert sample["responses"].tolist() == wanted.response_tokens_G.tolist()
        in_loss = wanted.loss_mask_G & (id not in UNTRAINED)
        assert sample["response_mask"].tolist() == in_loss.astype(int).tolist()
        known_G = wanted.loss_mask_G & np.isfinite(wanted.logprobs_G)
        logprobs = np.where(known_G, wanted.logprobs_G, np.float32(0))
        assert np.array_equal(sample["rollout_log_probs"].numpy(), logprobs)
        most = float(np.finfo(np.float32).max)
        assert sample["rm_scores"][-1].item() == min(wanted.reward or 0.0, most)


@pytest.mark.parametrize(("form", "takes"), [("verl", verl_takes), ("slime", slime_takes)])
def test_unknown_log_probs_in_the_loss_are_omitted_from_all_samples(exported, form, takes):
    """A log-prob of 0.0 would be a probability of 1.

    Both trainers infer all samples' fields from the first sample.
    """
    samples = {id: a_step()[id] for id in ("000000/cut/0", "000000/turns/0")}
    samples["000000/cut/0"].logprobs_G[2] = np.nan
    loaded, said = exported(form, samples)
    takes(loaded)
    assert not any("rollout_log_probs" in sample for sample in loaded["samples"])
    assert "no log-probs" in said


@pytest.mark.parametrize(("form", "takes"), [("verl", verl_takes), ("slime", slime_takes)])
def test_samples_of_a_step_without_routes_lack_the_routes_field(exported, form, takes):
    samples = [a_sample("plain", k, 4, routed=False) for k in range(2)]
    loaded, _ = exported(form, {sample.id: sample for sample in samples}, None)
    takes(loaded, routes=False)
    assert not any(name.endswith("routed_experts") for one in loaded["samples"] for name in one)


class FullDisk(io.BytesIO):
    """A file on a disk with 4 KiB of free space."""

    def write(self, data):
        if self.tell() + len(data) > 4096:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


@pytest.mark.parametrize("peer", ["verl", "slime"])
def test_a_full_disk_leaves_no_file_for_a_trainer(tmp_path, monkeypatch, peer):
    """A trainer would load an incomplete file under the final name."""
    store = open_store(str(tmp_path / "run"))
    write_step(store, 0, list(a_step().values()), GEOMETRY, MADE_BY)
    with monkeypatch.context() as full:

        def created(path):
            path.touch()
            return FullDisk()

        full.setattr(exporting, "_created", created)
        with pytest.raises(TraceError, match="No space left on device"):
            export_for(store, 0, tmp_path / "out", peer)
    assert list((tmp_path / "out").iterdir()) == []
    export_for(store, 0, tmp_path / "out", peer, num_layers=8)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["0.pt"]
    samples = torch.load(tmp_path / "out" / "0.pt")["samples"]
    assert {value.shape[1] for one in samples for n, value in one.items() if "routed" in n} == {8}


def test_an_existing_file_is_not_overwritten(exported, tmp_path):
    """The folder of --out must be empty, but other programs may also write to it."""
    exported("slime", a_step())
    store = open_store(str(tmp_path / "run"))
    with pytest.raises(TraceError, match=r"0\.pt: it already exists"):
        export_for(store, 0, tmp_path / "slime", "slime")
    (tmp_path / "other").mkdir()
    for name in ("000000_turns_0.npy", "000000_turns_0.valid.npy", "samples.json"):
        (tmp_path / "other" / name).write_text("mine")
        with pytest.raises(TraceError, match="already exists"):
            export(store, 0, tmp_path / "other", "npy")
        assert (tmp_path / "other" / name).read_text() == "mine"
        for path in (tmp_path / "other").iterdir():
            path.unlink()


@pytest.mark.parametrize("reward", [8.0, None])
@pytest.mark.parametrize("peer", ["verl", "slime"])
def test_rewards_count_in_a_group_as_they_do_in_retrace(tmp_path, peer, reward):
    """The reward of a greedy baseline is not one of its group's rewards, so the sample is left out.
    A sample with unknown rows keeps its reward. Only a sample without a reward gets 0."""
    samples = [a_sample("p", k, 5, reward=float(k + 5)) for k in range(4)]
    samples[1] = replace(samples[1], reward=None, reward_error="it raised")
    samples[2].routes.valid_T[3:] = False
    error = "it raised" if reward is None else None
    samples[3] = replace(samples[3], reward=reward, reward_error=error)
    store = open_store(str(tmp_path / "run"))
    write_shard(store, 0, 0, new_write_id(), samples, GEOMETRY, MADE_BY)
    ids = [sample.id for sample in samples]
    seal(store, 0, 1, lambda _: ids, None, baselines=[ids[3]])
    made = export_for(store, 0, tmp_path / "out", peer)
    assert (made.samples, made.untrained, made.left_out, made.not_counted) == (3, 2, 0, 1)
    found = torch.load(tmp_path / "out" / "0.pt")["samples"]
    rewards = [of["reward"] if peer == "slime" else float(of["rm_scores"].sum()) for of in found]
    assert rewards == [5.0, 0.0, 7.0]
    listed = CliRunner().invoke(traces.app, ["ls", store.uri], env={"COLUMNS": "200"}).output
    assert " 6.000 " in listed  # the mean of 5 and 7


@pytest.mark.parametrize(("peer", "P"), [("verl", 3), ("slime", 1)])
def test_no_file_is_written_without_samples(tmp_path, peer, P):
    """verl rejects samples without a response, and slime rejects samples of one token."""
    store = open_store(str(tmp_path / "run"))
    samples = [a_sample("silent", k, 0, P=P, finish_reason="abort") for k in range(2)]
    write_step(store, 0, samples, GEOMETRY, MADE_BY)
    with pytest.raises(TraceError, match=f"no file for {peer}"):
        export_for(store, 0, tmp_path / "out", peer)
    assert not (tmp_path / "out").exists()
