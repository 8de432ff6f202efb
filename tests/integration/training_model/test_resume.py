"""A trainer that resumes from a checkpoint continues exactly as if it had not been interrupted.

Two torchruns (resume.py) are the two lives of a trainer. The second life starts with different
weights, so that a tensor that is not restored is detected. It loads the checkpoint and trains the
third step. All weights, buffers, fp32 masters, moments and step counts are compared bit by bit, on
every rank.
"""

import json

import pytest
import torch

from pipeline.run import keys
from pipeline.run.commit import files_in, read_commit
from pipeline.store import open_store
from tests.integration.torchrun import run_ranks
from tests.integration.training_model.former import tensors_of
from tests.integration.training_model.resume import (
    CASES,
    FORMER,
    ON_ONE_RANK,
    PASSING,
    RESHARDED,
    RESHARDED_CASE,
)

pytestmark = pytest.mark.integration

PROGRAM = "tests.integration.training_model.resume"
PASSED = [(world, layout) for world, layouts in PASSING.items() for layout in layouts]
BY_WORLD = [
    *((1, "-".join(map(str, case))) for case in ON_ONE_RANK),
    *((2, "-".join(map(str, case))) for case in CASES),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return the folder of all output, keyed by number of ranks."""
    return {world: tmp_path_factory.mktemp(f"resume-{world}") for world in (1, 2, 4)}


@pytest.fixture(scope="module")
def lives(folders):
    """Return the digests of each rank, keyed by number of ranks and life."""
    found = {}
    for world in (1, 2):
        folder = folders[world]
        for life in ("first", "second"):
            run_ranks(PROGRAM, world, folder, life)
            found[world, life] = [
                json.loads((folder / f"{life}-{rank}.json").read_text()) for rank in range(world)
            ]
    return found


@pytest.mark.parametrize(("world", "case"), BY_WORLD)
def test_a_resumed_run_equals_the_undisturbed_one(lives, world, case):
    """The loaded state equals the saved one, and training continues from it exactly.

    The state after the third step equals that of a run without interruptions or checkpoints.
    """
    for first, second in zip(lives[world, "first"], lives[world, "second"], strict=True):
        assert changed(first[f"{case}/2"], second[f"{case}/2"]) == []
        assert changed(first[f"{case}/3"], second[f"{case}/3"]) == []


@pytest.mark.parametrize(("world", "case"), BY_WORLD)
def test_saving_does_not_change_training(lives, world, case):
    """A checkpoint after the second step does not change the third step."""
    for first in lives[world, "first"]:
        assert changed(first[f"{case}/3"], first[f"{case}/3 after saving"]) == []


@pytest.mark.parametrize(("world", "case"), BY_WORLD)
def test_the_comparison_can_detect_a_difference(lives, world, case):
    """The compared states contain masters, both moments and steps, which can differ.

    The second life begins with different weights, and the third step changes every trained tensor.
    """
    for first, second in zip(lives[world, "first"], lives[world, "second"], strict=True):
        before, after = first[f"{case}/2"], first[f"{case}/3"]
        assert {"master", "exp_avg", "exp_avg_sq", "step"} <= {
            name.rstrip("0123456789.") for name in before
        }
        masters = [name for name in before if name.startswith("master")]
        for name in masters:
            assert before[name] != after[name]
            assert before[name] != second[f"{case}/other"][name]


def test_gradients_summed_in_bfloat16_differ(lives):
    """The option takes effect in Megatron: after three steps it has changed every master."""
    for first in lives[2, "first"]:
        in_fp32 = first["dp2-qwen3_moe-True/3"]
        in_bf16 = first["dp2_bf16_gradients-qwen3_moe-True/3"]
        masters = {name for name in in_fp32 if name.startswith("master")}
        assert masters & set(changed(in_fp32, in_bf16)) == masters


@pytest.mark.parametrize("layout", RESHARDED)
def test_another_layout_keeps_every_bit(lives, layout):
    """The state of dp2 is unchanged after another layout has loaded and saved it."""
    case = "dp2-qwen3_moe-True"
    for first, second in zip(lives[2, "first"], lives[2, "second"], strict=True):
        assert changed(first[f"{case}/2"], second[f"{case}/2 by {layout}"]) == []


@pytest.fixture(scope="module")
def original(lives, folders):
    """Return the tensors of the checkpoint of two ranks."""
    return tensors_of(store_of(folders[2], RESHARDED_CASE), 2, folders[2] / "original")


def test_the_form_equals_that_of_former_versions(folders, original):
    """The tensors' names, dtypes and contents are equal, so each version can read both forms."""
    former = store_of(folders[2], f"{RESHARDED_CASE}-{FORMER}")
    assert differing(tensors_of(former, 2, folders[2] / "of-former"), original) == []
    assert sum(name.startswith("optimizer.state.exp_avg_sq.") for name in original) > 10


def test_no_rank_writes_the_state_of_another(lives, folders):
    """Each rank's files contain about half of the optimizer state and half of the weights.

    Tensors that are not split, and Megatron's framing of them, account for the difference in size.
    """
    files = files_in(read_commit(store_of(folders[2], RESHARDED_CASE), keys.checkpoint(2)))
    sizes = {file.key.rsplit("/", 1)[-1]: file.size for file in files}
    for kind in ("optimizer__", "__"):
        of_ranks = [sizes[name] for name in sizes if name.startswith(kind)]
        assert len(of_ranks) == 2
        assert max(of_ranks) <= 1.3 * min(of_ranks), sizes


@pytest.mark.parametrize(("world", "layout"), PASSED)
def test_more_or_fewer_ranks_keep_every_bit(folders, original, passed, world, layout):
    """Loading and saving a checkpoint with a different number of ranks changes no tensor."""
    again = store_of(passed[world], layout)
    assert differing(tensors_of(again, 2, passed[world] / f"of-{layout}"), original) == []


@pytest.fixture(scope="module")
def passed(lives, folders):
    """Return the folders, keyed by number of ranks, after 1 and 4 ranks have saved checkpoints."""
    for world in (1, 4):
        run_ranks(PROGRAM, world, folders[world], "passing", folders[2])
    return folders


def store_of(folder, name):
    """Open a store that the program has written."""
    return open_store(str(folder / "store" / name))


def differing(one, other):
    """Return the names of tensors that are not bit-identical."""
    return sorted(
        name
        for name in one.keys() | other.keys()
        if name not in one
        or name not in other
        or one[name].dtype != other[name].dtype
        or not torch.equal(one[name], other[name])
    )


def changed(before, after):
    """Return the names whose digests differ."""
    return sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    )
