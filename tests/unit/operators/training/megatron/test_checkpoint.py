"""Checkpoints that another layout cannot read."""

import pytest

from operators.training.megatron.checkpoint import read_checkpoint, refuse_other_layout
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
        with pytest.raises(InputError, match=r"checkpoint of policy 7 .* start a new run") as error:
            refuse_other_layout(7, self.saved, {**self.saved, **change})
        assert parts in str(error.value)


@pytest.mark.parametrize("other", [keys.policy(1), keys.validation(0, 1), keys.run_json()])
def test_a_commit_of_something_else_is_no_checkpoint(tmp_path, other):
    store = MemoryStore()
    whole_run(store, tmp_path)
    assert read_checkpoint(store, 1)["version"] == 1
    store.objects[keys.checkpoint(1)] = store.objects[other]
    with pytest.raises(CorruptObjectError, match=r"checkpoint\.json in memory.*remove this checkp"):
        read_checkpoint(store, 1)
