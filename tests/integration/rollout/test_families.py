"""Comparison with transformers for a tiny model of each family that vLLM runs on CPUs."""

import numpy as np
import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm import ModelRegistry
from vllm.platforms import current_platform

from operators.rollout.engine import RolloutEngine
from operators.rollout.types import Request, RolloutError
from pipeline.config.tree import Rollout
from pipeline.errors import InputError
from pipeline.inputs.model_folder import find_model
from pipeline.model.families import FAMILIES as TRAINED
from pipeline.model.families import moe_geometry
from pipeline.run.plan import Sampling
from pipeline.traces import Geometry
from tests.exhaustive import sample_or_all
from tests.integration.rollout.agreement import assert_agrees
from tests.integration.rollout.generations import assert_same, generate
from tests.integration.rollout.mixed import mixed_policy
from tests.integration.rollout.reference import ReferenceModel
from tests.tiny_models import make_own, make_tiny

pytestmark = pytest.mark.integration

FAMILIES = {
    "qwen2_moe": Geometry(16, 4, (0, 1, 2, 3)),
    "qwen3_moe": Geometry(16, 4, (0, 1, 2, 3)),
    "mixtral": Geometry(8, 2, (0, 1, 2, 3)),
    "deepseek_v3": Geometry(16, 4, (1, 2, 3)),
    "glm4_moe": Geometry(16, 4, (1, 2, 3)),
    "qwen3": None,
}
SAMPLING = Sampling(1.3, 1.0, -1, 24)
SETTINGS = Rollout(dtype="float32", max_num_seqs=16, max_num_batched_tokens=512)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_agrees_with_transformers(family, tmp_path):
    """Routes and log-probs agree with transformers, before and after a reload.

    A dense model runs if no routes are recorded, and is refused if they are.
    """
    if FAMILIES[family] is None:
        folder = make_tiny(tmp_path / "dense", family)
        with pytest.raises(RolloutError, match="the model has no MoE layers"):
            RolloutEngine(folder, SETTINGS, True, 128, None)
    check_family(family, tmp_path)


@pytest.mark.parametrize("family", sample_or_all(("deepseek_v3", "glm4_moe"), tuple(TRAINED)))
def test_a_model_as_transformers_writes_it_agrees_with_transformers(family, tmp_path):
    """Its config.json lacks fields that vLLM reads, for example DeepSeek-V3's topk_method."""
    folder = make_own(tmp_path, family)
    geometry = moe_geometry(find_model(str(folder)).config)
    engine = RolloutEngine(folder, SETTINGS, geometry is not None, 128, geometry)
    asked = [Request(f"{i}", tuple(range(5, 45)), i) for i in range(4)]
    try:
        found = generate(engine, asked, SAMPLING)
        assert_agrees(ReferenceModel(folder), asked, found, SAMPLING.temperature)
        engine.load(folder, 1)
    finally:
        engine.close()


def test_latent_attention_runs_in_float32_on_a_processor_with_amx(amx, tmp_path):
    """vLLM would select AMX_MLA, which cannot pack float32, so that the engine would not start."""
    check_family("deepseek_v3", tmp_path)


def test_a_policy_is_loaded_in_bfloat16_on_a_processor_with_amx(amx, tmp_path):
    """With AMX_MLA, the engine would start, but could not load another policy into its weights.

    The test does not generate, because the bfloat16 kernels of other layers need a real AMX.
    """
    current_platform.import_kernels()
    if not hasattr(torch.ops._C, "convert_weight_packed"):
        pytest.skip("vLLM loads its kernels for AVX2 here, which cannot pack weights for AMX")
    folders = [make_tiny(tmp_path / str(i), "deepseek_v3", seed=10 + i) for i in range(2)]
    settings = SETTINGS.model_copy(update={"dtype": "bfloat16"})
    engine = RolloutEngine(folders[0], settings, True, 128, FAMILIES["deepseek_v3"])
    try:
        engine.load(folders[1], 1)
    finally:
        engine.close()


@pytest.fixture
def amx(monkeypatch):
    """Make vLLM treat this processor as one with AMX; vLLM checks only this function."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)


def test_vllm_supports_every_family():
    names = {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] for model_type in TRAINED}
    assert names <= set(ModelRegistry.get_supported_archs())


def check_family(family, tmp_path):
    """Compare two policies of a family with transformers, then load some tensors of one."""
    geometry = FAMILIES[family]
    folders = [make_tiny(tmp_path / str(i), family, seed=10 + i) for i in range(2)]
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(2, 300, length).tolist()) for length in (7, 40, 66)]
    asked = [Request(f"{i}", prompts[i // 4], i) for i in range(12)]
    engine = RolloutEngine(folders[0], SETTINGS, geometry is not None, 128, geometry)
    try:
        for version, folder in enumerate(folders):
            if version:
                engine.load(folder, version)
            reference = ReferenceModel(folder)
            assert reference.layers == (geometry.layers if geometry else ())
            assert_agrees(reference, asked, generate(engine, asked, SAMPLING), 1.3)
        # Tensors of each kind: attention, a block's router and experts, and others.
        takes = ("layers.1.self_attn.o", "layers.2.mlp", "layers.2.block_sparse", "lm_head")
        folder, changed = mixed_policy(
            tmp_path / "mixed", folders[1], folders[0], lambda name: any(t in name for t in takes)
        )
        loaded = []
        for some in (changed, None):
            engine.load(folder, 2, some)
            loaded.append(generate(engine, asked, SAMPLING))
        assert_same(*loaded)
    finally:
        engine.close()


def test_experts_that_the_cpu_kernels_pad_are_refused(tmp_path):
    """Without the refusal, their first reload would fail, but only after a whole step."""
    folder = make_tiny(tmp_path, "qwen3_moe", num_hidden_layers=2, moe_intermediate_size=48)
    settings = Rollout(dtype="float32", max_num_seqs=4, max_num_batched_tokens=128)
    with pytest.raises(InputError, match="intermediate size 48"):
        RolloutEngine(folder, settings, True, 64, Geometry(16, 4, (0, 1)))
