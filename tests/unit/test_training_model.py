"""The Megatron side of training, as far as it needs no process group."""

import hashlib
import inspect
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.moe.router import TopKRouter

from operators.training import patched
from operators.training.bridges import problems_of
from operators.training.checkpoint import refuse_other_layout
from operators.training.local_layers import bridge_names
from operators.training.model import refuse_settings
from operators.training.parallel import expert_tensor_parallel_size
from operators.training.retention import expired, prune
from pipeline.config.errors import InputError
from pipeline.config.tree import Megatron
from pipeline.store import keys, open_store
from pipeline.store.commit import commit
from pipeline.store.restarts import restarts
from tests.tiny_models import FAMILIES, tiny_config


class TestPaddingMask:
    def counter(self, experts):
        return SimpleNamespace(
            enable_expert_bias=True, local_tokens_per_expert=torch.zeros(experts)
        )

    def test_counts_only_real_tokens(self):
        """4 tokens, 4 experts, K=2, the last token is padding."""
        routing_map = torch.tensor(
            [[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 1]], dtype=torch.bool
        )
        padding = torch.tensor([False, False, False, True])
        router = self.counter(4)
        patched._apply_expert_bias(router, routing_map, padding)
        assert router.local_tokens_per_expert.tolist() == [1, 2, 2, 1]

    def test_upstream_is_wrong_without_an_error_when_tokens_are_as_many_as_experts(self):
        """The reason of the patch; when this fails, Megatron-core has mended it: drop the patch."""
        upstream = inspect.unwrap(patched.UPSTREAM_APPLY_EXPERT_BIAS)
        routing_map = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 1]], dtype=torch.bool)
        padding = torch.tensor([False, False, True])
        router = self.counter(3)
        upstream(router, routing_map, padding)
        assert router.local_tokens_per_expert.tolist() == [2, 2, 0]
        with pytest.raises(RuntimeError):
            upstream(self.counter(3), routing_map[:2], padding[:2])

    def test_is_bound_once_and_again(self):
        patched.count_tokens_without_padding()
        patched.count_tokens_without_padding()
        assert TopKRouter._apply_expert_bias is patched._apply_expert_bias


def test_a_patch_refuses_source_it_does_not_know():
    """Another release of a patched library stops the start and says which function to read."""

    def function():
        return 1

    known = hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]
    patched.require_source(function, known, "some_patch")
    with pytest.raises(patched.PatchError, match=r"function.*some_patch.*0000") as error:
        patched.require_source(function, "0" * 16, "some_patch")
    assert known in str(error.value)


class TestExpertTensorParallel:
    @pytest.mark.parametrize(
        ("tp", "ep", "chosen", "expected"), [(2, 1, None, 2), (2, 2, None, 1), (2, 2, 2, 2)]
    )
    def test_follows_tp_at_ep1(self, tp, ep, chosen, expected):
        megatron = Megatron(
            tensor_model_parallel_size=tp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=chosen,
        )
        assert expert_tensor_parallel_size(megatron) == expected

    def test_unlike_tp_at_ep1_is_refused(self):
        """Megatron-core would train diverging copies of the experts."""
        megatron = Megatron(tensor_model_parallel_size=2, expert_tensor_parallel_size=1)
        with pytest.raises(InputError, match=r"expert_tensor_parallel_size is 1.*leave it out"):
            expert_tensor_parallel_size(megatron)


class TestRefusedSettings:
    def config(self, **fields):
        good = {
            "virtual_pipeline_model_parallel_size": 2,
            "overlap_p2p_comm": True,
            "batch_p2p_comm": False,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "num_moe_experts": 16,
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
        }
        return SimpleNamespace(**{**good, **fields})

    def test_good_settings_pass(self):
        refuse_settings(self.config())
        refuse_settings(self.config(virtual_pipeline_model_parallel_size=None, batch_p2p_comm=True))

    @pytest.mark.parametrize("field", [{"overlap_p2p_comm": False}, {"batch_p2p_comm": True}])
    def test_virtual_pipeline_with_batched_exchange_is_refused(self, field):
        """At PP2 an activation would arrive as a gradient."""
        with pytest.raises(InputError, match=next(iter(field))):
            refuse_settings(self.config(**field))

    def test_experts_under_tp_without_sequence_parallel_are_refused(self):
        """Megatron-core says so in the first training pass."""
        with pytest.raises(InputError, match="sequence_parallel is false at TP 2"):
            refuse_settings(self.config(sequence_parallel=False))
        refuse_settings(self.config(sequence_parallel=False, num_moe_experts=None))

    def test_dropout_is_refused(self):
        with pytest.raises(InputError, match=r"attention_dropout is 0\.1.*set it to 0.0"):
            refuse_settings(self.config(attention_dropout=0.1))


class TestModels:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_tiny_models_are_supported(self, family):
        assert problems_of(tiny_config(family)) == []

    @pytest.mark.parametrize(
        ("family", "overrides", "part"),
        [
            ("mixtral", {"sliding_window": 64}, "sliding_window 64"),
            ("qwen3_moe", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
            ("deepseek_v3", {"topk_group": 4}, "topk_group 4 is not 2"),
            ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob"),
            ("deepseek_v3", {"rope_interleave": False}, "rope_interleave"),
        ],
    )
    def test_what_megatron_would_ignore_is_named(self, family, overrides, part):
        problems = problems_of(tiny_config(family, **overrides))
        assert len(problems) == 1
        assert part in problems[0]

    def test_local_names_become_those_of_transformer_engine(self):
        """A dense layer's norms are fused into the next linear layer, the one before experts is
        not; latent attention keeps its input norm and fuses its inner norms."""
        dense, moe, latent = (f"decoder.layers.{n}." for n in (0, 1, 0))
        assert bridge_names(
            [
                dense + "input_layernorm.weight",
                dense + "pre_mlp_layernorm.weight",
                dense + "mlp.linear_fc1.weight",
                moe + "pre_mlp_layernorm.weight",
                moe + "self_attention.q_layernorm.weight",
                moe + "mlp.experts.local_experts.12.linear_fc2.weight",
            ]
        ) == {
            dense + "input_layernorm.weight": dense + "self_attention.linear_qkv.layer_norm_weight",
            dense + "pre_mlp_layernorm.weight": dense + "mlp.linear_fc1.layer_norm_weight",
            dense + "mlp.linear_fc1.weight": dense + "mlp.linear_fc1.weight",
            moe + "pre_mlp_layernorm.weight": moe + "pre_mlp_layernorm.weight",
            moe + "self_attention.q_layernorm.weight": moe + "self_attention.q_layernorm.weight",
            moe + "mlp.experts.local_experts.12.linear_fc2.weight": moe
            + "mlp.experts.linear_fc2.weight12",
        }
        assert bridge_names(
            [
                latent + "input_layernorm.weight",
                latent + "self_attention.q_layernorm.weight",
                latent + "self_attention.kv_layernorm.weight",
                latent + "self_attention.linear_kv_up_proj.weight",
            ]
        ) == {
            latent + "input_layernorm.weight": latent + "input_layernorm.weight",
            latent + "self_attention.q_layernorm.weight": latent
            + "self_attention.linear_q_up_proj.layer_norm_weight",
            latent + "self_attention.kv_layernorm.weight": latent
            + "self_attention.linear_kv_up_proj.layer_norm_weight",
            latent + "self_attention.linear_kv_up_proj.weight": latent
            + "self_attention.linear_kv_up_proj.weight",
        }


class TestCheckpointLayout:
    saved = {  # noqa: RUF012
        "tensor": 1,
        "pipeline": 1,
        "virtual_pipeline": 1,
        "data": 2,
        "expert": 1,
        "distributed_optimizer": True,
        "dtype": "bfloat16",
    }

    def test_other_tensor_pipeline_and_data_sizes_are_fine(self):
        refuse_other_layout(7, self.saved, {**self.saved, "tensor": 2, "pipeline": 2, "data": 1})

    @pytest.mark.parametrize(
        ("change", "parts"),
        [
            ({"expert": 2}, "expert_model_parallel_size 1, this attempt has 2"),
            ({"distributed_optimizer": False}, "use_distributed_optimizer True"),
            ({"dtype": "float32"}, "dtype bfloat16"),
        ],
    )
    def test_what_optimizer_state_cannot_cross_is_refused(self, change, parts):
        with pytest.raises(InputError, match="policies/000007") as error:
            refuse_other_layout(7, self.saved, {**self.saved, **change})
        assert parts in str(error.value)


class TestRetention:
    @given(
        newest=st.integers(0, 60),
        saved=st.sets(st.integers(1, 60)),
        save_freq=st.integers(1, 12),
        staleness=st.integers(0, 1),
    )
    def test_what_a_restart_or_a_rollout_needs_is_kept(self, newest, saved, save_freq, staleness):
        """Losing the newest checkpoint must still leave everything the run needs to go on."""
        checkpoints = {version for version in saved if version <= newest}
        policies, gone = expired(range(newest + 1), checkpoints, checkpoints, save_freq, staleness)
        left = sorted(checkpoints - set(gone))
        assert left == sorted(checkpoints)[-2:]
        restart = left[0] if len(left) == 2 else 0
        needed = {max(0, step - staleness) for step in range(restart, newest + staleness + 1)}
        needed |= set(range(0, newest + 1, save_freq))
        assert not needed & set(policies)
        if len(left) == 2:
            assert set(policies) == set(range(newest + 1)) - needed

    def test_a_restart_begins_at_a_checkpoint_whose_step_is_finished(self, tmp_path):
        """Metrics are a step's last commit: without them its checkpoint does not count, neither to
        begin at nor as one of the two that are kept."""
        store = open_store(str(tmp_path))
        for version in (1, 2, 3):
            commit(store, keys.checkpoint(version), {"version": version}, "aa")
        assert restarts(store) == []
        for step in (0, 1):
            commit(store, keys.metrics(step), {}, "aa")
        assert restarts(store) == [1, 2]
        assert prune(store, save_freq=1, max_staleness=0) == ([], [])

    def test_prune_deletes_commits_and_files(self, tmp_path):
        store = open_store(str(tmp_path))
        for version in range(9):
            store.create(keys.policy_file(version, "aa", "model.safetensors"), b"x")
            commit(store, keys.policy(version), {"version": version}, "aa")
        for version in (2, 4, 6):
            store.create(keys.checkpoint_file(version, "aa", "__0_0.distcp"), b"x")
            commit(store, keys.checkpoint(version), {"version": version}, "aa")
            commit(store, keys.metrics(version - 1), {}, "aa")
        assert prune(store, save_freq=2, max_staleness=0) == ([1, 3], [2])
        assert prune(store, save_freq=2, max_staleness=0) == ([], [])
        left = {info.key.split("/")[1] for info in store.list("policies/")}
        assert left == {f"{version:06d}" for version in (0, 2, 4, 5, 6, 7, 8)}
        assert [info.key for info in store.list("checkpoints/000002/")] == []
        assert store.size(keys.checkpoint(4)) is not None

    def stored(self, folder):
        """Policies 0 to 6, checkpoints 4 and 6 of finished steps."""
        store = open_store(str(folder))
        for version in range(7):
            store.create(keys.policy_file(version, "aa", "model.safetensors"), b"x")
            commit(store, keys.policy(version), {"version": version}, "aa")
        for version in (4, 6):
            commit(store, keys.checkpoint(version), {"version": version}, "aa")
            commit(store, keys.metrics(version - 1), {}, "aa")
        return store

    def test_an_interrupted_prune_is_resumed(self, tmp_path):
        """The commit went, the files did not: the next call finds the folder without it. Files that
        are newer than what a restart needs stay: their commit may still come."""
        store = self.stored(tmp_path)
        for version in (1, 5):
            store.delete(keys.policy(version))
        for version in (2, 8):
            store.create(keys.checkpoint_file(version, "aa", "__0_0.distcp"), b"x")
        assert prune(store, save_freq=2, max_staleness=0) == ([1, 3], [2])
        left = {keys.folder_number(info.key) for info in store.list("policies/")}
        assert left == {0, 2, 4, 5, 6}
        left = {keys.folder_number(info.key) for info in store.list("checkpoints/")}
        assert left == {4, 6, 8}

    def test_a_pending_validation_keeps_its_policy(self, tmp_path):
        """Until the last of its shards is there; then the next call takes it."""
        store = self.stored(tmp_path)
        commit(store, keys.validation_plan(3), {"shards": 2}, "aa")
        assert prune(store, save_freq=2, max_staleness=0) == ([1], [])
        commit(store, keys.validation(3, 0), {}, "aa")
        assert prune(store, save_freq=2, max_staleness=0) == ([], [])
        assert store.size(keys.policy(3)) is not None
        commit(store, keys.validation(3, 1), {}, "aa")
        assert prune(store, save_freq=2, max_staleness=0) == ([3], [])
