"""Nothing of verl's that alters numbers is ignored: each line of the table keeps its promise."""

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
    """Each line of the table keeps what its concern promises."""

    NUMBERS = (
        "loss|coef|clip|lr_|betas|decay|momentum|temperature|top_p|top_k|penalty|reward|gamma|lam|"
        "threshold|epochs|batch_size|max_samples|truncation|length|rollout_is|rollout_rs|adv_|"
        "estimator|kl_|warmup|template|quant|mtp|lora|override_config|critic"
    )
    """Parts of names of what alters numbers."""

    @pytest.mark.parametrize(
        "entry", of(Concern.SPEED, Concern.RECORDS), ids=lambda one: one.pattern
    )
    def test_speed_and_records(self, entry):
        """Names speak of speed, memory, places, logs or files. The exceptions are decided here."""
        sizes = {
            "data.val_batch_size": "a validation has no mini-batches",
            "trainer.max_*_ckpt_to_keep": "files",
            "reward.reward_kwargs.overlong_buffer_cfg.log": "what is stored beside the reward",
        }
        words = entry.pattern.removeprefix("critic.").replace("log_prob", "")
        assert entry.pattern in sizes or not re.search(self.NUMBERS, words)

    def test_random_numbers(self):
        """Few, so that each is a decision."""
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
    def test_unread(self, entry):
        """The key that would make verl read it is refused with such a value: it is an entry with
        harmless values, or a setting of ours whose rules do not allow them."""
        other = find_foreign(entry.guard)
        if other is None:
            assert entry.guard in {
                "actor_rollout_ref.model.path": "families of text models, in classes of our own",
                "actor_rollout_ref.rollout.name": "vllm alone",
                f"{ACTOR}.strategy": "megatron alone",
                f"{ACTOR}.policy_loss.loss_mode": "neither dro nor bypass_mode",
                "algorithm.adv_estimator": "grpo alone",
                "trainer.total_training_steps": "verl overwrites the one with the other",
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
    def test_what_is_written_elsewhere_must_agree(self, tmp_path, key, good, bad):
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
    def test_the_reference_counts_where_there_is_one(self, tmp_path, key, setting):
        written = f"actor_rollout_ref.ref.megatron.{setting}=True"
        assert load(tmp_path, written).notes
        (problem,) = load_error(tmp_path, written, f"{key}=True")
        assert problem.startswith(written.removesuffix("=True"))

    def test_every_condition_is_tried(self):
        tried = {
            find_foreign(arguments[0]).pattern
            for mark in self.test_what_is_written_elsewhere_must_agree.pytestmark
            for arguments in mark.args[1]
        }
        assert {entry.pattern for entry in of(Concern.ELSEWHERE)} == tried

    def test_every_entry_has_a_concern_that_is_held(self):
        held = {*IGNORED, Concern.SAME, Concern.REFUSED, Concern.ELSEWHERE}
        assert held == set(Concern)
        for entry in FOREIGN:
            assert bool(entry.guard) == (entry.concern is Concern.UNREAD), entry.pattern
            assert bool(entry.agreement) == (entry.concern is Concern.ELSEWHERE), entry.pattern
            assert not entry.harmless or entry.concern is Concern.SAME, entry.pattern
