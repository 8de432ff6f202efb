"""Runs of tiny models with the shapes of large ones.

Each run covers rollout by vLLM, routes, R3 training, export, and rollout from the exported policy.
"""

import numpy as np
import pytest
from safetensors.torch import load_file

import retrace
from pipeline.policies.fetch import fetch_policy
from pipeline.report.run_metrics import all_metrics
from pipeline.store import open_store
from pipeline.traces import Geometry
from pipeline.upkeep.verify import verify
from tests.exhaustive import sample_or_all
from tests.integration.run.retrace_runs import run, small
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.integration

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return len(solution_str) % 3
"""

SHAPES = {
    # Has a dense first layer, a shared expert, an expert bias and ids that need 16 bits.
    "glm4_moe": ({"n_routed_experts": 272}, Geometry(272, 4, (1, 2, 3))),
    "deepseek_v3": ({}, Geometry(16, 4, (1, 2, 3))),
}


@pytest.mark.parametrize("family", sample_or_all(["glm4_moe"], list(SHAPES)))
def test_a_run_replays_every_row(family, tmp_path):
    """In float32, every row of every MoE layer is replayed, and engine and trainer agree.

    They agree on probabilities and on the choice of experts. The exported policy generates the
    second step's samples. After training, only the fixed expert bias and the tensors of some
    experts are unchanged.
    """
    overrides, geometry = SHAPES[family]
    model = make_tiny(tmp_path / "model", family, **overrides)
    (tmp_path / "reward.py").write_text(REWARD)
    run(
        *small(
            tmp_path,
            "shapes",
            f"actor_rollout_ref.model.path={model}",
            f"custom_reward_function.path={tmp_path}/reward.py",
            "data.max_prompt_length=64",
            "actor_rollout_ref.actor.megatron.dtype=float32",
            "actor_rollout_ref.rollout.dtype=float32",
            "trainer.save_freq=1",
        )
    )
    uri = f"{tmp_path}/store/shapes"
    store = open_store(uri)
    for step in all_metrics(store):
        values = step.values
        assert (values["replay/coverage"], values["replay/rows_native"]) == (1.0, 0)
        assert values["replay/agreement"] > 0.99
        assert values["mismatch/kl"] < 1e-6
    assert verify(store).problems == []

    recorded = retrace.open_run(uri)
    for number in range(2):
        samples = list(recorded.step(number).samples())
        assert {span.version for s in samples for span in s.version_spans} == {number}
        sets = np.concatenate([s.routes.sets_TLK for s in samples])
        assert sets.shape[1:] == (len(geometry.layers), geometry.topk)
        assert sets.dtype == geometry.dtype
        assert geometry.experts * 0.9 < sets.max() < geometry.experts
    before = load_file(model / "model.safetensors")
    fetch_policy(store, 2, tmp_path / "policy")
    after = load_file(tmp_path / "policy" / "model.safetensors")
    assert {n: (t.shape, t.dtype) for n, t in after.items()} == {
        n: (t.shape, t.dtype) for n, t in before.items()
    }
    unchanged = {name for name, tensor in after.items() if tensor.equal(before[name])}
    bias = {name for name in before if name.endswith("e_score_correction_bias")}
    assert len(bias) == len(geometry.layers)
    assert bias <= unchanged
    assert not [name for name in unchanged - bias if ".experts." not in name]
