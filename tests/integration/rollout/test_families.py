"""Every family of models that the CPU build runs, at tiny size, against transformers."""

import numpy as np
import pytest

from operators.rollout.engine import RolloutEngine
from operators.rollout.records import Request, RolloutError, Sampling
from pipeline.config.tree import Rollout
from pipeline.traces import Geometry
from tests.integration.rollout.agreement import assert_agrees
from tests.integration.rollout.generations import generate
from tests.integration.rollout.reference import ReferenceModel
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.integration

FAMILIES = {
    "qwen2_moe": Geometry(16, 4, (0, 1, 2, 3)),
    "qwen3_moe": Geometry(16, 4, (0, 1, 2, 3)),
    "mixtral": Geometry(8, 2, (0, 1, 2, 3)),
    "deepseek_v3": Geometry(16, 4, (1, 2, 3)),
    "qwen3": None,
}
SAMPLING = Sampling(1.3, 1.0, -1, 24)


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family, tmp_path):
    """Routes and log-probs equal transformers' on the same tokens, before and after a reload; a
    dense model runs without routes and is refused with them.
    """
    geometry = FAMILIES[family]
    folders = [make_tiny(tmp_path / str(i), family, seed=10 + i) for i in range(2)]
    settings = Rollout(dtype="float32", max_num_seqs=16, max_num_batched_tokens=512)
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(2, 300, length).tolist()) for length in (7, 40, 66)]
    asked = [Request(f"{i}", prompts[i // 4], i) for i in range(12)]
    if geometry is None:
        with pytest.raises(RolloutError, match="without MoE layers"):
            RolloutEngine(folders[0], settings, True, 128, None)
    engine = RolloutEngine(folders[0], settings, geometry is not None, 128, geometry)
    try:
        for version, folder in enumerate(folders):
            if version:
                engine.load(folder, version)
            reference = ReferenceModel(folder)
            assert reference.layers == (geometry.layers if geometry else ())
            assert_agrees(reference, asked, generate(engine, asked, SAMPLING), 1.3)
    finally:
        engine.close()


def test_experts_that_the_cpu_kernels_pad_are_refused(tmp_path):
    """Their first reload would fail, after a whole step was made."""
    folder = make_tiny(tmp_path, "qwen3_moe", num_hidden_layers=2, moe_intermediate_size=48)
    settings = Rollout(dtype="float32", max_num_seqs=4, max_num_batched_tokens=128)
    with pytest.raises(RolloutError, match="intermediate size 48"):
        RolloutEngine(folder, settings, True, 64, Geometry(16, 4, (0, 1)))
