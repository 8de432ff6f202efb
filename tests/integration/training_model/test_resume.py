"""A trainer that comes back from a checkpoint is the trainer that went.

Two torchruns after each other (resume.py) are the two lives of a trainer. The second starts with
other weights, so a tensor that is not restored shows; it loads, and trains the third step. All
weights, buffers, fp32 masters, moments and step counts are compared by their bits, on every rank.
"""

import json

import pytest

from tests.integration.torchrun import run_ranks
from tests.integration.training_model.resume import CASES, ON_ONE_RANK, RESHARDED

pytestmark = pytest.mark.integration

BY_WORLD = [
    *((1, "-".join(map(str, case))) for case in ON_ONE_RANK),
    *((2, "-".join(map(str, case))) for case in CASES),
]


@pytest.fixture(scope="module")
def lives(tmp_path_factory):
    """By number of ranks and life: the digests of each rank."""
    found = {}
    for world in (1, 2):
        folder = tmp_path_factory.mktemp(f"resume-{world}")
        for life in ("first", "second"):
            run_ranks("tests.integration.training_model.resume", world, folder, life)
            found[world, life] = [
                json.loads((folder / f"{life}-{rank}.json").read_text()) for rank in range(world)
            ]
    return found


@pytest.mark.parametrize(("world", "case"), BY_WORLD)
def test_resumed_run_is_the_undisturbed_one(lives, world, case):
    """Loaded state == saved state, and the third step after it == the third step of a run that was
    never interrupted and never saved."""
    for first, second in zip(lives[world, "first"], lives[world, "second"], strict=True):
        assert changed(first[f"{case}/2"], second[f"{case}/2"]) == []
        assert changed(first[f"{case}/3"], second[f"{case}/3"]) == []


@pytest.mark.parametrize(("world", "case"), BY_WORLD)
def test_saving_disturbs_nothing(lives, world, case):
    """A run that saves after its second step makes the third like one that does not."""
    for first in lives[world, "first"]:
        assert changed(first[f"{case}/3"], first[f"{case}/3 after saving"]) == []


@pytest.mark.parametrize(("world", "case"), BY_WORLD)
def test_the_comparison_can_see_a_difference(lives, world, case):
    """The second life begins with other weights, the third step changes everything trained, and
    the state holds masters, both moments and steps."""
    for first, second in zip(lives[world, "first"], lives[world, "second"], strict=True):
        before, after = first[f"{case}/2"], first[f"{case}/3"]
        assert {"master", "exp_avg", "exp_avg_sq", "step"} <= {
            name.rstrip("0123456789.") for name in before
        }
        masters = [name for name in before if name.startswith("master")]
        for name in masters:
            assert before[name] != after[name]
            assert before[name] != second[f"{case}/other"][name]


def test_gradients_summed_in_bfloat16_are_other_gradients(lives):
    """The option reaches Megatron: all else is equal, and after three steps no master is."""
    for first in lives[2, "first"]:
        in_fp32 = first["dp2-qwen3_moe-True/3"]
        in_bf16 = first["dp2_bf16_gradients-qwen3_moe-True/3"]
        masters = {name for name in in_fp32 if name.startswith("master")}
        assert masters & set(changed(in_fp32, in_bf16)) == masters


@pytest.mark.parametrize("layout", RESHARDED)
def test_another_layout_keeps_every_bit(lives, layout):
    """DP2's state, loaded and saved by another layout and loaded by DP2 again."""
    case = "dp2-qwen3_moe-True"
    for first, second in zip(lives[2, "first"], lives[2, "second"], strict=True):
        assert changed(first[f"{case}/2"], second[f"{case}/2 by {layout}"]) == []


def changed(before, after):
    """Names whose digests differ."""
    return sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    )
