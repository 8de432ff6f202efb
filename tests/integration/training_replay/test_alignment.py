"""Each token gets its own recorded experts, on every rank and layer of every layout."""

import json
from pathlib import Path

import pytest

from tests.integration.torchrun import run_nodes, run_ranks
from tests.integration.training_replay.alignment import RAGGED
from tests.integration.training_replay.layouts import TRIED
from tests.integration.training_replay.models import make_aligned, make_biased

pytestmark = pytest.mark.integration
PROGRAM = "tests.integration.training_replay.alignment"
RANKS = {layout.name: layout.ranks for layout in TRIED}


@pytest.fixture(scope="module")
def found(
    sealed_run: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict]]:
    """What each rank found, by layout."""
    folder = tmp_path_factory.mktemp("alignment")
    (folder / "plain").symlink_to(tiny_model)
    make_aligned(folder / "aligned")
    make_biased(folder / "biased")
    for ranks in sorted({*RANKS.values()}):
        names = [layout.name for layout in TRIED if layout.ranks == ranks]
        start = run_nodes if ranks == 4 else run_ranks
        start(PROGRAM, ranks, sealed_run, folder, folder, *names)
    return {
        name: [
            json.loads((folder / f"alignment.{name}.{rank}.json").read_text())
            for rank in range(ranks)
        ]
        for name, ranks in RANKS.items()
    }


@pytest.mark.parametrize("layout", RANKS)
def test_routers_choose_the_code_of_the_token_they_see(found: dict, layout: str):
    """The router's input says which token the model's own split put there; its choice is compared
    with the code written into that token's route. Nothing of our layout takes part in the
    comparison. Recomputations are looked at as well: twice the rows in training."""
    parts = [report["alignment"] for report in found[layout]]
    for part in parts:
        assert part["forward"]["wrong"] == 0
        assert part["training"]["wrong"] == 0
        assert part["training"]["replayed"] == 2 * part["forward"]["replayed"] > 0
    # Under TP and CP ranks hold the same samples, and each router a part of their rows.
    rows = {tuple(part["share"]): part["rows"] for part in parts}
    assert sum(part["forward"]["replayed"] for part in parts) == sum(rows.values())


@pytest.mark.parametrize("layout", RANKS)
@pytest.mark.parametrize("shift", ["token", "layer", "sample"])
def test_misplaced_routes_are_detected(found: dict, layout: str, shift: str):
    """The test above would see a shift by one token or layer, or two samples swapped. Layers are
    shifted within a rank, so one with a single layer keeps its own."""
    parts = [report["alignment"][shift] for report in found[layout]]
    if shift == "layer" and "pp2" in layout and "vpp2" not in layout:
        first = len(parts) // 2
        assert [part["wrong"] for part in parts[:first]] == [0] * first
        parts = parts[first:]
    if shift == "sample":  # a rank may hold none of the two
        wrong, replayed = (sum(part[name] for part in parts) for name in ("wrong", "replayed"))
        assert wrong > 0.1 * replayed
        return
    for part in parts:
        assert part["wrong"] > 0.9 * part["replayed"]


@pytest.mark.parametrize("layout", RANKS)
def test_an_expert_bias_counts_no_padding(found: dict, layout: str):
    """A DeepSeek-V3-shaped model, whose first layer is dense: K tokens per real row and layer."""
    parts = [report["padding"] for report in found[layout]]
    assert all(part["with_mask"] for part in parts)
    rows = sum({part["share"]: part["rows"] for part in parts}.values())
    layers = {layer for part in parts for layer in part["counted"]}
    assert layers == {"1", "2", "3"}
    for layer in layers:
        assert sum(part["counted"].get(layer, 0) for part in parts) == 4 * rows


@pytest.mark.parametrize("layout", [name for name in RANKS if "pp2" not in name])
def test_a_failed_pass_leaves_nothing(found: dict, layout: str):
    """Recording, replaying and training passes that raise in a router: nothing stays bound, and
    the next pass is bit-identical to the one before."""
    for report in found[layout]:
        assert report["exception"] == {"raised": 6, "left": 0, "differ": 0}


def test_log_probs_over_a_cut_vocabulary(found: dict):
    """TP2 against plain torch over the whole vocabulary: log-probs, entropy, gradient."""
    for report in found["tp2-sp"]:
        differences = report["logprobs"]
        assert differences["largest_gradient"] > 1
        for name in ("logprobs", "entropy", "gradient"):
            assert differences[name] < 1e-5


@pytest.mark.parametrize("packed", ["packed", "padded"])
@pytest.mark.parametrize("model", RAGGED)
def test_samples_of_any_length_over_two_ranks(found: dict, model: str, packed: str):
    """1 to 600 positions, fp32: log-probs, and gradients relative to the largest of each tensor."""
    for report in found["cp2"]:
        differences = report["ragged"][model][packed]
        assert differences["tensors"] > 100
        assert differences["logprobs"] < 1e-5
        assert differences["gradient"] < 1e-5
