"""The patches of Megatron-core."""

import inspect
from types import SimpleNamespace

import pytest
import torch

from operators.training.megatron import patched


class TestPaddingMask:
    def counter(self, experts):
        return SimpleNamespace(
            enable_expert_bias=True, local_tokens_per_expert=torch.zeros(experts)
        )

    def test_the_patch_counts_only_real_tokens(self):
        """There are 4 tokens and 4 experts with K=2, and the last token is padding."""
        routing_map = torch.tensor(
            [[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 1]], dtype=torch.bool
        )
        padding = torch.tensor([False, False, False, True])
        router = self.counter(4)
        patched._apply_expert_bias(router, routing_map, padding)
        assert router.local_tokens_per_expert.tolist() == [1, 2, 2, 1]

    def test_upstream_is_silently_wrong_with_as_many_tokens_as_experts(self):
        """This is why the patch exists. If this test fails, upstream is fixed: remove the patch."""
        upstream = inspect.unwrap(patched.UPSTREAM_APPLY_EXPERT_BIAS)
        routing_map = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 1]], dtype=torch.bool)
        padding = torch.tensor([False, False, True])
        router = self.counter(3)
        upstream(router, routing_map, padding)
        assert router.local_tokens_per_expert.tolist() == [2, 2, 0]
        with pytest.raises(RuntimeError):
            upstream(self.counter(3), routing_map[:2], padding[:2])
