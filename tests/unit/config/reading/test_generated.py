"""verl's own files contain every setting, and load unless a value is missing or unresolved."""

from pathlib import Path
from typing import Any

import pytest

from pipeline.config.imports.compose import resolve
from pipeline.config.keys import setting_keys, value_at
from pipeline.config.reading.load import load_config
from pipeline.config.reading.read import read_file
from pipeline.errors import InputError
from tests.unit.config.settings import ACTOR, REPLAY
from tests.verl_jobs import FILES, needs_verl

pytestmark = needs_verl

MICRO = f"{ACTOR}.ppo_micro_batch_size_per_gpu"

REFUSED = (
    f"{MICRO}: found null, expected an integer >= 1; verl also requires this setting; write 1 or "
    "more, up to the number of samples that fit in memory",
)
"""The problems with the unchanged files, after `${...}` is resolved."""
FIXED = (f"{MICRO}=4", "algorithm.adv_estimator=grpo")


def resolved(path: Path) -> dict[str, Any]:
    return resolve(read_file(path), path.name)


def version(path: Path) -> str:
    return path.stem.rpartition("-")[2]


def test_files_of_each_version_exist():
    assert [version(path).rpartition(".")[0] for path in FILES] == [
        "v0.6", "v0.6", "v0.7", "v0.8", "v0.9",
    ]  # fmt: skip


@pytest.mark.parametrize("path", FILES or [Path("none")], ids=version)
class TestGeneratedFile:
    def test_only_the_missing_micro_batch_size_is_refused(self, path):
        with pytest.raises(InputError) as caught:
            load_config(resolved(path))
        assert caught.value.problems == REFUSED

    def test_the_other_settings_have_verls_values(self, path):
        """verl's default values apply, even where ours differ."""
        loaded = load_config(resolved(path), FIXED)
        expected = {
            "data.train_batch_size": 1024,
            "data.truncation": "error",
            f"{ACTOR}.ppo_mini_batch_size": 256,
            f"{ACTOR}.clip_ratio_high": 0.2,
            f"{ACTOR}.optim.lr": 1e-6,
            f"{ACTOR}.optim.lr_warmup_steps": 0,
            f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.0,
            f"{REPLAY}.mode": "disabled",
            "actor_rollout_ref.rollout.n": 1,
            "actor_rollout_ref.rollout.val_kwargs.temperature": 0,
            "trainer.total_epochs": 30,
            "trainer.n_gpus_per_node": 8,
            "trainer.save_freq": 10,
            "trainer.logger": ["console", "wandb"],
            "trainer.run_name": "gsm8k",
        }
        assert {key: value_at(loaded.config, key) for key in expected} == expected
        assert "total_training_steps" not in loaded.config.trainer.model_fields_set
        assert loaded.config.custom_reward_function is None

    def test_replay_may_be_set_under_either_name(self, path):
        """Each file contains both names; the value that differs from the default applies."""
        for name in (REPLAY, f"{ACTOR}.megatron.router_replay"):
            config = load_config(resolved(path), [*FIXED, f"{name}.mode=R3"]).config
            assert config.actor_rollout_ref.actor.router_replay.mode == "R3"

    def test_the_error_for_an_unresolved_file_names_the_import_command(self, path):
        with pytest.raises(InputError) as caught:
            load_config(path)
        first, *others = caught.value.problems
        assert first.startswith(
            "actor_rollout_ref.ref.log_prob_use_dynamic_bsz: found '${oc.select:"
        )
        assert first.endswith("or resolve the file with `retrace import-verl`")
        assert tuple(others) == REFUSED


def test_the_files_contain_every_setting_that_we_share_with_verl():
    """If a shared setting is missing, the files do not match the newest verl."""
    newest = resolved(FILES[-1])
    own = {
        "actor_rollout_ref.rollout.trace_buffer_mib",
        "actor_rollout_ref.rollout.trace_compression",
        "actor_rollout_ref.rollout.cpu_kv_cache_gib",
        f"{ACTOR}.optim.weight_decay_on_norms",
        "critic.optim.weight_decay_on_norms",
        "critic.optim.skip_nonfinite",
        "critic.forward_micro_batch_size_per_gpu",
        "critic.replay_routes",
        f"{ACTOR}.optim.skip_nonfinite",
        "algorithm.mask_truncated_samples",
        f"{REPLAY}.native_every",
        f"{REPLAY}.allow_aux_loss",
        f"{REPLAY}.min_agreement",
        f"{REPLAY}.on_unhealthy",
        f"{REPLAY}.replay_other_weights",
        "trainer.seed",
        "trainer.max_staleness",
        "algorithm.rollout_correction.preset",
        "algorithm.rollout_correction.rollout_token_veto_threshold",
        "algorithm.rollout_correction.uncorrected_staleness",
    }
    missing = set()
    for key in setting_keys():
        group: Any = newest
        for part in key.name.split("."):
            group = group.get(part, {}) if isinstance(group, dict) else {}
        if group == {} and not key.name.startswith(("store.", "launch.", "reward.")):
            missing.add(key.name)
    left_open = {
        "actor_rollout_ref.rollout.name",
        "actor_rollout_ref.rollout.engine_kwargs.vllm",
        f"{ACTOR}.megatron.override_transformer_config",
        f"{ACTOR}.megatron.override_ddp_config",
        f"{ACTOR}.optim.override_optimizer_config",
        "critic.optim.override_optimizer_config",
    }
    assert missing - left_open == own
