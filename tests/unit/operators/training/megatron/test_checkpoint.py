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
        ("change", "parts"),
        [
            (
                {"expert": 2, "distributed_optimizer": False},
                "expert_model_parallel_size 1, but this attempt has 2",
            ),
            ({"distributed_optimizer": False}, "use_distributed_optimizer True"),
            ({"dtype": "float32"}, "dtype bfloat16"),
        ],
    )
    def test_a_layout_to_which_optimizer_state_cannot_be_converted_is_refused(self, change, parts):
        with pytest.raises(InputError, match=r"checkpoint of policy 7 .* start a new run") as error:
            refuse_other_layout(7, self.saved, {**self.saved, **change})
        assert parts in str(error.value)

    @pytest.mark.parametrize("lost", ["distributed_optimizer", "dtype", "expert"])
    def test_a_layout_without_a_size_that_restricts_loading_is_damaged(self, lost):
        """The expert-parallel size matters only without the distributed optimizer."""
        here = {**self.saved, "distributed_optimizer": lost != "expert"}
        saved = {name: value for name, value in here.items() if name != lost}
        with pytest.raises(
            CorruptObjectError,
            match=rf"000007/checkpoint\.json: found a layout without {lost}, .*; remove",
        ):
            refuse_other_layout(7, saved, here)


@pytest.mark.parametrize("other", [keys.policy(1), keys.validation(0, 1), keys.run_json()])
def test_a_commit_of_another_kind_is_refused(tmp_path, other):
    store = MemoryStore()
    whole_run(store, tmp_path)
    assert read_checkpoint(store, 1)["version"] == 1
    store.objects[keys.checkpoint(1)] = store.objects[other]
    with pytest.raises(CorruptObjectError, match=r"checkpoint\.json in memory.*remove this checkp"):
        read_checkpoint(store, 1)
