"""No verl setting that changes a run's numbers is ignored. Each entry in the table of verl's
settings has a concern, which gives the condition for ignoring the setting, and meets that
condition."""

import re

import pytest

from pipeline.config.reading.foreign import IGNORED, Concern, Foreign
from pipeline.config.reading.verl import FOREIGN, find_foreign
from tests.unit.config.settings import ACTOR, OVERRIDE, ROLLOUT, load, load_error

CONFIG = "actor_rollout_ref.model.override_config"
REF_OVERRIDE = "actor_rollout_ref.ref.megatron.override_transformer_config"


def of(*concerns: Concern) -> list[Foreign]:
    return [entry for entry in FOREIGN if entry.concern in concerns]


def name(entry: Foreign) -> str:
    return entry.pattern


class TestNothingThatAltersNumbersIsIgnored:
    """Each entry in the table meets its concern's condition."""

    NUMBERS = (
        "loss|coef|clip|lr_|betas|decay|momentum|temperature|top_p|top_k|penalty|reward|gamma|lam|"
        "threshold|epochs|batch_size|max_samples|truncation|length|rollout_is|rollout_rs|adv_|"
        "estimator|kl_|warmup|template|quant|mtp|lora|override_config|critic"
    )
    """A pattern for words in the names of settings that change a run's numbers."""

    @pytest.mark.parametrize(
        "entry", of(Concern.SPEED, Concern.RECORDS), ids=lambda one: one.pattern
    )
    def test_speed_and_records(self, entry):
        """No setting's name contains a word from `NUMBERS`, except those in `sizes`."""
        sizes = {
            "data.val_batch_size": "a validation has no mini-batches",
            "trainer.max_*_ckpt_to_keep": "files",
            "reward.reward_kwargs.overlong_buffer_cfg.log": "what is stored with the reward",
        }
        words = entry.pattern.removeprefix("critic.").replace("log_prob", "")
        assert entry.pattern in sizes or not re.search(self.NUMBERS, words)

    def test_seeds_and_orders(self):
        """The test lists all entries for seeds and sample orders, because adding one must be a
        deliberate decision."""
        assert {entry.pattern for entry in of(Concern.RANDOM)} == {
            f"{ACTOR}.shuffle",
            f"{ACTOR}.data_loader_seed",
            f"{ACTOR}.megatron.seed",
            "actor_rollout_ref.ref.megatron.seed",
            "actor_rollout_ref.rollout.seed",
            "critic.shuffle",
            "critic.data_loader_seed",
            "critic.megatron.seed",
            "actor_rollout_ref.rollout.full_determinism",
            "trainer.balance_batch",
        }

    @pytest.mark.parametrize("entry", of(Concern.UNREAD), ids=name)
    def test_guards_refuse_values_that_make_verl_read_a_setting(self, entry):
        """Each entry has a guard: a setting whose value determines whether verl reads the entry's
        setting. Guard values that make verl read it are refused, either by the guard's own table
        entry or by the rules for our settings."""
        other = find_foreign(entry.guard)
        if other is None:
            assert entry.guard in {
                "actor_rollout_ref.model.path": "families of text models, in our own classes",
                "actor_rollout_ref.rollout.name": "only vllm",
                f"{ACTOR}.strategy": "only megatron",
                f"{ACTOR}.policy_loss.loss_mode": "neither dro nor bypass_mode",
                "algorithm.adv_estimator": "no estimator of verl that reads them",
                "trainer.total_training_steps": "verl overwrites one with the other",
            }
        else:
            assert other.concern in (Concern.SAME, Concern.ELSEWHERE)

    @pytest.mark.parametrize(
        "entry", of(Concern.SAME, Concern.REFUSED), ids=lambda one: one.pattern
    )
    def test_other_values_are_refused(self, tmp_path, entry):
        key = entry.pattern.replace("*", "zzz")
        assert entry.reason in entry.refusal
        assert all(entry.accepts(value) for value in (*entry.harmless, None, {}))
        (problem,) = load_error(tmp_path, f"{key}=other")
        assert problem == f"{key}: found 'other'; {entry.refusal}"

    @pytest.mark.parametrize(
        ("key", "good", "bad"),
        [
            (f"{ACTOR}.rollout_n", "8", "5"),
            ("actor_rollout_ref.ref.rollout_n", "8", "5"),
            ("actor_rollout_ref.ref.megatron.dtype", "bfloat16", "float32"),
            (f"{REF_OVERRIDE}.moe_router_dtype", "fp32", "fp64"),
            (f"{ROLLOUT}.prompt_length", "512", "256"),
            (f"{ROLLOUT}.response_length", "512", "256"),
            (f"{ROLLOUT}.max_model_len", "1024", "1023"),
            (f"{ROLLOUT}.engine_kwargs.vllm.max_model_len", "1024", "1023"),
            (f"{ROLLOUT}.calculate_log_probs", "True", "False"),
            (f"{ROLLOUT}.val_kwargs.do_sample", "True", "False"),
            (f"{ACTOR}.optim.min_lr_ratio", "0.5", "0.25"),
            (f"{ACTOR}.optim.lr_scheduler_type", "cosine", "constant"),
            (f"{ACTOR}.optim.warmup_style", "cosine", "constant"),
            ("actor_rollout_ref.ref.megatron.use_dist_checkpointing", "False", "True"),
            (f"{CONFIG}.max_position_embeddings", "1024", "1023"),
            (f"{CONFIG}.model_config.max_position_embeddings", "1024", "1023"),
            ("reward.reward_kwargs.max_resp_len", "512", "256"),
            ("critic.enable", "True", "False"),
            ("critic.rollout_n", "8", "5"),
            ("critic.model.path", "model", "other"),
            ("critic.megatron.context_parallel_size", "1", "2"),
            ("critic.megatron.sequence_parallel", "True", "False"),
            ("critic.megatron.use_distributed_optimizer", "True", "False"),
            ("critic.megatron.use_remove_padding", "True", "False"),
            ("critic.megatron.dtype", "bfloat16", "float32"),
            ("critic.megatron.override_transformer_config.moe_router_dtype", "fp32", "fp64"),
            ("critic.optim.min_lr_ratio", "0.5", "0.25"),
            ("critic.optim.lr_scheduler_type", "cosine", "constant"),
            ("critic.optim.warmup_style", "cosine", "constant"),
        ],
    )
    def test_settings_written_elsewhere_must_agree(self, tmp_path, key, good, bad):
        others = (
            f"{ACTOR}.use_kl_loss=True",
            f"{OVERRIDE}.moe_router_dtype=fp32",
            "algorithm.rollout_correction.rollout_is=token",
            f"{ROLLOUT}.val_kwargs.temperature=0.6",
            f"{ACTOR}.optim.lr=2e-6",
            f"{ACTOR}.optim.min_lr=1e-6",
            f"{ACTOR}.optim.lr_decay_style=cosine",
            "algorithm.adv_estimator=gae",
            "critic.optim.lr=2e-6",
            "critic.optim.min_lr=1e-6",
            "critic.optim.lr_decay_style=cosine",
        )
        entry = find_foreign(key)
        assert entry.concern is Concern.ELSEWHERE
        assert load(tmp_path, *others, f"{key}={good}").notes
        (problem,) = load_error(tmp_path, *others, f"{key}={bad}")
        assert problem.startswith(f"{key}: found ")
        assert problem.endswith(entry.refusal)

    @pytest.mark.parametrize("key", [f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"])
    @pytest.mark.parametrize("setting", ["use_dist_checkpointing", "override_transformer_config.x"])
    def test_the_references_settings_count_only_if_it_exists(self, tmp_path, key, setting):
        written = f"actor_rollout_ref.ref.megatron.{setting}=True"
        assert load(tmp_path, written).notes
        (problem,) = load_error(tmp_path, written, f"{key}=True")
        assert problem.startswith(written.removesuffix("=True"))

    def test_every_condition_is_tested(self):
        tried = {
            find_foreign(arguments[0]).pattern
            for mark in self.test_settings_written_elsewhere_must_agree.pytestmark
            for arguments in mark.args[1]
        }
        assert {entry.pattern for entry in of(Concern.ELSEWHERE)} == tried

    def test_every_entry_has_a_tested_concern(self):
        held = {*IGNORED, Concern.SAME, Concern.REFUSED, Concern.ELSEWHERE}
        assert held == set(Concern)
        for entry in FOREIGN:
            assert bool(entry.guard) == (entry.concern is Concern.UNREAD), entry.pattern
            assert bool(entry.agreement) == (entry.concern is Concern.ELSEWHERE), entry.pattern
            assert not entry.harmless or entry.concern is Concern.SAME, entry.pattern
