"""R2 of a native pass, replayed, changes no bit; and every layout replays what another recorded.

What follows together: the recorded set and the live scores determine everything else, in the
forward pass, in every recomputation and in the backward pass, in each layout.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.integration.torchrun import run_ranks
from tests.integration.training_replay.layouts import LAYOUTS, RECOMPUTE
from tests.integration.training_replay.sealed import config_of, make_run
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.integration
PROGRAM = "tests.integration.training_replay.layouts"
RANKS = {layout.name: layout.ranks for layout in LAYOUTS}


# Recomputing everything runs the most code; with K=8 that one mode is enough.
CASES = [(4, recompute) for recompute in RECOMPUTE] + [(8, "full")]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """What each rank found in each layout and recompute mode, as JSON files; by K."""
    folders = {}
    for topk in (4, 8):
        folder = folders[topk] = tmp_path_factory.mktemp(f"layouts-{topk}")
        model = make_tiny(folder / "model", "qwen3_moe", num_experts_per_tok=topk)
        make_run(folder / "run", model, config_of(), steps=1)
        modes = ",".join(recompute for k, recompute in CASES if k == topk)
        for ranks in (1, 2):
            names = [layout.name for layout in LAYOUTS if layout.ranks == ranks]
            run_ranks(PROGRAM, ranks, folder / "run", model, folder, modes, *names)
    return folders


def reports(folder: Path, layout: str, recompute: str) -> list[dict]:
    """The reports of all ranks."""
    return [
        json.loads((folder / f"{layout}.{recompute}.{rank}.json").read_text())
        for rank in range(RANKS[layout])
    ]


@pytest.mark.parametrize(("topk", "recompute"), CASES)
@pytest.mark.parametrize("layout", RANKS)
def test_replay_of_the_native_choice_changes_no_bit(
    found: dict[int, Path], layout: str, topk: int, recompute: str
):
    """Log-probs, losses and every gradient of two mini-batches of several micro-batches (gradient
    accumulation), fp32. Control: with other sets, nearly every tensor changes. The hook ran twice
    per micro-batch when the MoE layer is recomputed, and once when it is not."""
    runs_per_micro_batch = 1 if recompute == "none" else 2
    for report in reports(found[topk], layout, recompute):
        assert report["logprobs_differ"] == 0
        assert report["tensors"] > 50  # on a stage of one layer too
        assert report["differ"] == 0
        assert report["left_at_routers"] == 0
        assert len(report["mini_batches"]) == 2
        for mini_batch in report["mini_batches"]:
            assert mini_batch["micro_batches"] > 1
            assert mini_batch["changed_by_other_sets"] > 0.8 * report["tensors"] / 2
            assert mini_batch["router_runs"] == [runs_per_micro_batch * mini_batch["micro_batches"]]


@pytest.mark.parametrize("layout", RANKS)
def test_every_row_of_every_sample_is_replayed_once(found: dict[int, Path], layout: str):
    """Rows summed over the ranks that see different ones; each layer is on exactly one stage, and
    the routers' own choice is the recorded one."""
    parts = reports(found[4], layout, "none")
    layers = sorted({layer for report in parts for layer in report["layers"]})
    assert layers == [0, 1, 2, 3]
    samples = 2 if layout.startswith(("dp2", "ep2")) else 1
    expected = sum(report["expected_rows"] for report in parts[:samples])
    for layer in layers:
        counts = [r["counts"][str(layer)] for r in parts if layer in r["layers"]]
        assert sum(count["replayed"] for count in counts) == expected
        assert sum(count["agreeing"] for count in counts) == expected
        assert sum(count["native"] for count in counts) == 0
    padding = [m["padding"] for report in parts for m in report["mini_batches"]]
    assert sum(padding) > 0


@pytest.mark.parametrize("layout", [name for name in RANKS if name != "one"])
def test_every_layout_replays_what_one_rank_recorded(found: dict[int, Path], layout: str):
    """Log-probs are those of one rank up to float32 summation order, and so are the choices."""
    for report in reports(found[4], layout, "none"):
        foreign = report["foreign"]
        assert foreign["largest_difference"] < 1e-5
        assert foreign["replayed"] > 0
        assert foreign["agreeing"] >= 0.999 * foreign["replayed"]


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize(
    ("layout", "same"),
    [
        ("one-padded", "one"),
        ("one-tokens", "one"),
        ("tp2-sp-padded", "tp2-sp"),
        ("pp2-vpp2-padded", "pp2-vpp2"),
    ],
)
def test_gradients_do_not_depend_on_packing(
    found: dict[int, Path], layout: str, same: str, recompute: str
):
    """Nor on how tokens are cut into micro-batches: float32, relative to the largest gradient of
    each tensor."""
    compared = 0
    for rank in range(RANKS[layout]):
        ours, theirs = (
            np.load(found[4] / f"{name}.{recompute}.{rank}.gradients.npz")
            for name in (layout, same)
        )
        assert set(ours) == set(theirs)
        for name in ours:
            largest = np.abs(theirs[name]).max()
            assert np.abs(ours[name] - theirs[name]).max() <= 1e-5 * max(largest, 1e-3), name
            compared += 1
    assert compared > 50
