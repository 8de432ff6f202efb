"""Checkpoints that a layout cannot load, and commits that are not checkpoints."""

import pytest

from operators.training.megatron.checkpoint.layouts import refuse_other_layout
from operators.training.megatron.checkpoint.loading import read_checkpoint
from pipeline.errors import InputError
from pipeline.run import keys
from pipeline.run.commit import CorruptObjectError
from tests.memory_store import MemoryStore
from tests.stored_runs import whole_run


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

    def test_a_layout_with_other_parallel_sizes_is_accepted(self):
        sizes = {"tensor": 2, "pipeline": 2, "data": 1, "expert": 4}
        refuse_other_layout(7, self.saved, {**self.saved, **sizes})

    @pytest.mark.parametrize(
        ("change", "part"),
        [
            ({"expert": 2, "distributed_optimizer": False}, "expert_model_parallel_size 1, .* 2"),
            ({"distributed_optimizer": False}, "use_distributed_optimizer True"),
            ({"dtype": "float32"}, "dtype bfloat16"),
        ],
    )
    def test_a_layout_to_which_optimizer_state_cannot_be_converted_is_refused(self, change, part):
        with pytest.raises(InputError, match=f"checkpoint of policy 7 .*{part}"):
            refuse_other_layout(7, self.saved, {**self.saved, **change})

    def test_a_layout_without_a_size_that_restricts_loading_is_damaged(self):
        saved = {name: value for name, value in self.saved.items() if name != "dtype"}
        with pytest.raises(CorruptObjectError, match=r"000007/checkpoint\.json: .*dtype"):
            refuse_other_layout(7, saved, self.saved)


def test_a_commit_of_another_kind_is_refused(tmp_path):
    store = MemoryStore()
    whole_run(store, tmp_path)
    assert read_checkpoint(store, 1)["version"] == 1
    store.objects[keys.checkpoint(1)] = store.objects[keys.policy(1)]
    with pytest.raises(CorruptObjectError, match=r"checkpoint\.json in memory"):
        read_checkpoint(store, 1)
