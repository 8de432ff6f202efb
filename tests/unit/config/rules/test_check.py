"""Rules that involve several settings: valid combinations pass.

The message for each refused combination names the key, the value found and the fix.
"""

from typing import ClassVar

import pytest

from pipeline.config.rules.check import config_problems, rank_notes
from pipeline.config.rules.pods import InstalledGpus
from pipeline.errors import InputError
from tests.unit.config.settings import (
    ACTOR,
    MEGATRON,
    OVERRIDE,
    QWEN3,
    QWEN3_MOE,
    R3,
    RECORD,
    REPLAY,
    ROLLOUT,
    load,
    notes,
    problems,
    the_problem,
)


@pytest.mark.parametrize("mode", ["disabled", "R2"])
def test_minimal_settings_pass(tmp_path, mode):
    assert problems(tmp_path, f"{REPLAY}.mode={mode}") == []
    assert notes(tmp_path, f"{REPLAY}.mode={mode}") == []


class TestSampling:
    """The engine's log-probs must refer to the distribution that the trainer computes."""

    MODES = (
        (),
        R3,
        (f"{REPLAY}.mode=R2",),
        ("algorithm.rollout_correction.bypass_mode=True",),
        ("algorithm.rollout_correction.preset=bypass_pg_is",),
    )

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize(("setting", "fix"), [("top_p=0.9", "1.0"), ("top_k=20", "-1")])
    def test_renormalised_rollouts_are_refused_in_every_mode(self, tmp_path, mode, setting, fix):
        name, value = setting.split("=")
        problem = the_problem(tmp_path, *mode, f"{ROLLOUT}.{setting}")
        assert problem.startswith(f"{ROLLOUT}.{name}: found {value}; ")
        assert f"write {fix}, " in problem
        assert f"{ROLLOUT}.val_kwargs.{name}" in problem

    @pytest.mark.parametrize("setting", ["top_p=1.0", "top_k=-1", "top_k=0", "temperature=0.01"])
    def test_the_entire_distribution_passes(self, tmp_path, setting):
        assert problems(tmp_path, f"{ROLLOUT}.{setting}") == []

    def test_validation_is_free(self, tmp_path):
        free = [f"{ROLLOUT}.val_kwargs.{key}" for key in ("top_p=0.9", "top_k=20")]
        assert problems(tmp_path, *free) == []

    def test_a_temperature_that_vllm_would_raise_is_refused(self, tmp_path):
        """vLLM samples at 0.01 instead, while the trainer divides by the given temperature."""
        with pytest.raises(InputError) as caught:
            problems(tmp_path, f"{ROLLOUT}.temperature=0.005")
        assert f"{ROLLOUT}.temperature" in str(caught.value)

    @pytest.mark.parametrize(
        "argument", ["override_generation_config", "generation_config", "logits_processors"]
    )
    def test_the_engine_takes_no_other_sampling_parameters(self, tmp_path, argument):
        """Penalties, min_p, bad words and logit biases could only come from these arguments."""
        given = f"{ROLLOUT}.engine_kwargs.vllm.{argument}={{min_p: 0.1}}"
        assert argument in the_problem(tmp_path, given)


class TestReplay:
    def test_r3_without_the_rollout_flag_is_refused(self, tmp_path):
        problem = the_problem(tmp_path, f"{REPLAY}.mode=R3")
        assert problem.startswith(f"{RECORD}: found False, but ")
        assert problem.endswith(f"add {RECORD}=True")
        assert problems(tmp_path, *R3) == []
        assert notes(tmp_path, *R3) == []

    @pytest.mark.parametrize(
        ("mode", "note"),
        [
            ("R2", "R2 replays the trainer's routes"),
            ("disabled", "not replayed (actor_rollout_ref.actor.router_replay.mode is disabled)"),
        ],
    )
    def test_the_rollout_flag_without_r3_is_noted(self, tmp_path, mode, note):
        """verl's published R2 example also sets the rollout flag; without R3, the flag only allows
        an audit."""
        settings = (f"{REPLAY}.mode={mode}", f"{RECORD}=True")
        assert problems(tmp_path, *settings) == []
        assert note in "\n".join(notes(tmp_path, *settings))

    @pytest.mark.parametrize("mode", [(f"{REPLAY}.mode=R2",), R3])
    @pytest.mark.parametrize("name", ["moe_router_fusion", "enable_cuda_graph"])
    def test_incompatible_router_settings_are_refused(self, tmp_path, mode, name):
        """test_transformer_rules.py covers the other fields."""
        problem = the_problem(tmp_path, *mode, f"{OVERRIDE}.{name}=True")
        assert problem.startswith(f"{OVERRIDE}.{name}: found True; with ")
        assert problem.endswith("leave it out")
        assert problems(tmp_path, f"{OVERRIDE}.{name}=True") == []  # allowed without replay

    @pytest.mark.parametrize(
        "settings",
        [
            [f"{OVERRIDE}.moe_aux_loss_coeff=0.001"],
            [f"{OVERRIDE}.moe_aux_loss_coeff=[0.001]"],
            [f"{OVERRIDE}.moe_router_load_balancing_type=aux_loss"],  # the model's coefficient
        ],
    )
    def test_auxiliary_loss_must_be_acknowledged(self, tmp_path, settings):
        problem = the_problem(tmp_path, *R3, *settings)
        assert problem.startswith(f"{OVERRIDE}.moe_aux_loss_coeff: found ")
        assert "accept it with actor_rollout_ref.actor.router_replay.allow_aux_loss=True" in problem
        assert problems(tmp_path, *R3, *settings, f"{REPLAY}.allow_aux_loss=True") == []
        assert problems(tmp_path, *settings) == []

    @pytest.mark.parametrize(
        ("settings", "key"), [(R3, f"{REPLAY}.mode"), ((f"{RECORD}=True",), RECORD)]
    )
    def test_a_dense_model_has_no_routes(self, tmp_path, settings, key):
        problem = the_problem(tmp_path, *settings, model=QWEN3)
        assert problem.startswith(f"{key}: found ")
        assert "(model_type 'qwen3') has no MoE layers" in problem
        assert problems(tmp_path, model=QWEN3) == []


class TestModels:
    @pytest.mark.parametrize(
        "model",
        [
            {**QWEN3_MOE, "model_type": "new_moe"},
            {**QWEN3, "model_type": "new_dense"},
            {**QWEN3_MOE, "model_type": "new_moe", "num_experts": None},  # incomplete
        ],
    )
    def test_families_that_cannot_be_trained_are_refused(self, tmp_path, model):
        problem = the_problem(tmp_path, model=model)
        assert f"config.json has model_type='{model['model_type']}', which cannot be" in problem
        assert "expected one of deepseek_v3, glm4_moe, llama" in problem

    def test_model_features_that_the_trainer_would_ignore_are_refused(self, tmp_path):
        """The trainer also refuses such a model, but only after all processes have started."""
        problem = the_problem(tmp_path, model={**QWEN3_MOE, "hidden_act": "gelu"})
        assert problem.startswith(
            "actor_rollout_ref.model.path: config.json has hidden_act='gelu', expected silu: "
        )


class TestRecordSets:
    REPLAYED = (*R3, f"{REPLAY}.replay_file=old/set")

    def test_replay_needs_no_workers_and_no_reward_function(self, tmp_path):
        config = load(tmp_path, *self.REPLAYED).config
        config = config.model_copy(update={"custom_reward_function": None})
        assert config_problems(config, QWEN3_MOE) == []

    def test_replay_with_workers_is_refused(self, tmp_path):
        problem = the_problem(tmp_path, *self.REPLAYED, "launch.rollout_workers=2")
        assert problem.startswith("launch.rollout_workers: found 2, but with ")
        assert problems(tmp_path, *self.REPLAYED, "launch.rollout_workers=0") == []

    def test_replay_with_validation_is_refused(self, tmp_path):
        problem = the_problem(tmp_path, *self.REPLAYED, "data.val_files=val.parquet")
        assert problem.startswith("data.val_files: found val.parquet, but with")

    def test_recording_to_the_replayed_set_is_refused(self, tmp_path):
        """Recording is also refused if the path to the same folder is spelled differently."""
        for place in ("old/set", "./old/../old/set"):
            problem = the_problem(tmp_path, *self.REPLAYED, f"{REPLAY}.record_file={place}")
            assert problem.startswith(f"{REPLAY}.record_file: found {place}, the same as")
        assert problems(tmp_path, *self.REPLAYED, f"{REPLAY}.record_file=new") == []

    @pytest.mark.parametrize("name", ["record_file", "replay_file"])
    def test_a_set_in_the_runs_own_place_is_refused(self, tmp_path, name):
        place = "outputs/store/test"
        problem = the_problem(tmp_path, *R3, f"{REPLAY}.{name}={place}")
        assert problem.startswith(f"{REPLAY}.{name}: found {place}, which is the run's own place")

    @pytest.mark.parametrize("name", ["record_file", "replay_file"])
    def test_a_set_without_replay_is_refused(self, tmp_path, name):
        problem = the_problem(tmp_path, f"{REPLAY}.{name}=set")
        assert problem.startswith(f"{REPLAY}.{name}: found set, but {REPLAY}.mode is disabled")


class TestInputs:
    def test_a_run_without_prompts_is_refused(self, tmp_path):
        assert the_problem(tmp_path, "data.train_files=null").startswith("data.train_files: found")

    def test_a_run_without_workers_is_refused(self, tmp_path):
        assert "write 1 or more" in the_problem(tmp_path, "launch.rollout_workers=0")

    def test_batches_and_shards_must_fit_each_other(self, tmp_path):
        problem = the_problem(
            tmp_path, "data.train_batch_size=32", f"{ACTOR}.ppo_mini_batch_size=12"
        )
        assert problem.startswith(f"{ACTOR}.ppo_mini_batch_size: found 12, expected a divisor")
        assert problem.endswith("write 8")
        assert "at most data.train_batch_size=32" in the_problem(
            tmp_path, "launch.rollout_shards=33"
        )
        assert "at least launch.rollout_workers=3" in the_problem(
            tmp_path, "launch.rollout_shards=2", "launch.rollout_workers=3"
        )

    def test_steps_and_samples_above_the_limits_are_refused(self, tmp_path):
        """These settings are refused before anything starts, not later by a worker."""
        large = the_problem(tmp_path, "data.train_batch_size=131104", f"{ROLLOUT}.n=8")
        assert "gives 1048832 samples per step, expected at most 1048576" in large
        long, _ = problems(tmp_path, "data.max_response_length=2097152")
        assert "gives 2097664 tokens per sample, expected at most 2097152" in long

    def test_a_run_with_pods_cannot_have_its_store_in_a_folder(self, tmp_path):
        config = load(tmp_path, "trainer.nnodes=2", "store.uri=/data").config
        [problem] = config_problems(config, QWEN3_MOE, on_cluster=InstalledGpus())
        assert problem.startswith("store.uri: found /data, expected s3://BUCKET/PREFIX, because")

    def test_nodes_become_ranks_on_one_machine(self, tmp_path):
        nodes = ("trainer.nnodes=2", "trainer.n_gpus_per_node=3")
        assert problems(tmp_path, *nodes, f"{MEGATRON}.tensor_model_parallel_size=2") == []
        (note,) = rank_notes(load(tmp_path, *nodes).config)
        assert note.startswith("trainer.nnodes: 2 nodes with 3 ranks each mean 6 ranks, all on")

    def test_samples_longer_than_the_models_positions_are_refused(self, tmp_path):
        problem = the_problem(tmp_path, "data.max_response_length=2000")
        assert problem.startswith("data.max_response_length: found 2000, which with")
        assert "2512 tokens, but the model has 2048 positions; write at most 1536" in problem
        yarn = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
        [other] = problems(tmp_path, "data.max_response_length=2000", model={**QWEN3_MOE, **yarn})
        assert "rope_type='yarn'" in other


class TestLayout:
    """The tests use small names: ranks, and sizes of Megatron-core and of the engine."""

    NAMES: ClassVar = {
        "ranks": "trainer.n_gpus_per_node",
        "tp": f"{MEGATRON}.tensor_model_parallel_size",
        "pp": f"{MEGATRON}.pipeline_model_parallel_size",
        "vpp": f"{MEGATRON}.virtual_pipeline_model_parallel_size",
        "cp": f"{MEGATRON}.context_parallel_size",
        "ep": f"{MEGATRON}.expert_model_parallel_size",
        "etp": f"{MEGATRON}.expert_tensor_parallel_size",
        "sp": f"{MEGATRON}.sequence_parallel",
        "engine_tp": f"{ROLLOUT}.tensor_model_parallel_size",
        "overlap": f"{OVERRIDE}.overlap_p2p_comm",
        "batched": f"{OVERRIDE}.batch_p2p_comm",
        "batch": "data.train_batch_size",
        "mini": f"{ACTOR}.ppo_mini_batch_size",
    }

    def settings(self, written: str) -> list[str]:
        pairs = (pair.split("=") for pair in written.split())
        return [f"{self.NAMES[name]}={value}" for name, value in pairs]

    @pytest.mark.parametrize(
        "written",
        ["ranks=2", "ranks=2 tp=2", "ranks=2 pp=2", "ranks=2 pp=2 vpp=2", "ranks=2 ep=2",
         "ranks=8 tp=2 ep=8 etp=1"],
    )  # fmt: skip
    def test_layouts_that_fit_pass(self, tmp_path, written):
        assert problems(tmp_path, *R3, *self.settings(written)) == []

    @pytest.mark.parametrize(
        ("written", "key", "expected"),
        [
            ("ranks=3 tp=2", "ranks", "expected a multiple of 2 ranks"),
            ("ranks=2 ep=4", "ranks", "expected a multiple of 4 ranks"),
            ("ranks=6 tp=2 cp=2", "ranks", "expected a multiple of 4 ranks"),
            ("ranks=2 tp=2 etp=1", "etp", "silently train separate experts"),
            ("vpp=2", "vpp", "pipeline_model_parallel_size is 1; write null, or more"),
            ("ranks=3 pp=3", "pp", "model's num_hidden_layers=4; write one of 1, 2, 4"),
            ("ranks=2 pp=2 vpp=3", "pp", "found 6, expected a divisor of the model's num_hidden_"),
            ("ranks=4 tp=4", "tp", "model's num_key_value_heads=2; write one of 1, 2"),
            ("engine_tp=3", "engine_tp", "model's num_attention_heads=4; write one of 1, 2, 4"),
            ("ranks=3 ep=3", "ep", "model's experts=16; write one of 1, 2, 4, 8, 16"),
            ("ranks=2 tp=2 sp=False", "sp", "only with sequence parallelism; write True"),
            ("ranks=2 pp=2 vpp=2 overlap=False", "overlap", "silently confuse activations and"),
            ("ranks=2 pp=2 vpp=2 batched=True", "batched", "leave it out, which makes it false"),
            ("ranks=16 batch=1 mini=1", "mini", "8 samples for 16 data-parallel ranks; write more"),
        ],
    )
    def test_layouts_that_do_not_fit_are_refused(self, tmp_path, written, key, expected):
        """These layouts are also refused without replay, because Megatron-core would compute
        incorrect results or would not start."""
        problem = the_problem(tmp_path, *self.settings(written))
        assert problem.startswith(self.NAMES[key])
        assert expected in problem

    def test_a_size_must_divide_all_dimensions(self, tmp_path):
        """For each setting, one message lists the sizes that divide all dimensions."""
        dense, experts = problems(tmp_path, *self.settings("ranks=3 tp=3 sp=True"))
        assert "num_attention_heads=4, num_key_value_heads=2, vocab_size=512; write" in dense
        assert experts.startswith(f"{self.NAMES['etp']}: found 3 (null: the same as tensor_model_")

    def test_expert_parallelism_of_a_dense_model_is_refused(self, tmp_path):
        settings = ["trainer.n_gpus_per_node=2", f"{MEGATRON}.expert_model_parallel_size=2"]
        assert "the model has no MoE layers; write 1" in the_problem(
            tmp_path, *settings, model=QWEN3
        )


def test_all_problems_are_reported_together(tmp_path):
    found = problems(
        tmp_path, f"{REPLAY}.mode=R3", f"{ROLLOUT}.top_p=0.5", "trainer.n_gpus_per_node=3",
        f"{MEGATRON}.tensor_model_parallel_size=2", "data.train_files=null",
    )  # fmt: skip
    assert len(found) == 4


class TestUnevenStages:
    """Four layers are split into stages, in the ways that Megatron-core supports."""

    TWO = (f"{MEGATRON}.pipeline_model_parallel_size=2", "trainer.n_gpus_per_node=2")
    THREE = (f"{MEGATRON}.pipeline_model_parallel_size=3", "trainer.n_gpus_per_node=3")
    VPP = f"{MEGATRON}.virtual_pipeline_model_parallel_size=2"
    FIRST = f"{OVERRIDE}.num_layers_in_first_pipeline_stage"
    LAST = f"{OVERRIDE}.num_layers_in_last_pipeline_stage"
    EMBEDDING = f"{OVERRIDE}.account_for_embedding_in_pipeline_split"
    LOSS = f"{OVERRIDE}.account_for_loss_in_pipeline_split"

    @pytest.mark.parametrize(
        "settings",
        [
            (*TWO, f"{FIRST}=1"),
            (*TWO, f"{FIRST}=1", f"{LAST}=3"),
            (*THREE, f"{LAST}=2"),
            (*THREE, f"{FIRST}=1", f"{LAST}=1"),
            (*THREE, f"{EMBEDDING}=True", f"{LOSS}=True"),
            (*TWO, f"{EMBEDDING}=False", f"{FIRST}=null"),
            (f"{EMBEDDING}=True",),
        ],
    )
    def test_valid_splits_pass(self, tmp_path, settings):
        assert problems(tmp_path, *settings) == []

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ((*TWO, f"{FIRST}=4"), "which leaves 0 layers for 1 stages"),
            ((*TWO, f"{FIRST}=1", f"{LAST}=1"), "which leaves 2 layers for 0 stages"),
            ((f"{FIRST}=2", f"{LAST}=2"), "which is one stage; leave num_layers_in_first"),
            ((*THREE, f"{FIRST}=1"), "which leaves 3 layers for 2 stages; write numbers that"),
            ((*THREE, f"{LOSS}=True"), "which leaves 5 layers for 3 stages"),
            ((*TWO, f"{FIRST}=1", f"{LOSS}=True"), "expected one way to split the layers"),
            ((*TWO, VPP, f"{FIRST}=1"), "stages of 1, 3 layers, expected multiples of"),
        ],
    )
    def test_invalid_splits_are_refused(self, tmp_path, settings, message):
        (problem,) = problems(tmp_path, *settings)
        assert problem.startswith(f"{OVERRIDE}: found ")
        assert message in problem

    def test_a_layout_of_single_layers_is_refused(self, tmp_path):
        problem = the_problem(
            tmp_path, *self.TWO, f"{OVERRIDE}.pipeline_model_parallel_layout=Et|L"
        )
        assert "a layout of single layers is not supported yet; write num_layers_in_" in problem


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (f"{MEGATRON}.param_offload=true", f"{MEGATRON}.param_offload: True has no effect"),
        ("actor_rollout_ref.ref.megatron.param_offload=true", "there is no reference policy"),
        ("actor_rollout_ref.ref.log_prob_use_dynamic_bsz=true", "there is no reference policy"),
        (
            f"{ROLLOUT}.log_prob_max_token_len_per_gpu=5000",
            "no effect, because micro-batches are formed by number",
        ),
        (
            f"{ACTOR}.ppo_max_token_len_per_gpu=5000",
            "no effect, because micro-batches are formed by number",
        ),
        (f"{OVERRIDE}.recompute_modules=[mlp]", "no effect with recompute_granularity=null"),
    ],
)
def test_settings_without_effect_are_noted(tmp_path, settings, expected):
    (note,) = notes(tmp_path, settings)
    assert expected in note


def test_whole_versions_at_intervals_are_noted_without_differences(tmp_path):
    key = "store.policy_deltas"
    assert notes(tmp_path, f"{key}.enable=false") == notes(tmp_path, f"{key}.every=4") == []
    assert notes(tmp_path, f"{key}.enable=false", f"{key}.every=4") == [
        f"{key}.every: 4 has no effect with {key}.enable=false"
    ]


@pytest.mark.parametrize(
    "settings",
    [
        (f"{MEGATRON}.param_offload=true", f"{ACTOR}.use_kl_loss=true"),
        (f"{ACTOR}.ppo_max_token_len_per_gpu=5000", f"{ACTOR}.use_dynamic_bsz=true"),
        (f"{OVERRIDE}.recompute_modules=[mlp]", f"{OVERRIDE}.recompute_granularity=selective"),
    ],
)
def test_settings_with_an_effect_are_not_noted(tmp_path, settings):
    assert notes(tmp_path, *settings) == []


def test_replaced_fields_and_high_agreement_are_noted(tmp_path):
    assert notes(tmp_path, f"{OVERRIDE}.moe_permute_fusion=true") == []
    (note,) = notes(tmp_path, f"{OVERRIDE}.moe_permute_fusion=true", "trainer.device=cpu")
    assert "moe_permute_fusion: True requires CUDA" in note
    (note,) = notes(tmp_path, *R3, f"{REPLAY}.min_agreement=0.6")
    assert "min_agreement: 0.6 is high" in note
